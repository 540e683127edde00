// Before everything else in a unit that NVRTC compiles: names of namespace std that CUTLASS uses and NVRTC lacks.
#pragma once

// How far CUDA's standard library unrolls its type lists. NVRTC's default, 16, takes 0.4 s to parse; this is nvcc's.
#ifndef _CCCL_META_UNROLL_LIMIT
#define _CCCL_META_UNROLL_LIMIT 10
#endif

#include <cuda/std/type_traits>

namespace std {
using ::cuda::std::is_const_v;
using ::cuda::std::is_pointer_v;
using ::cuda::std::void_t;
}  // namespace std
