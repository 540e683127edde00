#include "split_division.h"

#include <algorithm>
#include <cmath>

#include "tile_scheduler.h"

namespace atomr_cutlass::estimate {
namespace {

constexpr double kEfficiency = 0.9;    // share of WGMMA's peak rate that a step sustains
constexpr double kStepClocks = 172.0;  // of the shortest step
constexpr double kSharedBytesPerClock = 125.0;  // of shared memory, which instructions read and TMA writes
// That one multiprocessor draws from L2: where those with rows or columns in common read them at the same time, and
// where they do not.
constexpr double kEvenBytesPerClock = 55.0, kUnevenBytesPerClock = 45.0;
constexpr double kTileClocks = 1000.0;
constexpr double kStoredPerClock = 32.0;      // elements of a tile
constexpr double kSharedClocks = 3500.0;      // leaving a part of a tile and finding out whether it is the last
constexpr double kPartsBytesPerClock = 40.0;  // at which parts are written, and read by the last

Division division(SplitProblem const& p, int64_t wide, int64_t pair_m, int64_t pair_n, bool even) {
  int64_t const rows = round_up(ceil_div(p.m, kSplitRows), pair_m), columns = round_up(ceil_div(p.n, wide), pair_n);
  int64_t const height = round_up(ceil_div(p.m, rows), p.a_along_k ? 8 * pair_n : 64);
  int64_t const width = round_up(ceil_div(p.n, columns), p.b_along_k ? 8 * pair_m : 64);
  int64_t const tiles = saturated(saturated(ceil_div(p.m, height * pair_m), ceil_div(p.n, width * pair_n)), p.batch);
  int64_t const steps = ceil_div(p.k, kSplitBox);
  int64_t whole = tiles / p.clusters * p.clusters, cut = tiles - whole;
  if (16 * cut >= 15 * p.clusters) whole = tiles, cut = 0;
  if (whole >= p.clusters && 0 < 2 * cut && 2 * cut < p.clusters) whole -= p.clusters, cut += p.clusters;
  int64_t sharing = std::min(saturated(cut, steps) / (kSplitLeastSteps * p.ranks), p.clusters);
  if (sharing <= cut && sharing < p.clusters) whole = tiles, cut = 0, sharing = 0;
  even = even && whole == 0 && sharing > cut;
  if (even) sharing = sharing / cut * cut;
  double const read = 128 * (double(height) / double(pair_n) + double(width) / double(pair_m));
  double const rate = cut == 0 || even ? kEvenBytesPerClock : kUnevenBytesPerClock;
  double const shared = double(128 * ((height > 64 ? 2 : 1) * (64 + wide) + height + width));
  int64_t const waves = ceil_div(whole, p.clusters);
  Division made{};
  made.wide = wide;
  made.pair_m = pair_m, made.pair_n = pair_n;
  made.height = height, made.width = width;
  made.whole = whole, made.cut = cut, made.sharing = sharing;
  double const shares = cut != 0 ? double(cut) / double(sharing) : 0.0;
  made.steps = double(steps) * (double(waves) + shares) / double(p.ranks);
  made.step_clocks =
      std::max({double(4 * wide) / kEfficiency, shared / kSharedBytesPerClock, read / rate, kStepClocks});
  made.tiles = waves;
  // Uneven slices end in one tile and begin in another.
  made.segments = cut == 0 ? 0 : sharing % cut == 0 ? 1 : 2;
  made.part_bytes = double(4 * height * wide) / double(p.ranks);
  return made;
}

}  // namespace

double Division::clocks() const {
  double const tile = kTileClocks + double(kSplitRows * wide) / kStoredPerClock;
  double const parts = part_bytes * (double(segments) + peers()) / kPartsBytesPerClock;
  return steps * step_clocks + double(tiles) * tile + double(segments) * (kSharedClocks + tile) + parts;
}

Division divide(SplitProblem const& problem) {
  Division best{};
  double least = INFINITY;
  for (int64_t wide = 64; wide <= problem.widest; wide += 64) {
    for (int64_t const pair_m : {1, 2, 4}) {
      if (problem.pairs % pair_m != 0) continue;
      for (bool const even : {false, true}) {
        Division const tried = division(problem, wide, pair_m, problem.pairs / pair_m, even);
        double const clocks = tried.clocks();
        if (clocks < least) best = tried, least = clocks;
      }
    }
  }
  return best;
}

}  // namespace atomr_cutlass::estimate
