// GEMM cells of the sm100 generation: UMMA, whose accumulators lie in tensor memory.
#pragma once

#include "atomr_cutlass/blackwell.h"
// The collective comes before the builder that names it.
#include "cutlass/gemm/collective/sm100_mma_warpspecialized.hpp"
//
#include "cutlass/gemm/collective/builders/sm100_umma_builder.inl"
