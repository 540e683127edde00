// The scaled epilogue (scaled.h) of CUTLASS 3.x kernels.
#pragma once

#include "atomr_cutlass/epilogue_plain.h"
#include "atomr_cutlass/rounding.h"
#include "atomr_cutlass/scaled.h"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/default_epilogue.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/numeric_conversion.h"

namespace atomr_cutlass {

// A visitor for CUTLASS 3.x's TMA epilogues: all of the tree in one node. The scales of a tile's rows and columns are
// read once a tile, into shared memory.
template <int kTileM, int kTileN>
struct ScaledVisitor : PlainVisitor<ScaledParams> {
  struct SharedStorage {
    float rows[kTileM];
    float columns[kTileN];
  };
  using Params = ScaledParams;

  CUTLASS_HOST_DEVICE ScaledVisitor() {}
  CUTLASS_HOST_DEVICE ScaledVisitor(Params const& params, SharedStorage const& shared)
      : params(&params),
        shared(const_cast<SharedStorage*>(&shared)) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return params->needs_c(); }
  CUTLASS_DEVICE bool is_C_load_needed() const { return params->needs_c(); }
  static constexpr bool kIsProduct = true;
  CUTLASS_DEVICE ProductOnly product() const {
    bool const only = params->uniform() && !params->needs_c() && params->amax == nullptr && params->scale_d == nullptr;
    return {only, only ? params->row(0, 1) * params->column(0, 1) : 1.0f};
  }

  // The scales of a tile's rows and columns that a thread reads, where at least 128 threads share them. All are asked
  // for before the first is there: each takes as long as a few steps of K.
  struct Read {
    static constexpr int kRows = (kTileM + 127) / 128, kColumns = (kTileN + 127) / 128;
    float rows[kRows], columns[kColumns];

    CUTLASS_DEVICE Read() {}
    CUTLASS_DEVICE Read(ScaledParams const& scales, int tile_m, int tile_n, int count_m, int count_n, int thread,
                        int threads) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows; ++i) rows[i] = scales.row(tile_m + thread + i * threads, count_m);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns; ++i) columns[i] = scales.column(tile_n + thread + i * threads, count_n);
    }
  };

  // Called before a tile's products, so that its scales are there after them.
  template <class Problem, class Where>
  CUTLASS_DEVICE void read_ahead(Problem const& problem, Where const& where, int thread, int threads) {
    if (params->uniform()) return;
    ahead = Read(*params, int(cute::get<0>(where)) * kTileM, int(cute::get<1>(where)) * kTileN,
                 int(cute::get<0>(problem)), int(cute::get<1>(problem)), thread, threads);
    is_ahead = true;
  }

  template <class Coordinates, class Source>
  struct Callbacks : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
    Params const& params;
    SharedStorage& shared;
    Coordinates coordinates;  // of the thread's elements, from its first one on
    Source const& source;
    int tile_m, tile_n;  // where the tile begins
    int first_m, first_n;  // the thread's first element in the tile
    int count_m, count_n, thread, threads;
    float scale_d;
    float scale;  // of all elements, where they have one
    LargestAbsolute largest;
    Read read;
    bool is_read = false;

    CUTLASS_DEVICE Callbacks(Params const& params, SharedStorage& shared, Coordinates coordinates, Source const& source)
        : params(params),
          shared(shared),
          coordinates(coordinates),
          source(source) {}

    CUTLASS_DEVICE void begin() { begin(params); }

    // With scales of a group; their forms are those of `params`.
    CUTLASS_DEVICE void begin(ScaledParams const& scales) {
      scale_d = scales.output();
      if (params.uniform()) {
        scale = scales.row(0, 1) * scales.column(0, 1);
        return;
      }
      if (!is_read) read = Read(scales, tile_m, tile_n, count_m, count_n, thread, threads);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Read::kRows; ++i) {
        if (thread + i * threads < kTileM) shared.rows[thread + i * threads] = read.rows[i];
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Read::kColumns; ++i) {
        if (thread + i * threads < kTileN) shared.columns[thread + i * threads] = read.columns[i];
      }
    }

    CUTLASS_DEVICE bool begin_sync_needed() const { return !params.uniform(); }

    template <class Accumulator, int kCount>
    CUTLASS_DEVICE cutlass::Array<float, kCount> visit(cutlass::Array<Accumulator, kCount> const& accumulators,
                                                       int fragment, int epilogue_m, int epilogue_n) {
      auto const places = coordinates(cute::_, cute::_, cute::_, epilogue_m, epilogue_n);
      cutlass::Array<float, kCount> result;
      if (params.uniform()) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) result[i] = times(scale, float(accumulators[i]));
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) {
          auto const place = places(fragment * kCount + i);
          float const factor =
              shared.rows[first_m + cute::get<0>(place)] * shared.columns[first_n + cute::get<1>(place)];
          result[i] = times(factor, float(accumulators[i]));
        }
      }
      if (params.needs_c()) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) {
          result[i] = plus_source(result[i], params.beta, float(source(fragment * kCount + i)));
        }
      }
      if (params.amax != nullptr) {
        // Block scales beyond the edges are whatever lies there: the accumulators need not be zeros, or numbers.
        int const left_m = count_m - tile_m - first_m, left_n = count_n - tile_n - first_n;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) {
          auto const place = places(fragment * kCount + i);
          if (cute::get<0>(place) < left_m && cute::get<1>(place) < left_n) largest.see(result[i]);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) result[i] *= scale_d;
      return result;
    }

    CUTLASS_DEVICE void end() {
      if (params.amax != nullptr) largest.store(params.amax);
    }
  };

  template <bool kReferenceSource, class... A>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<A...> const& args) {
    using Source = cute::remove_cvref_t<decltype(args.tCrC)>;
    Callbacks<decltype(args.tCcD), Source> callbacks(*params, *shared, args.tCcD, args.tCrC);
    callbacks.count_m = cute::get<0>(args.problem_shape_mnkl);
    callbacks.count_n = cute::get<1>(args.problem_shape_mnkl);
    callbacks.tile_m = int(cute::get<0>(args.tile_coord_mnkl)) * kTileM;
    callbacks.tile_n = int(cute::get<1>(args.tile_coord_mnkl)) * kTileN;
    callbacks.first_m = callbacks.count_m - int(cute::get<0>(args.residue_tCcD)) - callbacks.tile_m;
    callbacks.first_n = callbacks.count_n - int(cute::get<1>(args.residue_tCcD)) - callbacks.tile_n;
    callbacks.thread = args.thread_idx;
    callbacks.threads = cute::size(args.tiled_copy);
    callbacks.read = ahead;
    callbacks.is_read = is_ahead;
    return callbacks;
  }

  Params const* params;
  SharedStorage* shared;
  Read ahead;
  bool is_ahead = false;
};

// The same from registers straight to global memory, one element at a time: for D whose rows are not aligned to 16
// bytes, and for products computed as D^T = B^T A^T (kSwapped), whose rows are the columns of B.
template <class Element, class Stride, bool kSwapped>
struct ScaledStore : DirectStore<ScaledParams, Element, Stride> {
  using Base = DirectStore<ScaledParams, Element, Stride>;
  using Base::offset;
  using typename Base::Arguments;
  using typename Base::ElementC;
  using typename Base::ElementD;
  using typename Base::Params;
  using typename Base::SharedStorage;

  CUTLASS_HOST_DEVICE ScaledStore(Params const& params, SharedStorage const& = SharedStorage()) : params(params) {}

  template <class Problem, class Tile, class TileCoordinates, class Engine, class Layout, class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(Problem problem, Tile tile, TileCoordinates where,
                                 cute::Tensor<Engine, Layout> const& accumulators, TiledMma tiled_mma, Residue,
                                 int thread, char*) {
    ScaledParams const& scaled = params.thread;
    float const scale_d = scaled.output();
    LargestAbsolute largest;
    Base::each_element(problem, tile, where, accumulators, tiled_mma, thread, [&](int i, int m, int n, int batch) {
      int const row = kSwapped ? n : m, column = kSwapped ? m : n;
      float value = times(scaled.row(row, row + 1) * scaled.column(column, column + 1), float(accumulators(i)));
      if (scaled.needs_c()) {
        value = plus_source(value, scaled.beta, float(params.ptr_C[offset(params.dC, m, n, batch)]));
      }
      largest.see(value);
      cutlass::NumericConverter<ElementD, float> convert;
      params.ptr_D[offset(params.dD, m, n, batch)] = convert(value * scale_d);
    });
    if (scaled.amax != nullptr) largest.store(scaled.amax);
  }

 private:
  Params params;
};

}  // namespace atomr_cutlass
