// What kernels for operands that begin anywhere share: matrices as aligned vectors of memory, the instruction that
// multiplies, and sums of K in the workspace.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// A matrix of elements of 16 bits as vectors of 16 bytes, wherever its rows begin. Vectors from `first` on, `whole` of
// them, lie in it; it may begin in the one before these and end in the one behind them. Their numbers have 32 bits.
template <class Element>
struct UnalignedMatrix {
  static_assert(sizeof(Element) == 2, "elements of 16 bits");
  static constexpr int kVector = 8;  // elements of 16 bytes
  // In elements, so that the number of a vector has 32 bits, that of a step beyond the end too.
  static constexpr int64_t kMostLeading = int64_t(1) << 27, kMostElements = int64_t(1) << 34;

  uint4 const* vectors;  // from the one on in which the matrix begins
  uint32_t lead;  // elements of that one which lie before the matrix
  uint32_t first, whole;

  // `outer` rows of `inner` elements each, `leading` elements apart.
  CUTLASS_DEVICE UnalignedMatrix(Element const* at, int64_t outer, int64_t leading, int64_t inner) {
    auto const address = reinterpret_cast<uint64_t>(at);
    vectors = reinterpret_cast<uint4 const*>(address / 16 * 16);
    lead = uint32_t(address % 16 / sizeof(Element));
    first = lead > 0 ? 1 : 0;
    int64_t const elements = lead + (outer - 1) * leading + inner;
    whole = max(uint32_t(elements / kVector), first) - first;
  }

  CUTLASS_DEVICE bool is_whole(uint32_t index) const { return index - first < whole; }

  // Whether the matrix begins or ends in a vector.
  CUTLASS_DEVICE bool is_partial(uint32_t index) const { return index + 1 == first || index - first == whole; }

  // A vector in which the matrix from `begin` to `end` begins or ends, element by element: this is rare, and is to take
  // few registers. Zeros beside the matrix, which nobody reads.
  CUTLASS_DEVICE static uint4 partial(Element const* begin, Element const* end, uint32_t index) {
    auto const* const at =
        reinterpret_cast<Element const*>(reinterpret_cast<uint64_t>(begin) / 16 * 16) + int64_t(index) * kVector;
    uint64_t low = 0, high = 0;
#pragma unroll 1
    for (int i = 0; i < kVector; ++i) {
      if (at + i < begin || at + i >= end) continue;
      uint64_t const element = uint64_t(reinterpret_cast<uint16_t const*>(at)[i]) << i % 4 * 16;
      (i < 4 ? low : high) |= element;
    }
    return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
  }
};

// The product of 16 rows and 8 columns, of 16 elements of K.
template <class Element>
CUTLASS_DEVICE void multiply_16_8_16(float (&sums)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (cutlass::platform::is_same<Element, cutlass::half_t>::value) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Of kernels that start while the launch before runs; the next one may start from now on.
CUTLASS_DEVICE void wait_for_launch_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
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
