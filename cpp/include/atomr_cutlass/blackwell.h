// The GEMM cell of the sm100 and sm120 generations: CUTLASS 3.x kernels over TMA, whose tiles the hardware hands out
// (cluster launch control). The headers of the generations include this one and the collectives that they build.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/small_tensor_map.h"  // ahead of CuTe's headers

#include "atomr_cutlass/cell_3x.h"
#include "atomr_cutlass/epilogue_linear.h"
#include "atomr_cutlass/epilogue_scaled.h"
#include "atomr_cutlass/epilogue_visitor.h"
#include "atomr_cutlass/kernel_abi.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace atomr_cutlass {

// The scaled epilogue as Blackwell's collectives call it: what a visitor returns is already of D's type.
template <class Element, class Visitor>
struct ConvertingVisitor : Visitor {
  using Visitor::Visitor;

  template <class Callbacks>
  struct Converting : Callbacks {
    CUTLASS_DEVICE Converting(Callbacks const& callbacks) : Callbacks(callbacks) {}

    template <class Accumulator, int kCount>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, kCount> const& accumulators, int fragment, int epilogue_m,
                              int epilogue_n) {
      cutlass::NumericArrayConverter<Element, float, kCount> convert;
      return convert(Callbacks::visit(accumulators, fragment, epilogue_m, epilogue_n));
    }
  };

  template <bool kReferenceSource, class... A>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      cutlass::epilogue::fusion::detail::ConsumerStoreArgs<A...> const& args) {
    auto const callbacks = Visitor::template get_consumer_store_callbacks<kReferenceSource>(args);
    return Converting<cute::remove_cvref_t<decltype(callbacks)>>(callbacks);
  }
};

// Which scales the mainloop multiplies with, and where they lie: none, ...
struct NoScales {
  template <class Element>
  using ElementOf = Element;
  template <class Layout>
  using LayoutA = Layout;
  template <class Layout>
  using LayoutB = Layout;

  static bool can_implement(atomr_cutlass_gemm_args const&) { return true; }
  template <class Mainloop, class Arguments>
  static void fill(Arguments&, atomr_cutlass_gemm_args const&) {}
};

// ... a float for each block of kM rows of A and kK elements of K and one for each block of kN columns of B and kK
// elements of K, with strides of the caller's, ...
template <int kM, int kN, int kK>
struct FloatScales {
  template <int kBlock>
  using Scales = cute::Layout<cute::Shape<cute::Shape<cute::Int<kBlock>, int>, cute::Shape<cute::Int<kK>, int>, int>,
                              cute::Stride<cute::Stride<cute::_0, int>, cute::Stride<cute::_0, int>, int>>;
  template <class Element>
  using ElementOf = Element;
  template <class Layout>
  using LayoutA = cute::tuple<Layout, Scales<kM>>;
  template <class Layout>
  using LayoutB = cute::tuple<Layout, Scales<kN>>;

  template <int kBlock>
  CUTLASS_HOST_DEVICE static Scales<kBlock> layout(int extent, int k, int64_t stride, int64_t k_stride) {
    return {
        cute::make_shape(cute::make_shape(cute::Int<kBlock>{}, cute::ceil_div(extent, kBlock)),
                         cute::make_shape(cute::Int<kK>{}, cute::ceil_div(k, kK)), 1),
        cute::make_stride(cute::make_stride(cute::_0{}, int(stride)), cute::make_stride(cute::_0{}, int(k_stride)), 0)};
  }

  // Offsets of scales are 32 bits wide: with 64, the epilogue's warps spill.
  template <int kBlock>
  static bool in_reach(int extent, int k, int64_t stride, int64_t k_stride) {
    int64_t const last = (cute::ceil_div(extent, kBlock) - 1) * stride + (cute::ceil_div(k, kK) - 1) * k_stride;
    return stride >= 0 && k_stride >= 0 && last <= 0x7fffffff;
  }
  template <class Args>
  static bool in_reach(Args const& args) {
    return in_reach<kM>(args.m, args.k, args.scale_stride_a, args.scale_k_stride_a) &&
           in_reach<kN>(args.n, args.k, args.scale_stride_b, args.scale_k_stride_b);
  }

  static bool can_implement(atomr_cutlass_gemm_args const& args) {
    return args.batch == 1 && args.scale_a != nullptr && args.scale_b != nullptr && in_reach(args);
  }
  template <class Mainloop, class Arguments>
  static void fill(Arguments& mainloop, atomr_cutlass_gemm_args const& args) {
    mainloop.ptr_SFA = static_cast<float const*>(args.scale_a);
    mainloop.layout_SFA = layout<kM>(args.m, args.k, args.scale_stride_a, args.scale_k_stride_a);
    mainloop.ptr_SFB = static_cast<float const*>(args.scale_b);
    mainloop.layout_SFB = layout<kN>(args.n, args.k, args.scale_stride_b, args.scale_k_stride_b);
  }
};

// ... or an `Element` for each kVector elements of K of one row of A and one column of B, in the order that the tensor
// cores read: tiles of 128 rows and 4 scales, one matrix of a batch after the other.
template <class Element, int kVector>
struct VectorScales {
  template <class Value>
  using ElementOf = cute::conditional_t<kVector == 16, cutlass::nv_float4_t<Value>, cutlass::mx_float4_t<Value>>;
  template <class Layout>
  using LayoutA = Layout;
  template <class Layout>
  using LayoutB = Layout;

  static bool can_implement(atomr_cutlass_gemm_args const& args) {
    return args.scale_a != nullptr && args.scale_b != nullptr;
  }
  template <class Mainloop, class Arguments>
  static void fill(Arguments& mainloop, atomr_cutlass_gemm_args const& args) {
    using Config = typename Mainloop::Sm1xxBlkScaledConfig;
    static_assert(cute::is_same_v<typename Mainloop::ElementSF, Element> && Config::SFVecSize == kVector);
    auto const shape = cute::make_shape(args.m, args.n, args.k, args.batch);
    mainloop.ptr_SFA = static_cast<Element const*>(args.scale_a);
    mainloop.layout_SFA = Config::tile_atom_to_shape_SFA(shape);
    mainloop.ptr_SFB = static_cast<Element const*>(args.scale_b);
    mainloop.layout_SFB = Config::tile_atom_to_shape_SFB(shape);
  }
};

// Columns of tensor memory that end where a tensor ends.
template <class Tensor>
CUTLASS_DEVICE constexpr int tensor_memory_columns() {
  using Words = decltype(cute::recast<uint32_t>(cute::declval<Tensor&>()));
  return cute::cosize(typename Words::layout_type{}) & cutlass::detail::TmemColMask;
}

// Whether overlapping accumulators and the scales fit in tensor memory.
template <bool kOverlapping, class Mainloop, class EpilogueTile>
CUTLASS_DEVICE constexpr bool fits_in_tensor_memory() {
  if constexpr (kOverlapping) {
    using Memory = decltype(Mainloop::template init_tmem_tensors<EpilogueTile, true>(EpilogueTile{}));
    return tensor_memory_columns<decltype(Memory::accumulators)>() + tensor_memory_columns<decltype(Memory::tCtSFA)>() +
               tensor_memory_columns<decltype(Memory::tCtSFB)>() <=
           512;
  }
  return true;
}

// `Tile` is the MMA's: of one thread block, or of the two that a 2-SM schedule of sm_100 pairs along M. StageCount
// void: as many stages as fit beside the epilogue.
template <class Arch, class OpClass, class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB,
          int kAlignB, class ElementD, class LayoutD, int kAlignD, class ElementAccumulator, class ElementCompute,
          class Tile, class Cluster, class StageCount, class MainloopSchedule, class EpilogueSchedule,
          class TileScheduler, class Epilogue = LinearEpilogue, class Scales = NoScales>
struct BlackwellGemm {
  using Args = atomr_cutlass_gemm_args;

  static constexpr bool kPair = cute::is_base_of_v<cutlass::gemm::KernelSchedule2Sm, MainloopSchedule>;
  static constexpr int kTileM = cute::size<0>(Tile{}) / (kPair ? 2 : 1), kTileN = cute::size<1>(Tile{});

  using Fusion = typename VisitorOf<Epilogue, LinearVisitor<ElementD, ElementCompute>,
                                    ConvertingVisitor<ElementD, ScaledVisitor<kTileM, kTileN>>, kTileM, kTileN,
                                    ElementD, TreeParams, false>::Type;
  // Beside scales, two accumulators of 256 columns do not fit in tensor memory: they overlap by a step of the epilogue,
  // which CUTLASS makes 128 columns wide, too wide for the registers.
  static constexpr bool kOverlapping = kTileN == 256 && cute::is_same_v<Arch, cutlass::arch::Sm100> &&
                                       cute::is_same_v<OpClass, cutlass::arch::OpClassBlockScaledTensorOp>;
  using EpilogueTile = cute::conditional_t<kOverlapping, cute::Shape<cute::Int<kTileM>, cute::_64>,
                                           cutlass::epilogue::collective::EpilogueTileAuto>;
  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, OpClass, Tile, Cluster, EpilogueTile, ElementAccumulator, ElementCompute, ElementD, LayoutD, kAlignD,
      ElementD, LayoutD, kAlignD, EpilogueSchedule, Fusion>::CollectiveOp;

  using Stages = StagesBeside<StageCount, CollectiveEpilogue>;

  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, OpClass, typename Scales::template ElementOf<ElementA>, typename Scales::template LayoutA<LayoutA>, kAlignA,
      typename Scales::template ElementOf<ElementB>, typename Scales::template LayoutB<LayoutB>, kAlignB,
      ElementAccumulator, Tile, Cluster, Stages, MainloopSchedule>::CollectiveOp;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop,
                                                      CollectiveEpilogue, TileScheduler>;
  static constexpr bool kStreamK = cute::is_same_v<TileScheduler, cutlass::gemm::StreamKScheduler>;

  static typename Kernel::Arguments arguments(Args const& args) {
    auto result = gemm_arguments<Kernel>(args, !cute::is_same_v<Scales, NoScales>);
    Scales::template fill<CollectiveMainloop>(result.mainloop, args);
    return result;
  }

  static bool can_implement(Args const& args) {
    // Every tile is a block of the grid, whose second and third dimensions end here.
    constexpr int kGridLimit = 65535;
    int const rows = cute::ceil_div(args.m, kTileM), columns = cute::ceil_div(args.n, kTileN);
    bool const fits = args.batch <= kGridLimit && rows < kGridLimit && columns < kGridLimit;
    return (kStreamK || args.split_k == 1) && fits && Scales::can_implement(args) &&
           Kernel::can_implement(arguments(args));
  }

  // Stream-K's barriers must start at zero. They come after its partial tiles, which need not, but are few.
  static void clear_range(Args const& args, uint64_t& offset, uint64_t& bytes) {
    offset = 0;
    bytes = kStreamK ? Kernel::get_workspace_size(arguments(args)) : 0;
  }

#ifdef __CUDA_ARCH__  // nvcc's host compiler does not see what device functions return
  static_assert(fits_in_tensor_memory<kOverlapping, CollectiveMainloop, EpilogueTile>());
#endif
};

}  // namespace atomr_cutlass
