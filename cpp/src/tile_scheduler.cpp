#include "tile_scheduler.h"

#include <algorithm>

namespace atomr_cutlass::estimate {
namespace {

constexpr int64_t kMost = int64_t(1) << 55;

// Thread blocks that the shorter side of a stream-K kernel's grid has for a swizzle of kSwizzles to be taken.
constexpr std::array<int64_t, 4> kShortestSide = {1, 2, 3, 6};

// Multiprocessors of a GPC, by which the clusters that run at once are counted where no driver was asked.
constexpr int64_t kGpcMultiprocessors = 18;

// The driver's counts (an H200, one of whose GPCs has only ten).
struct ClustersAtOnce {
  int64_t multiprocessors, cluster, count;
};
constexpr ClustersAtOnce kClustersAtOnce[] = {{132, 4, 30}, {132, 8, 15}};

constexpr int64_t kShortestUnit = 8;  // steps along K that a stream-K unit has at least

}  // namespace

int64_t saturated(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? kMost : std::min(product, kMost);
}

TileList tile_list(Grid grid, int64_t cluster_m, int64_t cluster_n, int64_t multiprocessors, int64_t swizzle,
                   int raster, bool stream_k) {
  int64_t const rows = round_up(grid.rows, cluster_m), columns = round_up(grid.columns, cluster_n);
  int64_t const at_once = blocks_at_once(multiprocessors, cluster_m * cluster_n);
  swizzle = std::max<int64_t>(swizzle, 1);
  if (stream_k) {
    int64_t taken = 1;
    for (size_t i = 0; i < kSwizzles.size(); ++i) {
      if (kSwizzles[i] <= swizzle && std::min(rows, columns) >= kShortestSide[i]) taken = kSwizzles[i];
    }
    int64_t const all_rows = round_up(rows, taken * cluster_m), all_columns = round_up(columns, taken * cluster_n);
    if (raster == kHeuristic) raster = all_columns > all_rows ? kAlongM : kAlongN;
    return {all_rows, all_columns, grid.batch, cluster_m, cluster_n, taken, raster, at_once};
  }
  if (raster == kHeuristic) raster = columns > rows ? kAlongM : kAlongN;
  int64_t const taken = std::min(swizzle, raster == kAlongM ? columns / cluster_n : rows / cluster_m);
  TileList made{rows, columns, grid.batch, cluster_m, cluster_n, taken, raster, at_once};
  made.blocks = std::min(made.blocks, made.tiles());
  return made;
}

int64_t blocks_at_once(int64_t multiprocessors, int64_t cluster) {
  if (cluster == 1) return multiprocessors;
  for (ClustersAtOnce const& known : kClustersAtOnce) {
    if (known.multiprocessors == multiprocessors && known.cluster == cluster) return known.count * cluster;
  }
  int64_t const gpcs = multiprocessors / kGpcMultiprocessors, rest = multiprocessors % kGpcMultiprocessors;
  int64_t const found = gpcs * round_down(kGpcMultiprocessors, cluster) + round_down(rest, cluster);
  return std::max(cluster, round_down(std::min(found, multiprocessors), cluster));
}

std::vector<std::pair<int64_t, int>> orders(Grid grid, int64_t cluster_m, int64_t cluster_n, bool stream_k) {
  int64_t const rows = round_up(grid.rows, cluster_m), columns = round_up(grid.columns, cluster_n);
  int const own = columns > rows ? kAlongM : kAlongN;
  std::vector<std::pair<int64_t, int>> found;
  for (size_t i = 0; i < kSwizzles.size(); ++i) {
    for (int const raster : {own, int(own == kAlongM ? kAlongN : kAlongM)}) {
      bool const along_m = raster == kAlongM;
      int64_t const across = along_m ? columns / cluster_n : rows / cluster_m;
      int64_t const along = along_m ? rows / cluster_m : columns / cluster_n;
      bool const differs =
          stream_k ? std::min(rows, columns) >= kShortestSide[i] : i == 0 || (kSwizzles[i] < across && along > 1);
      if (differs) found.emplace_back(kSwizzles[i], raster);
    }
  }
  return found;
}

Decomposition decompose(TileList const& list, int64_t k_tiles) {
  int64_t const cluster = list.cluster_m * list.cluster_n, tiles = list.tiles();
  int64_t const full = tiles / list.blocks, tail = tiles - full * list.blocks;
  Decomposition const whole{tiles, 0, 0, 1};
  if (tail == 0 || 2 * tail >= list.blocks || k_tiles <= kShortestUnit) return whole;
  int64_t const cut = round_down(tiles - std::max<int64_t>(full - 1, 0) * list.blocks, cluster);
  int64_t const units =
      std::min(round_down(list.blocks, cluster), round_down(saturated(k_tiles, cut) / kShortestUnit, cluster));
  if (cut == 0 || units == 0) return whole;
  int64_t const splits = cut < units && units % cut == 0 ? units / cut : 1;
  // All tiles are cut then, not only those that were to be.
  if (splits > 1) return {0, tiles, tiles * splits, splits};
  return {tiles - cut, cut, units, 1};
}

}  // namespace atomr_cutlass::estimate
