// Takes the place of the driver's tensor map encoders under NVRTC: leaves a request where the tensor map belongs.
#pragma once

#include "atomr_cutlass/jit_abi.h"
#include "cuda.h"

namespace atomr_cutlass {

template <class Descriptor>
__device__ inline void leave_request(Descriptor* descriptor, atomr_cutlass_tensor_map_request const& request) {
  static_assert(sizeof(Descriptor) == 128 && alignof(Descriptor) >= 64, "a tensor map has 128 bytes, aligned to 64");
  memcpy(descriptor, &request, sizeof(request));
}

template <class Descriptor>
__device__ inline CUresult request_cuTensorMapEncodeTiled(Descriptor* descriptor, CUtensorMapDataType type, int rank,
                                                          void* address, uint64_t const* dims, uint64_t const* strides,
                                                          uint32_t const* box, uint32_t const* element_strides,
                                                          CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                                          CUtensorMapL2promotion promotion,
                                                          CUtensorMapFloatOOBfill fill) {
  atomr_cutlass_tensor_map_request request{};
  request.magic = ATOMR_CUTLASS_TENSOR_MAP_MAGIC;
  request.address = reinterpret_cast<uint64_t>(address);
  for (int i = 0; i < rank; ++i) {
    request.dims[i] = dims[i];
    request.box[i] = uint16_t(box[i]);
    request.element_strides[i] = uint8_t(element_strides[i]);
  }
  for (int i = 0; i + 1 < rank; ++i) request.strides[i] = strides[i];
  request.kind = ATOMR_CUTLASS_TENSOR_MAP_TILED;
  request.type = uint8_t(type);
  request.rank = uint8_t(rank);
  request.interleave = uint8_t(interleave);
  request.swizzle = uint8_t(swizzle);
  request.promotion = uint8_t(promotion);
  request.fill = uint8_t(fill);
  leave_request(descriptor, request);
  return CUDA_SUCCESS;
}

template <class Descriptor>
__device__ inline CUresult request_cuTensorMapEncodeIm2col(Descriptor* descriptor, CUtensorMapDataType type, int rank,
                                                           void* address, uint64_t const* dims, uint64_t const* strides,
                                                           int const* lower, int const* upper, uint32_t channels,
                                                           uint32_t pixels, uint32_t const* element_strides,
                                                           CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                                           CUtensorMapL2promotion promotion,
                                                           CUtensorMapFloatOOBfill fill) {
  atomr_cutlass_tensor_map_request request{};
  request.magic = ATOMR_CUTLASS_TENSOR_MAP_MAGIC;
  request.address = reinterpret_cast<uint64_t>(address);
  for (int i = 0; i < rank; ++i) {
    request.dims[i] = dims[i];
    request.element_strides[i] = uint8_t(element_strides[i]);
  }
  for (int i = 0; i + 1 < rank; ++i) request.strides[i] = strides[i];
  // All dimensions but the channels and the images have a corner.
  for (int i = 0; i + 2 < rank; ++i) {
    request.lower[i] = int8_t(lower[i]);
    request.upper[i] = int8_t(upper[i]);
  }
  request.box[0] = uint16_t(channels);
  request.box[1] = uint16_t(pixels);
  request.kind = ATOMR_CUTLASS_TENSOR_MAP_IM2COL;
  request.type = uint8_t(type);
  request.rank = uint8_t(rank);
  request.interleave = uint8_t(interleave);
  request.swizzle = uint8_t(swizzle);
  request.promotion = uint8_t(promotion);
  request.fill = uint8_t(fill);
  leave_request(descriptor, request);
  return CUDA_SUCCESS;
}

}  // namespace atomr_cutlass

#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) atomr_cutlass::request_##function
