// How persistent kernels of the sm90 generation divide a problem into tiles: a launch has as many thread blocks as run
// at once, and each takes one tile after the other off a list. The list rounds the grid of tiles up to whole clusters
// and, of stream-K kernels, both sides to whole swizzles: what lies outside the result is multiplied like any other
// tile, and dropped. The functions follow tile_list.h, and of stream-K tile_scheduler_params.h of CUTLASS 4.2;
// tests/build/test_tile_scheduler.py compares them.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace atomr_cutlass::estimate {

enum Raster { kHeuristic = 0, kAlongM = 1, kAlongN = 2 };  // as kernels' arguments have them

inline constexpr std::array<int64_t, 4> kSwizzles = {1, 2, 4, 8};

inline int64_t ceil_div(int64_t extent, int64_t part) { return (extent + part - 1) / part; }
inline int64_t round_up(int64_t extent, int64_t multiple) { return ceil_div(extent, multiple) * multiple; }
inline int64_t round_down(int64_t extent, int64_t multiple) { return extent / multiple * multiple; }

// A product of extents; what no memory could hold is cut off, so that no request overflows.
int64_t saturated(int64_t a, int64_t b);

struct Grid {
  int64_t rows, columns, batch;
};

// The tiles that a launch visits: thread blocks along M and N, padding included, in clusters, of which `swizzle` side
// by side are taken before the next ones along the raster order; `blocks` of them are launched.
struct TileList {
  int64_t rows, columns, batch;
  int64_t cluster_m, cluster_n;
  int64_t swizzle;
  int raster;
  int64_t blocks;
  int64_t tiles() const { return saturated(saturated(rows, columns), batch); }
};

// How a stream-K launch cuts its tiles: those that one thread block computes each, those that several share, the parts
// that these come to, and the parts of each of them where all are cut alike (1 otherwise).
struct Decomposition {
  int64_t whole, cut, units, splits;
};

// The list for a grid of tiles. No more blocks are launched than there are tiles, but of stream-K.
TileList tile_list(Grid grid, int64_t cluster_m, int64_t cluster_n, int64_t multiprocessors, int64_t swizzle,
                   int raster, bool stream_k);

// Thread blocks that run at once, in whole clusters that each lie in one GPC.
int64_t blocks_at_once(int64_t multiprocessors, int64_t cluster);

// The swizzles and raster orders that differ for a grid of tiles: small swizzles and CUTLASS's own order first.
std::vector<std::pair<int64_t, int>> orders(Grid grid, int64_t cluster_m, int64_t cluster_n, bool stream_k);

// How stream-K, left to its own heuristic, cuts a list of tiles with this many steps along K each.
Decomposition decompose(TileList const& tiles, int64_t k_tiles);

}  // namespace atomr_cutlass::estimate
