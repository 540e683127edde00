// Grouped GEMM cells of the sm100 generation: CUTLASS 3.x pointer-array kernels over TMA and UMMA, one persistent
// launch for all groups. As on sm_90a, each thread block keeps tensor maps of its own in the workspace and rewrites
// them when it comes to another group.
#pragma once

#include "atomr_cutlass/blackwell.h"
#include "atomr_cutlass/grouped_cell.h"
#include "cutlass/detail/blockwise_scale_layout.hpp"
// The collectives come before the builders that name them.
#include "cutlass/gemm/collective/sm100_mma_array_warpspecialized.hpp"
#include "cutlass/gemm/collective/sm100_mma_array_warpspecialized_blockwise_scaling.hpp"
//
#include "cutlass/gemm/collective/builders/sm100_umma_builder.inl"
//
#include "cutlass/gemm/collective/builders/sm100_blockwise_umma_builder.inl"

namespace atomr_cutlass {

// Groups as the mainloop's tensor maps see them: a map cannot be 0 wide, and nothing is read where K is 0.
template <class Groups>
struct NoneIsFlat : Groups {
  CUTLASS_DEVICE NoneIsFlat(Groups const& groups) : Groups(groups) {}

  CUTLASS_DEVICE auto get_problem_shape(int32_t group) const {
    auto problem = Groups::get_problem_shape(group);
    if (cute::get<2>(problem) == 0) cute::get<2>(problem) = 1;
    return problem;
  }
};

template <class Base>
struct AnyDepthSm100 : Base {
  using Base::Base;

  template <class Maps, class Groups>
  CUTLASS_DEVICE void tensormaps_perform_update(typename Base::TensorMapStorage& shared,
                                                typename Base::Params const& params, Maps const& maps, Groups groups,
                                                int32_t group) {
    Base::tensormaps_perform_update(shared, params, maps, NoneIsFlat<Groups>(groups), group);
  }
};

// The accumulators of a group without K, which the mainloop leaves as they are, count as zeros.
template <class Visitor>
struct AnyDepthVisitor : Visitor {
  using Visitor::Visitor;

  template <class Callbacks>
  struct Clearing : Callbacks {
    bool empty;

    CUTLASS_DEVICE Clearing(Callbacks const& callbacks, bool empty) : Callbacks(callbacks), empty(empty) {}

    template <class Accumulator, int kCount>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, kCount> accumulators, int fragment, int epilogue_m,
                              int epilogue_n) {
      if (empty) accumulators.clear();
      return Callbacks::visit(accumulators, fragment, epilogue_m, epilogue_n);
    }
  };

  template <bool kReferenceSource, class... A>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<A...> const& args) {
    auto const callbacks = Visitor::template get_consumer_store_callbacks<kReferenceSource>(args);
    return Clearing<cute::remove_cvref_t<decltype(callbacks)>>(callbacks, cute::get<2>(args.problem_shape_mnkl) == 0);
  }
};

// `Tile` is the MMA's: of one thread block, or of the two that a 2-SM schedule pairs along M. kScaleRows,
// kScaleColumns, kScaleDepth: rows of A, columns of B and elements of K that share a block scale; zeros without any.
template <class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB, int kAlignB, class ElementD,
          class LayoutD, int kAlignD, class ElementAccumulator, class ElementCompute, class Tile, class Cluster,
          class StageCount, class MainloopSchedule, class EpilogueSchedule, class Epilogue, int kScaleRows,
          int kScaleColumns, int kScaleDepth>
struct GroupedSm100 {
  using Problem = GroupedProblem<ElementA, LayoutA, kAlignA, ElementB, LayoutB, kAlignB, ElementD, kAlignD, Epilogue,
                                 kScaleRows != 0>;
  using Args = typename Problem::Args;
  using Shape = typename Problem::Shape;
  using Tables = typename Problem::Tables;

  static constexpr bool kBlockScales = kScaleRows != 0;
  static constexpr bool kPair = cute::is_base_of_v<cutlass::gemm::KernelSchedule2Sm, MainloopSchedule>;
  static constexpr int kTileM = cute::size<0>(Tile{}) / (kPair ? 2 : 1), kTileN = cute::size<1>(Tile{});

  using Visitor = typename VisitorOf<Epilogue, LinearVisitor<ElementD, ElementCompute>,
                                     ConvertingVisitor<ElementD, GroupedScaledVisitor<kTileM, kTileN>>, kTileM, kTileN,
                                     ElementD, GroupedTreeParams, false>::Type;
  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, ElementAccumulator, ElementCompute, ElementD, LayoutD*, kAlignD,
      ElementD, LayoutD*, kAlignD, EpilogueSchedule, AnyDepthVisitor<Visitor>>::CollectiveOp;

  using Stages = StagesBeside<StageCount, CollectiveEpilogue>;

  using Scales =
      FloatScales<kBlockScales ? kScaleRows : 1, kBlockScales ? kScaleColumns : 1, kBlockScales ? kScaleDepth : 1>;
  using ScaleLayoutA = typename Scales::template Scales<kBlockScales ? kScaleRows : 1>;
  using ScaleLayoutB = typename Scales::template Scales<kBlockScales ? kScaleColumns : 1>;
  using OperandA = cute::conditional_t<kBlockScales, cute::tuple<LayoutA*, ScaleLayoutA*>, LayoutA*>;
  using OperandB = cute::conditional_t<kBlockScales, cute::tuple<LayoutB*, ScaleLayoutB*>, LayoutB*>;
  using CollectiveMainloop = AnyDepthSm100<typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, ElementA, OperandA, kAlignA, ElementB, OperandB, kAlignB,
      ElementAccumulator, Tile, Cluster, Stages, MainloopSchedule>::CollectiveOp>;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<typename Problem::Groups, CollectiveMainloop, CollectiveEpilogue,
                                                      cutlass::gemm::GroupScheduler>;

  // Behind the tables: the layout of each group's scales, of A and of B.
  CUTLASS_HOST_DEVICE static uint64_t layout_bytes(int groups) {
    return kBlockScales ? (uint64_t(groups) * sizeof(ScaleLayoutA) + 255) / 256 * 256 : 0;
  }
  CUTLASS_HOST_DEVICE static ScaleLayoutA* layouts_a(Args const& args) {
    return reinterpret_cast<ScaleLayoutA*>(static_cast<char*>(args.workspace) + Tables::bytes(args.groups));
  }
  CUTLASS_HOST_DEVICE static ScaleLayoutB* layouts_b(Args const& args) {
    static_assert(sizeof(ScaleLayoutA) == sizeof(ScaleLayoutB), "they differ in static extents");
    return reinterpret_cast<ScaleLayoutB*>(static_cast<char*>(args.workspace) + Tables::bytes(args.groups) +
                                           layout_bytes(args.groups));
  }
  static uint64_t tables_bytes(Args const& args) { return Tables::bytes(args.groups) + 2 * layout_bytes(args.groups); }

  static typename Kernel::Arguments arguments(Args const& args) {
    auto result = Problem::template arguments<Kernel>(args);
    if constexpr (kBlockScales) {
      result.mainloop.layout_SFA = layouts_a(args);
      result.mainloop.layout_SFB = layouts_b(args);
    }
    return result;
  }

  static bool can_implement(Args const& args) {
    if (!Problem::admits(args)) return false;
    return Problem::listed(args) ||
           ((!kBlockScales || Scales::in_reach(args)) && Kernel::can_implement(arguments(args)));
  }

  CUTLASS_DEVICE static void fill_tables(Args const& args) {
    using Finder = typename Problem::Finder;
    Finder::template fill<Shape>(args);
    if constexpr (kBlockScales) {
      // A thread comes to the groups that it has just written.
      Tables const tables(args.workspace, args.groups);
      for (int g = blockIdx.x * Finder::kThreads + threadIdx.x; g < args.groups; g += gridDim.x * Finder::kThreads) {
        Shape const shape = tables.shapes()[g];
        int const m = cute::get<0>(shape), n = cute::get<1>(shape), k = cute::get<2>(shape);
        layouts_a(args)[g] = Scales::template layout<kScaleRows>(m, k, args.scale_stride_a, args.scale_k_stride_a);
        layouts_b(args)[g] = Scales::template layout<kScaleColumns>(n, k, args.scale_stride_b, args.scale_k_stride_b);
      }
    }
  }
};

}  // namespace atomr_cutlass
