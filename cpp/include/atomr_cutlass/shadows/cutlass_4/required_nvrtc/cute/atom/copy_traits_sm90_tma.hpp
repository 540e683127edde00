// CUTLASS leaves the encoding of tensor maps out under NVRTC. The companion of a kernel needs it: it is compiled as if
// for a host, and the driver's encoder replaced by one that records what it was asked.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4
#error "This header shadows that of CUTLASS 4, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

#ifdef ATOMR_CUTLASS_EVALUATE

#include <cute/algorithm/prefetch.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/atom/copy_atom.hpp>
#include <cute/atom/copy_traits.hpp>
#include <cute/atom/copy_traits_sm90_tma_swizzle.hpp>
#include <cute/numeric/integral_ratio.hpp>

#include "atomr_cutlass/nvrtc/tensor_map.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "cutlass/numeric_types.h"

namespace cute::TMA {

template <class T>
__device__ inline CUtensorMapDataType to_CUtensorMapDataType() {
  if constexpr (is_same_v<T, half_t>) {
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  } else if constexpr (is_same_v<T, bfloat16_t>) {
    return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  } else if constexpr (is_same_v<T, float>) {
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  } else if constexpr (is_same_v<T, tfloat32_t>) {
    return CU_TENSOR_MAP_DATA_TYPE_TFLOAT32;
  } else if constexpr (is_same_v<T, double>) {
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
  } else if constexpr (is_same_v<T, int32_t>) {
    return CU_TENSOR_MAP_DATA_TYPE_INT32;
  } else if constexpr (is_same_v<T, int64_t>) {
    return CU_TENSOR_MAP_DATA_TYPE_INT64;
  } else if constexpr (is_same_v<T, uint64_t>) {
    return CU_TENSOR_MAP_DATA_TYPE_UINT64;
  } else if constexpr (is_same_v<T, uint32_t>) {
    return CU_TENSOR_MAP_DATA_TYPE_UINT32;
  } else if constexpr (is_same_v<T, uint16_t>) {
    return CU_TENSOR_MAP_DATA_TYPE_UINT16;
  } else if constexpr (is_same_v<T, float_e2m1_t>) {
    return CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B;
  } else {
    static_assert(sizeof_bits_v<T> == 8, "no tensor map type for this element");
    return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

__device__ inline CUtensorMapSwizzle to_CUtensorMapSwizzle(SmemSwizzleBits const& bits, SmemSwizzleBase const& base) {
  switch (bits) {
    case SmemSwizzleBits::B32: return CU_TENSOR_MAP_SWIZZLE_32B;
    case SmemSwizzleBits::B64: return CU_TENSOR_MAP_SWIZZLE_64B;
    case SmemSwizzleBits::B128:
      return base == SmemSwizzleBase::SWIZZLE_BASE_32B   ? CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B
             : base == SmemSwizzleBase::SWIZZLE_BASE_64B ? CU_TENSOR_MAP_SWIZZLE_128B_ATOM_64B
                                                         : CU_TENSOR_MAP_SWIZZLE_128B;
    default: return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

}  // namespace cute::TMA

// What CuTe prints when the driver refuses a tensor map; the recorder never does.
namespace std {
struct discarded {};
template <class T>
__device__ inline discarded const& operator<<(discarded const& stream, T const&) {
  return stream;
}
__device__ constexpr discarded cerr{};
__device__ constexpr int endl = 0;
}  // namespace std

#undef __CUDACC_RTC__
#include_next <cute/atom/copy_traits_sm90_tma.hpp>
#define __CUDACC_RTC__ 1

#else
#include_next <cute/atom/copy_traits_sm90_tma.hpp>
#endif
