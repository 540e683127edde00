#include "op_args.h"

#include <algorithm>
#include <deque>
#include <initializer_list>

#include "atomr_cutlass/abi_layout.h"

namespace atomr_cutlass {
namespace {

ArgsField::Kind kind_of(atomr_cutlass_field_layout const& field) {
  if (field.kind == 'p') return ArgsField::Kind::kPointer;
  if (field.kind == 'f') return ArgsField::Kind::kDouble;
  return field.bytes == sizeof(int32_t) ? ArgsField::Kind::kInt32 : ArgsField::Kind::kInt64;
}

// The fields of a struct as abi_layout.h lists them, those of its tree operands as operand0, operand0_stride_m, ...
template <class Args>
std::vector<ArgsField> fields_of() {
  static std::deque<std::string>& names = *new std::deque<std::string>;
  auto const list = abi::Fields<Args>::list();
  auto const of_operand = abi::Fields<atomr_cutlass_tree_operand>::list();
  std::vector<ArgsField> fields;
  for (atomr_cutlass_field_layout const& field : list.fields) {
    if (field.kind != 's') {
      fields.push_back({field.name, kind_of(field), field.offset});
      continue;
    }
    for (size_t i = 0; i < ATOMR_CUTLASS_TREE_OPERANDS; ++i) {
      for (atomr_cutlass_field_layout const& part : of_operand.fields) {
        names.push_back("operand" + std::to_string(i) + (part.kind == 'p' ? "" : std::string("_") + part.name));
        size_t const offset = field.offset + i * sizeof(atomr_cutlass_tree_operand) + part.offset;
        fields.push_back({names.back().c_str(), kind_of(part), offset});
      }
    }
  }
  return fields;
}

template <class Args>
ArgsLayout layout_of(char const* op, std::initializer_list<char const*> required) {
  ArgsLayout made{op, sizeof(Args), fields_of<Args>(), {}, {}, 0, 0};
  for (ArgsField const& field : made.fields) {
    std::string const name = field.name;
    if (name == "max_active_clusters") made.max_active_clusters = field.offset;
    if (name == "workspace") made.workspace = field.offset;
    if (field.kind == ArgsField::Kind::kDouble) made.scalars.push_back(field.offset);
    if (field.kind == ArgsField::Kind::kPointer) {
      bool const needed = std::find(required.begin(), required.end(), name) != required.end();
      made.pointers.push_back({field.offset, !needed});
    }
  }
  return made;
}

std::vector<ArgsLayout> make_layouts() {
  std::vector<ArgsLayout> made = {
      kGemmArgs,
      layout_of<atomr_cutlass_grouped_args>("grouped_gemm", {"workspace"}),
      layout_of<atomr_cutlass_cast_args>("cast", {"a", "d", "workspace"}),
  };
  for (char const* op : {"quantize", "dequantize"}) {
    made.push_back(layout_of<atomr_cutlass_quantize_args>(op, {"workspace"}));
  }
  for (char const* op : {"conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad"}) {
    made.push_back(layout_of<atomr_cutlass_conv_args>(op, {"a", "b", "d", "workspace"}));
  }
  return made;
}

}  // namespace

ArgsLayout const kGemmArgs = layout_of<atomr_cutlass_gemm_args>("gemm", {"a", "b", "d", "workspace"});

ArgsField const* ArgsLayout::field(std::string const& name) const {
  for (ArgsField const& one : fields) {
    if (name == one.name) return &one;
  }
  return nullptr;
}

ArgsLayout const* args_of(std::string const& op) {
  static std::vector<ArgsLayout> const& layouts = *new std::vector<ArgsLayout>(make_layouts());
  for (ArgsLayout const& one : layouts) {
    if (one.op == op) return &one;
  }
  return nullptr;
}

}  // namespace atomr_cutlass
