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

template <uint32_t kCount>
constexpr FieldList<kCount> list_of(atomr_cutlass_field_layout const (&fields)[kCount]) {
  FieldList<kCount> list{};
  for (uint32_t i = 0; i < kCount; ++i) list.fields[i] = fields[i];
  return list;
}

#define ATOMR_CUTLASS_STRUCTS(STRUCT)  \
  STRUCT(atomr_cutlass_tree_operand)   \
  STRUCT(atomr_cutlass_gemm_args)      \
  STRUCT(atomr_cutlass_group)          \
  STRUCT(atomr_cutlass_grouped_args)   \
  STRUCT(atomr_cutlass_conv_args)      \
  STRUCT(atomr_cutlass_cast_args)      \
  STRUCT(atomr_cutlass_quantize_args)  \
  STRUCT(atomr_cutlass_launch)         \
  STRUCT(atomr_cutlass_row)            \
  STRUCT(atomr_cutlass_field_layout)   \
  STRUCT(atomr_cutlass_struct_layout)  \
  STRUCT(atomr_cutlass_pack)           \
  STRUCT(atomr_cutlass_jit_info)       \
  STRUCT(atomr_cutlass_jit_evaluation) \
  STRUCT(atomr_cutlass_tensor_map_request)

// The name of a struct, and its fields in order. Functions, since NVRTC puts constants into every image.
template <class Struct>
struct Fields;

#ifdef __CUDACC_RTC__  // which knows no offsetof, but that of the compiler that it is built on
#define OFFSET(member) __INTADDR__(&static_cast<S*>(nullptr)->member)
#else
#define OFFSET(member) __builtin_offsetof(S, member)
#endif
#define FIELD(Type, member) \
  {#member, uint32_t(OFFSET(member)), uint32_t(sizeof(S::member)), kKind<decltype(S::member)>, 0},
#define ARRAY(Type, member, count) FIELD(Type, member)
#define DESCRIBE(Struct)                                                              \
  template <>                                                                         \
  struct Fields<Struct> {                                                             \
    using S = Struct;                                                                 \
    static constexpr char const* name() { return #Struct; }                           \
    static constexpr auto list() { return list_of({Struct##_fields(FIELD, ARRAY)}); } \
  };
ATOMR_CUTLASS_STRUCTS(DESCRIBE)
#undef DESCRIBE
#undef ARRAY
#undef FIELD
#undef OFFSET

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
      "the compiler pads the struct, or has fields beside those of its list: fill gaps with fields named padding");
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
  constexpr void add(atomr_cutlass_struct_layout const& layout) {
    add(layout.name);
    add(layout.bytes);
    add(layout.field_count);
    for (uint32_t i = 0; i < layout.field_count; ++i) {
      atomr_cutlass_field_layout const& field = layout.fields[i];
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

constexpr uint64_t digest_of_all() {
  LayoutDigest digest;
#define ADD(Struct) digest.add(layout_of<Struct>(Fields<Struct>::list()));
  ATOMR_CUTLASS_STRUCTS(ADD)
#undef ADD
  return digest.value;
}

inline constexpr uint64_t kLayoutDigest = digest_of_all();
#ifndef __CUDACC_RTC__
template <class Struct>
inline constexpr auto kList = Fields<Struct>::list();
#define LAYOUT(Struct) layout_of<Struct>(kList<Struct>),
inline constexpr atomr_cutlass_struct_layout kStructs[] = {ATOMR_CUTLASS_STRUCTS(LAYOUT)};
#undef LAYOUT
inline constexpr uint32_t kStructCount = sizeof(kStructs) / sizeof(kStructs[0]);
#endif

}  // namespace atomr_cutlass::abi
