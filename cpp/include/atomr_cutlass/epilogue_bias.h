// D = act(alpha * A B + bias + beta * C), with a bias for each column, as a visitor of TMA epilogues.
#pragma once

#include "atomr_cutlass/epilogue_plain.h"
#include "cute/tensor.hpp"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/numeric_conversion.h"

namespace atomr_cutlass {

template <class Bias>
struct BiasParams {
  float alpha = 1, beta = 0;
  Bias const* bias = nullptr;  // none if null
};

// Function: of activation.h, or void.
template <class Function, int kTileN, class ElementD>
struct BiasVisitor : PlainVisitor<BiasParams<ElementD>> {
  struct SharedStorage {
    float columns[kTileN];
  };
  using Params = BiasParams<ElementD>;

  CUTLASS_HOST_DEVICE BiasVisitor() {}
  CUTLASS_HOST_DEVICE BiasVisitor(Params const& params, SharedStorage const& shared)
      : params(&params),
        shared(const_cast<SharedStorage*>(&shared)) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return is_C_load_needed(); }
  CUTLASS_DEVICE bool is_C_load_needed() const { return params->beta != 0; }

  template <class Coordinates, class Source>
  struct Callbacks : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
    Params const& params;
    SharedStorage& shared;
    Coordinates coordinates;  // of the thread's elements, from its first one on
    Source const& source;
    int first_n, tile_n, count_n, thread, threads;

    CUTLASS_DEVICE Callbacks(Params const& params, SharedStorage& shared, Coordinates coordinates, Source const& source)
        : params(params),
          shared(shared),
          coordinates(coordinates),
          source(source) {}

    CUTLASS_DEVICE void begin() {
      for (int i = thread; i < kTileN; i += threads) {
        bool const inside = params.bias != nullptr && tile_n + i < count_n;
        shared.columns[i] = inside ? float(params.bias[tile_n + i]) : 0.0f;
      }
    }
    CUTLASS_DEVICE bool begin_sync_needed() const { return true; }

    template <class Accumulator, int kCount>
    CUTLASS_DEVICE cutlass::Array<ElementD, kCount> visit(cutlass::Array<Accumulator, kCount> const& accumulators,
                                                          int fragment, int epilogue_m, int epilogue_n) {
      auto const places = coordinates(cute::_, cute::_, cute::_, epilogue_m, epilogue_n);
      cutlass::Array<float, kCount> result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        int const column = first_n + int(cute::get<1>(places(fragment * kCount + i)));
        float const sum = __fmaf_rn(params.alpha, float(accumulators[i]), shared.columns[column]);
        result[i] = __fmaf_rn(params.beta, float(source(fragment * kCount + i)), sum);
        if constexpr (!cute::is_void_v<Function>) result[i] = Function::apply(result[i]);
      }
      cutlass::NumericArrayConverter<ElementD, float, kCount> convert;
      return convert(result);
    }
  };

  template <bool kReferenceSource, class... A>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<A...> const& args) {
    using Source = cute::remove_cvref_t<decltype(args.tCrC)>;
    Callbacks<decltype(args.tCcD), Source> callbacks(*params, *shared, args.tCcD, args.tCrC);
    callbacks.count_n = cute::get<1>(args.problem_shape_mnkl);
    callbacks.tile_n = int(cute::get<1>(args.tile_coord_mnkl)) * kTileN;
    callbacks.first_n = callbacks.count_n - int(cute::get<1>(args.residue_tCcD)) - callbacks.tile_n;
    callbacks.thread = args.thread_idx;
    callbacks.threads = cute::size(args.tiled_copy);
    return callbacks;
  }

  Params const* params;
  SharedStorage* shared;
};

}  // namespace atomr_cutlass
