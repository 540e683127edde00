// Tiles that TMA moves between matrices and shared memory, for kernels of the sm90 generation.
#pragma once

#include "atomr_cutlass/small_tensor_map.h"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/atom/copy_traits_sm90_tma.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// A tile of kLines lines (rows, or columns of a column-major matrix) of kLength contiguous elements. In shared memory
// it is a row of boxes, as wide as the widest swizzle that divides a line, each with all lines of the tile.
template <class Element, int kLength, int kLines>
struct TmaTile {
  static constexpr int kElementBytes = cute::sizeof_bits_v<Element> / 8;
  static constexpr int kLineBytes = kLength * kElementBytes;
  static constexpr int kWidthBytes = kLineBytes % 128 == 0  ? 128
                                     : kLineBytes % 64 == 0 ? 64
                                     : kLineBytes % 32 == 0 ? 32
                                                            : 16;
  static constexpr int kWidth = kWidthBytes / kElementBytes;
  static constexpr int kBoxes = kLineBytes / kWidthBytes;
  static constexpr int kBoxBytes = kWidthBytes * kLines;
  static constexpr int kBytes = kLineBytes * kLines;
  // Of the start of a tile: the hardware swizzles addresses.
  static constexpr int kAlignment = kWidthBytes == 16 ? 128 : 8 * kWidthBytes;
  static_assert(kLineBytes % 16 == 0 && kLines % 8 == 0 && kLines <= 256, "no tile that TMA can swizzle");

  // Where a line's byte is, from the start of the tile.
  CUTLASS_DEVICE static constexpr int place(int line, int byte) {
    int const there = line * kWidthBytes + byte % kWidthBytes;
    return byte / kWidthBytes * kBoxBytes + (there ^ ((there >> 7) % (kWidthBytes / 16) << 4));
  }

  // The place of a byte that lies kFurther bytes further in the line than the byte at `there`, if the bits of kFurther
  // are 0 in that one's offset in the line: the swizzle leaves them alone.
  CUTLASS_DEVICE static constexpr int further(int there, int bytes) {
    return (there ^ bytes % kWidthBytes) + bytes / kWidthBytes * kBoxBytes;
  }

  // The tensor map of `batches` matrices, whose strides are in elements. `shares`: in how many parts of lines, one for
  // each thread block, a tile is loaded.
  static cute::TmaDescriptor map(void const* address, int length, int lines, int batches, int64_t line_stride,
                                 int64_t batch_stride, int shares = 1) {
    cute::TmaDescriptor result{};
#if !defined(__CUDACC_RTC__) || defined(ATOMR_CUTLASS_EVALUATE)
    uint64_t const dims[3] = {uint64_t(length), uint64_t(lines), uint64_t(batches)};
    uint64_t const strides[2] = {uint64_t(line_stride) * kElementBytes, uint64_t(batch_stride) * kElementBytes};
    uint32_t const box[3] = {kWidth, uint32_t(kLines / shares), 1}, steps[3] = {1, 1, 1};
    (void)CUTLASS_CUDA_DRIVER_WRAPPER_CALL(cuTensorMapEncodeTiled)(
        &result, cute::TMA::to_CUtensorMapDataType<Element>(), 3, const_cast<void*>(address), dims, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE,
        kWidthBytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
        : kWidthBytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
        : kWidthBytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                            : CU_TENSOR_MAP_SWIZZLE_NONE,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
#endif
    return result;
  }
};

}  // namespace atomr_cutlass
