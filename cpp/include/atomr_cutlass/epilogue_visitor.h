// Epilogue trees (epilogue_tree.h) in CUTLASS 3.x kernels.
#pragma once

#include "atomr_cutlass/epilogue_plain.h"
#include "atomr_cutlass/epilogue_tree.h"
#include "atomr_cutlass/rounding.h"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/default_epilogue.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/numeric_conversion.h"

namespace atomr_cutlass {

// A visitor for CUTLASS 3.x's TMA epilogues: all of the tree in one node. Rows, columns and the scales of a tile are
// read once a tile, into shared memory. What it returns is of D's type: the collectives convert from the accumulator's
// type only, which may be an integer. Params_: see TreeThread. kWhole: it is that of a ChosenEpilogue.
template <class Epilogue, int kTileM, int kTileN, class ElementD, class Params_ = TreeParams<typename Epilogue::Tree>,
          bool kWhole = false>
struct TreeVisitor : PlainVisitor<Params_> {
  using Tree = typename Epilogue::Tree;
  using Value = typename Tree::Value;
  using Staged = StagedVectors<Tree, kTileM, kTileN>;
  using Thread = TreeThread<Tree, typename Epilogue::Lanes, Staged, Params_>;
  static constexpr bool kScaled = Epilogue::kScaled, kSource = Epilogue::kSource;

  struct SharedStorage {
    float rows[kScaled ? kTileM : 1];
    float columns[kScaled ? kTileN : 1];
    Staged staged;
  };
  using Params = Params_;

  CUTLASS_HOST_DEVICE TreeVisitor() {}
  CUTLASS_HOST_DEVICE TreeVisitor(Params const& params, SharedStorage const& shared)
      : params(&params),
        shared(const_cast<SharedStorage*>(&shared)) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return is_C_load_needed(); }
  CUTLASS_DEVICE bool is_C_load_needed() const { return kSource || params->beta != Value(0); }

  template <class Coordinates, class Source>
  struct Callbacks : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
    SharedStorage& shared;
    Coordinates coordinates;  // of the thread's elements, from its first one on
    Source const& source;
    Thread tree;
    int thread, threads;
    float scale_d;
    LargestAbsolute largest;

    CUTLASS_DEVICE Callbacks(Params const& params, SharedStorage& shared, Coordinates coordinates, Source const& source)
        : shared(shared),
          coordinates(coordinates),
          source(source),
          tree(params) {}

    CUTLASS_DEVICE void begin() {
      if constexpr (!kWhole) stage(tree, shared, thread, threads);
      if constexpr (kScaled) scale_d = tree.params.scales(tree.batch).output();
      tree.begin();
    }

    CUTLASS_DEVICE bool begin_sync_needed() const {
      return !kWhole && (kScaled || Staged::kRows > 0 || Staged::kColumns > 0);
    }

    template <class Accumulator, int kCount>
    CUTLASS_DEVICE cutlass::Array<ElementD, kCount> visit(cutlass::Array<Accumulator, kCount> const& accumulators,
                                                          int fragment, int epilogue_m, int epilogue_n) {
      auto const all = coordinates(cute::_, cute::_, cute::_, epilogue_m, epilogue_n);
      struct Relative {
        int m, n;
      };
      auto const places = [&](int j) {
        auto const place = all(fragment * kCount + j);
        return Relative{int(cute::get<0>(place)), int(cute::get<1>(place))};
      };
      auto const from = [&](int j) { return source(fragment * kCount + j); };
      ScaledParams const& scaled = tree.params.scaled;
      cutlass::Array<Value, kCount> result;
      if constexpr (kWhole) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kCount; ++j) result[j] = Value(accumulators[j]);
        if (tree.params.beta != Value(0)) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kCount; ++j) result[j] = plus_source(result[j], tree.params.beta, Value(from(j)));
          activate(result);
        } else if (tree.params.number() == Tree::kRelu) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kCount; ++j) result[j] = ops::relu(result[j]);
          if constexpr (!kScaled) {
            // Converted here, for relu to become a part of it.
            cutlass::NumericArrayConverter<ElementD, Value, kCount> convert;
            return convert(result);
          }
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kCount; ++j) {
          auto const place = places(j);
          result[j] = scale(tree, shared, place.m, place.n) * Value(accumulators[j]);
        }
        if constexpr (!kSource) {
          if (tree.params.beta != Value(0)) {
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < kCount; ++j) result[j] = plus_source(result[j], tree.params.beta, Value(from(j)));
          }
        }
        tree.template apply<kCount>(result, places, from);
      }
      if constexpr (kScaled) {
        if (scaled.amax != nullptr) {
          int const left_m = tree.count_m - tree.tile_m - tree.first_m;
          int const left_n = tree.count_n - tree.tile_n - tree.first_n;
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kCount; ++j) {
            auto const place = places(j);
            if (place.m < left_m && place.n < left_n) largest.see(result[j]);
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kCount; ++j) result[j] *= scale_d;
      }
      cutlass::NumericArrayConverter<ElementD, Value, kCount> convert;
      return convert(result);
    }

    // Instructions are few, as they stand beside those that run where there is no C: elements take turns at the front.
    // Relu, with which residual blocks end, is one for each element.
    template <int kCount>
    CUTLASS_DEVICE void activate(cutlass::Array<Value, kCount>& values) const {
      constexpr int kFront = kCount % 4 == 0 ? 4 : 1;
      int const number = tree.params.number();
      if (number == 0) return;
      if (number == Tree::kRelu) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kCount; ++j) values[j] = ops::relu(values[j]);
        return;
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int turn = 0; turn < kCount; turn += kFront) {
        Tree::chosen(number, [&](auto one) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kFront; ++j) values[j] = decltype(one)::of(values[j]);
        });
        cutlass::Array<Value, kCount> const before = values;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kCount; ++j) values[j] = before[(j + kFront) % kCount];
      }
    }

    CUTLASS_DEVICE void end() {
      if (kScaled && tree.params.scaled.amax != nullptr) largest.store(tree.params.scaled.amax);
      tree.end();
    }
  };

  template <bool kReferenceSource, class... A>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<A...> const& args) {
    using Source = cute::remove_cvref_t<decltype(args.tCrC)>;
    Callbacks<decltype(args.tCcD), Source> callbacks(*params, *shared, args.tCcD, args.tCrC);
    Thread& tree = callbacks.tree;
    tree.staged = &shared->staged;
    tree.count_m = cute::get<0>(args.problem_shape_mnkl);
    tree.count_n = cute::get<1>(args.problem_shape_mnkl);
    tree.batch = cute::get<3>(args.tile_coord_mnkl);
    tree.tile_m = int(cute::get<0>(args.tile_coord_mnkl)) * kTileM;
    tree.tile_n = int(cute::get<1>(args.tile_coord_mnkl)) * kTileN;
    tree.first_m = tree.count_m - int(cute::get<0>(args.residue_tCcD)) - tree.tile_m;
    tree.first_n = tree.count_n - int(cute::get<1>(args.residue_tCcD)) - tree.tile_n;
    callbacks.thread = args.thread_idx;
    callbacks.threads = cute::size(args.tiled_copy);
    return callbacks;
  }

  // Makes D's values of all of a thread's accumulators of a tile; where there is C, what is added to it. Relu is left
  // to the conversion, of whose instruction it is a part.
  template <class Problem, class Tile, class TileCoordinates, class Engine, class Layout, class TiledMma>
  CUTLASS_DEVICE void apply(Problem problem, Tile tile, TileCoordinates where,
                            cute::Tensor<Engine, Layout>& accumulators, TiledMma tiled_mma, int thread) const {
    using namespace cute;
    Thread tree(*params);
    tree.staged = &shared->staged;
    tree.count_m = get<0>(problem);
    tree.count_n = get<1>(problem);
    tree.batch = get<3>(where);
    tree.tile_m = int(get<0>(where)) * kTileM;
    tree.tile_n = int(get<1>(where)) * kTileN;
    stage(tree, *shared, thread, int(size(tiled_mma)));
    cutlass::arch::NamedBarrier::sync(size(tiled_mma), cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
    Tensor const mine =
        tiled_mma.get_thread_slice(thread).partition_C(make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));
    Tensor const steps = make_coord_tensor(mine.layout());
    tree.first_m = get<0>(mine(_0{}));
    tree.first_n = get<1>(mine(_0{}));
    constexpr int kCount = decltype(size(accumulators))::value;
    int const number = params->number();
    Tree::chosen(params->beta != Value(0) || number == Tree::kRelu ? 0 : number, [&](auto one) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kCount; ++j) {
        int const m = get<0>(steps(j)), n = get<1>(steps(j));
        Value const in = shared->staged.rows[0][tree.first_n + n];
        accumulators(j) = decltype(one)::evaluate(scale(tree, *shared, m, n) * accumulators(j), &in, nullptr);
      }
    });
  }

  Params const* params;
  SharedStorage* shared;

 private:
  // Reads the tile's rows, columns and scales into shared memory; the caller synchronizes.
  CUTLASS_DEVICE static void stage(Thread& tree, SharedStorage& shared, int thread, int threads) {
    if constexpr (kScaled) {
      ScaledParams const& scaled = tree.params.scales(tree.batch);
      for (int i = thread; i < kTileM; i += threads) shared.rows[i] = scaled.row(tree.tile_m + i, tree.count_m);
      for (int i = thread; i < kTileN; i += threads) shared.columns[i] = scaled.column(tree.tile_n + i, tree.count_n);
    }
    tree.stage(thread, threads);
  }

  CUTLASS_DEVICE static Value scale(Thread const& tree, SharedStorage const& shared, int m, int n) {
    return kScaled ? Value(shared.rows[tree.first_m + m] * shared.columns[tree.first_n + n]) : tree.params.alpha;
  }
};

// A TMA epilogue with a tree that the arguments choose. Where there is no C, the accumulators are D's values before any
// of them is stored: the choice is one branch a tile. One for each part that is stored jumps over the instructions of
// the other trees and back, and nothing hides its wait in a cooperative kernel: up to 2% at 4096x16384x4096.
template <class Base, class Visitor>
struct ChosenEpilogue : Base {
  using typename Base::Params;
  using typename Base::TensorStorage;

  CUTLASS_HOST_DEVICE ChosenEpilogue(Params const& params, TensorStorage& shared)
      : Base(params, shared),
        visitor(params.thread, shared.thread) {}

  template <class Loads, class LoadState, class Stores, class StoreState, class Problem, class Tile,
            class TileCoordinates, class Engine, class Layout, class TiledMma, class... More>
  CUTLASS_DEVICE auto store(Loads loads, LoadState load_state, Stores stores, StoreState store_state, Problem problem,
                            Tile tile, TileCoordinates where, cute::Tensor<Engine, Layout> accumulators,
                            TiledMma tiled_mma, int thread, TensorStorage& shared, More const&... more) {
    visitor.apply(problem, tile, where, accumulators, tiled_mma, thread);
    return Base::store(loads, load_state, stores, store_state, problem, tile, where, accumulators, tiled_mma, thread,
                       shared, more...);
  }

 private:
  Visitor visitor;
};

// The visitor of an epilogue: an adaptor's own for one without a tree, `Linear` or `Scaled`. Params: see TreeThread.
// kChooses: whether a tree that the arguments choose is that of a ChosenEpilogue.
template <class Epilogue, class Linear, class Scaled, int kTileM, int kTileN, class ElementD,
          template <class> class Params = TreeParams, bool kChooses = true>
struct VisitorOf {
  using Type = Linear;
};
template <class Linear, class Scaled, int kTileM, int kTileN, class ElementD, template <class> class Params,
          bool kChooses>
struct VisitorOf<ScaledEpilogue, Linear, Scaled, kTileM, kTileN, ElementD, Params, kChooses> {
  using Type = Scaled;
};
template <class Tree, bool kScaled, class Lanes, class Linear, class Scaled, int kTileM, int kTileN, class ElementD,
          template <class> class Params, bool kChooses>
struct VisitorOf<TreeEpilogue<Tree, kScaled, Lanes>, Linear, Scaled, kTileM, kTileN, ElementD, Params, kChooses> {
  using Type = TreeVisitor<TreeEpilogue<Tree, kScaled, Lanes>, kTileM, kTileN, ElementD, Params<Tree>,
                           kChooses && kIsChosen<Tree>>;
};

template <class Built, class Fusion>
struct ChosenOf {
  using Type = Built;
};
template <class Built, class Epilogue, int kTileM, int kTileN, class ElementD, class Params>
struct ChosenOf<Built, TreeVisitor<Epilogue, kTileM, kTileN, ElementD, Params, true>> {
  using Type = ChosenEpilogue<Built, TreeVisitor<Epilogue, kTileM, kTileN, ElementD, Params, true>>;
};

// The same from registers straight to global memory, one element at a time: for D whose rows are not aligned to 16
// bytes.
template <class Epilogue, class Element, class Stride>
struct TreeStore : DirectStore<TreeParams<typename Epilogue::Tree>, Element, Stride> {
  using Tree = typename Epilogue::Tree;
  using Value = typename Tree::Value;
  using Base = DirectStore<TreeParams<typename Epilogue::Tree>, Element, Stride>;
  using Base::offset;
  using typename Base::Arguments;
  using typename Base::ElementC;
  using typename Base::ElementD;
  using typename Base::Params;
  using typename Base::SharedStorage;

  CUTLASS_HOST_DEVICE TreeStore(Params const& params, SharedStorage const& = SharedStorage()) : params(params) {}

  template <class Problem, class Tile, class TileCoordinates, class Engine, class Layout, class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(Problem problem, Tile tile, TileCoordinates where,
                                 cute::Tensor<Engine, Layout> const& accumulators, TiledMma tiled_mma, Residue,
                                 int thread, char*) {
    using namespace cute;
    struct Relative {
      int m, n;
    };
    constexpr int kCount = 8;
    constexpr int kElements = decltype(size(accumulators))::value;
    static_assert(kElements % kCount == 0, "the accumulators of a thread are whole fragments");
    TreeThread<Tree, typename Epilogue::Lanes> tree(params.thread);
    tree.count_m = get<0>(problem);
    tree.count_n = get<1>(problem);
    tree.batch = get<3>(where);
    Tensor const mine = tiled_mma.get_thread_slice(thread).partition_C(
        local_tile(make_identity_tensor(make_shape(tree.count_m, tree.count_n)), take<0, 2>(tile), take<0, 2>(where)));
    Tensor const steps = make_coord_tensor(mine.layout());
    tree.tile_m = int(get<0>(where)) * size<0>(tile);
    tree.tile_n = int(get<1>(where)) * size<1>(tile);
    tree.first_m = int(get<0>(mine(_0{}))) - tree.tile_m;
    tree.first_n = int(get<1>(mine(_0{}))) - tree.tile_n;
    tree.begin();

    ScaledParams const& scaled = params.thread.scaled;
    float const scale_d = Epilogue::kScaled ? scaled.output() : 1.0f;
    LargestAbsolute largest;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kElements; first += kCount) {
      auto const places = [&](int j) {
        auto const place = steps(first + j);
        return Relative{int(get<0>(place)), int(get<1>(place))};
      };
      auto const row = [&](int j) { return tree.tile_m + tree.first_m + places(j).m; };
      auto const column = [&](int j) { return tree.tile_n + tree.first_n + places(j).n; };
      auto const inside = [&](int j) { return row(j) < tree.count_m && column(j) < tree.count_n; };
      auto const source = [&](int j) {
        return inside(j) ? params.ptr_C[offset(params.dC, row(j), column(j), tree.batch)] : ElementC(0.0f);
      };
      cutlass::Array<Value, kCount> values;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kCount; ++j) {
        float const scale = Epilogue::kScaled
                                ? scaled.row(row(j), tree.count_m) * scaled.column(column(j), tree.count_n)
                                : params.thread.alpha;
        values[j] = scale * Value(accumulators(first + j));
        if (!Epilogue::kSource && params.thread.beta != Value(0)) {
          values[j] = plus_source(values[j], params.thread.beta, Value(source(j)));
        }
      }
      tree.template apply<kCount>(values, places, source);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kCount; ++j) {
        if (!inside(j)) continue;
        if (Epilogue::kScaled) largest.see(values[j]);
        params.ptr_D[offset(params.dD, row(j), column(j), tree.batch)] = converted<ElementD>(values[j] * scale_d);
      }
    }
    tree.end();
    if (Epilogue::kScaled && scaled.amax != nullptr) largest.store(scaled.amax);
  }

 private:
  Params params;
};

}  // namespace atomr_cutlass
