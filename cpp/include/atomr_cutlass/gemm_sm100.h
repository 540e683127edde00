// GEMM cells of the sm100 generation: CUTLASS 3.x warp-specialized kernels over TMA and UMMA, whose accumulators lie in
// tensor memory.
#pragma once

#include "atomr_cutlass/blackwell.h"
// Order matters: the builder names the collective.
#include "cutlass/gemm/collective/sm100_mma_warpspecialized.hpp"
//
#include "cutlass/gemm/collective/builders/sm100_umma_builder.inl"

namespace atomr_cutlass {

// `Tile` is the MMA's: of one thread block, or of the two that a 2-SM schedule pairs along M.
template <class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB, int kAlignB, class ElementD,
          class LayoutD, int kAlignD, class ElementAccumulator, class ElementCompute, class Tile, class Cluster,
          class StageCount, class MainloopSchedule, class EpilogueSchedule, class TileScheduler>
struct GemmSm100Collectives {
  using ClusterShape = Cluster;
  using Compute = ElementCompute;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, ElementAccumulator, ElementCompute, ElementD, LayoutD, kAlignD,
      ElementD, LayoutD, kAlignD, EpilogueSchedule>::CollectiveOp;

  // StageCount void: as many stages as fit beside the epilogue.
  using Stages = cute::conditional_t<
      cute::is_void_v<StageCount>,
      cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>, StageCount>;

  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, ElementA, LayoutA, kAlignA, ElementB, LayoutB, kAlignB,
      ElementAccumulator, Tile, Cluster, Stages, MainloopSchedule>::CollectiveOp;

  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue, TileScheduler>;
};

template <class Collectives>
struct GemmSm100
    : BlackwellGemm<GemmSm100<Collectives>, typename Collectives::Kernel, typename Collectives::ClusterShape> {
  using Base = typename GemmSm100::BlackwellGemm;
  using Args = typename Base::Args;
  using Kernel = typename Base::Kernel;
  using ElementCompute = typename Collectives::Compute;

  static typename Kernel::Arguments arguments(Args const& args) {
    auto result = Base::common_arguments(args);
    result.mainloop.ptr_A = static_cast<typename Kernel::ElementA const*>(args.a);
    result.mainloop.dA = make_stride<typename Kernel::StrideA>(args.lda, args.batch_stride_a);
    result.mainloop.ptr_B = static_cast<typename Kernel::ElementB const*>(args.b);
    result.mainloop.dB = make_stride<typename Kernel::StrideB>(args.ldb, args.batch_stride_b);
    result.epilogue.thread.alpha = ElementCompute(args.alpha);
    result.epilogue.thread.beta = ElementCompute(args.beta);
    return result;
  }
};

}  // namespace atomr_cutlass
