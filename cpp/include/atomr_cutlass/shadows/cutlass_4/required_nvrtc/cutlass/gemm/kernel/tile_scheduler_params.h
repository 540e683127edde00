// CUTLASS leaves the size of stream-K's workspace out under NVRTC. The companion of a kernel needs it: it is compiled
// as if for a host.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4
#error "This header shadows that of CUTLASS 4, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

#ifdef ATOMR_CUTLASS_EVALUATE

#include "cutlass/coord.h"
#include "cutlass/cuda_host_adapter.hpp"
#include "cutlass/fast_math.h"
#include "cutlass/gemm/kernel/tile_scheduler_detail.hpp"
#include "cutlass/gemm_coord.h"
#include "cutlass/kernel_hardware_info.h"
#include "cutlass/platform/platform.h"
#include "cutlass/workspace.h"

namespace cutlass {
// Named by what clears a workspace on a host, which the companion never does: plans clear it themselves.
__device__ inline Status zero_workspace(void*, size_t, cudaStream_t, CudaHostAdapter*) {
  return Status::kErrorNotSupported;
}
}  // namespace cutlass

// Its host code takes uint64_t and size_t for one type, which they are for a host; NVRTC's uint64_t is an unsigned long
// long, of the same size.
#undef __CUDACC_RTC__
#define uint64_t size_t
#include_next <cutlass/gemm/kernel/tile_scheduler_params.h>
#undef uint64_t
#define __CUDACC_RTC__ 1

#else
#include_next <cutlass/gemm/kernel/tile_scheduler_params.h>
#endif
