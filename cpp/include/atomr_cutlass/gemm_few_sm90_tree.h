// Epilogue trees (epilogue_tree.h) of kernels for few rows: four elements at once, side by side in a row of D, or in a
// column where A is the weights.
#pragma once

#include "atomr_cutlass/epilogue_tree.h"
#include "atomr_cutlass/gemm_few_sm90.h"

namespace atomr_cutlass {

// Epilogues that convert their results one by one.
struct FewConverted : FewEpilogue<LinearEpilogue> {
  template <class Element, int kCount>
  CUTLASS_DEVICE static cutlass::Array<Element, kCount> results(cutlass::Array<float, kCount> const& values) {
    cutlass::Array<Element, kCount> made;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) made[i] = converted<Element>(values[i]);
    return made;
  }
};

template <class Tree_, bool kScaled_, class Lanes>
struct FewEpilogue<TreeEpilogue<Tree_, kScaled_, Lanes>> : FewConverted {
  static constexpr bool kIsTree = true, kScaled = kScaled_;
  static constexpr bool kSource = TreeEpilogue<Tree_, kScaled_, Lanes>::kSource;
  // Most rows and columns of D that a tile has. With more columns than rows D's rows are the few.
  static constexpr int kTileM = 128, kTileN = 256;
  using Staged = StagedVectors<Tree_, kTileM, kTileN>;
  static constexpr int kStagedBytes = (int(sizeof(Staged)) + 127) / 128 * 128;
  using Params = TreeParams<Tree_>;

  struct Thread {
    TreeThread<Tree_, Lanes, Staged> tree;

    CUTLASS_DEVICE Thread(Params const& params, char* staged) : tree(params) {
      tree.staged = reinterpret_cast<Staged*>(staged);
    }

    // Reads the scalars, and this thread's part of a tile's rows and columns into shared memory: `apply` of any thread
    // must come after a barrier of all `threads`.
    CUTLASS_DEVICE void begin(int tile_m, int tile_n, int count_m, int count_n, int batch, int threads) {
      tree.tile_m = tile_m;
      tree.tile_n = tile_n;
      tree.count_m = count_m;
      tree.count_n = count_n;
      tree.batch = batch;
      tree.begin();
      tree.stage(int(threadIdx.x), threads);
    }

    // Of kRun rows of weights from `row` on, and one of the few, in the tile.
    template <int kRun, class Element>
    CUTLASS_DEVICE void apply(cutlass::Array<float, kRun>& values, bool turned, int row, int few,
                              Element const (&source)[kRun]) {
      struct Relative {
        int m, n;
      };
      tree.first_m = turned ? row : few;
      tree.first_n = turned ? few : row;
      tree.template apply<kRun>(
          values, [&](int j) { return turned ? Relative{j, 0} : Relative{0, j}; }, [&](int j) { return source[j]; });
    }

    CUTLASS_DEVICE void end() { tree.end(); }
  };
};

}  // namespace atomr_cutlass
