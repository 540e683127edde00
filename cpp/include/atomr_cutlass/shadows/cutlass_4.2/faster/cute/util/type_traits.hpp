// CuTe asks for a type without its reference and qualifiers thousands of times; the compiler has that built in.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4 || CUTLASS_MINOR != 2
#error "This header shadows that of CUTLASS 4.2, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

// What CuTe's own header includes, so that the renaming below reaches nothing else.
#include "cutlass/cutlass.h"
#ifdef __CUDACC_RTC__
#include CUDA_STD_HEADER(type_traits)
#include CUDA_STD_HEADER(utility)
#include CUDA_STD_HEADER(cstddef)
#include CUDA_STD_HEADER(cstdint)
#include CUDA_STD_HEADER(limits)
#else
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#endif
#include <cute/config.hpp>

#define remove_cvref remove_cvref_by_parts
#define remove_cvref_t remove_cvref_by_parts_t
#include_next <cute/util/type_traits.hpp>
#undef remove_cvref
#undef remove_cvref_t

namespace cute {
#ifdef __CUDA_ARCH__
template <class T>
struct remove_cvref {
  using type = __remove_cvref(T);
};
template <class T>
using remove_cvref_t = __remove_cvref(T);
#else
// The C++ compiler of nvcc's host pass need not have it.
template <class T>
struct remove_cvref {
  using type = std::remove_cv_t<std::remove_reference_t<T>>;
};
template <class T>
using remove_cvref_t = std::remove_cv_t<std::remove_reference_t<T>>;
#endif
}  // namespace cute
