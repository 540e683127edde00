// What kernels do so that launches overlap.
#pragma once

#include "cutlass/cutlass.h"

namespace atomr_cutlass {

// Of kernels that start while the launch before runs; the next one may start from now on.
CUTLASS_DEVICE void wait_for_launch_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Of copies, which start when the launch before has ended: the product that reads them may start beside them, and waits
// for them. Beside large ones it gains nothing, and some products took up to 8% longer than behind them.
CUTLASS_DEVICE void let_next_start_beside_few_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr unsigned kFewBlocks = 2048;
  if (gridDim.x * gridDim.y * gridDim.z <= kFewBlocks) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace atomr_cutlass
