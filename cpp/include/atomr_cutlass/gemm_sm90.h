// GEMM cells of the sm90 generation: warp-specialized persistent kernels over TMA and WGMMA, of our own where mainloop
// and epilogue are, else CUTLASS 3.x's.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/cell_3x.h"
#include "atomr_cutlass/epilogue_gated.h"
#include "atomr_cutlass/epilogue_linear.h"
#include "atomr_cutlass/epilogue_scaled.h"
#include "atomr_cutlass/epilogue_tma.h"
#include "atomr_cutlass/epilogue_visitor.h"
#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/mainloop_promoted.h"
#include "atomr_cutlass/mainloop_tma.h"
#include "atomr_cutlass/persistent_sm90.h"
#include "atomr_cutlass/tile_list.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace atomr_cutlass {

// No block scales.
struct Unscaled {
  static constexpr bool kPresent = false;
  template <class Layout>
  using A = Layout;
  template <class Layout>
  using B = Layout;
};

// A float for each block of kM rows of A and kK elements of K, and one for each block of kN columns of B and kK
// elements of K. The mainloop (mainloop_promoted.h) multiplies with them in full accumulation. Their strides are
// dynamic along both dimensions: CUTLASS's own layouts fix the contiguous one and read it through TMA, which asks for
// 16-byte aligned rows of scales.
template <int kM, int kN, int kK>
struct BlockScales {
  static_assert(kM == 1 && kN == BlockScaleMatrices::kColumns && kK == 128);
  static constexpr bool kPresent = true;
  template <int kBlock>
  using LayoutOf =
      cute::Layout<cute::Shape<cute::Shape<cute::Int<kBlock>, int>, cute::Shape<cute::Int<kK>, int>, int>,
                   cute::Stride<cute::Stride<cute::_0, int64_t>, cute::Stride<cute::_0, int64_t>, int64_t>>;
  // What the collective builder is told about an operand.
  template <class Layout>
  using A = cute::tuple<Layout, LayoutOf<kM>>;
  template <class Layout>
  using B = cute::tuple<Layout, LayoutOf<kN>>;
};

// What stores from registers.
template <class Epilogue, class ElementD, class Compute, class Stride, bool kSwapped>
struct StoreOf {
  using Type = LinearStore<ElementD, Compute, Stride>;
};
template <class ElementD, class Compute, class Stride, bool kSwapped>
struct StoreOf<ScaledEpilogue, ElementD, Compute, Stride, kSwapped> {
  using Type = ScaledStore<ElementD, Stride, kSwapped>;
};
template <class Tree, bool kScaled, class Lanes, class ElementD, class Compute, class Stride, bool kSwapped>
struct StoreOf<TreeEpilogue<Tree, kScaled, Lanes>, ElementD, Compute, Stride, kSwapped> {
  using Type = TreeStore<TreeEpilogue<Tree, kScaled, Lanes>, ElementD, Stride>;
};
template <class Tree, bool kScaled, class ElementD, class Compute, class Stride, bool kSwapped>
struct StoreOf<GatedEpilogue<Tree, kScaled>, ElementD, Compute, Stride, kSwapped> {
  using Type = GatedStore<GatedEpilogue<Tree, kScaled>, ElementD, Stride>;
};

// The collective epilogue.
template <class Epilogue, class Built, class Fusion, class ElementD, class Compute, class Layout, bool kSwapped,
          bool kDirect, class Mainloop>
struct CollectiveOf {
  using Type = typename ChosenOf<typename TmaEpilogueOf<Built, InMatrices, Mainloop>::Type, Fusion>::Type;
};
template <class Epilogue, class Built, class Fusion, class ElementD, class Compute, class Layout, bool kSwapped,
          class Mainloop>
struct CollectiveOf<Epilogue, Built, Fusion, ElementD, Compute, Layout, kSwapped, true, Mainloop> {
  using Stride = cutlass::detail::TagToStrideC_t<Layout>;
  using Type = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
      typename StoreOf<Epilogue, ElementD, Compute, Stride, kSwapped>::Type>;
};

// A mainloop that waits for the launch before: CUTLASS's kernels have all threads call `load_init` after they have set
// up their barriers, and before any of them touches global memory. The next launch may then start beside this one; it
// waits for the end of this one in the same way, so that a launch starts when the last but one has ended.
template <class Mainloop>
struct DependentMainloop : Mainloop {
  using Mainloop::Mainloop;
  template <class Shape, class Params>
  CUTLASS_DEVICE auto load_init(Shape const& shape, Params const& params) const {
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
    return Mainloop::load_init(shape, params);
  }
};

// One whose K is divided: slice s of batch b is number b * slices + s of what the kernel takes for batches, whose K is
// that of a slice, in whole steps. Steps beyond the last of K load zeros.
template <class Mainloop>
struct SlicedMainloop : DependentMainloop<Mainloop> {
  using Base = DependentMainloop<Mainloop>;
  using Base::Base;
  struct Arguments : Base::Arguments {
    int32_t k, batch, slices;  // of the whole problem
  };
  struct Params : Base::Params {
    int32_t slices, steps;  // the latter of a slice
  };

  template <class Shape>
  CUTLASS_HOST_DEVICE static auto whole(Shape const& shape, Arguments const& args) {
    return cute::make_shape(cute::get<0>(shape), cute::get<1>(shape), args.k, args.batch);
  }
  template <class Shape>
  static constexpr Params to_underlying_arguments(Shape const& shape, Arguments const& args, void* workspace) {
    constexpr int kStep = cute::size<2>(typename Base::TileShape{});
    return {Base::to_underlying_arguments(whole(shape, args), args, workspace), args.slices,
            int32_t(cute::get<2>(shape)) / kStep};
  }
  template <class Shape>
  static bool can_implement(Shape const& shape, Arguments const& args) {
    return Base::can_implement(whole(shape, args), args);
  }

  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, typename Base::MainloopPipeline pipeline,
                           typename Base::PipelineState state, cute::tuple<TensorA, TensorB> const& inputs,
                           BlockCoord const& block, KTileIterator, int count, int thread, uint32_t rank,
                           typename Base::TensorStorage& shared) {
    Slice const slice(params, cute::get<3>(block));
    Base::load(params, pipeline, state, inputs, slice.of(block), StepsFrom{slice.first}, count, thread, rank, shared);
  }
  template <class Pipeline, class BlockCoord, class... Operands>
  CUTLASS_DEVICE static void load_steps(bool issues, Params const& params, Pipeline& pipeline,
                                        typename Base::PipelineState& state, BlockCoord const& block, int first,
                                        int count, uint32_t rank, typename Base::TensorStorage& shared,
                                        Operands... operands) {
    Slice const slice(params, cute::get<3>(block));
    Base::load_steps(issues, params, pipeline, state, slice.of(block), slice.first + first, count, rank, shared,
                     operands...);
  }

 private:
  struct Slice {
    int batch, first;  // and its first step
    CUTLASS_DEVICE Slice(Params const& params, int number)
        : batch(number / params.slices),
          first((number - batch * params.slices) * params.steps) {}
    template <class BlockCoord>
    CUTLASS_DEVICE auto of(BlockCoord const& block) const {
      return cute::make_coord(cute::get<0>(block), cute::get<1>(block), cute::get<2>(block), batch);
    }
  };
};

// What is stored at once of a tile whose width is no multiple of 32, where CUTLASS takes 16 columns: 48 of them or all,
// where registers suffice.
template <class Tile, bool kCooperative, bool kLinear>
struct StoredAtOnce {
  static constexpr int kM = kCooperative ? 128 : 64, kN = cute::size<1>(Tile{});
  // Of 176 columns there are not registers enough beside the accumulators of 128 rows, or what scales are read into.
  static constexpr bool kWhole = !kCooperative && !((cute::size<0>(Tile{}) > kM || !kLinear) && kN > 160);
  static constexpr int kColumns = kN % 48 == 0 ? 48 : kWhole ? kN : 0;
  static constexpr bool kAuto = kN % 32 == 0 || kN % 16 != 0 || kColumns == 0;
  static constexpr bool kBySixteen = kAuto && kN % 32 == 16 && kN > 16;
  using Type = cute::conditional_t<kAuto, cutlass::epilogue::collective::EpilogueTileAuto,
                                   cute::Shape<cute::Int<kM>, cute::Int<kColumns>>>;
};

template <class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB, int kAlignB, class ElementD,
          class LayoutD, int kAlignD, class ElementAccumulator, class ElementCompute, class Tile, class Cluster,
          class StageCount, class MainloopSchedule, class EpilogueSchedule, class TileScheduler,
          class Epilogue = LinearEpilogue, class Scales = Unscaled>
struct GemmSm90 {
  using Args = atomr_cutlass_gemm_args;

  // 8-bit and tf32 operands reach WGMMA contiguous along K, or through registers, which only its first operand may
  // take. For a row-major B of such a type the builder therefore computes D^T = B^T A^T. It swaps M and N of the
  // problem itself; the epilogue has to be given D as it then lies.
  static constexpr bool kSwapped = cutlass::gemm::collective::detail::is_swapAB<ElementA, LayoutA, ElementB, LayoutB>();
  using EpilogueLayout =
      cute::conditional_t<kSwapped,
                          cute::conditional_t<cute::is_same_v<LayoutD, cutlass::layout::RowMajor>,
                                              cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>,
                          LayoutD>;

  static constexpr bool kDirect = cute::is_same_v<EpilogueSchedule, cutlass::epilogue::NoSmemWarpSpecialized>;
  static constexpr bool kCooperative =
      cute::is_same_v<EpilogueSchedule, cutlass::epilogue::TmaWarpSpecializedCooperative>;
  static constexpr bool kStreamK = cute::is_same_v<TileScheduler, cutlass::gemm::StreamKScheduler>;
  static constexpr int kTileM = cute::size<0>(Tile{}), kTileN = cute::size<1>(Tile{});
  // Three warp groups multiply 192 rows, which CUTLASS's builder does not know: it is told 128.
  static constexpr bool kThreeGroups = kCooperative && kTileM == 192;
  using BuiltTile = cute::conditional_t<
      kThreeGroups, cute::Shape<cute::_128, cute::tuple_element_t<1, Tile>, cute::tuple_element_t<2, Tile>>, Tile>;
  static_assert(!((kIsTree<Epilogue> || kIsGated<Epilogue>) && kSwapped),
                "a tree's operands would have to change places with the operands");

  // What the collective builder is told of an epilogue. Those that store from registers are not the builder's: it makes
  // the strides only.
  using Fusion = cute::conditional_t<
      kDirect, cutlass::epilogue::fusion::LinearCombination<ElementD, ElementCompute, ElementD, ElementCompute>,
      typename VisitorOf<Epilogue, LinearVisitor<ElementD, ElementCompute, true>, ScaledVisitor<kTileM, kTileN>, kTileM,
                         kTileN, ElementD>::Type>;
  static constexpr bool kLinear = cute::is_same_v<Epilogue, LinearEpilogue>;
  using Stored = StoredAtOnce<BuiltTile, kCooperative, kLinear>;
  using BuiltEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, BuiltTile, Cluster, typename Stored::Type,
      ElementAccumulator, ElementCompute, ElementD, EpilogueLayout, kAlignD, ElementD, EpilogueLayout, kAlignD,
      EpilogueSchedule, Fusion>::CollectiveOp;
  // Another stage of the mainloop, which holds 128 bytes of K, is worth smaller buffers of D: of f16 and bf16, up to
  // eight in clusters of four and more, up to four in others. Those of two share one operand only; their neighbours ask
  // L2 for the other one, at different times where they have more stages (measured: 192x80 in 4x2 7% faster, 128x112 in
  // 2x1 7% slower).
  static constexpr bool kFree = cute::is_void_v<StageCount> && cute::sizeof_bits_v<ElementD> == 16;
  static constexpr bool kChosen = kFree && kLinear;
  // Several subtiles of 16 or 32 columns are stored after one barrier in pingpong kernels (128x176 of fp8 10%, of bf16
  // 5% faster with K below 1,500), and those of 16 columns in cooperative kernels, where registers suffice and a tile
  // has seven of them or more (2 to 4% faster). Other cooperative kernels become 1 to 3% slower by that.
  static constexpr bool kManySubtiles = kTileM * kTileN >= 7 * 16 * 128;
  static constexpr bool kGrouped =
      kFree && Stored::kAuto && (kLinear || cute::is_same_v<Epilogue, ScaledEpilogue>) && kManySubtiles &&
      (kCooperative ? Stored::kBySixteen && !kThreeGroups && kTileM * kTileN <= 160 * 256 : kTileM > 64);
  static constexpr int kStageBytes = (kTileM + kTileN) * 128;
  static constexpr int kEnough = cute::size<0>(Cluster{}) * cute::size<1>(Cluster{}) >= 4 ? 8 : 4;
  using CollectiveEpilogue =
      typename CollectiveOf<Epilogue, BuiltEpilogue, Fusion, ElementD, ElementCompute, EpilogueLayout, kSwapped,
                            kDirect, BesideMainloop<kFree ? kStageBytes : 0, kEnough, kTileM, kChosen, kGrouped>>::Type;

  using Stages = StagesBeside<StageCount, CollectiveEpilogue>;

  using BuiltMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementA, typename Scales::template A<LayoutA>, kAlignA,
      ElementB, typename Scales::template B<LayoutB>, kAlignB, ElementAccumulator, BuiltTile, Cluster, Stages,
      MainloopSchedule>::CollectiveOp;
  static constexpr int kStagesOfThree =
      stages_beside(EpilogueBuffers::kBarriers + int{sizeof(typename CollectiveEpilogue::SharedStorage)}, kStageBytes);
  using Mainloop =
      typename cute::conditional_t<kThreeGroups, ThreeGroupsMainloopOf<BuiltMainloop, Tile, kStagesOfThree>,
                                   TmaMainloopOf<typename PromotedMainloopOf<BuiltMainloop>::Type>>::Type;
  // Kernels that leave float32 sums may divide K: each slice has a D of its own, one after the other, for another
  // kernel to add up. Scales of rows, columns and tensors are factors of each slice.
  static constexpr bool kSliced =
      cute::is_same_v<ElementD, float> && !Scales::kPresent && !kDirect && !kStreamK &&
      (cute::is_same_v<Epilogue, LinearEpilogue> || cute::is_same_v<Epilogue, ScaledEpilogue>);
  using CollectiveMainloop = cute::conditional_t<kSliced, SlicedMainloop<Mainloop>, DependentMainloop<Mainloop>>;
  static constexpr bool kDependent = true;

  // CUTLASS's mainloops, epilogues without shared memory and stream-K keep CUTLASS's kernel.
  static constexpr bool kOwnKernel = kHasOwnMainloop<Mainloop> && !kDirect && !kStreamK;
  static_assert(!(kOwnKernel && kSwapped), "bits of settled operands would change places");
  using Kernel = cute::conditional_t<
      kOwnKernel, PersistentGemm<CollectiveMainloop, CollectiveEpilogue>,
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue,
                                           cute::conditional_t<kStreamK, TileScheduler, TileListScheduler>>>;
  using Scheduler = typename Kernel::TileScheduler;

  static typename Kernel::Arguments arguments(Args const& args) {
    auto result = gemm_arguments<Kernel>(args, Scales::kPresent);
    if constexpr (kOwnKernel) result.settled = args.settled;
    if constexpr (cute::is_same_v<Epilogue, ScaledEpilogue>) {
      result.epilogue.thread.alpha_by_column = cute::is_same_v<LayoutD, cutlass::layout::ColumnMajor>;
    }
    if constexpr (kSliced) {
      constexpr int kStep = cute::size<2>(Tile{});
      int32_t const slices = args.split_k > 1 ? args.split_k : 1;
      result.mainloop.k = args.k;
      result.mainloop.batch = args.batch;
      result.mainloop.slices = slices;
      cute::get<2>(result.problem_shape) = cute::ceil_div(cute::ceil_div(args.k, kStep), slices) * kStep;
      cute::get<3>(result.problem_shape) = args.batch * slices;
    }
    if constexpr (Scales::kPresent) {
      result.mainloop.ptr_SFA = static_cast<float const*>(args.scale_a);
      result.mainloop.ptr_SFB = static_cast<float const*>(args.scale_b);
      result.mainloop.strides = {args.scale_stride_a, args.scale_k_stride_a, args.scale_stride_b,
                                 args.scale_k_stride_b};
    }
    return result;
  }

  static bool can_implement(Args const& args) {
    // The arguments have no stride from one batch's block scales to the next one's.
    if (Scales::kPresent && (args.batch > 1 || args.scale_a == nullptr || args.scale_b == nullptr)) return false;
    // Slices have one stride, as batches have.
    bool const sliced = kSliced && args.split_k > 1 && args.batch == 1 && args.c == nullptr && args.batch_stride_d != 0;
    return (kStreamK || sliced || args.split_k == 1) && Kernel::can_implement(arguments(args));
  }

  // Stream-K's barriers must start at zero; its partial tiles, which come first in the workspace, need not.
  static void clear_range(Args const& args, uint64_t& offset, uint64_t& bytes) {
    offset = bytes = 0;
    if constexpr (kStreamK) {
      auto const underlying = arguments(args);
      auto const shape = underlying.problem_shape;
      dim3 const blocks = Scheduler::get_tiled_cta_shape_mnl(shape, Tile{}, Cluster{});
      auto const k_tiles = uint32_t(cute::ceil_div(args.k, cute::size<2>(Tile{})));
      size_t barriers = 0, partials = 0;
      Scheduler::Params::get_workspace_component_sizes(
          blocks, k_tiles, cutlass::gemm::to_gemm_coord(Tile{}), cutlass::gemm::to_gemm_coord(Cluster{}), barriers,
          partials, underlying.hw_info, underlying.scheduler.splits, underlying.scheduler.max_swizzle_size,
          underlying.scheduler.raster_order, underlying.scheduler.decomposition_mode,
          underlying.scheduler.reduction_mode, Kernel::NumMmaWarpGroups,
          cute::sizeof_bits_v<typename Scheduler::BarrierType>, cute::sizeof_bits_v<ElementAccumulator>,
          CollectiveEpilogue::get_store_pipe_increment(Tile{}), 1);
      offset = partials;
      bytes = barriers;
    }
  }
};

}  // namespace atomr_cutlass
