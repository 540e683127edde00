// Convolutions of the sm90 generation: CUTLASS 3.x implicit GEMM over TMA (im2col) and WGMMA, warp-specialized.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/activation.h"
#include "atomr_cutlass/cell_3x.h"
#include "atomr_cutlass/conv_problem.h"
#include "atomr_cutlass/epilogue_visitor.h"
#include "atomr_cutlass/kernel_abi.h"
#ifdef __CUDACC_RTC__
#include "atomr_cutlass/nvrtc/const_tuple.h"
#endif
#include "cute/tensor.hpp"
// Before the collectives, which name its struct without including it.
#include "cutlass/kernel_hardware_info.hpp"

#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/conv/convnd_problem_shape.hpp"
#include "cutlass/conv/convolution.h"
#include "cutlass/conv/dispatch_policy.hpp"
#include "cutlass/conv/kernel/conv_universal.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"

namespace atomr_cutlass {

// An epilogue of bias and activation; Function is void where there is no activation.
template <class Function>
struct BiasEpilogue {};

// What the collective builder is told of an epilogue: a visitor, or CUTLASS's operation.
template <class Epilogue, bool kBias, int kTileM, int kTileN, class ElementD, class Compute>
struct ConvFusion;
template <class Tree, bool kScaled, class Lanes, bool kBias, int kTileM, int kTileN, class ElementD, class Compute>
struct ConvFusion<TreeEpilogue<Tree, kScaled, Lanes>, kBias, kTileM, kTileN, ElementD, Compute> {
  using Type =
      TreeVisitor<TreeEpilogue<Tree, kScaled, Lanes>, kTileM, kTileN, ElementD, TreeParams<Tree>, kIsChosen<Tree>>;
};
template <class Function, int kTileM, int kTileN, class ElementD, class Compute>
struct ConvFusion<BiasEpilogue<Function>, true, kTileM, kTileN, ElementD, Compute> {
  using Type = cutlass::epilogue::fusion::LinCombPerColBiasEltAct<Activation<Function>::template Of, ElementD, Compute,
                                                                  ElementD, ElementD, Compute>;
};
template <int kTileM, int kTileN, class ElementD, class Compute>
struct ConvFusion<BiasEpilogue<void>, true, kTileM, kTileN, ElementD, Compute> {
  using Type = cutlass::epilogue::fusion::LinCombPerColBias<ElementD, Compute, ElementD, ElementD, Compute>;
};
template <int kTileM, int kTileN, class ElementD, class Compute>
struct ConvFusion<BiasEpilogue<void>, false, kTileM, kTileN, ElementD, Compute> {
  using Type = cutlass::epilogue::fusion::LinearCombination<ElementD, Compute, ElementD, Compute>;
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

  // A dimension of several modes is tiled along its first one, the channels.
  template <int kExtent>
  using Channels = cute::Shape<cute::Int<kExtent>>;
  using Tile = cute::conditional_t<kWgrad, cute::Shape<cute::Int<kTileM>, Channels<kTileN>, Channels<kTileK>>,
                                   cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>, Channels<kTileK>>>;
  using LayoutD = cute::conditional_t<kWgrad, cutlass::layout::TensorKCSR, cutlass::layout::TensorNHWC>;
  using Fusion = typename ConvFusion<Epilogue, !kWgrad, kTileM, kTileN, ElementD, Compute>::Type;

  using BuiltEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, Accumulator, Compute, ElementD, LayoutD, kAlignD, ElementD,
      LayoutD, kAlignD, cutlass::epilogue::TmaWarpSpecialized, Fusion>::CollectiveOp;
  using CollectiveEpilogue = typename ChosenOf<BuiltEpilogue, Fusion>::Type;

  // The epilogue reuses the mainloop's shared memory: all of it can hold stages, beside the barriers. 0: as many as
  // fit.
  static constexpr int kReserved = 2048;
  using Stages = cute::conditional_t<kStages == 0, cutlass::conv::collective::StageCountAutoCarveout<kReserved>,
                                     cutlass::conv::collective::StageCount<kStages>>;

  using CollectiveMainloop = typename cutlass::conv::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, kOperator, ElementA, cutlass::layout::TensorNHWC, kAlignA,
      ElementB, cutlass::layout::TensorNHWC, kAlignB, Accumulator, Tile, Cluster, Stages,
      cutlass::conv::KernelImplicitTmaWarpSpecializedSm90>::CollectiveOp;

  using Problem = cutlass::conv::ConvProblemShape<kOperator, 2>;
  using Kernel = cutlass::conv::kernel::ConvUniversal<Problem, CollectiveMainloop, CollectiveEpilogue, void>;

  static cutlass::conv::PixelStrides strides(PixelTensor const& tensor) {
    return {tensor.stride_outer, tensor.stride_row, tensor.stride_column, 1};
  }

  static Problem problem(Args const& args) {
    return Problem(cutlass::conv::Mode::kCrossCorrelation, {args.n, args.h, args.w, args.c}, strides(tensor_x(args)),
                   {args.k, args.r, args.s, args.c}, strides(tensor_w(args)), strides(tensor_y(args)),
                   {args.pad_h, args.pad_w}, {args.pad_h_end, args.pad_w_end}, {args.stride_h, args.stride_w},
                   {args.dilation_h, args.dilation_w}, args.groups);
  }

  static typename Kernel::StrideD stride_d(Args const& args) {
    if constexpr (kWgrad) {
      PixelTensor const w = tensor_w(args);
      return {w.stride_outer, cute::make_stride(cute::Int<1>{}, w.stride_column, w.stride_row), {}};
    } else {
      PixelTensor const d = kFprop ? tensor_y(args) : tensor_x(args);
      return {cute::make_stride(d.stride_column, d.stride_row, d.stride_outer), {}, {}};
    }
  }

  static typename Kernel::Arguments arguments(Args const& args) {
    typename Kernel::Arguments result{};
    result.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    result.problem_shape = problem(args);
    result.mainloop.ptr_A = static_cast<ElementA const*>(args.a);
    result.mainloop.ptr_B = static_cast<ElementB const*>(args.b);
    // The TMA epilogue encodes a tensor map of C whether or not it is read, and the driver refuses a null address.
    bool const has_source = args.c_source != nullptr;
    result.epilogue.ptr_C = static_cast<ElementD const*>(has_source ? args.c_source : args.d);
    result.epilogue.dC = stride_d(args);
    result.epilogue.ptr_D = static_cast<ElementD*>(args.d);
    result.epilogue.dD = stride_d(args);
    if constexpr (kTree) {
      result.epilogue.thread = TreeParams<typename Epilogue::Tree>::of(args);
      if (!has_source) result.epilogue.thread.beta = 0;
    } else {
      result.epilogue.thread.alpha = Compute(args.alpha);
      result.epilogue.thread.beta = has_source ? Compute(args.beta) : Compute(0);
      if constexpr (!kWgrad) result.epilogue.thread.bias_ptr = static_cast<ElementD const*>(args.bias);
    }
    return result;
  }

  // Strides of a tensor map are multiples of 16 bytes below 2^40, whatever the extent of their dimension. CUTLASS
  // asserts that none is smaller than that of a packed tensor.
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
    // CUTLASS computes a dgrad with strides, wrongly.
    if (kDgrad && (args.stride_h != 1 || args.stride_w != 1)) return false;
    // What an im2col tensor map admits.
    if (args.stride_h > 8 || args.stride_w > 8) return false;
    PixelTensor const x = tensor_x(args), w = tensor_w(args), y = tensor_y(args);
    if (!mappable(kFprop ? x : y, kAlignA, sizeof(ElementA))) return false;
    if (!mappable(kWgrad ? x : w, kAlignB, sizeof(ElementB))) return false;
    if (!mappable(kFprop ? y : (kDgrad ? x : w), kAlignD, sizeof(ElementD))) return false;
    int64_t const largest = (int64_t(1) << 31) - 1;
    int64_t const pixels_x = int64_t(args.n) * args.h * args.w, pixels_y = int64_t(args.n) * args.p * args.q;
    if (pixels_x > largest - kTileM || pixels_y > largest - kTileM) return false;
    if (!Kernel::can_implement(arguments(args))) return false;
    dim3 const blocks = Kernel::get_grid_shape(Kernel::to_underlying_arguments(arguments(args), nullptr));
    return blocks.y <= 65535u && blocks.z <= 65535u;
  }

  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }
};

}  // namespace atomr_cutlass
