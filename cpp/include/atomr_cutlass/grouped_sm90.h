// Grouped GEMM cells of the sm90 generation: CUTLASS 3.x pointer-array kernels over TMA and WGMMA, one persistent
// launch for all groups. Each thread block keeps tensor maps of its own in the workspace and rewrites them when it
// comes to another group; they have the group's extents, so that nothing beyond them is read or written.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/epilogue_scaled.h"
#include "atomr_cutlass/epilogue_visitor.h"
#include "atomr_cutlass/grouped_setup.h"
#include "atomr_cutlass/kernel_abi.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/detail/blockwise_scale_layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace atomr_cutlass {

// A mainloop for groups that may have no K at all. CUTLASS's own leave the accumulators as they are then, or wait for
// data that never comes; and a tensor map cannot be 0 wide.
template <class Base>
struct AnyDepth : Base {
  template <class Accumulators>
  CUTLASS_DEVICE void mma(typename Base::MainloopPipeline pipeline, typename Base::PipelineState state,
                          Accumulators& accumulators, int k_tiles, int thread, typename Base::TensorStorage& shared,
                          typename Base::Params const& params) {
    if (k_tiles == 0) {
      cute::clear(accumulators);
      return;
    }
    Base::mma(pipeline, state, accumulators, k_tiles, thread, shared, params);
  }

  template <class Maps, class Problem>
  CUTLASS_DEVICE void tensormaps_perform_update(typename Base::TensorMapStorage& shared,
                                                typename Base::Params const& params, Maps const& maps, Problem problem,
                                                int32_t group) {
    if (cute::get<2>(problem) == 0) cute::get<2>(problem) = 1;
    Base::tensormaps_perform_update(shared, params, maps, problem, group);
  }
};

// CUTLASS's mainloop with block scales in floats, which takes them packed: here they have strides.
template <class Base, int kRows, int kColumns, int kDepth>
struct StridedScales : Base {
  struct Strides {
    int64_t row, row_k;        // from one row of A to the next, and from one block of K
    int64_t column, column_k;  // the same of column blocks of B
  };
  struct Arguments : Base::Arguments {
    Strides strides;
  };
  struct Params : Base::Params {
    Strides strides;
  };

  template <class Problem>
  static constexpr Params to_underlying_arguments(Problem problem, Arguments const& args, void* workspace) {
    Params result;
    static_cast<typename Base::Params&>(result) = Base::to_underlying_arguments(problem, args, workspace);
    result.strides = args.strides;
    return result;
  }

  template <class Problem>
  CUTLASS_DEVICE auto load_init(Problem const& problem, Params const& params, float const* scale_a = nullptr,
                                float const* scale_b = nullptr) const {
    using namespace cute;
    int const m = get<0>(problem), n = get<1>(problem), k = get<2>(problem);
    auto const matrices = Base::load_init(problem, params, nullptr, nullptr);
    return make_tuple(get<0>(matrices), get<1>(matrices),
                      scales<kRows>(scale_a, m, k, params.strides.row, params.strides.row_k),
                      scales<kColumns>(scale_b, n, k, params.strides.column, params.strides.column_k));
  }

  template <class Inputs, class Problem>
  CUTLASS_DEVICE auto tensors_perform_update(Inputs const&, Params const& params, Problem problem, int32_t group) {
    return load_init(problem, params, params.ptr_SFA[group], params.ptr_SFB[group]);
  }

 private:
  template <int kExtent>
  CUTLASS_DEVICE static auto scales(float const* from, int extent, int k, int64_t stride, int64_t stride_k) {
    using namespace cute;
    return make_tensor(make_gmem_ptr(from),
                       make_layout(make_shape(make_shape(Int<kExtent>{}, ceil_div(extent, kExtent)),
                                              make_shape(Int<kDepth>{}, ceil_div(k, kDepth)), 1),
                                   make_stride(make_stride(_0{}, stride), make_stride(_0{}, stride_k), _0{})));
  }
};

// D = alpha * A B + beta * C in one node. CUTLASS's own tree for groups has the warp that loads C wait for nothing on
// every tile when there is no C.
struct GroupedLinearVisitor {
  struct SharedStorage {};
  struct Arguments {
    float alpha, beta;
  };
  using Params = Arguments;

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

  CUTLASS_HOST_DEVICE GroupedLinearVisitor() {}
  CUTLASS_HOST_DEVICE GroupedLinearVisitor(Params const& params, SharedStorage const&) : params(&params) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return is_C_load_needed(); }
  CUTLASS_DEVICE bool is_C_load_needed() const { return params->beta != 0.0f; }

  template <class... A>
  CUTLASS_DEVICE auto get_producer_load_callbacks(cutlass::epilogue::fusion::detail::ProducerLoadArgs<A...> const&) {
    return cutlass::epilogue::fusion::detail::EmptyProducerLoadCallbacks{};
  }

  template <class Source>
  struct Callbacks : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
    Params const& params;
    Source const& source;

    CUTLASS_DEVICE Callbacks(Params const& params, Source const& source) : params(params), source(source) {}

    template <class Accumulator, int kCount>
    CUTLASS_DEVICE cutlass::Array<float, kCount> visit(cutlass::Array<Accumulator, kCount> const& accumulators,
                                                       int fragment, int, int) {
      cutlass::Array<float, kCount> result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) result[i] = params.alpha * float(accumulators[i]);
      if (params.beta != 0.0f) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) result[i] += params.beta * float(source(fragment * kCount + i));
      }
      return result;
    }
  };

  template <bool kReferenceSource, class... A>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<A...> const& args) {
    return Callbacks<cute::remove_cvref_t<decltype(args.tCrC)>>(*params, args.tCrC);
  }

  Params const* params;
};

// The scaled epilogue (epilogue_scaled.h) with scales that each group has of its own.
struct GroupedScaledParams {
  ScaledParams common;  // without scales
  float const* const* scale_a;
  float const* const* scale_b;

  // The scales are columns of the groups' tables.
  static GroupedScaledParams of(atomr_cutlass_grouped_args const& args, float const* const* scale_a,
                                float const* const* scale_b) {
    GroupedScaledParams made{};
    made.common.alpha = float(args.alpha);
    made.common.beta = float(args.beta);
    // One float for each group is one for all, of the group.
    made.common.form_a = args.scale_form_a == 1;
    made.common.form_b = args.scale_form_b == 1;
    made.scale_a = scale_a;
    made.scale_b = scale_b;
    return made;
  }
};

template <int kTileM, int kTileN>
struct GroupedScaledVisitor : ScaledVisitor<kTileM, kTileN> {
  using Base = ScaledVisitor<kTileM, kTileN>;
  using typename Base::SharedStorage;
  using Arguments = GroupedScaledParams;
  using Params = GroupedScaledParams;

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

  CUTLASS_HOST_DEVICE GroupedScaledVisitor() {}
  CUTLASS_HOST_DEVICE GroupedScaledVisitor(Params const& params, SharedStorage const& shared)
      : Base(params.common, shared),
        groups(&params) {}

  template <class One>
  struct Callbacks : One {
    float const* scale_a;
    float const* scale_b;

    CUTLASS_DEVICE Callbacks(One const& one, float const* scale_a, float const* scale_b)
        : One(one),
          scale_a(scale_a),
          scale_b(scale_b) {}

    CUTLASS_DEVICE void begin() {
      ScaledParams group = this->params;
      group.scale_a = scale_a;
      group.scale_b = scale_b;
      for (int i = this->thread; i < kTileM; i += this->threads) {
        this->shared.rows[i] = group.row(this->tile_m + i, this->count_m);
      }
      for (int i = this->thread; i < kTileN; i += this->threads) {
        this->shared.columns[i] = group.column(this->tile_n + i, this->count_n);
      }
      this->scale_d = group.output();
    }
  };

  template <bool kReferenceSource, class... A>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<A...> const& args) {
    auto const one = Base::template get_consumer_store_callbacks<kReferenceSource>(args);
    int const g = cute::get<3>(args.tile_coord_mnkl);
    return Callbacks<cute::remove_cvref_t<decltype(one)>>(one, groups->scale_a[g], groups->scale_b[g]);
  }

  Params const* groups;
};

// What an epilogue tree is given for each group: its operands, which are rows and scalars, and the scales.
template <class Tree>
struct GroupedTreeParams : TreeParams<Tree> {
  GroupedScaledParams groups;
  bool listed;  // operands are tables of addresses

  static GroupedTreeParams of(atomr_cutlass_grouped_args const& args, float const* const* scale_a,
                              float const* const* scale_b) {
    GroupedTreeParams made{};
    made.alpha = typename Tree::Value(args.alpha);
    made.beta = typename Tree::Value(args.beta);
    for (int i = 0; i < TreeParams<Tree>::kOperands; ++i) made.operands[i] = args.operands[i];
    made.groups = GroupedScaledParams::of(args, scale_a, scale_b);
    made.listed = args.form == ATOMR_CUTLASS_GROUPED_LIST;
    return made;
  }

  template <class Element>
  CUTLASS_DEVICE Element* at(int operand, int group, int m, int n) const {
    if (!listed) return TreeParams<Tree>::template at<Element>(operand, group, m, n);
    atomr_cutlass_tree_operand const& one = this->operands[operand];
    return static_cast<Element* const*>(one.pointer)[group] + m * one.stride_m + n * one.stride_n;
  }

  CUTLASS_DEVICE ScaledParams scales(int group) const {
    ScaledParams found = groups.common;
    found.scale_a = groups.scale_a[group];
    found.scale_b = groups.scale_b[group];
    return found;
  }
};

template <class Epilogue, int kTileM, int kTileN, class ElementD>
struct GroupedFusionOf {
  using Type = GroupedLinearVisitor;
};
template <int kTileM, int kTileN, class ElementD>
struct GroupedFusionOf<ScaledEpilogue, kTileM, kTileN, ElementD> {
  using Type = GroupedScaledVisitor<kTileM, kTileN>;
};
template <class Tree, bool kScaled, class Lanes, int kTileM, int kTileN, class ElementD>
struct GroupedFusionOf<TreeEpilogue<Tree, kScaled, Lanes>, kTileM, kTileN, ElementD> {
  using Type = TreeVisitor<TreeEpilogue<Tree, kScaled, Lanes>, kTileM, kTileN, ElementD, GroupedTreeParams<Tree>,
                           kIsChosen<Tree>>;
};

// Whether an epilogue reads the scales of groups.
template <class Epilogue>
inline constexpr bool kReadsScales = cute::is_same_v<Epilogue, ScaledEpilogue>;
template <class Tree, bool kScaled, class Lanes>
inline constexpr bool kReadsScales<TreeEpilogue<Tree, kScaled, Lanes>> = kScaled;

// kScaleRows, kScaleColumns, kScaleDepth: rows of A, columns of B and elements of K that share a block scale; zeros
// without any.
template <class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB, int kAlignB, class ElementD,
          class LayoutD, int kAlignD, class ElementAccumulator, class ElementCompute, class Tile, class Cluster,
          class StageCount, class MainloopSchedule, class EpilogueSchedule, class Epilogue, int kScaleRows,
          int kScaleColumns, int kScaleDepth>
struct GroupedSm90 {
  using Args = atomr_cutlass_grouped_args;

  static constexpr bool kBlockScales = kScaleRows != 0;
  static constexpr bool kTree = kIsTree<Epilogue>, kScaled = kReadsScales<Epilogue>;
  static constexpr bool kRowMajorA = cute::is_same_v<LayoutA, cutlass::layout::RowMajor>;
  static constexpr bool kRowMajorB = cute::is_same_v<LayoutB, cutlass::layout::RowMajor>;
  static_assert(cute::is_same_v<LayoutD, cutlass::layout::RowMajor>, "D is row-major");

  using Shape = cute::Shape<int, int, int>;
  using Groups = cutlass::gemm::GroupProblemShape<Shape>;
  using Tables = GroupTables<Shape>;
  using Finder = GroupFinder<cutlass::sizeof_bits<ElementA>::value, kRowMajorA, cutlass::sizeof_bits<ElementB>::value,
                             kRowMajorB, cutlass::sizeof_bits<ElementD>::value, kBlockScales>;

  using Fusion = typename GroupedFusionOf<Epilogue, cute::size<0>(Tile{}), cute::size<1>(Tile{}), ElementD>::Type;
  using BuiltEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, ElementAccumulator, ElementCompute, ElementD, LayoutD*, kAlignD,
      ElementD, LayoutD*, kAlignD, EpilogueSchedule, Fusion>::CollectiveOp;
  using CollectiveEpilogue = typename ChosenOf<BuiltEpilogue, Fusion>::Type;

  // StageCount void: as many stages as fit beside the epilogue. CUTLASS does not count what lies between the parts of
  // shared memory to align them: no cell without a tree comes so close to the end.
  static constexpr int kBetween = kTree ? 1024 : 0;
  using Stages = cute::conditional_t<cute::is_void_v<StageCount>,
                                     cutlass::gemm::collective::StageCountAutoCarveout<
                                         kBetween + int(sizeof(typename CollectiveEpilogue::SharedStorage))>,
                                     StageCount>;

  using ScaleConfig =
      cutlass::detail::Sm90BlockwiseScaleConfig<kBlockScales ? kScaleRows : 1, kBlockScales ? kScaleColumns : 1,
                                                kBlockScales ? kScaleDepth : 1>;
  using OperandA = cute::conditional_t<kBlockScales, cute::tuple<LayoutA*, typename ScaleConfig::LayoutSFA*>, LayoutA*>;
  using OperandB = cute::conditional_t<kBlockScales, cute::tuple<LayoutB*, typename ScaleConfig::LayoutSFB*>, LayoutB*>;
  using BuiltMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementA, OperandA, kAlignA, ElementB, OperandB, kAlignB,
      ElementAccumulator, Tile, Cluster, Stages, MainloopSchedule>::CollectiveOp;
  template <class Built, bool kWithScales>
  struct Strided {
    using type = Built;
  };
  template <class Built>
  struct Strided<Built, true> {
    using type = StridedScales<Built, kScaleRows, kScaleColumns, kScaleDepth>;
  };
  using CollectiveMainloop = AnyDepth<typename Strided<BuiltMainloop, kBlockScales>::type>;

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
  static_assert(kSharedBytes <= cutlass::gemm::collective::detail::sm90_smem_capacity_bytes, "too much shared memory");
  static constexpr int kClusterM = cute::size<0>(Cluster{});
  static constexpr int kClusterN = cute::size<1>(Cluster{});
  static constexpr int kClusterK = cute::size<2>(Cluster{});
  static constexpr int kSetupThreads = Finder::kThreads;

  static typename Kernel::Arguments arguments(Args const& args) {
    using InternalStrideA = typename Kernel::InternalStrideA;
    using InternalStrideB = typename Kernel::InternalStrideB;
    using InternalStrideC = typename Kernel::InternalStrideC;
    using InternalStrideD = typename Kernel::InternalStrideD;
    Tables const tables(args.workspace, args.groups);
    typename Kernel::Arguments result{};
    result.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    result.problem_shape = {args.groups, tables.shapes(), nullptr};
    // A stride table holds the one dynamic mode of each stride: its leading dimension.
    result.mainloop.ptr_A = tables.template column<ElementA const*>(Tables::kA);
    result.mainloop.dA = tables.template column<InternalStrideA>(Tables::kLda);
    result.mainloop.ptr_B = tables.template column<ElementB const*>(Tables::kB);
    result.mainloop.dB = tables.template column<InternalStrideB>(Tables::kLdb);
    if constexpr (kBlockScales) {
      result.mainloop.ptr_SFA = tables.template column<float const*>(Tables::kScaleA);
      result.mainloop.ptr_SFB = tables.template column<float const*>(Tables::kScaleB);
      result.mainloop.strides = {args.scale_stride_a, args.scale_k_stride_a, args.scale_stride_b,
                                 args.scale_k_stride_b};
    }
    if constexpr (kTree) {
      result.epilogue.thread =
          GroupedTreeParams<typename Epilogue::Tree>::of(args, tables.template column<float const*>(Tables::kScaleA),
                                                         tables.template column<float const*>(Tables::kScaleB));
    } else if constexpr (kScaled) {
      result.epilogue.thread = GroupedScaledParams::of(args, tables.template column<float const*>(Tables::kScaleA),
                                                       tables.template column<float const*>(Tables::kScaleB));
    } else {
      result.epilogue.thread.alpha = float(args.alpha);
      result.epilogue.thread.beta = float(args.beta);
    }
    result.epilogue.ptr_C = tables.template column<ElementD const*>(Tables::kC);
    result.epilogue.dC = tables.template column<InternalStrideC>(Tables::kLdc);
    result.epilogue.ptr_D = tables.template column<ElementD*>(Tables::kD);
    result.epilogue.dD = tables.template column<InternalStrideD>(Tables::kLdd);
    result.hw_info.sm_count = args.sm_count;
    // There are tensor maps for as many thread blocks as there are multiprocessors.
    int const clusters = args.sm_count / (kClusterM * kClusterN * kClusterK);
    result.hw_info.max_active_clusters = args.max_active_clusters < clusters ? args.max_active_clusters : clusters;
    return result;
  }

  static void* kernel_workspace(Args const& args) {
    return static_cast<char*>(args.workspace) + Tables::bytes(args.groups);
  }

  // The extents of the groups are not known, but leading dimensions and strides are, other than a list's.
  static bool can_implement(Args const& args) {
    if (args.groups < 1) return false;
    bool const scales = args.scale_a != nullptr || args.scale_b != nullptr;
    if (scales && !kScaled && !kBlockScales) return false;
    bool const list = args.form == ATOMR_CUTLASS_GROUPED_LIST;
    bool const along_k = args.form == ATOMR_CUTLASS_GROUPED_K;
    if (kBlockScales && (along_k || (!list && (args.scale_a == nullptr || args.scale_b == nullptr)))) return false;
    if (list) return true;
    // The rows of a column-major A begin anywhere.
    if (!kRowMajorA && args.form == ATOMR_CUTLASS_GROUPED_CONTIGUOUS) return false;
    bool const strided = args.lda % kAlignA == 0 && args.ldb % kAlignB == 0 && args.ldd % kAlignD == 0 &&
                         args.group_stride_a % kAlignA == 0 && args.group_stride_b % kAlignB == 0 &&
                         args.group_stride_d % kAlignD == 0;
    bool const source = args.c == nullptr || (args.ldc % kAlignD == 0 && args.group_stride_c % kAlignD == 0);
    return strided && source && Kernel::can_implement(arguments(args));
  }

  static uint64_t workspace_size(Args const& args) {
    return Tables::bytes(args.groups) + Kernel::get_workspace_size(arguments(args));
  }

  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    return {Kernel::to_underlying_arguments(arguments(args), kernel_workspace(args)), args};
  }

  static dim3 grid(Params const& params) { return Kernel::get_grid_shape(params.kernel); }

  static dim3 setup_grid(Params const& params) { return dim3(Finder::blocks(params.args)); }

  CUTLASS_DEVICE static void setup(Params const& params) { Finder::template fill<Shape>(params.args); }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Kernel kernel;
    kernel(params.kernel, shared);
  }
};

}  // namespace atomr_cutlass
