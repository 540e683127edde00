// How a kernel's parameters depend on the pointers and scalars of its arguments, so that for another launch of the same
// problem they are patched instead of evaluated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "op_args.h"

namespace atomr_cutlass {

using Bytes = std::vector<unsigned char>;

// A place in a kernel's parameters that depends on a pointer or scalar, which may change between launches.
struct Relocation {
  enum class Form : uint8_t { kPointer, kTensorMap, kDouble, kFloat, kInt32 };
  uint32_t offset;
  Form form;
  size_t source;  // offset of the pointer or scalar in the arguments
  int64_t addend;  // of pointers
};

using Relocations = std::vector<Relocation>;

// The problem of arguments: all of them but pointers and scalars, and which pointers are there. `problem` has room for
// `layout.bytes`.
void write_problem(ArgsLayout const& layout, void const* args, unsigned char* problem);

// One of two sets of arguments of a problem, which differ in every pointer that is there and in every scalar.
Bytes sentinel_args(ArgsLayout const& layout, Bytes const& problem, bool second);

// Compares two evaluations of a kernel's parameters, for the arguments of `sentinel_args`, and says how the differences
// follow from the arguments. Tensor map requests in `first_params`, as kernels compiled at run time make them, are
// encoded in place. `unexplained`, if given, is set to the first byte without an explanation; then there is no result.
std::optional<Relocations> find_relocations(ArgsLayout const& layout, void const* first, void const* second,
                                            unsigned char* first_params, unsigned char const* second_params,
                                            size_t bytes, size_t* unexplained = nullptr);

// Rewrites parameters for the pointers and scalars of `args`.
void relocate(Relocations const& relocations, void const* args, unsigned char* params);

}  // namespace atomr_cutlass
