// Epilogue trees (epilogue_tree.h) of the sm80 generation: a visitor for CUTLASS 2.x.
#pragma once

#include "atomr_cutlass/epilogue_tree.h"
#include "atomr_cutlass/gemm_sm80.h"
#include "atomr_cutlass/gemm_sm80_scaled.h"
#include "cutlass/array.h"
#include "cutlass/epilogue/threadblock/epilogue_with_visitor_callbacks.h"
#include "cutlass/gemm/kernel/gemm_universal_with_visitor.h"
#include "cutlass/gemm_coord.h"

namespace atomr_cutlass {

// A thread handles the same columns in all of its rows.
template <int kColumns>
struct RowLanes {
  static constexpr int kAlongM = 0, kAlongN = 0, kKeptColumns = kColumns;
  static constexpr bool kWholeBytes = false;
};

// What the visitor reads and writes beside the tree's operands: C and D are row-major, and their batches are a stride
// apart.
template <class Tree, class Element>
struct TreeOutputSm80 {
  TreeParams<Tree> tree;
  Element const* c;
  Element* d;
  int64_t ldc, ldd, batch_stride_c, batch_stride_d;
};

// All of the tree in one node, the loads of C and the stores of D included; parameters as in gemm_sm80_scaled.h.
template <class Epilogue, class ThreadMap, class Tile, class Element, int kAccess, int kAlign>
struct TreeVisitorSm80 {
  using Tree = typename Epilogue::Tree;
  using Value = typename Tree::Value;
  using Thread = TreeThread<Tree, RowLanes<ThreadMap::Iterations::kColumn * kAccess>>;
  using Vectors = VectorsSm80<Element, kAccess, kAlign>;
  static constexpr bool kScaled = Epilogue::kScaled, kSource = Epilogue::kSource;

  struct SharedStorage {};
  using Arguments = TreeOutputSm80<Tree, Element>;
  using Params = Arguments;

  template <class Problem>
  static constexpr Params to_underlying_arguments(Problem const&, Arguments const& args, void*) {
    return args;
  }

  // Where a step begins, from the thread's first row on: as CUTLASS's output iterator advances.
  CUTLASS_DEVICE static int first_row(int step) {
    using Shape = typename ThreadMap::Shape;
    using Count = typename ThreadMap::Count;
    int const group = step / Count::kRow, cluster = group / Count::kGroup;
    int const group_rows = Shape::kGroup * Count::kRow * Shape::kRow;
    return step % Count::kRow * Shape::kRow + (group + cluster * Count::kGroup) * group_rows;
  }

  CUTLASS_HOST_DEVICE TreeVisitorSm80() {}
  CUTLASS_HOST_DEVICE TreeVisitorSm80(Params const& params, SharedStorage const&) : params(&params) {}

  struct Callbacks {
    Params const& params;
    Thread tree;
    float scale_d;
    LargestAbsolute largest;

    CUTLASS_DEVICE Callbacks(Params const& params) : params(params), tree(params.tree) {}

    CUTLASS_DEVICE void begin_epilogue() {
      tree.begin();
      scale_d = kScaled ? params.tree.scaled.output() : 1.0f;
    }

    CUTLASS_DEVICE void begin_step(int) {}
    CUTLASS_DEVICE void begin_row(int) {}

    template <class Accumulator>
    CUTLASS_DEVICE void visit(int step, int row_index, int column_index, int,
                              cutlass::Array<Accumulator, kAccess> const& accumulators) {
      constexpr int kRows = ThreadMap::Iterations::kRow, kGroups = ThreadMap::Iterations::kGroup;
      struct Relative {
        int m, n;
      };
      int const m = first_row(step) + row_index % kRows * ThreadMap::Delta::kRow +
                    row_index / kRows % kGroups * ThreadMap::Delta::kGroup +
                    row_index / (kRows * kGroups) * ThreadMap::Delta::kCluster;
      int const n = column_index * ThreadMap::Delta::kColumn;
      auto const places = [&](int j) { return Relative{m, n + j}; };
      int const row = tree.tile_m + tree.first_m + m, column = tree.tile_n + tree.first_n + n;
      if (row >= tree.count_m || column >= tree.count_n) return;
      ScaledParams const& scaled = params.tree.scaled;
      typename Vectors::Values source;
      if (kSource || params.tree.beta != Value(0)) {
        source = Vectors::load(params.c + tree.batch * params.batch_stride_c + row * params.ldc + column,
                               tree.count_n - column);
      }
      Value const factor = kScaled ? Value(scaled.row(row, tree.count_m)) : params.tree.alpha;
      cutlass::Array<Value, kAccess> values;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kAccess; ++j) {
        Value const scale = kScaled ? factor * Value(scaled.column(column + j, tree.count_n)) : factor;
        values[j] = scale * Value(accumulators[j]);
      }
      if (!kSource && params.tree.beta != Value(0)) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kAccess; ++j) values[j] += params.tree.beta * Value(source[j]);
      }
      tree.template apply<kAccess>(values, places, [&](int j) { return source[j]; }, column_index * kAccess);
      typename Vectors::Values result;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kAccess; ++j) {
        if (kScaled && column + j < tree.count_n) largest.see(float(values[j]));
        result[j] = converted<Element>(values[j] * Value(scale_d));
      }
      Vectors::store(params.d + tree.batch * params.batch_stride_d + row * params.ldd + column, tree.count_n - column,
                     result);
    }

    CUTLASS_DEVICE void end_row(int) {}
    CUTLASS_DEVICE void end_step(int) {}
    CUTLASS_DEVICE void end_epilogue() {
      if (kScaled && params.tree.scaled.amax != nullptr) largest.store(params.tree.scaled.amax);
      tree.end();
      tree.end_columns(
          [&](int i) { return tree.tile_n + tree.first_n + i / kAccess * ThreadMap::Delta::kColumn + i % kAccess; });
    }
  };

  template <class Problem>
  CUTLASS_DEVICE Callbacks get_callbacks(cutlass::gemm::GemmCoord const& tile, int thread, Problem const& problem) {
    Callbacks callbacks(*params);
    auto const offset = ThreadMap::initial_offset(thread);
    Thread& tree = callbacks.tree;
    tree.tile_m = tile.m() * Tile::kM;
    tree.tile_n = tile.n() * Tile::kN;
    tree.first_m = offset.row();
    tree.first_n = offset.column();
    tree.count_m = cute::get<0>(problem);
    tree.count_n = cute::get<1>(problem);
    tree.batch = tile.k();
    return callbacks;
  }

  Params const* params;
};

template <class Tree, bool kScaled, class Lanes, class Linear, int kAlign>
struct EpilogueSm80<TreeEpilogue<Tree, kScaled, Lanes>, Linear, kAlign> {
  // A visitor does not add to what other slices of K have left.
  static constexpr bool kSplitK = false;

  using Base = typename Linear::Epilogue;
  using Element = typename Base::OutputTileIterator::Element;
  using Visitor = TreeVisitorSm80<TreeEpilogue<Tree, kScaled, Lanes>, typename Base::OutputTileIterator::ThreadMap,
                                  typename Linear::Mma::Shape, Element, Base::kElementsPerAccess, kAlign>;
  // Unrolled, a kernel of several trees has up to 430 KB of instructions, of which each step runs a few between jumps:
  // waiting for them takes longer than the products.
  static constexpr bool kUnrolled = !kIsChosen<Tree>;
  using Kernel = cutlass::gemm::kernel::GemmWithEpilogueVisitor<
      typename Linear::Mma, cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<Base, Visitor, 1, kUnrolled>,
      typename Linear::ThreadblockSwizzle>;

  static TreeOutputSm80<Tree, Element> arguments(atomr_cutlass_gemm_args const& args) {
    return {TreeParams<Tree>::of(args),
            static_cast<Element const*>(args.c),
            static_cast<Element*>(args.d),
            args.ldc,
            args.ldd,
            args.batch_stride_c,
            args.batch_stride_d};
  }
};

}  // namespace atomr_cutlass
