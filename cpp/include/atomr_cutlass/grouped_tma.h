// The mainloop and the TMA epilogue of grouped GEMMs of the sm90 generation, in the place of CUTLASS's: those of GEMMs
// (mainloop_tma.h, epilogue_tma.h) with tensor maps that each thread block rewrites when it comes to another group.
//
// A map is changed in shared memory by one thread and copied to the block's own place in the workspace, from where TMA
// reads it, once nothing is in flight that uses the one before it.
#pragma once

#include "atomr_cutlass/epilogue_tma.h"
#include "atomr_cutlass/mainloop_promoted.h"
#include "atomr_cutlass/mainloop_tma.h"
#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/container/array.hpp"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_epilogue.hpp"
#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/gemm/collective/collective_mma.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"

namespace atomr_cutlass {

// What is done to the tensor map of one matrix, of lines of contiguous elements.
template <class Boxes>
struct GroupMap {
  // A valid map to begin with, whose memory is never read.
  static cute::TmaDescriptor first(void const* address, int shares = 1) {
    constexpr int kLength = Boxes::kWidth * Boxes::kBoxes;
    return Boxes::map(address, kLength, Boxes::kLineCount, 1, kLength, int64_t(kLength) * Boxes::kLineCount, shares);
  }

  // Called by one thread.
  CUTLASS_DEVICE static void set(cute::TmaDescriptor& map, void const* address, int length, int lines, int64_t stride) {
    cute::array<uint32_t, 5> const extents = {uint32_t(length), uint32_t(lines), 1, 1, 1};
    cute::array<uint64_t, 5> const strides = {0, uint64_t(stride) * Boxes::kElementBytes, 0, 0, 0};
    cute::tma_descriptor_replace_addr_in_shared_mem(map, address);
    cute::tma_descriptor_replace_dims_strides_in_shared_mem(map, extents, strides);
  }
};

// Called by a whole warp, as is what follows: waits for what TMA was told before.
CUTLASS_DEVICE void wait_for_maps() {
  if (cute::elect_one_sync()) {
    cute::tma_desc_commit_group();
    cute::tma_desc_wait_group();
  }
}

// Base: TmaMainloop or PromotedMainloop, with the strides of one group.
template <class Base>
struct GroupedMainloop : Base {
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using typename Base::TileA;
  using typename Base::TileB;
  // What CUTLASS's kernels ask for.
  using InternalStrideA = typename Base::StrideA;
  using InternalStrideB = typename Base::StrideB;
  using StrideA = InternalStrideA*;
  using StrideB = InternalStrideB*;
  using ElementA = typename Base::ElementA;
  using ElementB = typename Base::ElementB;

  struct TensorMapStorage {
    alignas(128) cute::TmaDescriptor a;
    alignas(128) cute::TmaDescriptor b;
  };
  struct SharedStorage : Base::SharedStorage {
    TensorMapStorage tensormaps;
  };

  struct Arguments {
    ElementA const** ptr_A;
    StrideA dA;
    ElementB const** ptr_B;
    StrideB dB;
  };
  struct Params : Base::Params {
    cute::TmaDescriptor* maps;  // of A, one for each multiprocessor, then of B
    ElementA const** ptr_A;
    StrideA dA;
    ElementB const** ptr_B;
    StrideB dB;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const&, Arguments const& args, void* workspace) {
    Params result{};
    result.a = GroupMap<typename TileA::Boxes>::first(args.ptr_A, Base::kClusterN);
    result.b = GroupMap<typename TileB::Boxes>::first(args.ptr_B, Base::kClusterM);
    result.maps = static_cast<cute::TmaDescriptor*>(workspace);
    result.ptr_A = args.ptr_A;
    result.dA = args.dA;
    result.ptr_B = args.ptr_B;
    result.dB = args.dB;
    return result;
  }
  template <class Problem>
  static size_t get_workspace_size(Problem const&, Arguments const&, int multiprocessors) {
    return 2 * sizeof(cute::TmaDescriptor) * multiprocessors;
  }
  // The groups are not known to the host.
  template <class Problem>
  static bool can_implement(Problem const&, Arguments const&) {
    return true;
  }

  template <class Inputs, class Maps, class Where, class Steps>
  CUTLASS_DEVICE void load(Params const&, MainloopPipeline pipeline, PipelineState state, Inputs const&,
                           Maps const& maps, Where const& where, Steps step, int count, int, uint32_t rank,
                           TensorStorage& shared) {
    Base::load_from(*cute::get<0>(maps), *cute::get<1>(maps), pipeline, state, where, step, count, rank, shared);
  }

  // A group may have no K at all.
  template <class Sums>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState state, Sums& sums, int count, int thread,
                          TensorStorage& shared, Params const& params) {
    if (count == 0) {
      cute::clear(sums);
      return;
    }
    Base::mma(pipeline, state, sums, count, thread, shared, params);
  }
  CUTLASS_DEVICE void mma_tail(MainloopPipeline pipeline, PipelineState released, int count) {
    cute::warpgroup_wait<0>();  // without products too: else the compiler waits again where both ways meet
    if (count > 0) Base::release_last(pipeline, released, count);
  }

  CUTLASS_DEVICE auto tensormaps_init(Params const& params, TensorMapStorage& shared, int multiprocessors,
                                      int multiprocessor) const {
    if (cute::elect_one_sync()) {
      shared.a = params.a;
      shared.b = params.b;
    }
    __syncwarp();
    return cute::make_tuple(params.maps + multiprocessor, params.maps + multiprocessors + multiprocessor);
  }

  template <class Maps, class Problem>
  CUTLASS_DEVICE void tensormaps_perform_update(TensorMapStorage& shared, Params const& params, Maps const&,
                                                Problem const& problem, int32_t group) const {
    if (!cute::elect_one_sync()) return;
    // A tensor map cannot be 0 wide.
    int const k = cute::get<2>(problem) == 0 ? 1 : int(cute::get<2>(problem));
    set<TileA>(shared.a, params.ptr_A[group], params.dA[group], int(cute::get<0>(problem)), k);
    set<TileB>(shared.b, params.ptr_B[group], params.dB[group], int(cute::get<1>(problem)), k);
  }
  template <class Maps>
  CUTLASS_DEVICE void tensormaps_cp_fence_release(TensorMapStorage& shared, Maps const& maps) const {
    wait_for_maps();
    cute::tma_descriptor_cp_fence_release(cute::get<0>(maps), shared.a);
    cute::tma_descriptor_cp_fence_release(cute::get<1>(maps), shared.b);
  }
  template <class Maps>
  CUTLASS_DEVICE void tensormaps_fence_acquire(Maps const& maps) const {
    cute::tma_descriptor_fence_acquire(cute::get<0>(maps));
    cute::tma_descriptor_fence_acquire(cute::get<1>(maps));
  }
  template <class Inputs, class Problem>
  CUTLASS_DEVICE Inputs tensors_perform_update(Inputs const& inputs, Params const&, Problem const&, int32_t) const {
    return inputs;
  }

 private:
  template <class Tile, class Element, class Stride>
  CUTLASS_DEVICE static void set(cute::TmaDescriptor& map, Element const* address, Stride const& stride, int rows,
                                 int depth) {
    constexpr bool kAlongRows = Tile::kAlongRows;
    GroupMap<typename Tile::Boxes>::set(map, address, kAlongRows ? rows : depth, kAlongRows ? depth : rows,
                                        int64_t(cute::get<kAlongRows ? 1 : 0>(stride)));
  }
};

// One with scales of blocks that each group has of its own. Base: GroupedMainloop of PromotedMainloop.
template <class Base>
struct GroupedBlockScaledMainloop : BlockScaledMainloop<Base, float const* const*> {
  using typename BlockScaledMainloop<Base, float const* const*>::Params;

  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem const& problem, Params const& params) const {
    auto const tiles = Base::load_init(problem, params);
    return cute::make_tuple(cute::get<0>(tiles), cute::get<1>(tiles), BlockScaleMatrices{});
  }
  template <class Inputs, class Problem>
  CUTLASS_DEVICE Inputs tensors_perform_update(Inputs const& inputs, Params const& params, Problem const& problem,
                                               int32_t group) const {
    return {cute::get<0>(inputs), cute::get<1>(inputs),
            BlockScaleMatrices::of(problem, params.scale_a[group], params.scale_b[group])};
  }
};

// C and D of groups, for TmaEpilogue: the matrix is that of the tensor map.
struct InGroups : InMatrices {
  template <class Boxes, bool kColumnMajor>
  CUTLASS_DEVICE static void load(Params const&, cute::TmaDescriptor const& map, uint64_t* full, char* to, int m, int n,
                                  int) {
    Boxes::load(map, full, to, kColumnMajor ? m : n, kColumnMajor ? n : m, 0);
  }
  template <class Boxes, bool kColumnMajor>
  CUTLASS_DEVICE static void store(Params const&, cute::TmaDescriptor const& map, char const* from, int m, int n, int) {
    Boxes::store(map, from, kColumnMajor ? m : n, kColumnMajor ? n : m, 0);
  }
};

// Base: TmaEpilogue, with the strides of one group. Policy: CUTLASS's.
template <class Base, class Policy>
struct GroupedEpilogue : Base {
  // What CUTLASS's kernels ask for.
  using DispatchPolicy = Policy;
  using Element = typename Base::ElementD;
  using InternalStrideC = typename Base::StrideC;
  using InternalStrideD = typename Base::StrideD;
  using StrideC = InternalStrideC*;
  using StrideD = InternalStrideD*;
  using Base::kColumnMajor;
  using typename Base::Boxes;
  using typename Base::LoadPipeline;
  using typename Base::LoadPipelineState;
  using typename Base::PipelineStorage;
  using typename Base::StorePipeline;
  using typename Base::StorePipelineState;
  using typename Base::TensorStorage;
  static constexpr int NumEpilogueWarpGroups = Policy::NumEpilogueWarpGroups;
  static constexpr int kMaps = NumEpilogueWarpGroups + 1;  // of D, one for each warp group, then of C

  struct TensorMapStorage {
    struct alignas(128) Map {
      cute::TmaDescriptor map;
    };
    Map maps[kMaps];
  };
  struct SharedStorage {
    TensorStorage tensors;
    TensorMapStorage tensormaps;
    PipelineStorage pipeline;
  };

  struct Arguments {
    decltype(Base::Arguments::thread) thread{};
    Element const** ptr_C;
    StrideC dC;
    Element** ptr_D;
    StrideD dD;
  };
  struct Params : Base::Params {
    cute::TmaDescriptor* maps;  // kMaps for each multiprocessor
    Element const** ptr_C;
    StrideC dC;
    Element** ptr_D;
    StrideD dD;
  };

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& args, void* workspace) {
    Params result{};
    result.thread = Base::VisitorType::to_underlying_arguments(problem, args.thread, workspace);
    result.load_c = GroupMap<Boxes>::first(args.ptr_C);
    result.store_d = GroupMap<Boxes>::first(args.ptr_D);
    result.maps = static_cast<cute::TmaDescriptor*>(workspace);
    result.ptr_C = args.ptr_C;
    result.dC = args.dC;
    result.ptr_D = args.ptr_D;
    result.dD = args.dD;
    return result;
  }
  template <class Problem>
  static size_t get_workspace_size(Problem const&, Arguments const&, int multiprocessors) {
    return kMaps * sizeof(cute::TmaDescriptor) * multiprocessors;
  }
  // The groups are not known to the host.
  template <class Problem>
  static bool can_implement(Problem const& problem, Arguments const& args) {
    return Base::VisitorType::can_implement(problem, args.thread);
  }

  CUTLASS_HOST_DEVICE GroupedEpilogue(Params const& params, TensorStorage& shared) : Base(params, shared) {}

  // Only one warp of a warp group stores, and the first of warp groups that work on one tile.
  CUTLASS_DEVICE auto load_init(Params const& params, TensorMapStorage& shared, int multiprocessors,
                                int multiprocessor) const {
    return cute::make_tuple(begin(params, params.load_c, shared, multiprocessor, NumEpilogueWarpGroups));
  }
  CUTLASS_DEVICE auto store_init(Params const& params, TensorMapStorage& shared, int multiprocessors,
                                 int multiprocessor, int group) const {
    cute::TmaDescriptor* map = nullptr;
    if (cutlass::canonical_warp_idx_sync() % cutlass::NumWarpsPerWarpGroup == 0) {
      map = begin(params, params.store_d, shared, multiprocessor, group);
    }
    return cute::make_tuple(map);
  }

  template <bool kLoads, class Problem>
  CUTLASS_DEVICE void tensormaps_perform_update(TensorMapStorage& shared, Params const& params,
                                                cute::TmaDescriptor const*, Problem const& problem, int32_t group,
                                                int warp_group) const {
    if (!cute::elect_one_sync()) return;
    int const m = int(cute::get<0>(problem)), n = int(cute::get<1>(problem));
    int const length = kColumnMajor ? m : n, lines = kColumnMajor ? n : m;
    constexpr int kLine = kColumnMajor ? 1 : 0;
    if constexpr (kLoads) {
      GroupMap<Boxes>::set(shared.maps[NumEpilogueWarpGroups].map, params.ptr_C[group], length, lines,
                           int64_t(cute::get<kLine>(params.dC[group])));
    } else {
      GroupMap<Boxes>::set(shared.maps[warp_group].map, params.ptr_D[group], length, lines,
                           int64_t(cute::get<kLine>(params.dD[group])));
    }
  }
  template <bool kLoads>
  CUTLASS_DEVICE void tensormaps_cp_fence_release(TensorMapStorage& shared, cute::TmaDescriptor const* map,
                                                  int warp_group) const {
    wait_for_maps();
    cute::tma_descriptor_cp_fence_release(map, shared.maps[kLoads ? NumEpilogueWarpGroups : warp_group].map);
  }
  template <bool kLoads>
  CUTLASS_DEVICE void tensormaps_fence_acquire(cute::TmaDescriptor const* map) const {
    if (map != nullptr) cute::tma_descriptor_fence_acquire(map);
  }

  template <class Problem, class Shape, class Where, class TiledMma>
  CUTLASS_DEVICE LoadPipelineState load(LoadPipeline pipeline, LoadPipelineState state, Problem const&, Shape,
                                        Where const& where, TiledMma, int, TensorStorage& shared,
                                        cute::TmaDescriptor const* map, int only) {
    return Base::load_from(map, pipeline, state, where, shared, only);
  }
  template <class Problem, class Shape, class Where, class Engine, class Layout, class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState load_state, StorePipeline const&,
                            StorePipelineState store_state, Problem const& problem, Shape shape, Where const& where,
                            cute::Tensor<Engine, Layout> const& accumulators, TiledMma tiled_mma, int thread,
                            TensorStorage& shared, cute::TmaDescriptor const* map, int only) {
    return Base::store_to(map, load_pipeline, load_state, store_state, problem, shape, where, accumulators, tiled_mma,
                          thread, shared, only);
  }

 private:
  CUTLASS_DEVICE static cute::TmaDescriptor* begin(Params const& params, cute::TmaDescriptor const& map,
                                                   TensorMapStorage& shared, int multiprocessor, int which) {
    if (cute::elect_one_sync()) shared.maps[which].map = map;
    __syncwarp();
    return params.maps + multiprocessor * kMaps + which;
  }
};

// The mainloop for what CUTLASS's builder makes.
template <class Built>
struct GroupedMainloopOf;
template <int kStages, class Cluster, class Schedule, class Tile, class ElementA, class StrideA, class ElementB,
          class StrideB, class TiledMma, class CopyA, class LayoutA, class CopyB, class LayoutB>
struct GroupedMainloopOf<cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90ArrayTmaGmmaWarpSpecialized<kStages, Cluster, Schedule>, Tile, ElementA, StrideA*,
    ElementB, StrideB*, TiledMma, CopyA, LayoutA, void, cute::identity, CopyB, LayoutB, void, cute::identity>> {
  using Type =
      GroupedMainloop<TmaMainloop<cutlass::gemm::MainloopSm90ArrayTmaGmmaWarpSpecialized<kStages, Cluster, Schedule>,
                                  Tile, ElementA, StrideA, ElementB, StrideB, TiledMma>>;
};
// Without scales of blocks cooperative ones multiply ahead; with them groups lose more by it than they gain.
template <int kStages, class Cluster, class Schedule, class Tile, class ElementA, class StrideA, class ElementB,
          class StrideB, class TiledMma, class... Copies>
struct GroupedMainloopOf<cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90ArrayTmaGmmaWarpSpecializedFP8<kStages, Cluster, Schedule>, Tile, ElementA, StrideA*,
    ElementB, StrideB*, TiledMma, Copies...>> {
  using Type = GroupedMainloop<PromotedMainloop<
      TmaMainloop<cutlass::gemm::MainloopSm90ArrayTmaGmmaWarpSpecializedFP8<kStages, Cluster, Schedule>, Tile, ElementA,
                  StrideA, ElementB, StrideB, TiledMma>,
      false, cute::is_base_of_v<cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative, Schedule>>>;
};
template <int kStages, class Cluster, class Schedule, class Tile, class ElementA, class StrideA, class ScalesA,
          class ElementB, class StrideB, class ScalesB, class TiledMma, class... Copies>
struct GroupedMainloopOf<cutlass::gemm::collective::CollectiveMma<
    cutlass::gemm::MainloopSm90ArrayTmaGmmaWarpSpecializedBlockwise<kStages, Cluster, Schedule>, Tile, ElementA,
    cute::tuple<StrideA*, ScalesA*>, ElementB, cute::tuple<StrideB*, ScalesB*>, TiledMma, Copies...>> {
  using Type = GroupedBlockScaledMainloop<GroupedMainloop<PromotedMainloop<
      TmaMainloop<cutlass::gemm::MainloopSm90ArrayTmaGmmaWarpSpecializedBlockwise<kStages, Cluster, Schedule>, Tile,
                  ElementA, StrideA, ElementB, StrideB, TiledMma>,
      true, false>>>;
};

// The epilogue for what CUTLASS's builder makes.
template <class Built>
struct GroupedEpilogueOf {
  using Type = Built;
};
template <int kStagesC, int kStagesD, int kFragment, bool kReuseC, bool kDelays, int kGroups, class Tile, class Subtile,
          class Element, class Stride, class Visitor, class... Operations>
struct GroupedEpilogueOf<cutlass::epilogue::collective::CollectiveEpilogue<
    cutlass::epilogue::Sm90PtrArrayTmaWarpSpecialized<kStagesC, kStagesD, kFragment, kReuseC, kDelays, kGroups>, Tile,
    Subtile, Element, Stride*, Element, Stride*, Visitor, Operations...>> {
  using Type = GroupedEpilogue<
      TmaEpilogue<kStagesC, kStagesD, kFragment, kReuseC, Tile, Subtile, Element, Stride, Visitor, InGroups>,
      cutlass::epilogue::Sm90PtrArrayTmaWarpSpecialized<kStagesC, kStagesD, kFragment, kReuseC, kDelays, kGroups>>;
};

}  // namespace atomr_cutlass
