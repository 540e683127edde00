// GEMM cells of the sm80 generation: CUTLASS 2.x multistage (cp.async) or two-stage mainloops over mma.sync, DMMA or
// FFMA.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/kernel/default_gemm_universal.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

namespace atomr_cutlass {

template <class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB, int kAlignB, class ElementD,
          class LayoutD, int kAlignD, class ElementAccumulator, class ElementCompute, class OperatorClass, class Tile,
          class Warp, class Instruction, int kStages, class MathOperator, int kSwizzle>
struct GemmSm80 {
  using Args = atomr_cutlass_gemm_args;

  using Epilogue = cutlass::epilogue::thread::LinearCombination<ElementD, kAlignD, ElementAccumulator, ElementCompute>;

  using Kernel = typename cutlass::gemm::kernel::DefaultGemmUniversal<
      ElementA, LayoutA, cutlass::ComplexTransform::kNone, kAlignA, ElementB, LayoutB, cutlass::ComplexTransform::kNone,
      kAlignB, ElementD, LayoutD, ElementAccumulator, OperatorClass, cutlass::arch::Sm80, Tile, Warp, Instruction,
      Epilogue, cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<kSwizzle>, kStages,
      MathOperator>::GemmKernel;

  using Params = typename Kernel::Params;

  static constexpr int kThreads = Kernel::kThreadCount;
  static constexpr int kMinBlocks = 1;
  static constexpr int kSharedBytes = int(sizeof(typename Kernel::SharedStorage));
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;

  // Batches and serial split-K both use the grid's z dimension, so a problem has one or the other.
  static typename Kernel::Arguments arguments(Args const& args) {
    bool const batched = args.batch > 1;
    return typename Kernel::Arguments(
        batched ? cutlass::gemm::GemmUniversalMode::kBatched : cutlass::gemm::GemmUniversalMode::kGemm,
        {args.m, args.n, args.k}, batched ? args.batch : args.split_k,
        typename Epilogue::Params(ElementCompute(args.alpha), ElementCompute(args.beta)), args.a, args.b, args.c,
        args.d, args.batch_stride_a, args.batch_stride_b, args.batch_stride_c, args.batch_stride_d, args.lda, args.ldb,
        args.ldc, args.ldd);
  }

  static Params params(Args const& args) {
    Params result(arguments(args), args.sm_count, 1);
    result.semaphore = static_cast<int*>(args.workspace);
    return result;
  }

  static bool can_implement(Args const& args) {
    if (args.batch > 1 && args.split_k > 1) return false;
    dim3 const blocks = grid(params(args));
    return blocks.y <= 65535u && blocks.z <= 65535u &&
           Kernel::can_implement(arguments(args)) == cutlass::Status::kSuccess;
  }

  static uint64_t workspace_size(Args const& args) { return params(args).get_workspace_size(); }

  // The semaphores of serial split-K must start at zero.
  static void clear_range(Args const& args, uint64_t& offset, uint64_t& bytes) {
    offset = 0;
    bytes = workspace_size(args);
  }

  static dim3 grid(Params const& params) { return params.get_grid_dims(); }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Kernel kernel;
    kernel(params, *reinterpret_cast<typename Kernel::SharedStorage*>(shared));
  }
};

}  // namespace atomr_cutlass
