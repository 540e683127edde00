// The kernel of persistent GEMMs of the sm90 generation, in the place of CUTLASS's: the same roles of warps, and a
// short way from the start of a thread block to its first load. What one thread block does before that, and after its
// last product, no other one hides where all tiles run at once.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/gemm.h"
#include "cutlass/kernel_hardware_info.h"
#include "cutlass/pipeline/pipeline.hpp"

#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/tile_list.h"

namespace atomr_cutlass {

// The barriers of the stages that operands are loaded into. Thread blocks of a cluster that share operands wait for one
// another: a stage is free when all of them have multiplied what lies there.
//
// kWarpGroups: that multiply a stage. kProducers: arrivals that make a stage full, beside the bytes: more than one
// where a warp loads scales. Each multiplying warp reads those by itself, and so frees a stage by itself.
template <int kStages, class Cluster, int kWarpGroups, int kProducers>
class OperandStages {
  static constexpr int kClusterM = cute::size<0>(Cluster{}), kClusterN = cute::size<1>(Cluster{});
  static constexpr int kBlocks = kClusterM * kClusterN;
  // Threads of which one frees a stage for all: of a warp group, which waits for its products together, or of a warp.
  static constexpr int kFreeing = kProducers > 1 ? cutlass::NumThreadsPerWarp : cutlass::NumThreadsPerWarpGroup;
  static constexpr int kArrivals = kWarpGroups * cutlass::NumThreadsPerWarpGroup / kFreeing;
  using Barrier = cutlass::arch::ClusterBarrier;
  using Transactions = cutlass::arch::ClusterTransactionBarrier;

 public:
  using State = cutlass::PipelineState<kStages>;

  struct Storage {
    uint64_t full[kStages], empty[kStages];
  };

  // By one thread.
  CUTLASS_DEVICE static void init(Storage& storage) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kStages; ++i) {
      Barrier::init(&storage.full[i], kProducers);
      Barrier::init(&storage.empty[i], kArrivals * (kClusterM + kClusterN - 1));
    }
  }

  // `bytes` of a stage, which a thread announces that loads them; 0 in all others.
  CUTLASS_DEVICE OperandStages(Storage& storage, uint32_t bytes) : storage(&storage), bytes(bytes) {}

  // Of the thread of this number in a warp group that multiplies. Each of the first ones of kFreeing signals the
  // thread block of its number, if that shares operands with this one: itself and those of the same row or column of
  // the cluster.
  CUTLASS_DEVICE OperandStages(Storage& storage, int thread_in_group) : storage(&storage) {
    int const thread = thread_in_group % kFreeing;
    if constexpr (kBlocks == 1) {
      signals = thread == 0;
    } else {
      int const rank = int(cute::block_rank_in_cluster());
      signals = thread < kBlocks && (thread % kClusterM == rank % kClusterM || thread / kClusterM == rank / kClusterM);
      empty = cute::cast_smem_ptr_to_uint(storage.empty);
      asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(empty) : "r"(thread % kBlocks));
    }
  }

  // The names are those of CUTLASS's pipelines, which take the same places in mainloops.
  CUTLASS_DEVICE void producer_acquire(State const& state) const {
    Barrier::wait(&storage->empty[state.index()], state.phase());
    if (bytes > 0) Transactions::arrive_and_expect_tx(&storage->full[state.index()], bytes);
  }
  CUTLASS_DEVICE uint64_t* producer_get_barrier(State const& state) const { return &storage->full[state.index()]; }
  template <class Arrive>
  CUTLASS_DEVICE void producer_commit(State const& state, Arrive&& arrive) const {
    arrive(&storage->full[state.index()]);
  }
  // A thread block that left before its cluster has read what it loaded would take its shared memory with it.
  CUTLASS_DEVICE void producer_tail(State state) const {
    for (int i = 0; i < kStages; ++i) {
      Barrier::wait(&storage->empty[state.index()], state.phase());
      ++state;
    }
  }

  CUTLASS_DEVICE bool consumer_try_wait(State const& state) const {
    return Barrier::try_wait(&storage->full[state.index()], state.phase());
  }
  CUTLASS_DEVICE void consumer_wait(State const& state, bool there = false) const {
    if (!there) Barrier::wait(&storage->full[state.index()], state.phase());
  }
  CUTLASS_DEVICE void consumer_release(State const& state) const {
    if constexpr (kProducers > 1) __syncwarp();
    if constexpr (kBlocks == 1) {
      if (signals) Barrier::arrive(&storage->empty[state.index()]);
    } else {
      if (signals) {
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(empty + 8 * state.index()) : "memory");
      }
    }
  }

 private:
  Storage* storage;
  uint32_t bytes = 0;
  uint32_t empty = 0;  // the first one, in the thread block that this thread signals
  bool signals = false;
};

// Two warp groups that take turns, each with the first of two things and then with the second.
class Turns {
  using Barrier = cutlass::arch::ClusterBarrier;

 public:
  struct Storage {
    uint64_t turn[2];
  };

  // By one thread.
  CUTLASS_DEVICE static void init(Storage& storage) {
    for (uint64_t& turn : storage.turn) Barrier::init(&turn, cutlass::NumThreadsPerWarpGroup);
  }

  // The first group begins: its barrier counts as passed once.
  CUTLASS_DEVICE Turns(Storage& storage, int group)
      : mine(&storage.turn[group]),
        others(&storage.turn[1 - group]),
        phase(1 - group) {}

  CUTLASS_DEVICE void wait() {
    Barrier::wait(mine, phase);
    phase ^= 1;
  }
  CUTLASS_DEVICE void pass() const { Barrier::arrive(others); }

 private:
  uint64_t *mine, *others;
  uint32_t phase;
};

// Whether a mainloop is ours, which loads through TMA as TmaMainloop does.
template <class Mainloop, class = void>
inline constexpr bool kHasOwnMainloop = false;
template <class Mainloop>
inline constexpr bool kHasOwnMainloop<Mainloop, cute::void_t<typename Mainloop::TileA>> = true;

template <class Mainloop, class Epilogue>
struct PersistentGemm {
  // What adaptors ask of kernels.
  using ClusterShape = typename Mainloop::Cluster;
  using TileShape = typename Mainloop::TileShape;
  using TiledMma = typename Mainloop::TiledMma;
  using StrideA = typename Mainloop::StrideA;
  using StrideB = typename Mainloop::StrideB;
  using StrideC = typename Epilogue::StrideC;
  using StrideD = typename Epilogue::StrideD;
  using List = TileList<ClusterShape>;
  using TileScheduler = List;
  using TileSchedulerTag = TileListScheduler;
  using Problem = cute::Shape<int, int, int, int>;

  static constexpr bool kPingpong =
      cute::is_base_of_v<cutlass::gemm::KernelTmaWarpSpecializedPingpong, typename Mainloop::DispatchPolicy::Schedule>;
  static constexpr int kGroup = cutlass::NumThreadsPerWarpGroup;
  static constexpr int kMultiplying = decltype(cute::size(TiledMma{}))::value;  // threads that multiply a tile
  static_assert(!kPingpong || kMultiplying == kGroup);
  static constexpr uint32_t MaxThreadsPerBlock = kGroup + (kPingpong ? 2 * kGroup : kMultiplying);
  static constexpr uint32_t MinBlocksPerMultiprocessor = 1;

  // Registers of a thread that loads, and of one that multiplies.
  static constexpr int kSums = cute::size<0>(TileShape{}) * cute::size<1>(TileShape{}) / kMultiplying;
  static constexpr bool kThreeGroups = kMultiplying == 3 * kGroup;
  static constexpr int kLoadRegisters = kThreeGroups ? 32 : (kSums >= 208 ? 24 : 40);
  static constexpr int kMultiplyRegisters = kThreeGroups ? 160 : (kSums >= 208 ? 240 : 232);

  using Stages =
      OperandStages<Mainloop::kStages, ClusterShape, kMultiplying / kGroup, Mainloop::NumProducerThreadEvents>;
  using State = typename Stages::State;
  using LoadC = typename Epilogue::LoadPipeline;
  using LoadCState = typename Epilogue::LoadPipelineState;
  using StoreState = typename Epilogue::StorePipelineState;

  struct SharedStorage {
    struct Barriers {
      typename Stages::Storage operands;
      alignas(16) typename Epilogue::PipelineStorage c;
      typename Turns::Storage multiplying, storing;
    } barriers;
    struct Tensors {
      typename Epilogue::TensorStorage epilogue;
      typename Mainloop::TensorStorage mainloop;
    } tensors;
  };
  static constexpr int SharedStorageSize = sizeof(SharedStorage);
  static_assert(SharedStorageSize <= 227 * 1024, "more shared memory than a thread block may have");

  struct Arguments {
    Problem problem_shape{};
    typename Mainloop::Arguments mainloop{};
    typename Epilogue::Arguments epilogue{};
    cutlass::KernelHardwareInfo hw_info{};
    typename List::Arguments scheduler{};
    int32_t settled = 0;  // bits of operands that no running launch writes (kernel_abi.h)
  };
  struct Params {
    Problem problem;
    int32_t settled;
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue;
    typename List::Params tiles;
    cutlass::KernelHardwareInfo device;
  };

  static Params to_underlying_arguments(Arguments const& args, void*) {
    Params result{};
    result.problem = args.problem_shape;
    result.settled = args.settled;
    result.mainloop = Mainloop::to_underlying_arguments(args.problem_shape, args.mainloop, nullptr);
    result.epilogue = Epilogue::to_underlying_arguments(args.problem_shape, args.epilogue, nullptr);
    result.tiles =
        List::to_underlying_arguments(args.problem_shape, TileShape{}, ClusterShape{}, args.hw_info, args.scheduler);
    result.device = args.hw_info;
    return result;
  }
  static bool can_implement(Arguments const& args) {
    return Mainloop::can_implement(args.problem_shape, args.mainloop) &&
           Epilogue::can_implement(args.problem_shape, args.epilogue);
  }
  static size_t get_workspace_size(Arguments const&) { return 0; }
  static dim3 get_grid_shape(Params const& params) {
    typename List::Arguments args{};
    args.raster_order = params.tiles.raster_order_ == List::RasterOrder::AlongN ? List::RasterOrderOptions::AlongN
                                                                                : List::RasterOrderOptions::AlongM;
    return List::get_grid_shape(params.tiles, params.problem, TileShape{}, ClusterShape{}, params.device, args);
  }

  CUTLASS_DEVICE void operator()(Params const& params, char* memory) const {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
    int const warp = cutlass::canonical_warp_idx_sync();
    if (warp == 0) {
      if (cute::elect_one_sync()) {
        Stages::init(shared.barriers.operands);
        for (auto& barrier : shared.barriers.c.full_barrier_) barrier.init(cutlass::NumThreadsPerWarp);
        for (auto& barrier : shared.barriers.c.empty_barrier_) barrier.init(kMultiplying);
        if constexpr (kPingpong) {
          Turns::init(shared.barriers.multiplying);
          Turns::init(shared.barriers.storing);
        }
        cutlass::arch::fence_barrier_init();
      }
      __syncwarp();
    } else if (warp == 1) {
      if (cute::elect_one_sync()) {
        Mainloop::prefetch_tma_descriptors(params.mainloop);
        Epilogue::prefetch_tma_descriptors(params.epilogue);
      }
      __syncwarp();
    }
    // No thread block writes into another before that one has its barriers.
    if constexpr (decltype(cute::size(ClusterShape{}))::value > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }

    if (warp < kGroup / 32) {
      cutlass::arch::warpgroup_reg_dealloc<kLoadRegisters>();
      if (warp == 0) {
        load(params, shared);
      } else if (warp == 1) {
        if constexpr (Mainloop::NumProducerThreadEvents > 1) load_scales(params, shared);
      } else if (warp == 2) {
        load_c(params, shared);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<kMultiplyRegisters>();
      wait();
      multiply(params, shared);
    }
  }

 private:
  using Work = typename List::WorkTileInfo;

  // For the launch before: nothing in global memory but settled operands is touched before that.
  CUTLASS_DEVICE static void wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

  CUTLASS_DEVICE static auto place(Work const& tile) {
    return cute::make_coord(tile.M_idx, tile.N_idx, cute::_, tile.L_idx);
  }
  CUTLASS_DEVICE static int steps(Params const& params) {
    constexpr int kStep = cute::size<2>(TileShape{});
    return (cute::get<2>(params.problem) + kStep - 1) / kStep;
  }
  static constexpr int kReadAhead = 4;
  static constexpr int32_t kBoth = ATOMR_CUTLASS_A_SETTLED | ATOMR_CUTLASS_B_SETTLED;
  // Stages are free at the start: waiting for their first turn waits for the one before.
  CUTLASS_DEVICE static State first_free() { return {0, 1, 0}; }

  CUTLASS_DEVICE static void load(Params const& params, SharedStorage& shared) {
    bool const issues = cute::elect_one_sync();
    Stages stages(shared.barriers.operands, issues ? params.mainloop.tma_transaction_bytes : uint32_t(0));
    State state = first_free();
    List list(params.tiles);
    uint32_t const rank = cute::block_rank_in_cluster();
    int const count = steps(params);
    Work tile = list.get_current_work();
    int begin = 0;
    if (params.settled != 0 && tile.is_valid()) {
      // The first stages are announced once: of settled operands they are filled before the launch before has ended, of
      // the other one after that. More of them would be in its way where that launch ends soon (measured).
      begin = cute::min(count, cute::min(int(Mainloop::kStages), kReadAhead));
      State again = state;
      Mainloop::load_steps(issues, params.mainloop, stages, state, place(tile), 0, begin, rank, shared.tensors.mainloop,
                           SomeOperands{params.settled});
      wait();
      if (int32_t const others = kBoth & ~params.settled; others != 0) {
        Stages const announced_before(shared.barriers.operands, uint32_t(0));
        Mainloop::load_steps(issues, params.mainloop, announced_before, again, place(tile), 0, begin, rank,
                             shared.tensors.mainloop, SomeOperands{others});
      }
    } else {
      wait();
    }
    // The next launch may start beside this one, and waits for its end.
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    for (; tile.is_valid(); tile = next(list, 1)) {
      Mainloop::load_steps(issues, params.mainloop, stages, state, place(tile), begin, count - begin, rank,
                           shared.tensors.mainloop);
      begin = 0;
    }
    stages.producer_tail(state);
  }

  CUTLASS_DEVICE static void load_scales(Params const& params, SharedStorage& shared) {
    wait();
    Mainloop mainloop;
    auto const inputs = mainloop.load_init(params.problem, params.mainloop);
    Stages stages(shared.barriers.operands, uint32_t(0));
    State state = first_free();
    List list(params.tiles);
    int const count = steps(params);
    for (Work tile = list.get_current_work(); tile.is_valid(); tile = next(list, 1)) {
      int first = 0;
      mainloop.load_auxiliary(params.mainloop, stages, state, inputs, place(tile), &first, count, int(threadIdx.x) % 32,
                              0, shared.tensors.mainloop);
      state.advance(count);
    }
  }

  CUTLASS_DEVICE static LoadC pipeline_of_c(Params const& params, SharedStorage& shared) {
    typename LoadC::Params pipeline;
    pipeline.transaction_bytes = params.epilogue.tma_transaction_bytes;
    pipeline.producer_arv_count = cutlass::NumThreadsPerWarp;
    pipeline.consumer_arv_count = kMultiplying;
    return LoadC(shared.barriers.c, pipeline, cute::false_type{});
  }

  CUTLASS_DEVICE static void load_c(Params const& params, SharedStorage& shared) {
    Epilogue epilogue(params.epilogue, shared.tensors.epilogue);
    if (!epilogue.is_producer_load_needed()) return;
    wait();
    LoadC const pipeline = pipeline_of_c(params, shared);
    LoadCState state{0, 1, 0};
    List list(params.tiles);
    for (Work tile = list.get_current_work(); tile.is_valid(); tile = next(list, 1)) {
      state = epilogue.load(pipeline, state, params.problem, TileShape{}, place(tile), TiledMma{},
                            int(threadIdx.x) % 32, shared.tensors.epilogue);
    }
    epilogue.load_tail(pipeline, state);
  }

  CUTLASS_DEVICE static Work next(List& list, int count) {
    list.advance_to_next_work(count);
    return list.get_current_work();
  }

  CUTLASS_DEVICE static void multiply(Params const& params, SharedStorage& shared) {
    int const thread = int(threadIdx.x) % kGroup, group = int(threadIdx.x) / kGroup - 1;
    int const together = kPingpong ? thread : int(threadIdx.x) - kGroup;
    Mainloop mainloop;
    Epilogue epilogue(params.epilogue, shared.tensors.epilogue);
    auto const product = epilogue.product_only();
    Stages const stages(shared.barriers.operands, thread);
    LoadC const pipeline_c = pipeline_of_c(params, shared);
    typename Epilogue::StorePipeline store_pipeline({true});
    State state;
    LoadCState state_c;
    StoreState store_state{0, 1, 0};
    List list(params.tiles);
    int const count = steps(params);
    int const turn = kPingpong ? group : 0;
    Turns multiplying(shared.barriers.multiplying, turn), storing(shared.barriers.storing, turn);
    if constexpr (kPingpong) {
      if (group == 1) {
        list.advance_to_next_work();
        state.advance(count);
        state_c.advance(Epilogue::get_load_pipe_increment(TileShape{}));
        store_state.advance(Epilogue::get_store_pipe_increment(TileShape{}));
      }
    }
    for (Work tile = list.get_current_work(); tile.is_valid(); tile = next(list, kPingpong ? 2 : 1)) {
      auto sums = cute::partition_fragment_C(TiledMma{}, cute::take<0, 2>(TileShape{}));
      epilogue.read_ahead(params.problem, place(tile), together);
      if constexpr (kPingpong) multiplying.wait();
      mainloop.mma(stages, state, sums, count, together, shared.tensors.mainloop, params.mainloop);
      if constexpr (kPingpong) multiplying.pass();
      mainloop.mma_tail(stages, state, count);
      state.advance(kPingpong ? 2 * count : count);

      if constexpr (kPingpong) storing.wait();
      if (product.only) {
        store_state =
            epilogue.store_product(product.factor, store_state, place(tile), sums, together, shared.tensors.epilogue);
      } else {
        auto const states =
            epilogue.store(pipeline_c, state_c, store_pipeline, store_state, params.problem, TileShape{}, place(tile),
                           sums, TiledMma{}, together, shared.tensors.epilogue);
        state_c = cute::get<0>(states);
        store_state = cute::get<1>(states);
      }
      if constexpr (kPingpong) {
        // The other group writes into the same buffers.
        auto const states = epilogue.store_tail(pipeline_c, state_c, store_pipeline, store_state);
        state_c = cute::get<0>(states);
        store_state = cute::get<1>(states);
        state_c.advance(Epilogue::get_load_pipe_increment(TileShape{}));
        store_state.advance(Epilogue::get_store_pipe_increment(TileShape{}));
        storing.pass();
      }
    }
    if constexpr (!kPingpong) epilogue.store_tail(pipeline_c, state_c, store_pipeline, store_state);
  }
};

}  // namespace atomr_cutlass
