"""A pack of fp4 GEMM kernels that run on the host, for `fake_pack`'s driver.

They read packed operands and swizzled scales as real ones do, so that what plans tell kernels is tested without a GPU.
The last arguments of all are exported as `last_args`.
"""

import json
from pathlib import Path

from atomr_cutlass.generator.key import KernelKey
from fake_pack import CONTENT, compile_library, exported

KERNEL = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "atomr_cutlass/kernel_abi.h"

typedef atomr_cutlass_gemm_args Args;
extern Args last_args;
extern int launches;
Args last_args;
int launches = 0;

static float e2m1(const void* packed, int64_t element) {
  static const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const int nibble = ((const uint8_t*)packed)[element / 2] >> (element % 2 * 4) & 15;
  return nibble & 8 ? -values[nibble & 7] : values[nibble & 7];
}
static float power(int exponent) {
  float value = 1;
  for (; exponent > 0; --exponent) value *= 2;
  for (; exponent < 0; ++exponent) value /= 2;
  return value;
}
/* The scale of a row and a block of K among `columns` of them. */
static float scale(const void* scales, int64_t row, int64_t column, int64_t columns, int vector) {
  const int64_t tile = row / 128 * ((columns + 3) / 4) + column / 4;
  const uint8_t bits = ((const uint8_t*)scales)[tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4];
  if (vector == 32) return power(bits - 127);
  return bits >> 3 ? (8 + (bits & 7)) * power((bits >> 3) - 10) : (float)(bits & 7) * power(-9);
}
static float load(const void* from, int64_t i, int wide) {
  uint32_t bits = wide ? ((const uint32_t*)from)[i] : (uint32_t)((const uint16_t*)from)[i] << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static void store(void* to, int64_t i, int wide, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (wide) ((uint32_t*)to)[i] = bits;
  else ((uint16_t*)to)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* context: "16f", "16b", "32f" or "32b" */
static int supports(const atomr_cutlass_row* row, const void* given) {
  const Args* g = given;
  const int d = row->context != NULL && ((const char*)row->context)[2] == 'f' ? 4 : 8;
  const int whole = g->k % 32 == 0 && g->lda % 32 == 0 && g->ldb % 32 == 0 && g->ldd % d == 0 && g->n % d == 0;
  return whole && g->batch == 1 && g->scale_a && g->scale_b && !g->scale_d && !g->amax ? 0
                                                                                   : ATOMR_CUTLASS_CANNOT_IMPLEMENT;
}
static int workspace_size(const atomr_cutlass_row* row, const void* args, uint64_t* bytes) {
  (void)row, (void)args;
  *bytes = 0;
  return 0;
}
static int prepare(const atomr_cutlass_row* row, const void* args, void* params, atomr_cutlass_launch* launch) {
  (void)row;
  memcpy(params, args, sizeof(Args));
  memset(launch, 0, sizeof(*launch));
  launch->grid[0] = launch->grid[1] = launch->grid[2] = 1;
  return 0;
}
static int launch(const atomr_cutlass_row* row, const void* params, const atomr_cutlass_launch* how, void* stream) {
  const Args* g = params;
  const char* kind = row->context;
  const int vector = kind[0] == '1' ? 16 : 32, wide = kind[2] == 'f';
  const int64_t columns = (g->k + vector - 1) / vector;
  (void)how, (void)stream;
  last_args = *g;
  ++launches;
  for (int64_t i = 0; i < g->m; ++i) {
    for (int64_t j = 0; j < g->n; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < g->k; ++k) {
        sum += (double)(e2m1(g->a, i * g->lda + k) * scale(g->scale_a, i, k / vector, columns, vector)) *
               (double)(e2m1(g->b, j * g->ldb + k) * scale(g->scale_b, j, k / vector, columns, vector));
      }
      double value = g->alpha * sum;
      if (g->beta != 0) value += g->beta * (double)load(g->c, i * g->ldc + j, wide);
      store(g->d, i * g->ldd + j, wide, (float)value);
    }
  }
  return 0;
}
"""


def make_pack(library: Path, keys: list[KernelKey]) -> Path:
    """A pack of these keys, with a D of bf16 or f32."""
    source = KERNEL
    for i, key in enumerate(keys):
        context = f"{key.scale_granularity[2]}{key.d.value[0]}"
        source += (
            f"static const atomr_cutlass_row row_{i} = {{{json.dumps(key.name)}, {json.dumps(key.to_json())}, "
            f"{CONTENT}, sizeof(Args), 16, 1024, 128, 0, 13000, "
            f'"{context}", supports, workspace_size, prepare, launch}};\n'
        )
    source += (
        f"static const atomr_cutlass_row* const rows[] = {{{', '.join(f'&row_{i}' for i in range(len(keys)))}}};\n"
        f"{exported(len(keys))}"
    )
    return compile_library(source, library)
