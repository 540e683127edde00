// D = alpha * A B + beta * C. Of TMA epilogues of CUTLASS 3.x, a visitor of one node: CUTLASS's own admits scalars on
// the device and one for each matrix of a batch; the registers that this takes are missed by mainloops that use the
// epilogue's warps. For groups, it has the warp that loads C wait for nothing on every tile when there is no C.
#pragma once

#include "atomr_cutlass/epilogue_plain.h"
#include "atomr_cutlass/rounding.h"
#include "cute/tensor.hpp"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/numeric_conversion.h"

namespace atomr_cutlass {

template <class Compute>
struct LinearParams {
  Compute alpha = Compute(1), beta = Compute(0);
};

// kZeros: the source is zeros where it is not loaded, else anything.
template <class ElementD, class Compute, bool kZeros = false>
struct LinearVisitor : PlainVisitor<LinearParams<Compute>> {
  struct SharedStorage {};
  using Params = LinearParams<Compute>;

  CUTLASS_HOST_DEVICE LinearVisitor() {}
  CUTLASS_HOST_DEVICE LinearVisitor(Params const& params, SharedStorage const&) : params(&params) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return is_C_load_needed(); }
  static constexpr bool kIsProduct = cute::is_same_v<Compute, float>;
  CUTLASS_DEVICE ProductOnly product() const { return {params->beta == 0, params->alpha}; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return params->beta != Compute(0); }

  template <class Source>
  struct Callbacks : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
    Params const& params;
    Source const& source;

    CUTLASS_DEVICE Callbacks(Params const& params, Source const& source) : params(params), source(source) {}

    template <class Accumulator, int kCount>
    CUTLASS_DEVICE cutlass::Array<ElementD, kCount> visit(cutlass::Array<Accumulator, kCount> const& accumulators,
                                                          int fragment, int, int) {
      cutlass::NumericConverter<Compute, Accumulator> of_accumulator;
      cutlass::NumericConverter<Compute, ElementD> of_source;
      cutlass::Array<Compute, kCount> result;
      auto const add_source = [&](int i) {
        result[i] = plus_source(result[i], params.beta, of_source(source(fragment * kCount + i)));
      };
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        result[i] = times(params.alpha, of_accumulator(accumulators[i]));
        if (kZeros) add_source(i);
      }
      if (!kZeros && params.beta != Compute(0)) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) add_source(i);
      }
      cutlass::NumericArrayConverter<ElementD, Compute, kCount> convert;
      return convert(result);
    }
  };

  template <bool kReferenceSource, class... A>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<A...> const& args) {
    return Callbacks<cute::remove_cvref_t<decltype(args.tCrC)>>(*params, args.tCrC);
  }

  Params const* params;
};

// The same from registers straight to global memory, for D whose rows are not aligned to 16 bytes: CUTLASS's rounds
// beta C first.
template <class ElementD, class Compute, class Stride>
struct LinearStore : DirectStore<LinearParams<Compute>, ElementD, Stride> {
  using Base = DirectStore<LinearParams<Compute>, ElementD, Stride>;
  using typename Base::Params;
  using typename Base::SharedStorage;

  CUTLASS_HOST_DEVICE LinearStore(Params const& params, SharedStorage const& = SharedStorage()) : params(params) {}

  template <class Problem, class Tile, class TileCoordinates, class Engine, class Layout, class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(Problem problem, Tile tile, TileCoordinates where,
                                 cute::Tensor<Engine, Layout> const& accumulators, TiledMma tiled_mma, Residue,
                                 int thread, char*) {
    cutlass::NumericConverter<Compute, typename Engine::value_type> of_accumulator;
    cutlass::NumericConverter<Compute, ElementD> of_source;
    cutlass::NumericConverter<ElementD, Compute> convert;
    Compute const alpha = params.thread.alpha, beta = params.thread.beta;
    Base::each_element(problem, tile, where, accumulators, tiled_mma, thread, [&](int i, int m, int n, int batch) {
      Compute value = times(alpha, of_accumulator(accumulators(i)));
      if (beta != Compute(0)) {
        value = plus_source(value, beta, of_source(params.ptr_C[Base::offset(params.dC, m, n, batch)]));
      }
      params.ptr_D[Base::offset(params.dD, m, n, batch)] = convert(value);
    });
  }

 private:
  Params params;
};

}  // namespace atomr_cutlass
