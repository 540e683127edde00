// GEMM cells of the sm90 generation: CUTLASS 3.x warp-specialized persistent kernels over TMA and WGMMA.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/epilogue_gated.h"
#include "atomr_cutlass/epilogue_scaled.h"
#include "atomr_cutlass/epilogue_tma.h"
#include "atomr_cutlass/epilogue_visitor.h"
#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/mainloop_promoted.h"
#include "atomr_cutlass/mainloop_tma.h"
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
// elements of K. The mainloop multiplies with them in full accumulation. Their strides are dynamic along both
// dimensions: CUTLASS's own layouts fix the contiguous one and read it through TMA, which asks for 16-byte aligned rows
// of scales.
template <int kM, int kN, int kK>
struct BlockScales {
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

  template <int kBlock>
  static LayoutOf<kBlock> layout(int extent, int k, int64_t stride, int64_t k_stride) {
    return cute::make_layout(
        cute::make_shape(cute::make_shape(cute::Int<kBlock>{}, cute::ceil_div(extent, kBlock)),
                         cute::make_shape(cute::Int<kK>{}, cute::ceil_div(k, kK)), 1),
        cute::make_stride(cute::make_stride(cute::_0{}, stride), cute::make_stride(cute::_0{}, k_stride), int64_t(0)));
  }
  template <class Args>
  static LayoutOf<kM> layout_a(Args const& args) {
    return layout<kM>(args.m, args.k, args.scale_stride_a, args.scale_k_stride_a);
  }
  template <class Args>
  static LayoutOf<kN> layout_b(Args const& args) {
    return layout<kN>(args.n, args.k, args.scale_stride_b, args.scale_k_stride_b);
  }
};

// What the collective builder is told of an epilogue: a visitor, or CUTLASS's operation. Epilogues that store from
// registers are not the builder's: it makes the strides only.
template <class Epilogue, int kTileM, int kTileN, class ElementD, class Compute, bool kDirect>
struct FusionOf {
  using Type =
      cute::conditional_t<kDirect, cutlass::epilogue::fusion::LinearCombination<ElementD, Compute, ElementD, Compute>,
                          LinearVisitor<ElementD, Compute>>;
};
template <int kTileM, int kTileN, class ElementD, class Compute>
struct FusionOf<ScaledEpilogue, kTileM, kTileN, ElementD, Compute, false> {
  using Type = ScaledVisitor<kTileM, kTileN>;
};
template <class Tree, bool kScaled, class Lanes, int kTileM, int kTileN, class ElementD, class Compute>
struct FusionOf<TreeEpilogue<Tree, kScaled, Lanes>, kTileM, kTileN, ElementD, Compute, false> {
  using Type =
      TreeVisitor<TreeEpilogue<Tree, kScaled, Lanes>, kTileM, kTileN, ElementD, TreeParams<Tree>, kIsChosen<Tree>>;
};

template <class Epilogue, class ElementD, class Stride, bool kSwapped>
struct StoreOf {
  using Type = ScaledStore<ElementD, Stride, kSwapped>;
};
template <class Tree, bool kScaled, class Lanes, class ElementD, class Stride, bool kSwapped>
struct StoreOf<TreeEpilogue<Tree, kScaled, Lanes>, ElementD, Stride, kSwapped> {
  using Type = TreeStore<TreeEpilogue<Tree, kScaled, Lanes>, ElementD, Stride>;
};
template <class Tree, bool kScaled, class ElementD, class Stride, bool kSwapped>
struct StoreOf<GatedEpilogue<Tree, kScaled>, ElementD, Stride, kSwapped> {
  using Type = GatedStore<GatedEpilogue<Tree, kScaled>, ElementD, Stride>;
};

// The collective epilogue. CUTLASS's stores plain results from registers.
template <class Epilogue, class Built, class Fusion, class ElementD, class Layout, bool kSwapped, bool kDirect>
struct CollectiveOf {
  using Type = typename ChosenOf<typename TmaEpilogueOf<Built>::Type, Fusion>::Type;
};
template <class Epilogue, class Built, class Fusion, class ElementD, class Layout, bool kSwapped>
struct CollectiveOf<Epilogue, Built, Fusion, ElementD, Layout, kSwapped, true> {
  using Store = typename StoreOf<Epilogue, ElementD, cutlass::detail::TagToStrideC_t<Layout>, kSwapped>::Type;
  using Type = cute::conditional_t<kIsTree<Epilogue> || kIsGated<Epilogue> || cute::is_same_v<Epilogue, ScaledEpilogue>,
                                   cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<Store>, Built>;
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

  // Steps along K from one on.
  struct Steps {
    int at;
    CUTLASS_DEVICE int operator*() const { return at; }
    CUTLASS_DEVICE Steps& operator++() {
      ++at;
      return *this;
    }
  };

  template <class TensorA, class TensorB, class KTileIterator, class BlockCoord>
  CUTLASS_DEVICE void load(Params const& params, typename Base::MainloopPipeline pipeline,
                           typename Base::PipelineState state, cute::tuple<TensorA, TensorB> const& inputs,
                           BlockCoord const& block, KTileIterator, int count, int thread, uint32_t rank,
                           typename Base::TensorStorage& shared) {
    int const number = cute::get<3>(block), batch = number / params.slices;
    auto const at = cute::make_coord(cute::get<0>(block), cute::get<1>(block), cute::get<2>(block), batch);
    Base::load(params, pipeline, state, inputs, at, Steps{(number - batch * params.slices) * params.steps}, count,
               thread, rank, shared);
  }
};

// What is stored at once of a tile whose width is no multiple of 32: CUTLASS takes 16 columns, and waits after each.
template <class Tile, bool kCooperative>
struct StoredAtOnce {
  static constexpr int kM = kCooperative ? 128 : 64, kN = cute::size<1>(Tile{});
  static constexpr int kColumns = kN % 48 == 0 ? 48 : kCooperative ? 0 : kN;
  using Type = cute::conditional_t<kN % 32 == 0 || kN % 16 != 0 || kColumns == 0,
                                   cutlass::epilogue::collective::EpilogueTileAuto,
                                   cute::Shape<cute::Int<kM>, cute::Int<kColumns>>>;
};

template <class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB, int kAlignB, class ElementD,
          class LayoutD, int kAlignD, class ElementAccumulator, class ElementCompute, class Tile, class Cluster,
          class StageCount, class MainloopSchedule, class EpilogueSchedule, class TileScheduler,
          class Epilogue = LinearEpilogue, class Scales = Unscaled>
struct GemmSm90 {
  using Args = atomr_cutlass_gemm_args;

  // 8-bit and tf32 operands reach WGMMA contiguous along K, or through registers, which only its first operand may
  // take. For a row-major B of such a type the builder therefore computes D^T = B^T A^T. It exchanges M and N of the
  // problem itself; the epilogue has to be given D as it then lies.
  static constexpr bool kSwapped = cutlass::gemm::collective::detail::is_swapAB<ElementA, LayoutA, ElementB, LayoutB>();
  using EpilogueLayout =
      cute::conditional_t<kSwapped,
                          cute::conditional_t<cute::is_same_v<LayoutD, cutlass::layout::RowMajor>,
                                              cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>,
                          LayoutD>;

  static constexpr bool kTree = kIsTree<Epilogue>, kGated = kIsGated<Epilogue>;
  static constexpr bool kScaled = cute::is_same_v<Epilogue, ScaledEpilogue>;
  static constexpr bool kDirect = cute::is_same_v<EpilogueSchedule, cutlass::epilogue::NoSmemWarpSpecialized>;
  static constexpr bool kCooperative =
      cute::is_same_v<EpilogueSchedule, cutlass::epilogue::TmaWarpSpecializedCooperative>;
  static constexpr bool kStreamK = cute::is_same_v<TileScheduler, cutlass::gemm::StreamKScheduler>;
  static constexpr int kTileM = cute::size<0>(Tile{}), kTileN = cute::size<1>(Tile{});
  static_assert(!((kTree || kGated) && kSwapped), "a tree's operands would have to change places with the operands");

  using Fusion = typename FusionOf<Epilogue, kTileM, kTileN, ElementD, ElementCompute, kDirect>::Type;
  using BuiltEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      typename StoredAtOnce<Tile, kCooperative>::Type, ElementAccumulator, ElementCompute, ElementD, EpilogueLayout,
      kAlignD, ElementD, EpilogueLayout, kAlignD, EpilogueSchedule, Fusion>::CollectiveOp;
  using CollectiveEpilogue =
      typename CollectiveOf<Epilogue, BuiltEpilogue, Fusion, ElementD, EpilogueLayout, kSwapped, kDirect>::Type;

  // StageCount void: as many stages as fit beside the epilogue.
  using Stages = cute::conditional_t<
      cute::is_void_v<StageCount>,
      cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename CollectiveEpilogue::SharedStorage))>,
      StageCount>;

  using BuiltMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementA, typename Scales::template A<LayoutA>, kAlignA,
      ElementB, typename Scales::template B<LayoutB>, kAlignB, ElementAccumulator, Tile, Cluster, Stages,
      MainloopSchedule>::CollectiveOp;
  using Mainloop = typename TmaMainloopOf<typename PromotedMainloopOf<BuiltMainloop>::Type>::Type;
  // Kernels that leave float32 sums may divide K: each slice has a D of its own, one after the other, for another
  // kernel to add up.
  static constexpr bool kSliced = cute::is_same_v<ElementD, float> && cute::sizeof_bits_v<ElementA> == 16 &&
                                  cute::is_same_v<Epilogue, LinearEpilogue> && !kStreamK;
  using CollectiveMainloop = cute::conditional_t<kSliced, SlicedMainloop<Mainloop>, DependentMainloop<Mainloop>>;
  static constexpr bool kDependent = true;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop,
                                                      CollectiveEpilogue, TileScheduler>;
  using Params = typename Kernel::Params;
  using Scheduler = typename Kernel::TileScheduler;

  static constexpr int kThreads = Kernel::MaxThreadsPerBlock;
  static constexpr int kMinBlocks = Kernel::MinBlocksPerMultiprocessor;
  static constexpr int kSharedBytes = Kernel::SharedStorageSize;
  static constexpr int kClusterM = cute::size<0>(Cluster{});
  static constexpr int kClusterN = cute::size<1>(Cluster{});
  static constexpr int kClusterK = cute::size<2>(Cluster{});

  template <class Stride>
  static Stride stride(int64_t leading, int64_t batch) {
    // CUTLASS marks the contiguous mode with a static 1; the other of the two leading modes is dynamic.
    Stride result{};
    if constexpr (cute::is_static_v<cute::tuple_element_t<0, Stride>>) {
      cute::get<1>(result) = leading;
    } else {
      cute::get<0>(result) = leading;
    }
    cute::get<2>(result) = batch;
    return result;
  }

  static typename Kernel::Arguments arguments(Args const& args) {
    typename Kernel::Arguments result{};
    result.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    result.problem_shape = cute::make_shape(args.m, args.n, args.k, args.batch);
    if constexpr (kSliced) {
      constexpr int kStep = cute::size<2>(Tile{});
      int32_t const slices = args.split_k > 1 ? args.split_k : 1;
      result.mainloop.k = args.k;
      result.mainloop.batch = args.batch;
      result.mainloop.slices = slices;
      cute::get<2>(result.problem_shape) = cute::ceil_div(cute::ceil_div(args.k, kStep), slices) * kStep;
      cute::get<3>(result.problem_shape) = args.batch * slices;
    }
    result.mainloop.ptr_A = static_cast<ElementA const*>(args.a);
    result.mainloop.dA = stride<typename Kernel::StrideA>(args.lda, args.batch_stride_a);
    result.mainloop.ptr_B = static_cast<ElementB const*>(args.b);
    result.mainloop.dB = stride<typename Kernel::StrideB>(args.ldb, args.batch_stride_b);
    if constexpr (Scales::kPresent) {
      result.mainloop.ptr_SFA = static_cast<float const*>(args.scale_a);
      result.mainloop.layout_SFA = Scales::layout_a(args);
      result.mainloop.ptr_SFB = static_cast<float const*>(args.scale_b);
      result.mainloop.layout_SFB = Scales::layout_b(args);
    }
    if constexpr (kTree) {
      result.epilogue.thread = TreeParams<typename Epilogue::Tree>::of(args);
      if (Scales::kPresent) {
        result.epilogue.thread.scaled.scale_a = result.epilogue.thread.scaled.scale_b = nullptr;
      }
    } else if constexpr (kScaled || kGated) {
      result.epilogue.thread = ScaledParams::of(args);
      // Block scales are the mainloop's.
      if (Scales::kPresent) result.epilogue.thread.scale_a = result.epilogue.thread.scale_b = nullptr;
    } else {
      result.epilogue.thread.alpha = ElementCompute(args.alpha);
      result.epilogue.thread.beta = ElementCompute(args.beta);
    }
    // The TMA epilogue encodes a tensor map of C whether or not it is read, and the driver refuses a null address.
    bool const has_c = args.c != nullptr;
    result.epilogue.ptr_C = static_cast<ElementD const*>(has_c ? args.c : args.d);
    result.epilogue.dC = stride<typename Kernel::StrideC>(has_c ? args.ldc : args.ldd,
                                                          has_c ? args.batch_stride_c : args.batch_stride_d);
    result.epilogue.ptr_D = static_cast<ElementD*>(args.d);
    result.epilogue.dD = stride<typename Kernel::StrideD>(args.ldd, args.batch_stride_d);
    result.hw_info.sm_count = args.sm_count;
    result.hw_info.max_active_clusters = args.max_active_clusters;
    result.scheduler.max_swizzle_size = args.swizzle;
    using Raster = decltype(result.scheduler.raster_order);
    result.scheduler.raster_order =
        args.raster == 1 ? Raster::AlongM : (args.raster == 2 ? Raster::AlongN : Raster::Heuristic);
    if constexpr (kStreamK) {
      if (args.split_k > 1) result.scheduler.splits = args.split_k;
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

  static uint64_t workspace_size(Args const& args) { return Kernel::get_workspace_size(arguments(args)); }

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

  static Params params(Args const& args) { return Kernel::to_underlying_arguments(arguments(args), args.workspace); }

  static dim3 grid(Params const& params) { return Kernel::get_grid_shape(params); }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Kernel kernel;
    kernel(params, shared);
  }
};

}  // namespace atomr_cutlass
