// The list of tiles of a persistent GEMM of the sm90 generation, in the place of CUTLASS's: whole clusters of tiles, of
// which `swizzle` side by side are taken before the next ones along the raster order. CUTLASS's rounds both sides up to
// whole swizzles, and multiplies what lies outside; here the last ones are as many as are left.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace atomr_cutlass {

// The tag by which CUTLASS's kernels take it.
struct TileListScheduler {};

template <class Cluster>
class TileList : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;

 public:
  using typename Base::Arguments;
  using typename Base::RasterOrder;
  using typename Base::WorkTileInfo;

  struct Params {
    uint32_t clusters = 0;  // of tiles, in all
    cutlass::FastDivmod in_matrix;  // clusters of one matrix of the batch
    cutlass::FastDivmod in_panel;  // and of `width` side by side, along the whole raster order
    cutlass::FastDivmod width;  // the swizzle
    cutlass::FastDivmod last_width;  // what is left of it in the last panel
    int32_t last_panel = 0;
    RasterOrder raster_order_ = RasterOrder::AlongN;
    int32_t log_swizzle_size_ = 0;  // which CUTLASS's kernels ask for
  };

  template <class Problem, class Tile>
  static Params to_underlying_arguments(Problem const& problem, Tile tile, Cluster cluster,
                                        cutlass::KernelHardwareInfo const&, Arguments const& args, void* = nullptr,
                                        uint32_t = 1, uint32_t = 1) {
    dim3 const blocks = Base::get_tiled_cta_shape_mnl(problem, tile, cluster);
    Params result;
    result.raster_order_ = Base::Params::get_rasterization_order(blocks.x, blocks.y, args.raster_order);
    int const along_m = int(blocks.x) / cute::size<0>(cluster), along_n = int(blocks.y) / cute::size<1>(cluster);
    bool const is_along_n = result.raster_order_ == RasterOrder::AlongN;
    int const along = is_along_n ? along_n : along_m, across = is_along_n ? along_m : along_n;
    int const width = cute::max(1, cute::min(args.max_swizzle_size, across));
    result.clusters = uint32_t(along) * uint32_t(across) * blocks.z;
    result.in_matrix = cutlass::FastDivmod(along * across);
    result.in_panel = cutlass::FastDivmod(along * width);
    result.width = cutlass::FastDivmod(width);
    result.last_panel = (across - 1) / width;
    result.last_width = cutlass::FastDivmod(across - result.last_panel * width);
    return result;
  }

  // As many clusters as run at once, along the grid's first side.
  template <class Problem, class Tile>
  static dim3 get_grid_shape(Params const&, Problem const& problem, Tile tile, Cluster cluster,
                             cutlass::KernelHardwareInfo const& device, Arguments args) {
    args.max_swizzle_size = 1;
    dim3 const grid = Base::get_grid_shape(typename Base::Params{}, problem, tile, cluster, device, args);
    return dim3(grid.x * grid.y / kN, kN, 1);
  }

  CUTLASS_DEVICE explicit TileList(Params const& params) : params(params), at(blockIdx.x / kM), step(gridDim.x / kM) {}

  CUTLASS_DEVICE WorkTileInfo get_current_work() const { return tile(at); }
  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(Cluster) const { return tile(at); }
  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) { at += step * count; }
  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo const&, uint32_t count = 1) const {
    return at + step * count >= params.clusters;
  }
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const&) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }
  template <class Pipeline, class State>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo const& tile, Pipeline&, State) {
    return fetch_next_work(tile);
  }

  // Each tile is computed by one thread block.
  CUTLASS_DEVICE static bool compute_epilogue(WorkTileInfo const&, Params const&) { return true; }
  CUTLASS_DEVICE static bool requires_separate_reduction(Params const&) { return false; }
  template <class Sums>
  CUTLASS_DEVICE static void fixup(Params const&, WorkTileInfo const&, Sums const&, uint32_t, uint32_t) {}

 private:
  static constexpr int kM = cute::size<0>(Cluster{}), kN = cute::size<1>(Cluster{});

  CUTLASS_DEVICE WorkTileInfo tile(uint32_t number) const {
    if (number >= params.clusters) return WorkTileInfo::invalid_work_tile();
    int batch, rest, panel, along, across;
    params.in_matrix(batch, rest, int(number));
    params.in_panel(panel, rest, rest);
    if (panel == params.last_panel) {
      params.last_width(along, across, rest);
    } else {
      params.width(along, across, rest);
    }
    across += panel * params.width.divisor;
    bool const is_along_n = params.raster_order_ == RasterOrder::AlongN;
    int const m = is_along_n ? across : along, n = is_along_n ? along : across;
    return {m * kM + int(blockIdx.x) % kM, n * kN + int(blockIdx.y), batch, true};
  }

  Params const& params;
  uint32_t at, step;
};

}  // namespace atomr_cutlass

namespace cutlass::gemm::kernel::detail {

template <class Tile, class Cluster, uint32_t kStages>
struct TileSchedulerSelector<atomr_cutlass::TileListScheduler, arch::Sm90, Tile, Cluster, kStages> {
  using Scheduler = atomr_cutlass::TileList<Cluster>;
};

}  // namespace cutlass::gemm::kernel::detail
