// The 3.x kernels, unless it is the 2.x kernel's header that asks. No #pragma once: who asks next may want them.
#ifndef ATOMR_CUTLASS_NO_3X_KERNELS
#include_next <cutlass/gemm/kernel/gemm_universal.hpp>
#endif
