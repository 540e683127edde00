// The division of a problem by kernels whose thread blocks divide K (GemmSplitSm90): tiles, pairs of them, and slices
// of K. The functions follow `shape` of gemm_split_sm90.h, which decides when a kernel is launched.
#pragma once

#include <cstdint>

namespace atomr_cutlass::estimate {

inline constexpr int64_t kSplitRows = 128;      // of a tile
inline constexpr int64_t kSplitBox = 64;        // elements of a step along K
inline constexpr int64_t kSplitLeastSteps = 4;  // that a thread block has at least of a tile that is divided

// A kernel whose thread blocks divide K, and the problem.
struct SplitProblem {
  int64_t m, n, k, batch;
  int64_t widest;    // columns of a tile
  int64_t pairs;     // thread blocks that load for one another
  int64_t ranks;     // thread blocks of a cluster that divide K
  int64_t clusters;  // that run at once
  bool a_along_k, b_along_k;
};

// One way to divide a problem among the clusters of a launch, and what its slowest thread block does.
struct Division {
  int64_t wide;             // columns that a thread block's instructions compute
  int64_t pair_m, pair_n;   // thread blocks of a pair along M and along N
  int64_t height, width;    // of a tile of D
  int64_t whole, cut;       // pairs that one cluster computes, and those that clusters share
  int64_t sharing;          // clusters that share the latter
  double steps;             // along K, of a thread block
  double step_clocks;       // of one of them, at least
  int64_t tiles, segments;  // whole tiles of a thread block, and parts of others
  double part_bytes;        // written for each of these, and read of each cluster that shares its tile

  double peers() const { return cut != 0 ? double(sharing) / double(cut) : 0.0; }  // clusters that share a tile
  double clocks() const;                                                            // by which the kernel decides
};

// The division that a kernel takes.
Division divide(SplitProblem const& problem);

}  // namespace atomr_cutlass::estimate
