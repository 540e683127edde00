// The companion of a kernel compiled at run time: CUTLASS's host code, on the device.
#pragma once

#include "atomr_cutlass/abi_layout.h"
#include "atomr_cutlass/jit_abi.h"
#include "atomr_cutlass/kernel_abi.h"
#include "atomr_cutlass/setup.h"

namespace atomr_cutlass {

template <class Cell>
constexpr atomr_cutlass_jit_info info = {abi::kLayoutDigest,
                                         uint32_t(sizeof(typename Cell::Params)),
                                         uint32_t(alignof(typename Cell::Params)),
                                         uint32_t(Cell::kSharedBytes),
                                         uint32_t(Cell::kThreads),
                                         {Cell::kClusterM, Cell::kClusterN, Cell::kClusterK},
                                         uint32_t(kSetupThreadsOf<Cell>)};

// One block of one thread per problem; `results` are `stride` bytes apart and have been zeroed.
template <class Cell>
__device__ void evaluate(typename Cell::Args const* problems, unsigned char* results, uint64_t stride) {
  typename Cell::Args const& args = problems[blockIdx.x];
  unsigned char* const place = results + blockIdx.x * stride;
  auto& result = *reinterpret_cast<atomr_cutlass_jit_evaluation*>(place);
  result.implementable = Cell::can_implement(args);
  if (!result.implementable) return;
  // Made in place: of a copy the compiler makes a store for each byte, since CuTe's tensor maps are bytes.
  using Params = typename Cell::Params;
  auto& params = *::new (static_cast<void*>(place + ATOMR_CUTLASS_JIT_PARAMS_OFFSET)) Params(Cell::params(args));
  dim3 const grid = Cell::grid(params);
  result.grid[0] = grid.x;
  result.grid[1] = grid.y;
  result.grid[2] = grid.z;
  if constexpr (kSetupThreadsOf<Cell> > 0) {
    dim3 const setup_grid = Cell::setup_grid(params);
    result.setup_grid[0] = setup_grid.x;
    result.setup_grid[1] = setup_grid.y;
    result.setup_grid[2] = setup_grid.z;
  }
  result.padding = kLaunchBitsOf<Cell>;
  result.workspace_bytes = Cell::workspace_size(args);
  Cell::clear_range(args, result.clear_offset, result.clear_bytes);
}

}  // namespace atomr_cutlass
