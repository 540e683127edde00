// What the cells of CUTLASS 3.x kernels share, whatever the generation.
//
// Functions without an annotation run on the host when nvcc compiles them, and on the device under NVRTC, whose
// -default-device makes them device functions.
#pragma once

#include "atomr_cutlass/epilogue_scaled.h"
#include "atomr_cutlass/epilogue_tree.h"
#include "atomr_cutlass/kernel_abi.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder_decl.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace atomr_cutlass {

// The cell of an adaptor, which has Args, Kernel, arguments(args), which are the kernel's, can_implement(args) and
// clear_range(args, offset, bytes).
template <class Adaptor>
struct Cell3x : Adaptor {
  using typename Adaptor::Args;
  using typename Adaptor::Kernel;
  using Cluster = typename Kernel::ClusterShape;
  using Params = typename Kernel::Params;

  static constexpr int kThreads = Kernel::MaxThreadsPerBlock;
  static constexpr int kMinBlocks = Kernel::MinBlocksPerMultiprocessor;
  static constexpr int kSharedBytes = Kernel::SharedStorageSize;
  static constexpr int kClusterM = cute::size<0>(Cluster{});
  static constexpr int kClusterN = cute::size<1>(Cluster{});
  static constexpr int kClusterK = cute::size<2>(Cluster{});

  static uint64_t workspace_size(Args const& args) { return Kernel::get_workspace_size(Adaptor::arguments(args)); }

  static Params params(Args const& args) {
    return Kernel::to_underlying_arguments(Adaptor::arguments(args), args.workspace);
  }

  static dim3 grid(Params const& params) { return Kernel::get_grid_shape(params); }

  CUTLASS_DEVICE static void run(Params const& params, char* shared) {
    Kernel kernel;
    kernel(params, shared);
  }
};

// StageCount void: as many stages as fit beside the epilogue and `kBetween` bytes.
template <class StageCount, class CollectiveEpilogue, int kBetween = 0>
using StagesBeside = cute::conditional_t<cute::is_void_v<StageCount>,
                                         cutlass::gemm::collective::StageCountAutoCarveout<
                                             kBetween + int(sizeof(typename CollectiveEpilogue::SharedStorage))>,
                                         StageCount>;

// A stride of CuTe's from a leading dimension and a batch stride: the contiguous mode is a static 1, the other of the
// two leading modes is dynamic.
template <class Stride>
Stride stride_of(int64_t leading, int64_t batch) {
  Stride result{};
  if constexpr (cute::is_static_v<cute::tuple_element_t<0, Stride>>) {
    cute::get<1>(result) = leading;
  } else {
    cute::get<0>(result) = leading;
  }
  cute::get<2>(result) = batch;
  return result;
}

// An epilogue's arguments. Block scales are the mainloop's.
template <class Tree>
void fill_epilogue(TreeParams<Tree>& thread, atomr_cutlass_gemm_args const& args, bool block_scales) {
  thread = TreeParams<Tree>::of(args);
  if (block_scales) thread.scaled.scale_a = thread.scaled.scale_b = nullptr;
}
inline void fill_epilogue(ScaledParams& thread, atomr_cutlass_gemm_args const& args, bool block_scales) {
  thread = ScaledParams::of(args);
  if (block_scales) thread.scale_a = thread.scale_b = nullptr;
}
template <class Linear>
void fill_epilogue(Linear& thread, atomr_cutlass_gemm_args const& args, bool) {
  thread.alpha = decltype(thread.alpha)(args.alpha);
  thread.beta = decltype(thread.beta)(args.beta);
}

// The addresses of C and D; returns whether there is a C. The TMA epilogue encodes a tensor map of C whether or not it
// is read, and the driver refuses a null address.
template <class Arguments>
bool fill_results(Arguments& epilogue, void const* c, void* d) {
  epilogue.ptr_C = static_cast<decltype(epilogue.ptr_C)>(c != nullptr ? c : d);
  epilogue.ptr_D = static_cast<decltype(epilogue.ptr_D)>(d);
  return c != nullptr;
}

// A GEMM kernel's arguments, without scales of blocks.
template <class Kernel>
typename Kernel::Arguments gemm_arguments(atomr_cutlass_gemm_args const& args, bool block_scales) {
  typename Kernel::Arguments result{};
  result.problem_shape = cute::make_shape(args.m, args.n, args.k, args.batch);
  auto& mainloop = result.mainloop;
  mainloop.ptr_A = static_cast<decltype(mainloop.ptr_A)>(args.a);
  mainloop.dA = stride_of<typename Kernel::StrideA>(args.lda, args.batch_stride_a);
  mainloop.ptr_B = static_cast<decltype(mainloop.ptr_B)>(args.b);
  mainloop.dB = stride_of<typename Kernel::StrideB>(args.ldb, args.batch_stride_b);
  auto& epilogue = result.epilogue;
  fill_epilogue(epilogue.thread, args, block_scales);
  bool const has_c = fill_results(epilogue, args.c, args.d);
  epilogue.dC = stride_of<typename Kernel::StrideC>(has_c ? args.ldc : args.ldd,
                                                    has_c ? args.batch_stride_c : args.batch_stride_d);
  epilogue.dD = stride_of<typename Kernel::StrideD>(args.ldd, args.batch_stride_d);
  result.hw_info.sm_count = args.sm_count;
  result.hw_info.max_active_clusters = args.max_active_clusters;
  auto& scheduler = result.scheduler;
  scheduler.max_swizzle_size = args.swizzle;
  using Raster = decltype(scheduler.raster_order);
  scheduler.raster_order = args.raster == 1 ? Raster::AlongM : (args.raster == 2 ? Raster::AlongN : Raster::Heuristic);
  if constexpr (cute::is_same_v<typename Kernel::TileSchedulerTag, cutlass::gemm::StreamKScheduler>) {
    if (args.split_k > 1) scheduler.splits = args.split_k;
  }
  return result;
}

}  // namespace atomr_cutlass
