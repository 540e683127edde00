// How this compiler lays out the structs of kernel_abi.h and jit_abi.h: compared where a pack is loaded, and where a
// companion compiled at run time tells of itself. Host and device compilers both include it.
#pragma once

#include "atomr_cutlass/jit_abi.h"
#include "atomr_cutlass/kernel_abi.h"

namespace atomr_cutlass::abi {

// The `kind` of a field, by its type.
template <class Value>
inline constexpr char kKind = 's';
template <>
inline constexpr char kKind<char> = 'i';
template <>
inline constexpr char kKind<int8_t> = 'i';
template <>
inline constexpr char kKind<int32_t> = 'i';
template <>
inline constexpr char kKind<int64_t> = 'i';
template <>
inline constexpr char kKind<uint8_t> = 'u';
template <>
inline constexpr char kKind<uint16_t> = 'u';
template <>
inline constexpr char kKind<uint32_t> = 'u';
template <>
inline constexpr char kKind<uint64_t> = 'u';
template <>
inline constexpr char kKind<double> = 'f';
template <class Value>
inline constexpr char kKind<Value*> = 'p';
template <class Value, decltype(sizeof(0)) kCount>
inline constexpr char kKind<Value[kCount]> = kKind<Value>;

template <uint32_t kCount>
struct FieldList {
  atomr_cutlass_field_layout fields[kCount];
};

template <class... Field>
constexpr FieldList<sizeof...(Field)> list_of(Field... fields) {
  return {{fields...}};
}

// The name of a struct, and its fields in order, all of them: `check` stops the compiler else. Functions, since NVRTC
// puts constants into every image.
template <class Struct>
struct Fields;

#define ATOMR_CUTLASS_FIELDS(Struct, ...)                         \
  template <>                                                     \
  struct Fields<Struct> {                                         \
    using S = Struct;                                             \
    static constexpr char const* name() { return #Struct; }       \
    static constexpr auto list() { return list_of(__VA_ARGS__); } \
  };
#ifdef __CUDACC_RTC__  // which knows no offsetof, but that of the compiler that it is built on
#define OFFSET(member) __INTADDR__(&static_cast<S*>(nullptr)->member)
#else
#define OFFSET(member) __builtin_offsetof(S, member)
#endif
#define FIELD(member)                                                                        \
  atomr_cutlass_field_layout{#member, uint32_t(OFFSET(member)), uint32_t(sizeof(S::member)), \
                             kKind<decltype(S::member)>, 0}

ATOMR_CUTLASS_FIELDS(atomr_cutlass_tree_operand, FIELD(pointer), FIELD(stride_m), FIELD(stride_n), FIELD(batch_stride))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_gemm_args, FIELD(m), FIELD(n), FIELD(k), FIELD(batch), FIELD(a), FIELD(b), FIELD(c),
                     FIELD(d), FIELD(lda), FIELD(ldb), FIELD(ldc), FIELD(ldd), FIELD(batch_stride_a),
                     FIELD(batch_stride_b), FIELD(batch_stride_c), FIELD(batch_stride_d), FIELD(alpha), FIELD(beta),
                     FIELD(split_k), FIELD(swizzle), FIELD(raster), FIELD(sm_count), FIELD(max_active_clusters),
                     FIELD(scale_form_a), FIELD(scale_form_b), FIELD(settled), FIELD(width), FIELD(padding),
                     FIELD(workspace), FIELD(scale_a), FIELD(scale_b), FIELD(scale_d), FIELD(amax),
                     FIELD(scale_stride_a), FIELD(scale_stride_b), FIELD(scale_k_stride_a), FIELD(scale_k_stride_b),
                     FIELD(operands))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_group, FIELD(a), FIELD(b), FIELD(c), FIELD(d), FIELD(scale_a), FIELD(scale_b),
                     FIELD(lda), FIELD(ldb), FIELD(ldc), FIELD(ldd), FIELD(m), FIELD(n), FIELD(k), FIELD(padding))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_grouped_args, FIELD(groups), FIELD(form), FIELD(m), FIELD(n), FIELD(k),
                     FIELD(rows_are_counts), FIELD(a), FIELD(b), FIELD(c), FIELD(d), FIELD(offsets), FIELD(table),
                     FIELD(lda), FIELD(ldb), FIELD(ldc), FIELD(ldd), FIELD(group_stride_a), FIELD(group_stride_b),
                     FIELD(group_stride_c), FIELD(group_stride_d), FIELD(alpha), FIELD(beta), FIELD(sm_count),
                     FIELD(max_active_clusters), FIELD(scale_form_a), FIELD(scale_form_b), FIELD(workspace),
                     FIELD(scale_a), FIELD(scale_b), FIELD(scale_stride_a), FIELD(scale_stride_b),
                     FIELD(scale_k_stride_a), FIELD(scale_k_stride_b), FIELD(scale_group_stride_a),
                     FIELD(scale_group_stride_b), FIELD(operands))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_conv_args, FIELD(n), FIELD(h), FIELD(w), FIELD(c), FIELD(k), FIELD(r), FIELD(s),
                     FIELD(p), FIELD(q), FIELD(pad_h), FIELD(pad_w), FIELD(pad_h_end), FIELD(pad_w_end),
                     FIELD(stride_h), FIELD(stride_w), FIELD(dilation_h), FIELD(dilation_w), FIELD(groups),
                     FIELD(split_k), FIELD(sm_count), FIELD(max_active_clusters), FIELD(swizzle), FIELD(raster),
                     FIELD(split_parallel), FIELD(a), FIELD(b), FIELD(c_source), FIELD(d), FIELD(bias),
                     FIELD(x_stride_w), FIELD(x_stride_h), FIELD(x_stride_n), FIELD(w_stride_s), FIELD(w_stride_r),
                     FIELD(w_stride_k), FIELD(y_stride_q), FIELD(y_stride_p), FIELD(y_stride_n), FIELD(alpha),
                     FIELD(beta), FIELD(workspace), FIELD(operands))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_cast_args, FIELD(count), FIELD(slice_stride), FIELD(a), FIELD(c), FIELD(d),
                     FIELD(scale), FIELD(alpha), FIELD(beta), FIELD(slices), FIELD(padding), FIELD(sm_count),
                     FIELD(max_active_clusters), FIELD(workspace))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_quantize_args, FIELD(rows), FIELD(columns), FIELD(lda), FIELD(a), FIELD(d),
                     FIELD(scales), FIELD(amax), FIELD(alpha), FIELD(block_rows), FIELD(block_columns), FIELD(sm_count),
                     FIELD(max_active_clusters), FIELD(workspace))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_launch, FIELD(grid), FIELD(block), FIELD(cluster), FIELD(shared_bytes),
                     FIELD(setup_grid), FIELD(padding), FIELD(clear_offset), FIELD(clear_bytes), FIELD(functions))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_row, FIELD(name), FIELD(key), FIELD(content), FIELD(params_bytes),
                     FIELD(params_align), FIELD(shared_bytes), FIELD(threads), FIELD(flags), FIELD(cuda_version),
                     FIELD(context), FIELD(supports), FIELD(workspace_size), FIELD(prepare), FIELD(launch))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_field_layout, FIELD(name), FIELD(offset), FIELD(bytes), FIELD(kind), FIELD(padding))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_struct_layout, FIELD(name), FIELD(fields), FIELD(field_count), FIELD(bytes))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_pack, FIELD(abi_version), FIELD(struct_count), FIELD(layout_digest), FIELD(structs),
                     FIELD(name), FIELD(rows), FIELD(count), FIELD(padding))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_jit_info, FIELD(layout_digest), FIELD(params_bytes), FIELD(params_align),
                     FIELD(shared_bytes), FIELD(threads), FIELD(cluster), FIELD(setup_threads))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_jit_evaluation, FIELD(implementable), FIELD(grid), FIELD(setup_grid), FIELD(padding),
                     FIELD(workspace_bytes), FIELD(clear_offset), FIELD(clear_bytes))
ATOMR_CUTLASS_FIELDS(atomr_cutlass_tensor_map_request, FIELD(magic), FIELD(address), FIELD(dims), FIELD(strides),
                     FIELD(box), FIELD(element_strides), FIELD(lower), FIELD(upper), FIELD(kind), FIELD(type),
                     FIELD(rank), FIELD(interleave), FIELD(swizzle), FIELD(promotion), FIELD(fill), FIELD(padding))

#undef FIELD
#undef OFFSET
#undef ATOMR_CUTLASS_FIELDS

template <class Struct>
constexpr bool every_byte_is_a_fields() {
  auto const list = Fields<Struct>::list();
  uint32_t end = 0;
  for (atomr_cutlass_field_layout const& field : list.fields) {
    if (field.offset != end) return false;
    end += field.bytes;
  }
  return end == sizeof(Struct);
}

template <class Struct>
constexpr void check() {
  static_assert(
      every_byte_is_a_fields<Struct>(),
      "a field is missing from the struct's list in abi_layout.h, or the compiler pads the struct: list every "
      "field, and fill gaps with fields named padding");
}

template <class Struct, uint32_t kCount>
constexpr atomr_cutlass_struct_layout layout_of(FieldList<kCount> const& list) {
  check<Struct>();
  return {Fields<Struct>::name(), list.fields, kCount, uint32_t(sizeof(Struct))};
}

// FNV-1a of 64 bits, of names, places, sizes and kinds.
struct LayoutDigest {
  uint64_t value = 0xcbf29ce484222325u;

  constexpr void add(uint32_t number) {
    for (int shift = 0; shift < 32; shift += 8) value = (value ^ (number >> shift & 0xff)) * 0x100000001b3u;
  }
  constexpr void add(char const* text) {
    for (; *text != 0; ++text) add(uint32_t(*text));
    add(0u);
  }
  constexpr void add(atomr_cutlass_struct_layout const& one) {
    add(one.name);
    add(one.bytes);
    add(one.field_count);
    for (uint32_t i = 0; i < one.field_count; ++i) {
      atomr_cutlass_field_layout const& field = one.fields[i];
      add(field.name);
      add(field.offset);
      add(field.bytes);
      add(field.kind);
    }
  }
};

constexpr uint64_t digest_of(atomr_cutlass_struct_layout const* structs, uint32_t count) {
  LayoutDigest digest;
  for (uint32_t i = 0; i < count; ++i) digest.add(structs[i]);
  return digest.value;
}

template <class... Structs>
struct StructList {
  static constexpr uint64_t digest() {
    LayoutDigest digest;
    (digest.add(layout_of<Structs>(Fields<Structs>::list())), ...);
    return digest.value;
  }

#ifndef __CUDACC_RTC__
  static constexpr uint32_t kCount = sizeof...(Structs);

  template <class Struct>
  static constexpr auto kList = Fields<Struct>::list();
  static constexpr atomr_cutlass_struct_layout kStructs[] = {layout_of<Structs>(kList<Structs>)...};
#endif
};

using All =
    StructList<atomr_cutlass_tree_operand, atomr_cutlass_gemm_args, atomr_cutlass_group, atomr_cutlass_grouped_args,
               atomr_cutlass_conv_args, atomr_cutlass_cast_args, atomr_cutlass_quantize_args, atomr_cutlass_launch,
               atomr_cutlass_row, atomr_cutlass_field_layout, atomr_cutlass_struct_layout, atomr_cutlass_pack,
               atomr_cutlass_jit_info, atomr_cutlass_jit_evaluation, atomr_cutlass_tensor_map_request>;

inline constexpr uint64_t kLayoutDigest = All::digest();
#ifndef __CUDACC_RTC__
inline constexpr auto const& kStructs = All::kStructs;
inline constexpr uint32_t kStructCount = All::kCount;
#endif

}  // namespace atomr_cutlass::abi
