// What kernels for operands that begin anywhere share: the instruction that multiplies, and sums of K in the workspace.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// The product of 16 rows and 8 columns, of 16 elements of K.
template <class Element>
CUTLASS_DEVICE void multiply_16_8_16(float (&sums)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (cutlass::platform::is_same<Element, cutlass::half_t>::value) {
    asm(  // of f16
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm(  // of bf16
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// A workspace in which the thread blocks that divide K leave their sums: a counter for each tile, then sums. Counters
// are 0 before the first launch, and again after each.
struct SumsWorkspace {
  CUTLASS_HOST_DEVICE static uint64_t counters(int64_t tiles) { return uint64_t((tiles * 4 + 255) / 256 * 256); }

  static uint64_t size(int64_t tiles, int64_t splits, int64_t sums) {
    return splits <= 1 ? 0 : counters(tiles) + uint64_t(tiles * splits * sums) * sizeof(float);
  }

  // Called by all threads of a block when each has written its sums: whether the block is the last of its tile, so that
  // it reads those of all. `shared` is for one number.
  CUTLASS_DEVICE static bool is_last(uint32_t* counter, int splits, uint32_t* shared) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t const before = atomicAdd(counter, 1u);
      *shared = before == uint32_t(splits - 1);
      if (*shared) *counter = 0;
    }
    __syncthreads();
    bool const last = *shared != 0;
    if (last) __threadfence();
    return last;
  }
};

}  // namespace atomr_cutlass
