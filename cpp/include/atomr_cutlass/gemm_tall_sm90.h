// GEMM kernels of three consumer warp groups, whose tiles have 192 rows: CUTLASS's own are of one or two. Its
// collectives load, multiply and store; what runs them is ours.
#pragma once

#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/pipeline/pipeline.hpp"

namespace atomr_cutlass {

// A collective of two warp groups as one of three.
template <class Collective>
struct OfThree;

template <class Policy, class Tile, class ElementA, class StrideA, class ElementB, class StrideB, class Mma,
          class... Rest>
struct OfThree<
    cutlass::gemm::collective::CollectiveMma<Policy, Tile, ElementA, StrideA, ElementB, StrideB, Mma, Rest...>> {
  using Groups =
      decltype(cute::make_tiled_mma(typename Mma::Atom{}, cute::Layout<cute::Shape<cute::_3, cute::_1, cute::_1>>{}));
  using Type =
      cutlass::gemm::collective::CollectiveMma<Policy, Tile, ElementA, StrideA, ElementB, StrideB, Groups, Rest...>;
};

// Two warp groups store 128 rows at once; of 192, a thread of three has as many elements.
template <class Policy, class Tile, class Part, class... Rest>
struct OfThree<cutlass::epilogue::collective::CollectiveEpilogue<Policy, Tile, Part, Rest...>> {
  static_assert(cute::size<0>(Tile{}) == 128 && cute::size<0>(Part{}) == 128);
  using Type = cutlass::epilogue::collective::CollectiveEpilogue<
      Policy, cute::Shape<cute::_192, decltype(cute::get<1>(Tile{})), decltype(cute::get<2>(Tile{}))>,
      cute::Shape<cute::_192, decltype(cute::get<1>(Part{}))>, Rest...>;
};

// A persistent kernel: a warp loads A and B, another one C, and three warp groups multiply a tile together. The rest is
// as CUTLASS's cooperative kernel has it.
template <class Kernel>
struct TallKernel : Kernel {
  using Params = typename Kernel::Params;

  CUTLASS_DEVICE void operator()(Params const& params, char* shared) {
    using namespace cute;
    using Mainloop = typename Kernel::CollectiveMainloop;
    using Epilogue = typename Kernel::CollectiveEpilogue;
    using Cluster = typename Kernel::ClusterShape;
    using Tile = typename Kernel::TileShape;
    using Pipeline = typename Mainloop::MainloopPipeline;
    using LoadC = typename Epilogue::LoadPipeline;
    using StoreD = typename Epilogue::StorePipeline;
    constexpr int kConsumers = int(Kernel::NumMMAThreads);
    static_assert(kConsumers == 384);

    auto& storage = *reinterpret_cast<typename Kernel::SharedStorage*>(shared);
    int const warp = cutlass::canonical_warp_idx_sync();
    bool const consumes = warp >= 4, loads = warp == 0, loads_c = warp == 2;
    if (warp == 0 && elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(params.mainloop);
      Epilogue::prefetch_tma_descriptors(params.epilogue);
    }
    typename Pipeline::Params of_mainloop;
    if (loads) of_mainloop.role = Pipeline::ThreadCategory::Producer;
    if (consumes) of_mainloop.role = Pipeline::ThreadCategory::Consumer;
    of_mainloop.is_leader = threadIdx.x % cutlass::NumThreadsPerWarpGroup == 0;
    of_mainloop.num_consumers = kConsumers;
    of_mainloop.num_producers = Kernel::NumProducerThreads;
    of_mainloop.transaction_bytes = params.mainloop.tma_transaction_bytes;
    Pipeline pipeline(storage.pipelines.mainloop, of_mainloop, Cluster{});

    typename LoadC::Params of_c;
    if (loads_c) of_c.role = LoadC::ThreadCategory::Producer;
    if (consumes) of_c.role = LoadC::ThreadCategory::Consumer;
    of_c.dst_blockid = block_rank_in_cluster();
    of_c.producer_arv_count = cutlass::NumThreadsPerWarp;
    of_c.consumer_arv_count = kConsumers;
    if constexpr (Epilogue::RequiresTransactionBytes) of_c.transaction_bytes = params.epilogue.tma_transaction_bytes;
    LoadC load_c(storage.pipelines.epi_load, of_c);
    typename StoreD::Params of_d;
    of_d.always_wait = true;
    StoreD store_d(of_d);

    // Barriers are there before another thread block of the cluster signals them.
    if constexpr (size(Cluster{}) > 1) {
      cluster_arrive_relaxed();
    } else {
      __syncthreads();
    }
    auto const problem = params.problem_shape;
    Mainloop mainloop;
    auto const inputs = mainloop.load_init(problem, params.mainloop);
    int const steps = size<3>(get<0>(inputs));
    if constexpr (size(Cluster{}) > 1) cluster_wait();

    typename Kernel::TileScheduler scheduler{params.scheduler};
    auto work = scheduler.initial_work_tile_info(Cluster{});
    auto const place = [&] { return make_coord(int(work.M_idx), int(work.N_idx), _, int(work.L_idx)); };
    auto const next = [&] {
      scheduler.advance_to_next_work();
      work = scheduler.get_current_work();
    };
    if (!consumes) {
      cutlass::arch::warpgroup_reg_dealloc<32>();
      if (loads) {
        auto state = cutlass::make_producer_start_state<Pipeline>();
        for (; work.is_valid(); next()) {
          mainloop.load(params.mainloop, pipeline, state, inputs, place(), make_coord_iterator(steps), steps,
                        cutlass::canonical_lane_idx(), block_rank_in_cluster(), storage.tensors.mainloop);
          state.advance(steps);
        }
        mainloop.load_tail(pipeline, state);
      } else if (loads_c) {
        Epilogue epilogue(params.epilogue, storage.tensors.epilogue);
        if (epilogue.is_producer_load_needed()) {
          auto state = cutlass::make_producer_start_state<LoadC>();
          for (; work.is_valid(); next()) {
            state = epilogue.load(load_c, state, problem, Tile{}, place(), typename Kernel::TiledMma{},
                                  cutlass::canonical_lane_idx(), storage.tensors.epilogue);
          }
          epilogue.load_tail(load_c, state);
        }
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<160>();
      Epilogue epilogue(params.epilogue, storage.tensors.epilogue);
      typename Mainloop::PipelineState state;
      typename Epilogue::LoadPipelineState state_c;
      auto state_d = cutlass::make_producer_start_state<StoreD>();
      typename Kernel::TiledMma mma;
      int const thread = int(threadIdx.x) - cutlass::NumThreadsPerWarpGroup;
      bool stored = false;
      for (; work.is_valid(); next()) {
        auto sums = partition_fragment_C(mma, take<0, 2>(Tile{}));
        mainloop.mma(pipeline, state, sums, steps, thread, storage.tensors.mainloop, params.mainloop);
        mainloop.mma_tail(pipeline, state, steps);
        state.advance(steps);
        auto const states = epilogue.store(load_c, state_c, store_d, state_d, problem, Tile{}, place(), sums, mma,
                                           thread, storage.tensors.epilogue);
        state_c = get<0>(states);
        state_d = get<1>(states);
        stored = true;
      }
      if (stored) epilogue.store_tail(load_c, state_c, store_d, state_d);
    }
  }
};

}  // namespace atomr_cutlass
