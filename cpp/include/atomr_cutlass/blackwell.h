// What the GEMM cells of the sm100 and sm120 generations share: CUTLASS 3.x kernels whose blocks are scheduled by the
// hardware, and where an operand's strides lie among a kernel's arguments.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/kernel_abi.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace atomr_cutlass {

// A stride of CuTe's from a leading dimension and a batch stride: the contiguous mode is a static 1, the other of the
// two leading modes is dynamic.
template <class Stride>
Stride make_stride(int64_t leading, int64_t batch) {
  Stride result{};
  if constexpr (cute::is_static_v<cute::tuple_element_t<0, Stride>>) {
    cute::get<1>(result) = leading;
  } else {
    cute::get<0>(result) = leading;
  }
  cute::get<2>(result) = batch;
  return result;
}

// `Derived` has the arguments of `Kernel_`, and what more it asks of a problem.
template <class Derived, class Kernel_, class Cluster>
struct BlackwellGemm {
  using Args = atomr_cutlass_gemm_args;
  using Kernel = Kernel_;
  using Params = typename Kernel::Params;

  static constexpr int kThreads = Kernel::MaxThreadsPerBlock;
  static constexpr int kMinBlocks = Kernel::MinBlocksPerMultiprocessor;
  static constexpr int kSharedBytes = Kernel::SharedStorageSize;
  static constexpr int kClusterM = cute::size<0>(Cluster{});
  static constexpr int kClusterN = cute::size<1>(Cluster{});
  static constexpr int kClusterK = cute::size<2>(Cluster{});

  // All but the operands of the mainloop.
  static typename Kernel::Arguments common_arguments(Args const& args) {
    typename Kernel::Arguments result{};
    result.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    result.problem_shape = cute::make_shape(args.m, args.n, args.k, args.batch);
    // The TMA epilogue encodes a tensor map of C whether or not it is read, and the driver refuses a null address.
    bool const has_c = args.c != nullptr;
    using ElementC = typename Kernel::ElementC;
    using ElementD = typename Kernel::ElementD;
    result.epilogue.ptr_C = static_cast<ElementC const*>(has_c ? args.c : args.d);
    result.epilogue.dC = make_stride<typename Kernel::StrideC>(has_c ? args.ldc : args.ldd,
                                                               has_c ? args.batch_stride_c : args.batch_stride_d);
    result.epilogue.ptr_D = static_cast<ElementD*>(args.d);
    result.epilogue.dD = make_stride<typename Kernel::StrideD>(args.ldd, args.batch_stride_d);
    result.hw_info.sm_count = args.sm_count;
    result.hw_info.max_active_clusters = args.max_active_clusters;
    result.scheduler.max_swizzle_size = args.swizzle;
    using Raster = decltype(result.scheduler.raster_order);
    result.scheduler.raster_order =
        args.raster == 1 ? Raster::AlongM : (args.raster == 2 ? Raster::AlongN : Raster::Heuristic);
    return result;
  }

  static bool can_implement(Args const& args) {
    // Every tile is a block of the grid, whose second and third dimensions end here.
    constexpr int kGridLimit = 65535;
    return args.split_k == 1 && args.batch <= kGridLimit && Kernel::can_implement(Derived::arguments(args));
  }

  static uint64_t workspace_size(Args const& args) { return Kernel::get_workspace_size(Derived::arguments(args)); }

  static void clear_range(Args const&, uint64_t& offset, uint64_t& bytes) { offset = bytes = 0; }

  static Params params(Args const& args) {
    return Kernel::to_underlying_arguments(Derived::arguments(args), args.workspace);
  }

  static dim3 grid(Params const& params) { return Kernel::get_grid_shape(params); }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Kernel kernel;
    kernel(params, shared);
  }
};

}  // namespace atomr_cutlass
