// Convolutions of the sm90 generation: implicit GEMM over TMA (im2col) and WGMMA, in CUTLASS's warp-specialized kernel.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/activation.h"
#include "atomr_cutlass/cell_3x.h"
#include "atomr_cutlass/conv_problem.h"
#include "atomr_cutlass/epilogue_bias.h"
#include "atomr_cutlass/epilogue_linear.h"
#include "atomr_cutlass/epilogue_tma.h"
#include "atomr_cutlass/epilogue_visitor.h"
#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/mainloop_conv.h"
#include "cute/arch/mma_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/conv/convolution.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/builders/sm90_common.inl"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace atomr_cutlass {

// An epilogue of bias and activation; Function is void where there is no activation.
template <class Function>
struct BiasEpilogue {};

// The visitor of an epilogue: a tree's, or ...
template <class Epilogue, bool kBias, int kTileM, int kTileN, class ElementD, class Compute>
struct ConvFusion : VisitorOf<Epilogue, void, void, kTileM, kTileN, ElementD> {};
template <class Function, int kTileM, int kTileN, class ElementD, class Compute>
struct ConvFusion<BiasEpilogue<Function>, true, kTileM, kTileN, ElementD, Compute> {
  using Type = BiasVisitor<Function, kTileN, ElementD>;
};
template <int kTileM, int kTileN, class ElementD, class Compute>
struct ConvFusion<BiasEpilogue<void>, false, kTileM, kTileN, ElementD, Compute> {
  using Type = LinearVisitor<ElementD, Compute, true>;
};

template <cutlass::conv::Operator kOperator, class ElementA, int kAlignA, class ElementB, int kAlignB, class ElementD,
          int kAlignD, class Accumulator, class Compute, int kTileM, int kTileN, int kTileK, class Cluster, int kStages,
          class Epilogue>
struct ConvSm90 {
  using Args = atomr_cutlass_conv_args;
  using Operator = cutlass::conv::Operator;
  static constexpr bool kFprop = kOperator == Operator::kFprop;
  static constexpr bool kDgrad = kOperator == Operator::kDgrad;
  static constexpr bool kWgrad = kOperator == Operator::kWgrad;
  static constexpr bool kTree = kIsTree<Epilogue>;
  static_assert(!(kTree && kWgrad), "the filter's gradient has columns of several dimensions, which trees know not");

  using Tile = cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, cute::Int<kTileK>>;
  using Fusion = typename ConvFusion<Epilogue, !kWgrad, kTileM, kTileN, ElementD, Compute>::Type;
  // Of wgrad the rows of D are filters, and the batches places of the filter.
  using BuiltEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, Accumulator, Compute, ElementD, cutlass::layout::RowMajor,
      kAlignD, ElementD, cutlass::layout::RowMajor, kAlignD, cutlass::epilogue::TmaWarpSpecialized,
      Fusion>::CollectiveOp;
  using Place = cute::conditional_t<kWgrad, InMatrices, InImages>;
  using CollectiveEpilogue = typename ChosenOf<typename TmaEpilogueOf<BuiltEpilogue, Place>::Type, Fusion>::Type;

  // The epilogue reuses the mainloop's shared memory: all of it can hold stages, beside the barriers. 0: as many as
  // fit.
  static constexpr int kReserved = 2048;
  static constexpr int kStageBytes = (kTileM * int(sizeof(ElementA)) + kTileN * int(sizeof(ElementB))) * kTileK +
                                     int(sizeof(typename cutlass::PipelineTmaAsync<1>::SharedStorage));
  using Policy =
      cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<kStages == 0 ? stages_beside(kReserved, kStageBytes) : kStages,
                                                        Cluster, cutlass::gemm::KernelTmaWarpSpecialized>;

  // Whether an operand is contiguous along K, or along its rows.
  using AlongK = cute::Stride<int64_t, cute::Int<1>, int64_t>;
  using AlongRows = cute::Stride<cute::Int<1>, int64_t, int64_t>;
  static constexpr auto kMajorA = kWgrad ? cute::GMMA::Major::MN : cute::GMMA::Major::K;
  static constexpr auto kMajorB = kFprop ? cute::GMMA::Major::K : cute::GMMA::Major::MN;
  template <class Element>
  using Multiplied = cute::conditional_t<cute::is_same_v<Element, float>, cutlass::tfloat32_t, Element>;
  using TiledMma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Multiplied<ElementA>, Multiplied<ElementB>, Accumulator, Tile, kMajorA, kMajorB>()));
  using CollectiveMainloop =
      ConvMainloop<TmaMainloop<Policy, Tile, ElementA, cute::conditional_t<kWgrad, AlongRows, AlongK>, ElementB,
                               cute::conditional_t<kFprop, AlongK, AlongRows>, TiledMma>,
                   kWgrad>;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop,
                                                      CollectiveEpilogue, void>;

  // Operands by their place in the product, and D.
  static PixelTensor operand_a(Args const& args) { return kFprop ? tensor_x(args) : tensor_y(args); }
  static PixelTensor operand_b(Args const& args) { return kWgrad ? tensor_x(args) : tensor_w(args); }
  static PixelTensor result_d(Args const& args) {
    return kFprop ? tensor_y(args) : (kDgrad ? tensor_x(args) : tensor_w(args));
  }

  static int32_t reach(int32_t places, int32_t dilation) { return (places - 1) * dilation; }

  static ConvGeometry geometry(Args const& args) {
    ConvGeometry result{};
    int32_t const reach_w = reach(args.s, args.dilation_w), reach_h = reach(args.r, args.dilation_h);
    result.places_column = args.s;
    result.places_row = args.r;
    if constexpr (kDgrad) {
      // Of dx's pixels, places of the filter lie the other way round.
      result.images = operand_a(args);
      result.other = operand_b(args);
      result.numbers = {cutlass::FastDivmod(args.w),
                        cutlass::FastDivmod(args.h),
                        args.pad_w - reach_w,
                        args.pad_h - reach_h,
                        args.stride_w,
                        args.stride_h};
      result.upper_column = args.pad_w - reach_w + args.w - args.q;
      result.upper_row = args.pad_h - reach_h + args.h - args.p;
      result.beyond_column = reach_w;
      result.beyond_row = reach_h;
      result.dilation_column = -args.dilation_w;
      result.dilation_row = -args.dilation_h;
    } else {
      result.images = kFprop ? operand_a(args) : operand_b(args);
      result.other = kFprop ? operand_b(args) : operand_a(args);
      result.numbers = {cutlass::FastDivmod(args.q),
                        cutlass::FastDivmod(args.p),
                        -args.pad_w,
                        -args.pad_h,
                        args.stride_w,
                        args.stride_h};
      result.upper_column = args.pad_w_end - reach_w;
      result.upper_row = args.pad_h_end - reach_h;
      result.dilation_column = args.dilation_w;
      result.dilation_row = args.dilation_h;
    }
    return result;
  }

  // M, N, K and batches of the product. K has whole tiles of each of the filter's places.
  static int64_t depth(Args const& args) {
    if (kWgrad) return int64_t(args.n) * args.p * args.q;
    int64_t const channels = operand_a(args).channels;
    return (channels + kTileK - 1) / kTileK * kTileK * args.r * args.s;
  }
  static cute::Shape<int, int, int, int> problem(Args const& args) {
    PixelTensor const d = result_d(args);
    int const rows = int(kWgrad ? d.outer : d.outer * d.rows * d.columns);
    return {rows, int(d.channels), int(depth(args)), kWgrad ? args.r * args.s : 1};
  }

  static typename Kernel::Arguments arguments(Args const& args) {
    typename Kernel::Arguments result{};
    result.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    result.problem_shape = problem(args);
    result.mainloop.ptr_A = static_cast<ElementA const*>(args.a);
    result.mainloop.ptr_B = static_cast<ElementB const*>(args.b);
    result.mainloop.geometry = geometry(args);
    auto& epilogue = result.epilogue;
    bool const has_source = fill_results(epilogue, args.c_source, args.d);
    PixelTensor const d = result_d(args);
    if constexpr (kWgrad) {
      epilogue.dC = epilogue.dD = {d.stride_outer, {}, d.stride_column};
    } else {
      epilogue.images = d;
    }
    if constexpr (kTree) {
      epilogue.thread = TreeParams<typename Epilogue::Tree>::of(args);
      if (!has_source) epilogue.thread.beta = 0;
    } else {
      epilogue.thread.alpha = Compute(args.alpha);
      epilogue.thread.beta = has_source ? Compute(args.beta) : Compute(0);
      if constexpr (!kWgrad) epilogue.thread.bias = static_cast<ElementD const*>(args.bias);
    }
    return result;
  }

  // Strides of a tensor map are multiples of 16 bytes below 2^40, whatever the extent of their dimension. None
  // may be smaller than that of a packed tensor.
  static bool mappable(PixelTensor const& tensor, int align, int64_t bytes) {
    int64_t const largest = (int64_t(1) << 40) / bytes;
    return tensor.aligned(align) && tensor.stride_column >= tensor.channels &&
           tensor.stride_row >= tensor.columns * tensor.channels &&
           tensor.stride_outer >= tensor.rows * tensor.columns * tensor.channels && tensor.stride_outer < largest &&
           tensor.stride_row < largest && tensor.stride_column < largest;
  }

  static bool can_implement(Args const& args) {
    if (!consistent(args) || args.groups != 1 || args.split_k != 1) return false;
    if ((kWgrad || kTree) && args.bias != nullptr) return false;
    // With strides, the pixels that a place of the filter contributes to are not side by side.
    if (kDgrad && (args.stride_h != 1 || args.stride_w != 1)) return false;
    PixelTensor const a = operand_a(args), b = operand_b(args), d = result_d(args);
    if (!mappable(a, kAlignA, sizeof(ElementA)) || !mappable(b, kAlignB, sizeof(ElementB)) ||
        !mappable(d, kAlignD, sizeof(ElementD))) {
      return false;
    }
    // The pixels of dy are the lines of a matrix, and the places of a filter are evenly spaced.
    if (kWgrad && !(a.collapses() && a.stride_column == a.channels && d.collapses() && d.stride_column == d.channels)) {
      return false;
    }
    // What an im2col tensor map admits: corners of eight bits with a sign, and places less than 255 from the first one.
    constexpr int kPadding = 256, kCorner = 128, kReach = 255;
    ConvGeometry const geometry = ConvSm90::geometry(args);
    auto const corner = [](int32_t value) { return -kCorner <= value && value < kCorner; };
    if (args.stride_h > 8 || args.stride_w > 8) return false;
    if (args.pad_h > kPadding || args.pad_w > kPadding || args.pad_h_end > kPadding || args.pad_w_end > kPadding) {
      return false;
    }
    if (int64_t(args.r - 1) * args.dilation_h >= kReach || int64_t(args.s - 1) * args.dilation_w >= kReach) {
      return false;
    }
    if (!corner(geometry.numbers.first_column) || !corner(geometry.numbers.first_row) ||
        !corner(geometry.upper_column) || !corner(geometry.upper_row)) {
      return false;
    }
    int64_t const largest = (int64_t(1) << 31) - 1;
    int64_t const pixels_x = int64_t(args.n) * args.h * args.w, pixels_y = int64_t(args.n) * args.p * args.q;
    if (pixels_x > largest - kTileM || pixels_y > largest - kTileM || depth(args) > largest) return false;
    dim3 const blocks = Kernel::TileScheduler::get_tiled_cta_shape_mnl(problem(args), Tile{}, Cluster{});
    return blocks.y <= 65535u && blocks.z <= 65535u;
  }

  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }
};

}  // namespace atomr_cutlass
