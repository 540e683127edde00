#include "op_args.h"

#include <algorithm>
#include <deque>
#include <initializer_list>
#include <type_traits>

namespace atomr_cutlass {
namespace {

template <class Value>
constexpr ArgsField::Kind kind_of() {
  if constexpr (std::is_pointer_v<Value>) {
    return ArgsField::Kind::kPointer;
  } else if constexpr (std::is_same_v<Value, double>) {
    return ArgsField::Kind::kDouble;
  } else if constexpr (std::is_same_v<Value, int64_t>) {
    return ArgsField::Kind::kInt64;
  } else {
    static_assert(std::is_same_v<Value, int32_t>, "a field of an unknown type");
    return ArgsField::Kind::kInt32;
  }
}

// Adds the fields of the tree operands that lie `first` bytes into a struct: operand0, operand0_stride_m, ...
std::vector<ArgsField> with_operands(std::vector<ArgsField> fields, size_t first) {
  static std::deque<std::string>& names = *new std::deque<std::string>;
  using Operand = atomr_cutlass_tree_operand;
  for (size_t i = 0; i < ATOMR_CUTLASS_TREE_OPERANDS; ++i) {
    size_t const start = first + i * sizeof(Operand);
    auto const add = [&](char const* suffix, ArgsField::Kind kind, size_t offset) {
      names.push_back("operand" + std::to_string(i) + suffix);
      fields.push_back({names.back().c_str(), kind, start + offset});
    };
    add("", ArgsField::Kind::kPointer, offsetof(Operand, pointer));
    add("_stride_m", ArgsField::Kind::kInt64, offsetof(Operand, stride_m));
    add("_stride_n", ArgsField::Kind::kInt64, offsetof(Operand, stride_n));
    add("_batch_stride", ArgsField::Kind::kInt64, offsetof(Operand, batch_stride));
  }
  return fields;
}

#define FIELD(Args, member) \
  ArgsField { #member, kind_of<decltype(Args::member)>(), offsetof(Args, member) }

ArgsLayout layout_of(char const* op, size_t bytes, std::vector<ArgsField> fields,
                     std::initializer_list<char const*> required) {
  ArgsLayout made{op, bytes, std::move(fields), {}, {}, 0, 0};
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

#define GEMM(member) FIELD(atomr_cutlass_gemm_args, member)
#define GROUPED(member) FIELD(atomr_cutlass_grouped_args, member)
#define CONV(member) FIELD(atomr_cutlass_conv_args, member)
#define CAST(member) FIELD(atomr_cutlass_cast_args, member)
#define QUANTIZE(member) FIELD(atomr_cutlass_quantize_args, member)

std::vector<ArgsLayout> make_layouts() {
  std::vector<ArgsField> const conv = {CONV(n),          CONV(h),          CONV(w),
                                       CONV(c),          CONV(k),          CONV(r),
                                       CONV(s),          CONV(p),          CONV(q),
                                       CONV(pad_h),      CONV(pad_w),      CONV(pad_h_end),
                                       CONV(pad_w_end),  CONV(stride_h),   CONV(stride_w),
                                       CONV(dilation_h), CONV(dilation_w), CONV(groups),
                                       CONV(split_k),    CONV(sm_count),   CONV(max_active_clusters),
                                       CONV(swizzle),    CONV(raster),     CONV(split_parallel),
                                       CONV(a),          CONV(b),          CONV(c_source),
                                       CONV(d),          CONV(bias),       CONV(x_stride_w),
                                       CONV(x_stride_h), CONV(x_stride_n), CONV(w_stride_s),
                                       CONV(w_stride_r), CONV(w_stride_k), CONV(y_stride_q),
                                       CONV(y_stride_p), CONV(y_stride_n), CONV(alpha),
                                       CONV(beta),       CONV(workspace)};
  std::vector<ArgsField> const grouped = {GROUPED(groups),
                                          GROUPED(form),
                                          GROUPED(m),
                                          GROUPED(n),
                                          GROUPED(k),
                                          GROUPED(rows_are_counts),
                                          GROUPED(a),
                                          GROUPED(b),
                                          GROUPED(c),
                                          GROUPED(d),
                                          GROUPED(offsets),
                                          GROUPED(table),
                                          GROUPED(lda),
                                          GROUPED(ldb),
                                          GROUPED(ldc),
                                          GROUPED(ldd),
                                          GROUPED(group_stride_a),
                                          GROUPED(group_stride_b),
                                          GROUPED(group_stride_c),
                                          GROUPED(group_stride_d),
                                          GROUPED(alpha),
                                          GROUPED(beta),
                                          GROUPED(sm_count),
                                          GROUPED(max_active_clusters),
                                          GROUPED(scale_form_a),
                                          GROUPED(scale_form_b),
                                          GROUPED(workspace),
                                          GROUPED(scale_a),
                                          GROUPED(scale_b),
                                          GROUPED(scale_stride_a),
                                          GROUPED(scale_stride_b),
                                          GROUPED(scale_k_stride_a),
                                          GROUPED(scale_k_stride_b),
                                          GROUPED(scale_group_stride_a),
                                          GROUPED(scale_group_stride_b)};
  std::vector<ArgsField> const cast = {CAST(count),
                                       CAST(slice_stride),
                                       CAST(a),
                                       CAST(c),
                                       CAST(d),
                                       CAST(scale),
                                       CAST(alpha),
                                       CAST(beta),
                                       CAST(slices),
                                       CAST(sm_count),
                                       CAST(max_active_clusters),
                                       CAST(workspace)};
  std::vector<ArgsLayout> made = {
      kGemmArgs,
      layout_of("grouped_gemm", sizeof(atomr_cutlass_grouped_args),
                with_operands(grouped, offsetof(atomr_cutlass_grouped_args, operands)), {"workspace"}),
      layout_of("cast", sizeof(atomr_cutlass_cast_args), cast, {"a", "d", "workspace"}),
  };
  for (char const* op : {"quantize", "dequantize"}) {
    made.push_back(
        layout_of(op, sizeof(atomr_cutlass_quantize_args),
                  {QUANTIZE(rows), QUANTIZE(columns), QUANTIZE(lda), QUANTIZE(a), QUANTIZE(d), QUANTIZE(scales),
                   QUANTIZE(amax), QUANTIZE(alpha), QUANTIZE(block_rows), QUANTIZE(block_columns), QUANTIZE(sm_count),
                   QUANTIZE(max_active_clusters), QUANTIZE(workspace)},
                  {"workspace"}));
  }
  for (char const* op : {"conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad"}) {
    made.push_back(layout_of(op, sizeof(atomr_cutlass_conv_args),
                             with_operands(conv, offsetof(atomr_cutlass_conv_args, operands)),
                             {"a", "b", "d", "workspace"}));
  }
  return made;
}

}  // namespace

ArgsLayout const kGemmArgs = layout_of("gemm", sizeof(atomr_cutlass_gemm_args),
                                       with_operands({GEMM(m),
                                                      GEMM(n),
                                                      GEMM(k),
                                                      GEMM(batch),
                                                      GEMM(a),
                                                      GEMM(b),
                                                      GEMM(c),
                                                      GEMM(d),
                                                      GEMM(lda),
                                                      GEMM(ldb),
                                                      GEMM(ldc),
                                                      GEMM(ldd),
                                                      GEMM(batch_stride_a),
                                                      GEMM(batch_stride_b),
                                                      GEMM(batch_stride_c),
                                                      GEMM(batch_stride_d),
                                                      GEMM(alpha),
                                                      GEMM(beta),
                                                      GEMM(split_k),
                                                      GEMM(swizzle),
                                                      GEMM(raster),
                                                      GEMM(sm_count),
                                                      GEMM(max_active_clusters),
                                                      GEMM(scale_form_a),
                                                      GEMM(scale_form_b),
                                                      GEMM(padding),
                                                      GEMM(workspace),
                                                      GEMM(scale_a),
                                                      GEMM(scale_b),
                                                      GEMM(scale_d),
                                                      GEMM(amax),
                                                      GEMM(scale_stride_a),
                                                      GEMM(scale_stride_b),
                                                      GEMM(scale_k_stride_a),
                                                      GEMM(scale_k_stride_b)},
                                                     offsetof(atomr_cutlass_gemm_args, operands)),
                                       {"a", "b", "d", "workspace"});

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
