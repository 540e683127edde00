// The 3.x kernels, unless it is the 2.x kernel's header that asks. No #pragma once: who asks next may want them.
#include <cutlass/version.h>
#if CUTLASS_MAJOR != 4 || CUTLASS_MINOR != 2
#error "This header shadows that of CUTLASS 4.2, and another CUTLASS is there: generator/headers.py chooses the folders"
#endif
#ifndef ATOMR_CUTLASS_NO_3X_KERNELS
#include_next <cutlass/gemm/kernel/gemm_universal.hpp>
#endif
