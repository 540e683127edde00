/* What a kernel compiled at run time tells the host about itself. NVRTC makes device code only, so CUTLASS's own host
 * code (the kernel's parameters, grid and workspace) runs on the device, once per plan, in the kernel's companion
 * `NAME_evaluate`. */
#pragma once

#include <stdint.h>

#include "atomr_cutlass/kernel_abi.h"

// clang-format off: as in kernel_abi.h

/* `NAME_info`, a constant of the companion's module. */
#define atomr_cutlass_jit_info_fields(FIELD, ARRAY) \
  FIELD(uint64_t, layout_digest) /* of the structs that the companion and the host share, as its headers have them */ \
  FIELD(uint32_t, params_bytes) \
  FIELD(uint32_t, params_align) \
  FIELD(uint32_t, shared_bytes) \
  FIELD(uint32_t, threads) \
  ARRAY(uint32_t, cluster, 3) \
  FIELD(uint32_t, setup_threads) /* of a block of the kernel `NAME_setup` that runs before the main one; 0 without it */
ATOMR_CUTLASS_STRUCT(atomr_cutlass_jit_info)

/* What the companion answers for one problem; the rest is meaningless unless `implementable`. The parameters themselves
 * follow, at the next multiple of 128 bytes. */
#define atomr_cutlass_jit_evaluation_fields(FIELD, ARRAY) \
  FIELD(uint32_t, implementable) \
  ARRAY(uint32_t, grid, 3) \
  ARRAY(uint32_t, setup_grid, 3) /* of `NAME_setup` */ \
  FIELD(uint32_t, padding) \
  FIELD(uint64_t, workspace_bytes) \
  FIELD(uint64_t, clear_offset) FIELD(uint64_t, clear_bytes)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_jit_evaluation)

#define ATOMR_CUTLASS_JIT_PARAMS_OFFSET 128

/* Only the driver can encode a tensor map. Where one belongs, the companion leaves this request, and the host encodes
 * it in place. The magic is looked for at multiples of 64 bytes, a tensor map's alignment. */
#define ATOMR_CUTLASS_TENSOR_MAP_MAGIC 0x70616D20726F7361ull
enum { ATOMR_CUTLASS_TENSOR_MAP_TILED = 0, ATOMR_CUTLASS_TENSOR_MAP_IM2COL = 1 };

#define atomr_cutlass_tensor_map_request_fields(FIELD, ARRAY) \
  FIELD(uint64_t, magic) \
  FIELD(uint64_t, address) \
  ARRAY(uint64_t, dims, 5) \
  ARRAY(uint64_t, strides, 4) /* bytes, of every dimension but the first */ \
  ARRAY(uint16_t, box, 5) /* tiled; im2col: channels and pixels per column in the first two */ \
  ARRAY(uint8_t, element_strides, 5) \
  ARRAY(int8_t, lower, 3) ARRAY(int8_t, upper, 3) /* im2col: corners of the box of pixels */ \
  FIELD(uint8_t, kind) FIELD(uint8_t, type) FIELD(uint8_t, rank) FIELD(uint8_t, interleave) FIELD(uint8_t, swizzle) \
  FIELD(uint8_t, promotion) FIELD(uint8_t, fill) \
  ARRAY(uint8_t, padding, 4)
ATOMR_CUTLASS_STRUCT(atomr_cutlass_tensor_map_request)

// clang-format on

#ifdef __cplusplus
static_assert(sizeof(atomr_cutlass_tensor_map_request) <= 128, "a request takes the place of a tensor map");
static_assert(sizeof(atomr_cutlass_jit_evaluation) <= ATOMR_CUTLASS_JIT_PARAMS_OFFSET, "the parameters come after it");
#endif
