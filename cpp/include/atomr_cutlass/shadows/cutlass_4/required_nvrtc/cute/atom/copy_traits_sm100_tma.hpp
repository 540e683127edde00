// CUTLASS leaves the tensor maps of Blackwell's loads out under NVRTC, and with them the types that a kernel's
// parameters are made of. They are compiled as if for a host; the encoder is the recorder of copy_traits_sm90_tma.hpp.
#pragma once

#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4
#error "This header shadows that of CUTLASS 4, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif

// What the header itself includes, so that it alone is compiled for a host.
#include <cuda.h>

#include <cute/arch/copy_sm100_tma.hpp>
#include <cute/atom/copy_traits.hpp>
#include <cute/atom/copy_traits_sm90_tma.hpp>
#include <cute/tensor.hpp>

#undef __CUDACC_RTC__
#pragma push_macro("CUTE_HOST")
#undef CUTE_HOST
#define CUTE_HOST CUTE_HOST_DEVICE
#include_next <cute/atom/copy_traits_sm100_tma.hpp>
#pragma pop_macro("CUTE_HOST")
#define __CUDACC_RTC__ 1
