// CUTLASS's GEMM kernel of the 2.x generation without the 3.x kernels, which its header includes for one trait: a third
// of what a compiler otherwise parses for a cell of the sm80 generation.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4 || CUTLASS_MINOR != 2
#error "This header shadows that of CUTLASS 4.2, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

#include <cute/util/type_traits.hpp>

#include "cutlass/block_striped.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/kernel/gemm_universal_decl.h"

namespace cutlass::gemm::kernel {
// The trait, by a name of its own, so that a unit may have the 3.x kernels as well.
template <class T, class = void>
struct HasUnderlyingProblemShape : cute::false_type {};
template <class T>
struct HasUnderlyingProblemShape<T, cute::void_t<typename T::UnderlyingProblemShape>> : cute::true_type {};
}  // namespace cutlass::gemm::kernel

#define ATOMR_CUTLASS_NO_3X_KERNELS
#define IsCutlass3ArrayKernel HasUnderlyingProblemShape
#include_next <cutlass/gemm/kernel/gemm_universal.h>
#undef IsCutlass3ArrayKernel
#undef ATOMR_CUTLASS_NO_3X_KERNELS
