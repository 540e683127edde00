// Tiles that TMA moves between matrices and shared memory, for kernels of the sm90 generation.
#pragma once

#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/atom/copy_traits_sm90_tma.hpp"
#include "cutlass/cuda_host_adapter.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace atomr_cutlass {

// A tile of kLines lines (rows, or columns of a column-major matrix) of kLength contiguous elements. In shared memory
// it is a row of boxes, as wide as the widest swizzle that divides a line, each with all lines of the tile.
template <class Element_, int kLength, int kLines>
struct TmaTile {
  using Element = Element_;
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
  static constexpr int kLineCount = kLines;
  // Of the start of a tile: the hardware swizzles addresses.
  static constexpr int kAlignment = kWidthBytes == 16 ? 128 : 8 * kWidthBytes;
  static_assert(kLineBytes % 16 == 0 && kLines % 8 == 0 && kLines <= 256, "no tile that TMA can swizzle");

  // Where a line's byte is, from the start of the tile: before the swizzle, and after it.
  CUTLASS_DEVICE static constexpr int offset(int line, int byte) {
    return byte / kWidthBytes * kBoxBytes + line * kWidthBytes + byte % kWidthBytes;
  }
  CUTLASS_DEVICE static constexpr int place(int line, int byte) {
    int const there = offset(line, byte);
    return there ^ ((there >> 7) % (kWidthBytes / 16) << 4);
  }

  // The place of the byte that comes `bytes` after that of place `there` in its line. No bit may be set both in `bytes`
  // and in that one's offset in the line: adding is then the same as setting bits, which the swizzle permits.
  CUTLASS_DEVICE static constexpr int further(int there, int bytes) {
    return (there ^ bytes % kWidthBytes) + bytes / kWidthBytes * kBoxBytes;
  }

  // Called by one thread. The tile begins at element `along` of a line.
  CUTLASS_DEVICE static void load(cute::TmaDescriptor const& map, uint64_t* full, char* tile, int along, int line,
                                  int batch) {
    constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < kBoxes; ++box) {
      cute::SM90_TMA_LOAD_3D::copy(&map, full, kHint, tile + box * kBoxBytes, along + box * kWidth, line, batch);
    }
  }
  // Into the same place of all blocks of the cluster whose bits are set in `blocks`.
  CUTLASS_DEVICE static void load_shared(cute::TmaDescriptor const& map, uint64_t* full, uint16_t blocks, char* tile,
                                         int along, int line, int batch) {
    constexpr auto kHint = uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < kBoxes; ++box) {
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, full, blocks, kHint, tile + box * kBoxBytes, along + box * kWidth,
                                             line, batch);
    }
  }
  CUTLASS_DEVICE static void store(cute::TmaDescriptor const& map, char const* tile, int along, int line, int batch) {
    CUTLASS_PRAGMA_UNROLL
    for (int box = 0; box < kBoxes; ++box) {
      cute::SM90_TMA_STORE_3D::copy(&map, tile + box * kBoxBytes, along + box * kWidth, line, batch);
    }
  }

#if !defined(__CUDACC_RTC__) || defined(ATOMR_CUTLASS_EVALUATE)
  static constexpr CUtensorMapSwizzle kSwizzle = kWidthBytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                                 : kWidthBytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                 : kWidthBytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                                     : CU_TENSOR_MAP_SWIZZLE_NONE;
  static constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
#endif

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
        CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzle, kPromotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
#endif
    return result;
  }
};

}  // namespace atomr_cutlass
