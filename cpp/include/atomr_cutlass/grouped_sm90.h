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
  static_assert(!kBlockScales ||
                (kScaleRows == 1 && kScaleColumns == BlockScaleMatrices::kColumns && kScaleDepth == 128));
  static_assert(cute::is_same_v<LayoutD, cutlass::layout::RowMajor>, "D is row-major");

  static constexpr int kTileM = cute::size<0>(Tile{}), kTileN = cute::size<1>(Tile{});
  using Fusion = typename VisitorOf<Epilogue, LinearVisitor<ElementD, float>, GroupedScaledVisitor<kTileM, kTileN>,
                                    kTileM, kTileN, ElementD, GroupedTreeParams>::Type;
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
  using CollectiveMainloop = typename GroupedMainloopOf<BuiltMainloop>::Type;

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
