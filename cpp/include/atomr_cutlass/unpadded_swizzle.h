// The order of tiles that CUTLASS's identity swizzle has (but for five tiles along N, which are one band here), without
// the tiles that it adds.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

namespace atomr_cutlass {

// Bands of kWidth tiles along N, in each of them row by row. CUTLASS's own grid has whole bands: thread blocks beyond D
// return at once, but not before the GPU has counted them as a multiprocessor's share. Of three by eleven tiles and
// four slices of K, 132 thread blocks of 192 have work, and some multiprocessors get two of those while others get
// none: the launch takes twice as long.
template <int kWidth>
struct UnpaddedSwizzle : cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<kWidth> {
  using Base = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<kWidth>;
  using GemmCoord = cutlass::gemm::GemmCoord;

  // Of more tiles than a grid can count, or than 31 bits can, CUTLASS's order stays.
  static bool countable(GemmCoord tiles) { return tiles.n() <= 65535 && int64_t(tiles.m()) * tiles.n() <= 0x7fffffff; }

  static int get_log_tile(GemmCoord tiles) { return countable(tiles) ? 0 : Base::get_log_tile(tiles); }

  static dim3 get_grid_shape(GemmCoord tiles) {
    return countable(tiles) ? dim3(tiles.m(), tiles.n(), tiles.k()) : Base::get_grid_shape(tiles);
  }

  CUTLASS_DEVICE static GemmCoord get_tile_offset(int log_tile) {
    if (kWidth == 1 || log_tile != 0) return Base::get_tile_offset(log_tile);
    unsigned const tiles_m = gridDim.x, tiles_n = gridDim.y, band = tiles_m * kWidth;
    unsigned const tile = blockIdx.y * tiles_m + blockIdx.x, first = tile / band * kWidth;
    unsigned const width = tiles_n - first < kWidth ? tiles_n - first : kWidth, in_band = tile % band;
    return {int(in_band / width), int(first + in_band % width), int(blockIdx.z)};
  }
};

}  // namespace atomr_cutlass
