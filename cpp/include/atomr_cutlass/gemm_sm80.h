// GEMM cells of the sm80 generation: CUTLASS 2.x multistage (cp.async) or two-stage mainloops over mma.sync, DMMA or
// FFMA.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/mainloop_dmma.h"
#include "atomr_cutlass/mainloop_simt.h"
#include "atomr_cutlass/scaled.h"
#include "atomr_cutlass/unpadded_swizzle.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/kernel/default_gemm_universal.h"

namespace atomr_cutlass {

// The kernel that a cell's epilogue makes of the one that has CUTLASS's linear combination, and its arguments. Those of
// visitors are in gemm_sm80_scaled.h and gemm_sm80_tree.h.
template <class Epilogue, class Linear, int kAlignD>
struct EpilogueSm80;

template <class Linear, int kAlignD>
struct EpilogueSm80<LinearEpilogue, Linear, kAlignD> {
  static constexpr bool kSplitK = true;

  using Kernel = Linear;
  using Output = typename Linear::Epilogue::OutputOp;

  static typename Output::Params arguments(atomr_cutlass_gemm_args const& args) {
    using Compute = typename Output::ElementCompute;
    return typename Output::Params(Compute(args.alpha), Compute(args.beta));
  }
};

// CUTLASS's kernel, and over FFMA (steps of 1 along K) or DMMA with operands aligned to vectors the one that has our
// mainloop.
template <class Default, class LayoutA, class LayoutB, int kStep, int kStages, bool kVectors>
struct LinearSm80 {
  using Kernel = Default;
};

template <class Default, class LayoutA, class LayoutB, int kStep, int kStages>
struct LinearSm80<Default, LayoutA, LayoutB, kStep, kStages, true> {
  using Mainloop =
      cutlass::platform::conditional_t<kStep == 1, MainloopSimt<typename Default::Mma, LayoutA, LayoutB, kStages>,
                                       MainloopDmma<typename Default::Mma, LayoutA, LayoutB, kStep, kStages>>;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<Mainloop, typename Default::Epilogue, typename Default::ThreadblockSwizzle>;
};

template <class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB, int kAlignB, class ElementD,
          class LayoutD, int kAlignD, class ElementAccumulator, class ElementCompute, class OperatorClass, class Arch,
          class Tile, class Warp, class Instruction, int kStages, class MathOperator, int kSwizzle,
          class Epilogue = LinearEpilogue>
struct GemmSm80 {
  using Args = atomr_cutlass_gemm_args;

  // CUTLASS's epilogues handle at least 8 elements of 8 bits at once, and of 16 bits from integers; visitors store them
  // as D is aligned.
  static constexpr int kBitsD = cutlass::sizeof_bits<ElementD>::value;
  static constexpr bool kFromInteger = cutlass::platform::is_same<ElementAccumulator, int32_t>::value;
  static constexpr bool kWide = (kBitsD == 8 || (kBitsD == 16 && kFromInteger)) && kAlignD < 8 &&
                                !cutlass::platform::is_same<Epilogue, LinearEpilogue>::value;
  static constexpr int kAccess = kWide ? 8 : kAlignD;

  static constexpr bool kDouble = cutlass::platform::is_same<ElementA, double>::value;
  static constexpr bool kVectors =
      (kDouble || cutlass::platform::is_same<OperatorClass, cutlass::arch::OpClassSimt>::value) && kAlignA > 1;
  // CUTLASS's mainloop over FFMA has no register to spare for the order without padding.
  static constexpr bool kPadded =
      cutlass::platform::is_same<OperatorClass, cutlass::arch::OpClassSimt>::value && !kVectors;
  using Swizzle =
      cutlass::platform::conditional_t<kPadded, cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<kSwizzle>,
                                       UnpaddedSwizzle<kSwizzle>>;
  // Beside our mainloop over DMMA, CUTLASS supplies the epilogue and the order of sums. It gets the instruction that it
  // handles, 16x8x4, whose sums lie as those of 16x8x8 and 16x8x16 do.
  using Known = cutlass::platform::conditional_t<kVectors && kDouble, cutlass::gemm::GemmShape<16, 8, 4>, Instruction>;

  using Default = typename cutlass::gemm::kernel::DefaultGemmUniversal<
      ElementA, LayoutA, cutlass::ComplexTransform::kNone, kVectors ? 1 : kAlignA, ElementB, LayoutB,
      cutlass::ComplexTransform::kNone, kVectors ? 1 : kAlignB, ElementD, LayoutD, ElementAccumulator, OperatorClass,
      Arch, Tile, Warp, Known,
      cutlass::epilogue::thread::LinearCombination<ElementD, kAccess, ElementAccumulator, ElementCompute>, Swizzle,
      kStages, MathOperator>::GemmKernel;
  using Linear = typename LinearSm80<Default, LayoutA, LayoutB, Instruction::kK, kStages, kVectors>::Kernel;

  using Output = EpilogueSm80<Epilogue, Linear, kAlignD>;
  using Kernel = typename Output::Kernel;
  using Params = typename Kernel::Params;

  static constexpr int kThreads = Kernel::kThreadCount;
  static constexpr int kSharedBytes = int(sizeof(typename Kernel::SharedStorage));
  // Thread blocks of four warps share a multiprocessor, to hide each other's loads: three, or two of many registers a
  // thread, as far as the 228 KB of sm_90 hold them. Model::vectors (estimate.cpp) counts on it.
  static constexpr int kAccumulators =
      Tile::kM * Tile::kN / kThreads * cutlass::sizeof_bits<ElementAccumulator>::value / 32;
  static constexpr int kFitting = 228 * 1024 / (kSharedBytes + 1024);
  static constexpr int kSharing = cutlass::const_min((kAccumulators <= 64 ? 384 : 256) / kThreads, kFitting);
  static constexpr int kMinBlocks = kVectors ? cutlass::const_max(kSharing, 1) : 1;
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;

  // Slices of K take turns with a tile of D, or each has a D of its own, one after the other, for another kernel to add
  // up: of sums as they were added, float32 or float64.
  static constexpr bool kSliced = Output::kSplitK && cutlass::platform::is_same<ElementD, ElementAccumulator>::value &&
                                  !cutlass::platform::is_same<ElementD, int32_t>::value;
  static bool sliced(Args const& args) {
    return kSliced && args.split_k > 1 && args.batch == 1 && args.c == nullptr && args.batch_stride_d != 0;
  }

  // Batches and slices of K both use the grid's z dimension, so a problem has one or the other.
  static typename Kernel::Arguments arguments(Args const& args) {
    using Mode = cutlass::gemm::GemmUniversalMode;
    Mode const mode = args.batch > 1 ? Mode::kBatched : sliced(args) ? Mode::kGemmSplitKParallel : Mode::kGemm;
    return typename Kernel::Arguments(mode, {args.m, args.n, args.k}, args.batch > 1 ? args.batch : args.split_k,
                                      Output::arguments(args), args.a, args.b, args.c, args.d, args.batch_stride_a,
                                      args.batch_stride_b, args.batch_stride_c, args.batch_stride_d, args.lda, args.ldb,
                                      args.ldc, args.ldd);
  }

  static Params params(Args const& args) {
    Params result(arguments(args), args.sm_count, 1);
    result.semaphore = static_cast<int*>(args.workspace);
    if (args.split_k > 1 && args.batch == 1) {
      // In whole steps: slices that begin inside a cache line of A or B read each line twice, and take up to 1.6 times
      // as long.
      result.gemm_k_size = (((args.k + Tile::kK - 1) / Tile::kK + args.split_k - 1) / args.split_k) * Tile::kK;
      result.grid_tiled_shape.k() = (args.k + result.gemm_k_size - 1) / result.gemm_k_size;
    }
    return result;
  }

  static bool can_implement(Args const& args) {
    if (args.split_k > 1 && (!Output::kSplitK || args.batch > 1)) return false;
    if (sliced(args) && params(args).grid_tiled_shape.k() != args.split_k) return false;  // the last ones were empty
    dim3 const blocks = grid(params(args));
    Args checked = args;
    if (kWide) checked.n = (args.n + kAccess - 1) / kAccess * kAccess;
    return blocks.y <= 65535u && blocks.z <= 65535u &&
           Kernel::can_implement(arguments(checked)) == cutlass::Status::kSuccess;
  }

  static uint64_t workspace_size(Args const& args) { return sliced(args) ? 0 : params(args).get_workspace_size(); }

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
