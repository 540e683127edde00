// Grouped GEMM cells of the sm90 generation: CUTLASS 3.x pointer-array kernels over TMA and WGMMA, one persistent
// launch for all groups. Each thread block keeps tensor maps of its own in the workspace and rewrites them when it
// comes to another group; they have the group's extents, so that nothing beyond them is read or written.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/epilogue_linear.h"
#include "atomr_cutlass/epilogue_visitor.h"
#include "atomr_cutlass/grouped_cell.h"
#include "atomr_cutlass/grouped_tma.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/detail/blockwise_scale_layout.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
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

template <class Epilogue, int kTileM, int kTileN, class ElementD>
struct GroupedFusionOf {
  using Type = LinearVisitor<ElementD, float>;
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

// kScaleRows, kScaleColumns, kScaleDepth: rows of A, columns of B and elements of K that share a block scale; zeros
// without any.
template <class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB, int kAlignB, class ElementD,
          class LayoutD, int kAlignD, class ElementAccumulator, class ElementCompute, class Tile, class Cluster,
          class StageCount, class MainloopSchedule, class EpilogueSchedule, class Epilogue, int kScaleRows,
          int kScaleColumns, int kScaleDepth>
struct GroupedSm90 {
  using Problem = GroupedProblem<ElementA, LayoutA, kAlignA, ElementB, LayoutB, kAlignB, ElementD, kAlignD, Epilogue,
                                 kScaleRows != 0>;
  using Args = typename Problem::Args;

  static constexpr bool kBlockScales = kScaleRows != 0;
  static_assert(cute::is_same_v<LayoutD, cutlass::layout::RowMajor>, "D is row-major");

  using Fusion = typename GroupedFusionOf<Epilogue, cute::size<0>(Tile{}), cute::size<1>(Tile{}), ElementD>::Type;
  using BuiltEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, ElementAccumulator, ElementCompute, ElementD, LayoutD*, kAlignD,
      ElementD, LayoutD*, kAlignD, EpilogueSchedule, Fusion>::CollectiveOp;
  using CollectiveEpilogue = typename ChosenOf<typename GroupedEpilogueOf<BuiltEpilogue>::Type, Fusion>::Type;

  // CUTLASS does not count what lies between the parts of shared memory to align them: no cell without a tree comes so
  // close to the end.
  using Stages = StagesBeside<StageCount, CollectiveEpilogue, kIsTree<Epilogue> ? 1024 : 0>;

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
  using OurMainloop = typename GroupedMainloopOf<BuiltMainloop>::Type;
  using CollectiveMainloop =
      cute::conditional_t<cute::is_same_v<OurMainloop, BuiltMainloop>,
                          AnyDepth<typename Strided<BuiltMainloop, kBlockScales>::type>, OurMainloop>;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<typename Problem::Groups, CollectiveMainloop, CollectiveEpilogue,
                                                      cutlass::gemm::GroupScheduler>;

  static_assert(Kernel::SharedStorageSize <= cutlass::gemm::collective::detail::sm90_smem_capacity_bytes,
                "too much shared memory");

  static typename Kernel::Arguments arguments(Args const& args) {
    auto result = Problem::template arguments<Kernel>(args);
    if constexpr (kBlockScales) {
      result.mainloop.strides = {args.scale_stride_a, args.scale_k_stride_a, args.scale_stride_b,
                                 args.scale_k_stride_b};
    }
    return result;
  }

  static bool can_implement(Args const& args) {
    return Problem::admits(args) && (Problem::listed(args) || Kernel::can_implement(arguments(args)));
  }

  static uint64_t tables_bytes(Args const& args) { return Problem::Tables::bytes(args.groups); }

  CUTLASS_DEVICE static void fill_tables(Args const& args) {
    Problem::Finder::template fill<typename Problem::Shape>(args);
  }
};

}  // namespace atomr_cutlass
