// What CUTLASS has named since 4.2 and NVRTC lacks: declared before everything else of it, since no template delays it.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4
#error "This header shadows that of CUTLASS 4, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

namespace std {
template <class T>
__host__ __device__ constexpr T const& min(T const& a, T const& b) {
  return b < a ? b : a;
}
template <class T>
__host__ __device__ constexpr T const& max(T const& a, T const& b) {
  return a < b ? b : a;
}
}  // namespace std

// CUTLASS clears a bit of the tensor maps that older drivers encode. Here a request to encode one is in that place, so
// the driver has to look newer than any of these.
__device__ inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = 0x7fffffff;
  return cudaSuccess;
}

#include_next <cutlass/platform/platform.h>
