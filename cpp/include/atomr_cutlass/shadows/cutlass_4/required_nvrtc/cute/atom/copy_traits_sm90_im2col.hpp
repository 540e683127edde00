// CuTe encodes im2col tensor maps in functions that a kernel instantiates as well, to learn their types, although none
// of what they call exists under NVRTC: the recorder takes the encoder's place in the companion and in the kernel.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4
#error "This header shadows that of CUTLASS 4, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

#include <cute/atom/copy_traits_sm90_tma.hpp>

#include "atomr_cutlass/nvrtc/tensor_map.h"

namespace cute::TMA {

#ifndef ATOMR_CUTLASS_EVALUATE
// A kernel only asks what these return; the companion has them from the shadow of copy_traits_sm90_tma.hpp.
template <class T>
__device__ CUtensorMapDataType to_CUtensorMapDataType();
__device__ CUtensorMapSwizzle to_CUtensorMapSwizzle(SmemSwizzleBits const& bits, SmemSwizzleBase const& base);
#endif

__device__ inline CUtensorMapL2promotion to_CUtensorMapL2promotion(L2Promotion const& promotion) {
  switch (promotion) {
    case L2Promotion::B64: return CU_TENSOR_MAP_L2_PROMOTION_L2_64B;
    case L2Promotion::B128: return CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    case L2Promotion::B256: return CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    default: return CU_TENSOR_MAP_L2_PROMOTION_NONE;
  }
}

__device__ inline CUtensorMapFloatOOBfill to_CUtensorMapFloatOOBfill(OOBFill const& fill) {
  return fill == OOBFill::ZERO ? CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE : CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
}

}  // namespace cute::TMA

namespace cute {
// Under NVRTC the two kinds of tensor maps have types of their own, and CuTe prefetches one of them.
__device__ inline void prefetch_tma_descriptor(Im2ColTmaDescriptor const* descriptor) {
  prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(descriptor));
}
}  // namespace cute

#include_next <cute/atom/copy_traits_sm90_im2col.hpp>
