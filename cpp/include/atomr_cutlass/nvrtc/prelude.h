// Before everything else in a unit that NVRTC compiles: names of namespace std that CUTLASS uses and NVRTC lacks.
#pragma once

#include <cuda/std/type_traits>

namespace std {
using ::cuda::std::is_const_v;
using ::cuda::std::is_pointer_v;
using ::cuda::std::void_t;
}  // namespace std
