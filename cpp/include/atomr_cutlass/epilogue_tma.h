// The TMA epilogue of warp-specialized GEMMs of the sm90 generation, in the place of CUTLASS's: the same pipelines, the
// same shared memory, the same bits (but for signs of zeros: see store_product), and a fraction of its templates, which
// took a third of a kernel's compilation.
#pragma once

#include "atomr_cutlass/epilogue_plain.h"
#include "atomr_cutlass/rounding.h"
#include "atomr_cutlass/tma_tile.h"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/copy_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/detail/layout.hpp"
#include "cutlass/epilogue/collective/collective_epilogue.hpp"
#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/numeric_conversion.h"
#include "cutlass/pipeline/pipeline.hpp"

namespace atomr_cutlass {

// Where a thread's results lie in a subtile of kM x kN. As WGMMA leaves them: of a warp's 16 rows and of every eight
// columns, a lane has two neighbours in row lane / 4, and two in the row eight below.
template <class Element, int kM, int kN, bool kColumnMajor>
struct AccumulatorPlaces {
  using Tile = TmaTile<Element, kColumnMajor ? kM : kN, kColumnMajor ? kN : kM>;
  static constexpr int kCount = kN / 2;  // of a thread
  static constexpr int kBytes = Tile::kElementBytes;
  static constexpr bool kMatrices = kBytes == 2;  // by matrices of 8 x 8, which the warp moves at once
  using Values = cutlass::Array<Element, kCount>;

  CUTLASS_DEVICE static int row(int value) { return value / 2 % 2 * 8; }
  CUTLASS_DEVICE static int column(int value) { return value / 4 * 8 + value % 2; }

  CUTLASS_DEVICE AccumulatorPlaces(int thread) {
    int const warp = thread / 32, lane = thread % 32;
    first_m = 16 * warp + lane / 4;
    first_n = 2 * (lane % 4);
    if constexpr (kMatrices) {
      // Lanes 0 to 7 say where the lines of the first matrix are, 8 to 15 those of the one below it, and so on.
      int const line = lane % 8, below = lane / 8 % 2 * 8, beside = lane / 16 * 8;
      start[0] = kColumnMajor ? Tile::place(beside + line, (16 * warp + below) * kBytes)
                              : Tile::place(16 * warp + below + line, beside * kBytes);
    } else if constexpr (kColumnMajor) {
      for (int i = 0; i < 2; ++i) start[i] = Tile::place(first_n + i, first_m * kBytes);
    } else {
      start[0] = Tile::place(first_m, first_n * kBytes);
    }
  }

  // Of the matrices from this column of the subtile on.
  CUTLASS_DEVICE int matrices(int from) const {
    return kColumnMajor ? start[0] + from * Tile::kWidthBytes : Tile::further(start[0], from * kBytes);
  }
  // Of an element, and of the next one if they are neighbours.
  CUTLASS_DEVICE int element(int value) const {
    if constexpr (kColumnMajor) {
      return Tile::further(start[value % 2], row(value) * kBytes) + (column(value) - value % 2) * Tile::kWidthBytes;
    } else {
      return Tile::further(start[0], column(value) * kBytes) + row(value) * Tile::kWidthBytes;
    }
  }

  CUTLASS_DEVICE void write(Values const& values, char* tile) const {
    if constexpr (kMatrices) {
      auto const* const words = reinterpret_cast<uint32_t const*>(&values);
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n + 16 <= kN; n += 16) {
        auto& to = *reinterpret_cast<cute::uint128_t*>(tile + matrices(n));
        uint32_t const* const from = words + n / 4;
        if constexpr (kColumnMajor) {
          cute::SM90_U16x8_STSM_T::copy(from[0], from[1], from[2], from[3], to);
        } else {
          cute::SM90_U32x4_STSM_N::copy(from[0], from[1], from[2], from[3], to);
        }
      }
      if constexpr (kN % 16 != 0) {
        auto& to = *reinterpret_cast<cute::uint128_t*>(tile + matrices(kN - 8));
        uint32_t const* const from = words + (kN - 8) / 4;
        if constexpr (kColumnMajor) {
          cute::SM90_U16x4_STSM_T::copy(from[0], from[1], to);
        } else {
          cute::SM90_U32x2_STSM_N::copy(from[0], from[1], to);
        }
      }
    } else if constexpr (kColumnMajor) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) *reinterpret_cast<Element*>(tile + element(i)) = values[i];
    } else {
      using Pair = cutlass::AlignedArray<Element, 2>;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; i += 2) {
        Pair pair;
        pair[0] = values[i];
        pair[1] = values[i + 1];
        *reinterpret_cast<Pair*>(tile + element(i)) = pair;
      }
    }
  }

  CUTLASS_DEVICE void read(Values& values, char const* tile) const {
    if constexpr (kMatrices) {
      auto* const words = reinterpret_cast<uint32_t*>(&values);
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n + 16 <= kN; n += 16) {
        auto const& from = *reinterpret_cast<cute::uint128_t const*>(tile + matrices(n));
        uint32_t* const to = words + n / 4;
        if constexpr (kColumnMajor) {
          cute::SM75_U16x8_LDSM_T::copy(from, to[0], to[1], to[2], to[3]);
        } else {
          cute::SM75_U32x4_LDSM_N::copy(from, to[0], to[1], to[2], to[3]);
        }
      }
      if constexpr (kN % 16 != 0) {
        auto const& from = *reinterpret_cast<cute::uint128_t const*>(tile + matrices(kN - 8));
        uint32_t* const to = words + (kN - 8) / 4;
        if constexpr (kColumnMajor) {
          cute::SM75_U16x4_LDSM_T::copy(from, to[0], to[1]);
        } else {
          cute::SM75_U32x2_LDSM_N::copy(from, to[0], to[1]);
        }
      }
    } else if constexpr (kColumnMajor) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) values[i] = *reinterpret_cast<Element const*>(tile + element(i));
    } else {
      using Pair = cutlass::AlignedArray<Element, 2>;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; i += 2) {
        Pair const pair = *reinterpret_cast<Pair const*>(tile + element(i));
        values[i] = pair[0];
        values[i + 1] = pair[1];
      }
    }
  }

  int first_m, first_n;
  int start[2];
};

// Where TMA finds the tiles of C and D: in the matrices of a batch.
struct InMatrices {
  struct Arguments {};
  struct Params {};

  static Params params(Arguments const&) { return {}; }

  template <class Boxes, bool kColumnMajor, class Problem, class Stride>
  static cute::TmaDescriptor map(Problem const& problem, Arguments const&, void const* address, Stride const& stride) {
    int const m = cute::get<0>(problem), n = cute::get<1>(problem), batches = cute::get<3>(problem);
    int64_t const batch = cute::get<2>(stride);
    if constexpr (kColumnMajor) {
      return Boxes::map(address, m, n, batches, cute::get<1>(stride), batch);
    } else {
      return Boxes::map(address, n, m, batches, cute::get<0>(stride), batch);
    }
  }

  template <class Boxes, bool kColumnMajor>
  CUTLASS_DEVICE static void load(Params const&, cute::TmaDescriptor const& map, uint64_t* full, char* to, int m, int n,
                                  int batch) {
    Boxes::load(map, full, to, kColumnMajor ? m : n, kColumnMajor ? n : m, batch);
  }
  template <class Boxes, bool kColumnMajor>
  CUTLASS_DEVICE static void store(Params const&, cute::TmaDescriptor const& map, char const* from, int m, int n,
                                   int batch) {
    Boxes::store(map, from, kColumnMajor ? m : n, kColumnMajor ? n : m, batch);
  }
};

// `kGroup`: how many subtiles are written before one barrier and stored after it, where no C is loaded. Of more than
// one there are at least twice as many buffers: TMA reads those of a group while the next group is written.
template <int kStagesC, int kStagesD, int kFragment, bool kReuseC, class Tile, class Subtile, class Element,
          class Stride, class Visitor, class Place = InMatrices, int kGroup = 1>
struct TmaEpilogue {
  // What CUTLASS's kernels ask for.
  using DispatchPolicy = cutlass::epilogue::Sm90TmaWarpSpecialized<kStagesC, kStagesD, kFragment, kReuseC, false>;
  using ElementC = Element;
  using ElementD = Element;
  using StrideC = Stride;
  using StrideD = Stride;
  using VisitorType = Visitor;
  using GmemTiledCopyC = cute::SM90_TMA_LOAD;
  using GmemTiledCopyD = cute::SM90_TMA_STORE;
  using LoadPipeline = cutlass::PipelineTransactionAsync<kStagesC>;
  using LoadPipelineState = cutlass::PipelineState<kStagesC>;
  using StorePipeline = cute::conditional_t<kReuseC, cutlass::PipelineTmaStore<kStagesC, kStagesD - 1>,
                                            cutlass::PipelineTmaStore<kStagesD>>;
  static constexpr int kBuffersD = kReuseC ? kStagesC : kStagesD;
  using StorePipelineState = cutlass::PipelineState<kBuffersD>;
  static constexpr bool RequiresTransactionBytes = true;

  static constexpr int kTileM = cute::size<0>(Tile{}), kTileN = cute::size<1>(Tile{});
  static constexpr int kM = cute::size<0>(Subtile{}), kN = cute::size<1>(Subtile{});
  static constexpr int kAlongM = kTileM / kM, kAlongN = kTileN / kN;
  static_assert(kAlongM * kM == kTileM && kAlongN * kN == kTileN && kM % 64 == 0 && kN % 8 == 0);
  static constexpr bool kColumnMajor = cutlass::gemm::detail::is_major<0, Stride>();
  using Places = AccumulatorPlaces<Element, kM, kN, kColumnMajor>;
  using Boxes = typename Places::Tile;
  static constexpr uint32_t TmaTransactionBytes = Boxes::kBytes;

  struct SharedStorage {
    struct TensorStorage {
      alignas(Boxes::kAlignment) char tiles[((kReuseC ? 0 : kStagesC) + kBuffersD) * Boxes::kBytes];
      typename Visitor::SharedStorage thread;
    } tensors;
    using PipelineStorage = typename LoadPipeline::SharedStorage;
    PipelineStorage pipeline;
  };
  using TensorStorage = typename SharedStorage::TensorStorage;
  using PipelineStorage = typename SharedStorage::PipelineStorage;

  struct Arguments : Place::Arguments {
    typename Visitor::Arguments thread{};
    Element const* ptr_C;
    Stride dC;
    Element* ptr_D;
    Stride dD;
  };
  struct Params : Place::Params {
    typename Visitor::Params thread{};
    cute::TmaDescriptor load_c, store_d;
    uint32_t tma_transaction_bytes = TmaTransactionBytes;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& args, void* workspace) {
    Params result{};
    static_cast<typename Place::Params&>(result) = Place::params(args);
    result.thread = Visitor::to_underlying_arguments(problem, args.thread, workspace);
    result.load_c = Place::template map<Boxes, kColumnMajor>(problem, args, args.ptr_C, args.dC);
    result.store_d = Place::template map<Boxes, kColumnMajor>(problem, args, args.ptr_D, args.dD);
    return result;
  }
  template <class Problem>
  static bool can_implement(Problem const& problem, Arguments const& args) {
    constexpr int kAligned = 16 / int(sizeof(Element));
    return cute::get<kColumnMajor ? 0 : 1>(problem) % kAligned == 0 && Visitor::can_implement(problem, args.thread);
  }
  template <class Problem>
  static size_t get_workspace_size(Problem const& problem, Arguments const& args) {
    return Visitor::get_workspace_size(problem, args.thread);
  }
  template <class Problem>
  static cutlass::Status initialize_workspace(Problem const& problem, Arguments const& args, void* workspace,
                                              cudaStream_t stream, cutlass::CudaHostAdapter* adapter = nullptr) {
    return Visitor::initialize_workspace(problem, args.thread, workspace, stream, adapter);
  }

  template <class Shape>
  CUTLASS_HOST_DEVICE static constexpr int get_load_pipe_increment(Shape) {
    return kAlongM * kAlongN;
  }
  template <class Shape>
  CUTLASS_HOST_DEVICE static constexpr int get_store_pipe_increment(Shape) {
    return kAlongM * kAlongN;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(&params.load_c);
    cute::prefetch_tma_descriptor(&params.store_d);
  }

  CUTLASS_HOST_DEVICE TmaEpilogue(Params const& params, TensorStorage& shared)
      : params(params),
        visitor(params.thread, shared.thread) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return visitor.is_producer_load_needed(); }

  // Where the buffers of C and of D are. They are the same where C's are used again.
  CUTLASS_DEVICE static char* buffer_c(TensorStorage& shared, int stage) {
    return shared.tiles + stage * Boxes::kBytes;
  }
  CUTLASS_DEVICE static char* buffer_d(TensorStorage& shared, int stage) {
    return shared.tiles + ((kReuseC ? 0 : kStagesC) + stage) * Boxes::kBytes;
  }

  template <class Problem, class Shape, class Where, class TiledMma>
  CUTLASS_DEVICE LoadPipelineState load(LoadPipeline pipeline, LoadPipelineState state, Problem const&, Shape,
                                        Where const& where, TiledMma, int, TensorStorage& shared, int only = -1) {
    return load_from(&params.load_c, pipeline, state, where, shared, only);
  }
  template <class Where>
  CUTLASS_DEVICE LoadPipelineState load_from(cute::TmaDescriptor const* map, LoadPipeline pipeline,
                                             LoadPipelineState state, Where const& where, TensorStorage& shared,
                                             int only) {
    bool const issues = cute::elect_one_sync() && visitor.is_C_load_needed();
    int const tile_m = int(cute::get<0>(where)) * kTileM, tile_n = int(cute::get<1>(where)) * kTileN;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < kAlongM * kAlongN; ++i) {
      if (only != -1 && i != only) continue;
      uint64_t* const full = pipeline.producer_get_barrier(state);
      pipeline.producer_acquire(state);
      if (issues) {
        int const m = tile_m + i % kAlongM * kM, n = tile_n + i / kAlongM * kN;
        char* const to = buffer_c(shared, state.index());
        Place::template load<Boxes, kColumnMajor>(params, *map, full, to, m, n, int(cute::get<3>(where)));
        pipeline.producer_expect_transaction(state);
      }
      pipeline.producer_commit(state);
      ++state;
    }
    return state;
  }

  CUTLASS_DEVICE LoadPipelineState load_tail(LoadPipeline pipeline, LoadPipelineState state) {
    if (cute::elect_one_sync()) pipeline.producer_tail(state);
    return state;
  }

  // The rows and columns of a thread's results, relative to its first one, as visitors ask for them.
  struct Coordinates {
    struct Of {
      int m, n;
      CUTLASS_DEVICE cute::tuple<int, int> operator()(int value) const {
        return {m + Places::row(value), n + Places::column(value)};
      }
    };
    template <class All>
    CUTLASS_DEVICE Of operator()(All, All, All, int along_m, int along_n) const {
      return {along_m * kM, along_n * kN};
    }
  };
  struct Source {
    alignas(16) typename Places::Values values;
    CUTLASS_DEVICE Element operator()(int value) const { return values[value]; }
  };

  template <class Problem, class Shape, class Where, class Engine, class Layout, class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState load_state, StorePipeline const&,
                            StorePipelineState store_state, Problem const& problem, Shape shape, Where const& where,
                            cute::Tensor<Engine, Layout> const& accumulators, TiledMma tiled_mma, int thread,
                            TensorStorage& shared, int only = -1) {
    return store_to(&params.store_d, load_pipeline, load_state, store_state, problem, shape, where, accumulators,
                    tiled_mma, thread, shared, only);
  }
  // `map` is D's, of the thread that stores.
  template <class Problem, class Shape, class Where, class Engine, class Layout, class TiledMma>
  CUTLASS_DEVICE auto store_to(cute::TmaDescriptor const* map, LoadPipeline load_pipeline, LoadPipelineState load_state,
                               StorePipelineState store_state, Problem const& problem, Shape shape, Where const& where,
                               cute::Tensor<Engine, Layout> const& accumulators, TiledMma tiled_mma, int thread,
                               TensorStorage& shared, int only) {
    static_assert(decltype(cute::size(tiled_mma))::value == kThreads, "a warp group has 64 rows of a subtile");

    Places const places(thread);
    Source source;
    source.values.fill(Element(0));
    int const tile_m = int(cute::get<0>(where)) * kTileM, tile_n = int(cute::get<1>(where)) * kTileN;
    auto const left = cute::make_tuple(int(cute::get<0>(problem)) - tile_m, int(cute::get<1>(problem)) - tile_n);
    auto const left_of_thread =
        cute::make_tuple(cute::get<0>(left) - places.first_m, cute::get<1>(left) - places.first_n);
    auto callbacks =
        visitor.template get_consumer_store_callbacks<true>(cutlass::epilogue::fusion::detail::ConsumerStoreArgs(
            problem, shape, where, tiled_mma, Subtile{}, cute::Int<kThreads>{}, Coordinates{}, left, Coordinates{},
            left_of_thread, source, thread));
    bool const loads = visitor.is_producer_load_needed(), reads = visitor.is_C_load_needed();
    // The thread that stores is the one that waits for stores.
    bool const issues = thread / 32 == 0 && cute::elect_one_sync();

    // With buffers used again, stores in flight hold those that were loaded: they are released when stores end.
    LoadPipelineState wait_state = load_state;
    if constexpr (kReuseC) {
      wait_state = store_state;
      wait_state.phase_ ^= 1;
    }

    callbacks.begin();
    if (callbacks.begin_sync_needed()) synchronize();

    CUTLASS_PRAGMA_UNROLL
    for (int along_n = 0; along_n < kAlongN; ++along_n) {
      CUTLASS_PRAGMA_UNROLL
      for (int along_m = 0; along_m < kAlongM; ++along_m) {
        if (only != -1 && along_n * kAlongM + along_m != only) continue;
        if (loads) {
          load_pipeline.consumer_wait(wait_state);
          if (reads) places.read(source.values, buffer_c(shared, wait_state.index()));
          if constexpr (!kReuseC) {
            cutlass::arch::fence_view_async_shared();
            load_pipeline.consumer_release(load_state);
            ++load_state;
          }
          ++wait_state;
        }

        auto const results = callbacks.visit(of_subtile(accumulators, along_m, along_n), 0, along_m, along_n);
        // Without C the buffers are D's alone.
        store_subtile(map, results, places, shared, store_state, along_m, along_n, where, issues, !loads,
                      loads || only != -1);
        ++store_state;
        ++stores;

        if constexpr (kReuseC) {
          // All but the last kStagesD - 1 stores have ended.
          if (stores > int(StorePipeline::UnacquiredStages)) {
            if (loads) load_pipeline.consumer_release(load_state);
            ++load_state;
          }
        }
      }
    }
    callbacks.end();
    return cute::make_tuple(load_state, store_state);
  }

  // Called before the products, so that scales are there after them.
  CUTLASS_DEVICE ProductOnly product_only() const {
    if constexpr (kIsProduct<Visitor>) return visitor.product();
    return {false, 0.0f};
  }

  template <class Problem, class Where>
  CUTLASS_DEVICE void read_ahead(Problem const& problem, Where const& where, int thread) {
    if constexpr (kReadsAhead<Visitor>) visitor.read_ahead(problem, where, thread, kThreads);
  }

  // D = factor * sums, of a visitor that says so: -0 stays, which adding 0 * C would make 0.
  template <class Where, class Engine, class Layout>
  CUTLASS_DEVICE StorePipelineState store_product(float factor, StorePipelineState state, Where const& where,
                                                  cute::Tensor<Engine, Layout>& sums, int thread,
                                                  TensorStorage& shared) {
    if constexpr (kIsProduct<Visitor> && cute::is_same_v<typename Engine::value_type, float>) {
      if (factor != 1.0f) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < decltype(cute::size(sums))::value; ++i) sums(i) = times(factor, sums(i));
      }
      Places const places(thread);
      bool const issues = thread / 32 == 0 && cute::elect_one_sync();
      CUTLASS_PRAGMA_UNROLL
      for (int along_n = 0; along_n < kAlongN; ++along_n) {
        CUTLASS_PRAGMA_UNROLL
        for (int along_m = 0; along_m < kAlongM; ++along_m) {
          store_subtile(&params.store_d, of_subtile(sums, along_m, along_n), places, shared, state, along_m, along_n,
                        where, issues, true, false);
          ++state;
        }
      }
    }
    return state;
  }

  CUTLASS_DEVICE auto store_tail(LoadPipeline load_pipeline, LoadPipelineState load_state, StorePipeline store_pipeline,
                                 StorePipelineState store_state) {
    store_pipeline.producer_tail(store_state);
    stores = 0;
    if constexpr (kReuseC) {
      if (visitor.is_producer_load_needed()) {
        constexpr int kHeld = cute::min(int(StorePipeline::UnacquiredStages), kAlongM * kAlongN);
        for (int i = 0; i < kHeld; ++i) {
          load_pipeline.consumer_release(load_state);
          ++load_state;
        }
      }
    }
    return cute::make_tuple(load_state, store_state);
  }

  Params const& params;
  Visitor visitor;
  int stores = 0;

 private:
  static constexpr int kThreads = kM * 2;  // that store a subtile

  CUTLASS_DEVICE static void synchronize() {
    cutlass::arch::NamedBarrier::sync(kThreads, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
  }

  // A thread's accumulators of a subtile. Those of an instruction, (2, 2, N / 8) of them, lie in their order; then come
  // those along M, then along N.
  template <class Engine, class Layout>
  CUTLASS_DEVICE static auto of_subtile(cute::Tensor<Engine, Layout> const& accumulators, int along_m, int along_n) {
    static_assert(decltype(cute::size(accumulators))::value == kTileM * kTileN / kThreads);
    static_assert(decltype(cute::size<1>(accumulators))::value == kAlongM);
    constexpr int kInstruction = decltype(cute::size<0>(accumulators))::value;
    cutlass::Array<typename Engine::value_type, Places::kCount> values;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Places::kCount; ++i) {
      int const along = along_n * Places::kCount + i;
      values[i] =
          accumulators.data()[along % kInstruction + kInstruction * (along_m + kAlongM * (along / kInstruction))];
    }
    return values;
  }

  // Writes a subtile's results, of which a thread has `values`, into a buffer, and stores the subtiles of a group where
  // it is the last one; `alone`: itself. `issues`: of the thread that stores, which is the one that waits for stores.
  // When it returns the next buffer is free. `ahead`: the wait for that comes before these stores and shares their
  // barrier; for buffers that nothing is loaded into.
  template <class Values, class Where>
  CUTLASS_DEVICE void store_subtile(cute::TmaDescriptor const* map, Values const& values, Places const& places,
                                    TensorStorage& shared, StorePipelineState const& state, int along_m, int along_n,
                                    Where const& where, bool issues, bool ahead, bool alone) const {
    cutlass::NumericArrayConverter<Element, typename Values::Element, Places::kCount> convert;
    alignas(16) typename Places::Values const results = convert(values);
    places.write(results, buffer_d(shared, state.index()));
    int const place = along_n * kAlongM + along_m, before = alone ? 0 : place % kGroup;
    if (!alone && before != kGroup - 1 && place != kAlongM * kAlongN - 1) return;
    cutlass::arch::fence_view_async_shared();  // what was written to shared memory, before TMA reads it
    ahead = ahead && kBuffersD > 1;
    // All wait at once for what was written, and for the next buffers to be free.
    constexpr int kGroups = kBuffersD / kGroup;
    if (ahead && issues) cute::tma_store_wait<(kGroups > 1 ? kGroups - 2 : 0)>();
    synchronize();
    if (issues) {
      CUTLASS_PRAGMA_UNROLL
      for (int back = kGroup - 1; back >= 0; --back) {
        if (back > before) continue;
        int const stored = place - back, buffer = int(state.index()) - back;
        int const m = int(cute::get<0>(where)) * kTileM + stored % kAlongM * kM;
        int const n = int(cute::get<1>(where)) * kTileN + stored / kAlongM * kN;
        Place::template store<Boxes, kColumnMajor>(
            params, *map, buffer_d(shared, buffer < 0 ? buffer + kBuffersD : buffer), m, n, int(cute::get<3>(where)));
      }
      cute::tma_store_arrive();
    }
    if (!ahead) {
      if (issues) cute::tma_store_wait<int(StorePipeline::UnacquiredStages)>();
      synchronize();
    }
  }
};

// The stages of the mainloop that fit into a thread block's shared memory beside other bytes.
constexpr int stages_beside(int bytes, int stage_bytes) { return (227 * 1024 - bytes) / stage_bytes; }

// How many of a tile's columns a buffer of D holds, and how many buffers there are.
struct EpilogueBuffers {
  static constexpr int kBarriers = 1024;  // bytes for them, at most

  int columns, count;
  int group = 1;  // of them that are stored after one barrier

  // Two groups of buffers, as large as the mainloop's stages leave room for, with at most `most` in each; itself where
  // there is no room. `others`: bytes of the visitor. Twice kBarriers are kept free: a stage is lost if they do not
  // fit.
  constexpr EpilogueBuffers grouped(int column_bytes, int others, int stage_bytes, int most) const {
    int const bytes = columns * column_bytes, taken = 2 * kBarriers + others;
    int const stages = stages_beside(taken + count * bytes, stage_bytes);
    int const group = cute::min((227 * 1024 - taken - stages * stage_bytes) / bytes / 2, most);
    return group > 1 ? EpilogueBuffers{columns, cute::max(2 * group, count), group} : *this;
  }

  // As the builder has it; or less, where the mainloop has fewer than `enough` stages and gains one by that.
  // `column_bytes`: of a column in a buffer. `stage_bytes`: of A and B in a stage. `piece`: columns that stay together:
  // boxes of 16 bytes, half a sector, take 2 us longer for 128 x 144 results.
  static constexpr EpilogueBuffers beside(int columns, int count, int column_bytes, int stage_bytes, int piece,
                                          int enough) {
    int const half = columns % (2 * piece) == 0 && columns > 32 ? columns / 2 : columns;
    EpilogueBuffers const smaller[] = {{columns, 3}, {columns, 2}, {half, 3}, {half, 2}};
    EpilogueBuffers best{columns, count};
    auto const stages = [&](EpilogueBuffers const& buffers) {
      return stages_beside(kBarriers + buffers.columns * buffers.count * column_bytes, stage_bytes);
    };
    if (stages(best) >= enough) return best;
    for (EpilogueBuffers const& buffers : smaller) {
      if (buffers.count <= count && stages(buffers) > stages(best)) best = buffers;
    }
    return best;
  }
};

// What the epilogue is told of the tile and the mainloop.
template <int kStageBytes_, int kEnough_, int kRows_, bool kSmaller_ = false, bool kGrouped_ = false>
struct BesideMainloop {
  static constexpr int kStageBytes = kStageBytes_;  // of A and B in a stage
  static constexpr int kEnough = kEnough_;  // stages, for which nothing else becomes smaller
  static constexpr int kRows = kRows_;  // of the tile: 192 where the builder was told 128
  static constexpr bool kSmaller = kSmaller_;  // buffers may become smaller for another stage
  static constexpr bool kGrouped = kGrouped_;  // several buffers are stored after one barrier
};

// The epilogue for what CUTLASS's builder makes, of which only the template's arguments are used; Built itself where
// they are not those of an epilogue with C and D alike.
template <class Built, class Place = InMatrices, class Mainloop = BesideMainloop<1, 0, 0>>
struct TmaEpilogueOf {
  using Type = Built;
};
template <int kStagesC, int kStagesD, int kFragment, bool kReuseC, class Tile, class Subtile, class Element,
          class Stride, class Visitor, class... Operations, class Place, class Mainloop>
struct TmaEpilogueOf<cutlass::epilogue::collective::CollectiveEpilogue<
                         cutlass::epilogue::Sm90TmaWarpSpecialized<kStagesC, kStagesD, kFragment, kReuseC, false>, Tile,
                         Subtile, Element, Stride, Element, Stride, Visitor, Operations...>,
                     Place, Mainloop> {
  static constexpr bool kTaller = Mainloop::kRows > cute::size<0>(Tile{});
  using Whole =
      cute::conditional_t<kTaller, cute::Shape<cute::Int<Mainloop::kRows>, cute::tuple_element_t<1, Tile>>, Tile>;
  static constexpr int kM = kTaller ? Mainloop::kRows : int(cute::size<0>(Subtile{})), kN = cute::size<1>(Subtile{});
  static constexpr int kColumnBytes = kM * int{sizeof(Element)};
  static constexpr bool kFits = kStagesC > 2 && kReuseC;
  static constexpr int kPiece = cutlass::gemm::detail::is_major<0, Stride>() ? 8 : 16;
  static constexpr EpilogueBuffers kWritten =
      Mainloop::kSmaller && kFits
          ? EpilogueBuffers::beside(kN, kStagesC, kColumnBytes, Mainloop::kStageBytes, kPiece, Mainloop::kEnough)
          : EpilogueBuffers{kN, kStagesC};
  static constexpr int kSubtiles = int(cute::size(Whole{})) / (kM * kWritten.columns);
  static constexpr EpilogueBuffers kBuffers =
      Mainloop::kGrouped && kReuseC
          ? kWritten.grouped(kColumnBytes, sizeof(typename Visitor::SharedStorage), Mainloop::kStageBytes, kSubtiles)
          : kWritten;
  using Type = TmaEpilogue<kBuffers.count, kStagesD, kFragment, kReuseC, Whole,
                           cute::Shape<cute::Int<kM>, cute::Int<kBuffers.columns>>, Element, Stride, Visitor, Place,
                           kBuffers.group>;
};

}  // namespace atomr_cutlass
