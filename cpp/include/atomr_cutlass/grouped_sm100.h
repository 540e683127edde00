// Grouped GEMM cells of the sm100 generation: CUTLASS 3.x pointer-array kernels over TMA and UMMA, one persistent
// launch for all groups. As on sm_90a, each thread block keeps tensor maps of its own in the workspace and rewrites
// them when it comes to another group.
#pragma once

#include "atomr_cutlass/blackwell.h"
#include "atomr_cutlass/grouped_setup.h"
#include "atomr_cutlass/grouped_sm90.h"
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

template <class Epilogue, int kTileM, int kTileN, class ElementD, class ElementCompute>
struct GroupedFusionOfSm100 {
  using Type = LinearVisitor<ElementD, ElementCompute>;
};
template <int kTileM, int kTileN, class ElementD, class ElementCompute>
struct GroupedFusionOfSm100<ScaledEpilogue, kTileM, kTileN, ElementD, ElementCompute> {
  using Type = ConvertingVisitor<ElementD, GroupedScaledVisitor<kTileM, kTileN>>;
};
template <class Tree, bool kScaled, class Lanes, int kTileM, int kTileN, class ElementD, class ElementCompute>
struct GroupedFusionOfSm100<TreeEpilogue<Tree, kScaled, Lanes>, kTileM, kTileN, ElementD, ElementCompute> {
  using Type = TreeVisitor<TreeEpilogue<Tree, kScaled, Lanes>, kTileM, kTileN, ElementD, GroupedTreeParams<Tree>>;
};

// `Tile` is the MMA's: of one thread block, or of the two that a 2-SM schedule pairs along M. kScaleRows,
// kScaleColumns, kScaleDepth: rows of A, columns of B and elements of K that share a block scale; zeros without any.
template <class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB, int kAlignB, class ElementD,
          class LayoutD, int kAlignD, class ElementAccumulator, class ElementCompute, class Tile, class Cluster,
          class StageCount, class MainloopSchedule, class EpilogueSchedule, class Epilogue, int kScaleRows,
          int kScaleColumns, int kScaleDepth>
struct GroupedSm100 {
  using Args = atomr_cutlass_grouped_args;

  static constexpr bool kBlockScales = kScaleRows != 0;
  static constexpr bool kTree = kIsTree<Epilogue>, kScaled = kReadsScales<Epilogue>;
  static constexpr bool kRowMajorA = cute::is_same_v<LayoutA, cutlass::layout::RowMajor>;
  static constexpr bool kRowMajorB = cute::is_same_v<LayoutB, cutlass::layout::RowMajor>;
  static constexpr bool kPair = cute::is_base_of_v<cutlass::gemm::KernelSchedule2Sm, MainloopSchedule>;
  static constexpr int kTileM = cute::size<0>(Tile{}) / (kPair ? 2 : 1), kTileN = cute::size<1>(Tile{});

  using Shape = cute::Shape<int, int, int>;
  using Groups = cutlass::gemm::GroupProblemShape<Shape>;
  using Tables = GroupTables<Shape>;
  using Finder = GroupFinder<cutlass::sizeof_bits<ElementA>::value, kRowMajorA, cutlass::sizeof_bits<ElementB>::value,
                             kRowMajorB, cutlass::sizeof_bits<ElementD>::value, kBlockScales>;

  using Visitor = typename GroupedFusionOfSm100<Epilogue, kTileM, kTileN, ElementD, ElementCompute>::Type;
  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, ElementAccumulator, ElementCompute, ElementD, LayoutD*, kAlignD,
      ElementD, LayoutD*, kAlignD, EpilogueSchedule, AnyDepthVisitor<Visitor>>::CollectiveOp;

  using Stages = cute::conditional_t<
      cute::is_void_v<StageCount>,
      cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename CollectiveEpilogue::SharedStorage))>,
      StageCount>;

  using Scales =
      FloatScales<kBlockScales ? kScaleRows : 1, kBlockScales ? kScaleColumns : 1, kBlockScales ? kScaleDepth : 1>;
  using ScaleLayoutA = typename Scales::template Scales<kBlockScales ? kScaleRows : 1>;
  using ScaleLayoutB = typename Scales::template Scales<kBlockScales ? kScaleColumns : 1>;
  using OperandA = cute::conditional_t<kBlockScales, cute::tuple<LayoutA*, ScaleLayoutA*>, LayoutA*>;
  using OperandB = cute::conditional_t<kBlockScales, cute::tuple<LayoutB*, ScaleLayoutB*>, LayoutB*>;
  using CollectiveMainloop = AnyDepthSm100<typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, ElementA, OperandA, kAlignA, ElementB, OperandB, kAlignB,
      ElementAccumulator, Tile, Cluster, Stages, MainloopSchedule>::CollectiveOp>;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<Groups, CollectiveMainloop, CollectiveEpilogue,
                                                      cutlass::gemm::GroupScheduler>;

  // The arguments are for the setup kernel.
  struct Params {
    typename Kernel::Params kernel;
    Args args;
  };

  static constexpr int kThreads = Kernel::MaxThreadsPerBlock;
  static constexpr int kMinBlocks = Kernel::MinBlocksPerMultiprocessor;
  static constexpr int kSharedBytes = Kernel::SharedStorageSize;
  static constexpr int kClusterM = cute::size<0>(Cluster{});
  static constexpr int kClusterN = cute::size<1>(Cluster{});
  static constexpr int kClusterK = cute::size<2>(Cluster{});
  static constexpr int kSetupThreads = Finder::kThreads;

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
    Tables const tables(args.workspace, args.groups);
    typename Kernel::Arguments result{};
    result.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    result.problem_shape = {args.groups, tables.shapes(), nullptr};
    // A stride table holds the one dynamic mode of each stride: its leading dimension.
    result.mainloop.ptr_A = tables.template column<ElementA const*>(Tables::kA);
    result.mainloop.dA = tables.template column<typename Kernel::InternalStrideA>(Tables::kLda);
    result.mainloop.ptr_B = tables.template column<ElementB const*>(Tables::kB);
    result.mainloop.dB = tables.template column<typename Kernel::InternalStrideB>(Tables::kLdb);
    if constexpr (kBlockScales) {
      result.mainloop.ptr_SFA = tables.template column<float const*>(Tables::kScaleA);
      result.mainloop.layout_SFA = layouts_a(args);
      result.mainloop.ptr_SFB = tables.template column<float const*>(Tables::kScaleB);
      result.mainloop.layout_SFB = layouts_b(args);
    }
    if constexpr (kTree) {
      result.epilogue.thread =
          GroupedTreeParams<typename Epilogue::Tree>::of(args, tables.template column<float const*>(Tables::kScaleA),
                                                         tables.template column<float const*>(Tables::kScaleB));
    } else if constexpr (kScaled) {
      result.epilogue.thread = GroupedScaledParams::of(args, tables.template column<float const*>(Tables::kScaleA),
                                                       tables.template column<float const*>(Tables::kScaleB));
    } else {
      result.epilogue.thread = {ElementCompute(args.alpha), ElementCompute(args.beta)};
    }
    result.epilogue.ptr_C = tables.template column<ElementD const*>(Tables::kC);
    result.epilogue.dC = tables.template column<typename Kernel::InternalStrideC>(Tables::kLdc);
    result.epilogue.ptr_D = tables.template column<ElementD*>(Tables::kD);
    result.epilogue.dD = tables.template column<typename Kernel::InternalStrideD>(Tables::kLdd);
    result.hw_info.sm_count = args.sm_count;
    // There are tensor maps for as many thread blocks as there are multiprocessors.
    int const clusters = args.sm_count / (kClusterM * kClusterN * kClusterK);
    result.hw_info.max_active_clusters = args.max_active_clusters < clusters ? args.max_active_clusters : clusters;
    return result;
  }

  static void* kernel_workspace(Args const& args) { return static_cast<char*>(args.workspace) + tables_bytes(args); }

  // The extents of the groups are not known, but leading dimensions and strides are, other than a list's.
  static bool can_implement(Args const& args) {
    if (args.groups < 1) return false;
    bool const scales = args.scale_a != nullptr || args.scale_b != nullptr;
    if (scales && !kScaled && !kBlockScales) return false;
    bool const list = args.form == ATOMR_CUTLASS_GROUPED_LIST;
    bool const along_k = args.form == ATOMR_CUTLASS_GROUPED_K;
    if (kBlockScales && (along_k || (!list && (args.scale_a == nullptr || args.scale_b == nullptr)))) return false;
    if (list) return true;
    if (kBlockScales && !Scales::in_reach(args)) return false;
    // The rows of a column-major A begin anywhere.
    if (!kRowMajorA && args.form == ATOMR_CUTLASS_GROUPED_CONTIGUOUS) return false;
    bool const strided = args.lda % kAlignA == 0 && args.ldb % kAlignB == 0 && args.ldd % kAlignD == 0 &&
                         args.group_stride_a % kAlignA == 0 && args.group_stride_b % kAlignB == 0 &&
                         args.group_stride_d % kAlignD == 0;
    bool const source = args.c == nullptr || (args.ldc % kAlignD == 0 && args.group_stride_c % kAlignD == 0);
    return strided && source && Kernel::can_implement(arguments(args));
  }

  static uint64_t workspace_size(Args const& args) {
    return tables_bytes(args) + Kernel::get_workspace_size(arguments(args));
  }

  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    return {Kernel::to_underlying_arguments(arguments(args), kernel_workspace(args)), args};
  }

  static dim3 grid(Params const& params) { return Kernel::get_grid_shape(params.kernel); }

  static dim3 setup_grid(Params const& params) { return dim3(Finder::blocks(params.args)); }

  CUTLASS_DEVICE static void setup(Params const& params) {
    Args const& args = params.args;
    Finder::template fill<Shape>(args);
    if constexpr (kBlockScales) {
      // A thread comes to the groups that it has just written.
      Tables const tables(args.workspace, args.groups);
      for (int g = blockIdx.x * kSetupThreads + threadIdx.x; g < args.groups; g += gridDim.x * kSetupThreads) {
        Shape const shape = tables.shapes()[g];
        int const m = cute::get<0>(shape), n = cute::get<1>(shape), k = cute::get<2>(shape);
        layouts_a(args)[g] = Scales::template layout<kScaleRows>(m, k, args.scale_stride_a, args.scale_k_stride_a);
        layouts_b(args)[g] = Scales::template layout<kScaleColumns>(n, k, args.scale_stride_b, args.scale_k_stride_b);
      }
    }
  }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Kernel kernel;
    kernel(params.kernel, shared);
  }
};

}  // namespace atomr_cutlass
