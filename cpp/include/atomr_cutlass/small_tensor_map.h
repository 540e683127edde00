// A defect of drivers, and its cure. On GPUs of sm_100 and later, a tensor map that cuTensorMapEncode* made of an array
// of less than 128 KiB that is not dense may have the hardware fault on addresses outside the array: the driver sets
// bit 85, which is right for larger arrays only. The release notes of driver 595.71 name the defect and clearing the
// bit as the cure. The bit is reserved on sm_90, whose tensor maps are left alone.
//
// Under NVRTC this header is empty: the package encodes what the requests of nvrtc/tensor_map.h ask for, and corrects
// it.
#pragma once

#ifndef __CUDACC_RTC__

#include <cstdint>
#include <cstring>

namespace atomr_cutlass {

constexpr uint64_t kSmallTensorMapBytes = 128 << 10;

// Bits of an element, by the number of its CUtensorMapDataType.
constexpr uint64_t tensor_map_element_bits(int type) {
  constexpr uint64_t bits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
  return bits[type];
}

// Clears bit 85 of the tensor map of an array whose last element ends within 128 KiB of its first.
// `strides` are in bytes, without that of the first dimension, whose elements lie side by side.
inline void correct_small_tensor_map(void* map, int type, int rank, uint64_t const* dims, uint64_t const* strides) {
  uint64_t bytes = (dims[0] * tensor_map_element_bits(type) + 7) / 8;
  for (int i = 1; i < rank; ++i) bytes += (dims[i] - 1) * strides[i - 1];
  if (bytes >= kSmallTensorMapBytes) return;
  auto* const word = static_cast<unsigned char*>(map) + 8;
  uint64_t value;
  std::memcpy(&value, word, sizeof(value));
  value &= ~(uint64_t(1) << 21);
  std::memcpy(word, &value, sizeof(value));
}

}  // namespace atomr_cutlass

// CUTLASS encodes the tensor maps of kernels that nvcc compiled, through a macro that this header redefines: include it
// before CuTe's.
#ifdef __CUDACC__
#include "cutlass/cuda_host_adapter.hpp"

namespace atomr_cutlass {

template <class... Rest>
CUresult encode_cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, uint32_t rank, void* address,
                                       uint64_t const* dims, uint64_t const* strides, Rest... rest) {
  CUresult const result = cutlass::call_cuTensorMapEncodeTiled(map, type, rank, address, dims, strides, rest...);
  if (result == CUDA_SUCCESS) correct_small_tensor_map(map, int(type), int(rank), dims, strides);
  return result;
}

}  // namespace atomr_cutlass

#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) atomr_cutlass::encode_##function
#endif
#endif
