#include "op_args.h"

#include <algorithm>
#include <array>
#include <deque>

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

struct Operation {
  char const* name;
  Op op;
  ArgsLayout (*layout)(Operation const&);
  std::array<char const*, 4> required;  // pointers that may not be null; the rest is null
};

template <class Args>
ArgsLayout layout_of(Operation const& operation) {
  auto const& required = operation.required;
  ArgsLayout made{operation.name, sizeof(Args), fields_of<Args>(), {}, {}, 0, 0};
  for (ArgsField const& field : made.fields) {
    std::string const name = field.name;
    if (name == "max_active_clusters") made.max_active_clusters = field.offset;
    if (name == "workspace") made.workspace = field.offset;
    if (field.kind == ArgsField::Kind::kDouble) made.scalars.push_back(field.offset);
    if (field.kind == ArgsField::Kind::kPointer) {
      bool const needed = std::any_of(required.begin(), required.end(),
                                      [&name](char const* pointer) { return pointer != nullptr && name == pointer; });
      made.pointers.push_back({field.offset, !needed});
    }
  }
  return made;
}

// Ops that take the arguments of another one, and that the model does not know, need no entry.
constexpr Operation kOperations[] = {
    {"gemm", Op::kGemm, layout_of<atomr_cutlass_gemm_args>, {"a", "b", "d", "workspace"}},
    {"gemv", Op::kGemv, layout_of<atomr_cutlass_gemm_args>, {"a", "b", "d", "workspace"}},
    {"grouped_gemm", Op::kGrouped, layout_of<atomr_cutlass_grouped_args>, {"workspace"}},
    {"conv2d_fprop", Op::kFprop, layout_of<atomr_cutlass_conv_args>, {"a", "b", "d", "workspace"}},
    {"conv2d_dgrad", Op::kDgrad, layout_of<atomr_cutlass_conv_args>, {"a", "b", "d", "workspace"}},
    {"conv2d_wgrad", Op::kWgrad, layout_of<atomr_cutlass_conv_args>, {"a", "b", "d", "workspace"}},
    {"cast", Op::kCast, layout_of<atomr_cutlass_cast_args>, {"a", "d", "workspace"}},
    {"quantize", Op::kOther, layout_of<atomr_cutlass_quantize_args>, {"workspace"}},
    {"dequantize", Op::kOther, layout_of<atomr_cutlass_quantize_args>, {"workspace"}},
};

}  // namespace

ArgsField const* ArgsLayout::field(std::string const& name) const {
  for (ArgsField const& field : fields) {
    if (name == field.name) return &field;
  }
  return nullptr;
}

ArgsLayout const* args_of(std::string const& op) {
  static std::vector<ArgsLayout> const& layouts = *[] {
    auto* const made = new std::vector<ArgsLayout>;
    for (Operation const& operation : kOperations) made->push_back(operation.layout(operation));
    return made;
  }();
  for (ArgsLayout const& layout : layouts) {
    if (layout.op == op) return &layout;
  }
  return nullptr;
}

Op op_of(std::string const& op) {
  for (Operation const& operation : kOperations) {
    if (op == operation.name) return operation.op;
  }
  return Op::kOther;
}

}  // namespace atomr_cutlass
