// fp4 GEMM cells of the sm120 generation: mma.sync with the scales of nvfp4 and mxfp4, fed by TMA.
#pragma once

#include "atomr_cutlass/blackwell.h"
// The collective comes before the builder that names it, and the counting of stages with sm100's builder.
#include "cutlass/gemm/collective/sm120_blockscaled_mma_tma.hpp"
//
#include "cutlass/gemm/collective/builders/sm100_blockscaled_umma_builder.inl"
//
#include "cutlass/gemm/collective/builders/sm120_blockscaled_mma_builder.inl"
