// fp4 GEMM cells of the sm100 generation: UMMA multiplies with the scales of nvfp4 and mxfp4 itself.
#pragma once

#include "atomr_cutlass/blackwell.h"
// The collective comes before the builder that names it.
#include "cutlass/gemm/collective/sm100_blockscaled_mma_warpspecialized.hpp"
//
#include "cutlass/gemm/collective/builders/sm100_blockscaled_umma_builder.inl"
