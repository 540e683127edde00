// GEMM cells of the sm100 generation with block scales in float: the epilogue's warps add up the products of UMMA,
// block of K by block of K, each multiplied with its scales.
#pragma once

#include "atomr_cutlass/blackwell.h"
// The collective comes before the builder that names it.
#include "cutlass/gemm/collective/sm100_mma_warpspecialized_blockwise_scaling.hpp"
//
#include "cutlass/gemm/collective/builders/sm100_umma_builder.inl"
//
#include "cutlass/gemm/collective/builders/sm100_blockwise_umma_builder.inl"
