// Grouped GEMM cells of the sm80 generation: CUTLASS 2.x grouped kernels over mma.sync, whose thread blocks find their
// tiles on the device: a persistent launch of as many as fit at once.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/activation.h"
#include "atomr_cutlass/grouped_setup.h"
#include "atomr_cutlass/kernel_abi.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/epilogue/thread/linear_combination_generic.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/kernel/default_gemm_grouped.h"
#include "cutlass/gemm/kernel/gemm_grouped.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

namespace atomr_cutlass {

// A mainloop for groups that may have no K at all: CUTLASS's multistage one would prefetch what lies behind them.
template <class Base>
struct AnyDepthSm80 : Base {
  using Base::Base;

  CUTLASS_DEVICE void operator()(int k_tiles, typename Base::FragmentC& accumulators, typename Base::IteratorA a,
                                 typename Base::IteratorB b, typename Base::FragmentC const& source) {
    if (k_tiles == 0) {
      accumulators = source;
      return;
    }
    Base::operator()(k_tiles, accumulators, a, b, source);
  }
};

// `Function` is of activation.h, or void. A bias, where there is no C, comes in its place: its leading dimension is 0.
template <class ElementA, class LayoutA, int kAlignA, class ElementB, class LayoutB, int kAlignB, class ElementD,
          class LayoutD, int kAlignD, class ElementAccumulator, class ElementCompute, class Arch, class Tile,
          class Warp, class Instruction, int kStages, class MathOperator, class Function>
struct GroupedSm80 {
  using Args = atomr_cutlass_grouped_args;

  static constexpr bool kRowMajorA = cutlass::platform::is_same<LayoutA, cutlass::layout::RowMajor>::value;
  static constexpr bool kRowMajorB = cutlass::platform::is_same<LayoutB, cutlass::layout::RowMajor>::value;
  static_assert(cutlass::platform::is_same<LayoutD, cutlass::layout::RowMajor>::value, "D is row-major");

  using Shape = cutlass::gemm::GemmCoord;
  using Tables = GroupTables<Shape>;
  using Finder = GroupFinder<cutlass::sizeof_bits<ElementA>::value, kRowMajorA, cutlass::sizeof_bits<ElementB>::value,
                             kRowMajorB, cutlass::sizeof_bits<ElementD>::value, false>;

  using Epilogue = cutlass::platform::conditional_t<
      cutlass::platform::is_void<Function>::value,
      cutlass::epilogue::thread::LinearCombination<ElementD, kAlignD, ElementAccumulator, ElementCompute>,
      cutlass::epilogue::thread::LinearCombinationGeneric<Activation<Function>::template Of, ElementD, kAlignD,
                                                          ElementAccumulator, ElementCompute>>;
  using Swizzle = cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle;  // grouped kernels have their own

  static constexpr auto kSchedule = cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly;
  using Default = typename cutlass::gemm::kernel::DefaultGemmGrouped<
      ElementA, LayoutA, cutlass::ComplexTransform::kNone, kAlignA, ElementB, LayoutB, cutlass::ComplexTransform::kNone,
      kAlignB, ElementD, LayoutD, ElementAccumulator, cutlass::arch::OpClassTensorOp, Arch, Tile, Warp, Instruction,
      Epilogue, Swizzle, kStages, kSchedule, MathOperator>::DefaultGemmKernel;
  using Kernel = cutlass::gemm::kernel::GemmGrouped<AnyDepthSm80<typename Default::Mma>, typename Default::Epilogue,
                                                    Swizzle, kSchedule>;

  // The arguments are for the setup kernel.
  struct Params {
    typename Kernel::Params kernel;
    Args args;
  };

  static constexpr int kThreads = Kernel::kThreadCount;
  static constexpr int kMinBlocks = 1;
  static constexpr int kSharedBytes = int(sizeof(typename Kernel::SharedStorage));
  static constexpr int kClusterM = 1, kClusterN = 1, kClusterK = 1;
  static constexpr int kSetupThreads = Finder::kThreads;

  // The extents of the groups are not known, but those that all groups share are, other than a list's. Loads are as
  // wide as the alignment, and so must be the contiguous extent of every operand.
  static bool can_implement(Args const& args) {
    if (args.groups < 1 || args.scale_a != nullptr || args.scale_b != nullptr) return false;
    if (args.form == ATOMR_CUTLASS_GROUPED_LIST) return true;
    bool const along_k = args.form == ATOMR_CUTLASS_GROUPED_K;
    if (along_k ? (kRowMajorA && kAlignA > 1) || (!kRowMajorB && kAlignB > 1) : !kRowMajorA && kAlignA > 1) {
      return false;  // groups begin anywhere along the rows of A, or along K
    }
    bool const strided = args.lda % kAlignA == 0 && args.ldb % kAlignB == 0 && args.ldd % kAlignD == 0 &&
                         args.group_stride_a % kAlignA == 0 && args.group_stride_b % kAlignB == 0 &&
                         args.group_stride_d % kAlignD == 0;
    bool const source = args.c == nullptr || (args.ldc % kAlignD == 0 && args.group_stride_c % kAlignD == 0);
    bool const extents = (kRowMajorA ? args.k : args.m) % kAlignA == 0 &&
                         (kRowMajorB ? args.n : args.k) % kAlignB == 0 && args.n % kAlignD == 0;
    return strided && source && extents;
  }

  static uint64_t workspace_size(Args const& args) { return Tables::bytes(args.groups); }

  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    Tables const tables(args.workspace, args.groups);
    int const blocks = args.max_active_clusters > 0 ? args.max_active_clusters : args.sm_count;
    typename Kernel::Arguments const arguments(
        tables.shapes(), args.groups, blocks,
        typename Epilogue::Params(ElementCompute(args.alpha), ElementCompute(args.beta)),
        tables.template column<ElementA*>(Tables::kA), tables.template column<ElementB*>(Tables::kB),
        tables.template column<ElementD*>(Tables::kC), tables.template column<ElementD*>(Tables::kD),
        tables.template column<int64_t>(Tables::kLda), tables.template column<int64_t>(Tables::kLdb),
        tables.template column<int64_t>(Tables::kLdc), tables.template column<int64_t>(Tables::kLdd));
    return {typename Kernel::Params(arguments), args};
  }

  static dim3 grid(Params const& params) { return dim3(unsigned(params.kernel.threadblock_count)); }

  static dim3 setup_grid(Params const& params) { return dim3(Finder::blocks(params.args)); }

  CUTLASS_DEVICE static void setup(Params const& params) { Finder::template fill<Shape>(params.args); }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Kernel kernel;
    kernel(params.kernel, *reinterpret_cast<typename Kernel::SharedStorage*>(shared));
  }
};

}  // namespace atomr_cutlass
