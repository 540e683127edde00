// What CUTLASS 3.x asks of every epilogue, for those whose arguments are their parameters and that need no workspace.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/default_epilogue.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"

namespace atomr_cutlass {

template <class Params_>
struct PlainEpilogue {
  using Arguments = Params_;
  using Params = Params_;

  template <class Problem>
  static constexpr Params to_underlying_arguments(Problem const&, Arguments const& args, void*) {
    return args;
  }
  template <class Problem>
  static bool can_implement(Problem const&, Arguments const&) {
    return true;
  }
  template <class Problem>
  static size_t get_workspace_size(Problem const&, Arguments const&) {
    return 0;
  }
  template <class Problem>
  static cutlass::Status initialize_workspace(Problem const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
};

// Whether D is factor * sums and nothing else in a launch.
struct ProductOnly {
  bool only;
  float factor;
};
template <class Visitor, class = void>
inline constexpr bool kIsProduct = false;
template <class Visitor>
inline constexpr bool kIsProduct<Visitor, cute::enable_if_t<Visitor::kIsProduct>> = true;

// Whether a visitor reads what a tile's results need before the tile's products.
template <class Visitor, class = void>
inline constexpr bool kReadsAhead = false;
template <class Visitor>
inline constexpr bool kReadsAhead<Visitor, cute::void_t<typename Visitor::Read>> = true;

// Of visitors of TMA epilogues that load nothing but C.
template <class Params>
struct PlainVisitor : PlainEpilogue<Params> {
  template <class... A>
  CUTLASS_DEVICE auto get_producer_load_callbacks(cutlass::epilogue::fusion::detail::ProducerLoadArgs<A...> const&) {
    return cutlass::epilogue::fusion::detail::EmptyProducerLoadCallbacks{};
  }
};

// Of epilogues from registers straight to global memory; `Thread` is what is done with the accumulators.
template <class Thread, class Element, class Stride>
struct DirectParams {
  Thread thread{};
  Element const* ptr_C = nullptr;
  Stride dC{};
  Element* ptr_D = nullptr;
  Stride dD{};
};

template <class Thread, class Element, class Stride>
struct DirectStore : PlainEpilogue<DirectParams<Thread, Element, Stride>> {
  using EpilogueSchedule = cutlass::gemm::EpilogueDefault;
  using DispatchPolicy = EpilogueSchedule;
  using ThreadEpilogueOp = void;
  using ElementOutput = Element;
  using ElementAccumulator = float;
  using ElementCompute = float;
  using ElementScalar = float;
  using ElementC = Element;
  using ElementD = Element;
  using StrideC = Stride;
  using StrideD = Stride;
  using GmemTiledCopyC = void;
  using GmemTiledCopyD = void;
  static constexpr int kOutputAlignment = 1;

  struct SharedStorage {};
  using TensorStorage = SharedStorage;

  CUTLASS_DEVICE static int64_t offset(Stride const& stride, int m, int n, int batch) {
    return int64_t(m) * cute::get<0>(stride) + int64_t(n) * cute::get<1>(stride) +
           int64_t(batch) * cute::get<2>(stride);
  }

  // Calls `use` with each element of D that a thread has the sum of: its place among those, its row, its column and its
  // batch.
  template <class Problem, class Tile, class TileCoordinates, class Engine, class Layout, class TiledMma, class Use>
  CUTLASS_DEVICE static void each_element(Problem const& problem, Tile const& tile, TileCoordinates const& where,
                                          cute::Tensor<Engine, Layout> const& accumulators, TiledMma tiled_mma,
                                          int thread, Use const& use) {
    using namespace cute;
    int const count_m = get<0>(problem), count_n = get<1>(problem);
    Tensor const all = make_identity_tensor(make_shape(count_m, count_n));
    Tensor const mine =
        tiled_mma.get_thread_slice(thread).partition_C(local_tile(all, take<0, 2>(tile), take<0, 2>(where)));
    Tensor const steps = make_coord_tensor(mine.layout());
    int const first_m = get<0>(mine(_0{})), first_n = get<1>(mine(_0{}));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < size(accumulators); ++i) {
      int const m = first_m + get<0>(steps(i)), n = first_n + get<1>(steps(i));
      if (m < count_m && n < count_n) use(i, m, n, int(get<3>(where)));
    }
  }
};

}  // namespace atomr_cutlass
