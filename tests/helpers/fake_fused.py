"""A pack of float32 GEMM kernels with epilogue trees that run on the host, for `fake_pack`'s driver.

They read and write the operands of their trees where the arguments say that these lie.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from atomr_cutlass.epilogue import EpilogueVisitorTree, EvtBuilder
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.lower import COMMON, LINEAR, epilogue_id, swapped, with_source
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import with_epilogue
from fake_pack import CONTENT, compile_library, exported

BIASED = EvtBuilder().add_bias("bias", dtype=D.F32).activation("relu").build()
"""The tree of bias and relu."""
BLOCK = (
    EvtBuilder()
    .add_bias("bias", dtype=D.F32)
    .activation("relu")
    .mask_store("bits")
    .reduce("sums", "row")
    .add_matrix("residual", dtype=D.F32)
    .build()
)
"""relu(acc + bias) + residual, with where the former is not 0, and its sums."""

PREAMBLE = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "atomr_cutlass/kernel_abi.h"

typedef ARGS Args;
typedef atomr_cutlass_tree_operand Operand;

static int supports(const atomr_cutlass_row* row, const void* args) {
  (void)row, (void)args;
  return 0;
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
"""
"""The C source before the `launch` of kernels that serve every problem of the arguments ARGS and have no workspace."""

KERNEL = """
static float* at(const Operand* one, int64_t l, int64_t i, int64_t j) {
  return (float*)one->pointer + l * one->batch_stride + i * one->stride_m + j * one->stride_n;
}
/* context: layouts of A and B, then 0 for the bias and relu alone, 1 for the block, 2 for it with C as the residual,
   and 3 for what the arguments say: in the first operand's stride_m 1 for a bias, 4 for relu */
static int launch(const atomr_cutlass_row* row, const void* params, const atomr_cutlass_launch* how, void* stream) {
  const Args* g = params;
  const char* kind = row->context;
  const Operand *bias = &g->operands[BIAS], *residual = &g->operands[RESIDUAL];
  const Operand *bits = &g->operands[2], *sums = &g->operands[3];
  (void)how, (void)stream;
  for (int64_t l = 0; l < g->batch; ++l) {
    const float* a = (const float*)g->a + l * g->batch_stride_a;
    const float* b = (const float*)g->b + l * g->batch_stride_b;
    const float* c = (const float*)g->c + l * g->batch_stride_c;
    float* d = (float*)g->d + l * g->batch_stride_d;
    for (int64_t i = 0; i < g->m; ++i) {
      for (int64_t j = 0; j < g->n; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < g->k; ++k) {
          sum += (double)(kind[0] == 'r' ? a[i * g->lda + k] : a[i + k * g->lda]) *
                 (double)(kind[1] == 'r' ? b[k * g->ldb + j] : b[k + j * g->ldb]);
        }
        double value = g->alpha * sum;
        if (kind[2] != '2' && g->beta != 0) value += g->beta * (double)c[i * g->ldc + j];
        if (kind[2] == '3') {
          const Operand row = {g->operands[0].pointer, 0, g->operands[0].stride_n, g->operands[0].batch_stride};
          if (g->operands[0].stride_m & 1) value += (double)*at(&row, l, i, j);
          if (value < 0 && g->operands[0].stride_m >> 2 == 1) value = 0;
        } else {
          value += (double)*at(kind[2] == '0' ? &g->operands[0] : bias, l, i, j);
          if (value < 0) value = 0;
        }
        if (kind[2] != '0' && kind[2] != '3') {
          uint8_t* bytes = (uint8_t*)bits->pointer + l * bits->batch_stride + i * bits->stride_m;
          bytes[j / 8 * bits->stride_n] |= (uint8_t)((value != 0) << j % 8);
          *at(sums, l, i, j) += (float)value;
          value += (double)(kind[2] == '2' ? c[i * g->ldc + j] : *at(residual, l, i, j));
        }
        d[i * g->ldd + j] = (float)value;
      }
    }
  }
  return 0;
}
"""


def keys_of(cells: Sequence[KernelKey]) -> list[tuple[KernelKey, str]]:
    """The cells with the trees, each with the C of its kernel."""
    residual = [operand.name for operand in BLOCK.inputs].index("residual")
    epilogues = {
        BIASED.program: "0",
        swapped(BIASED.program): "0",
        BLOCK.program: "1",
        with_source(BLOCK.program, residual): "2",
    }
    ids = {**{epilogue_id(LINEAR, program): kind for program, kind in epilogues.items()}, COMMON: "3"}
    return [
        (with_epilogue(cell, epilogue, D.F32), cell.layout_a + cell.layout_b + kind)
        for cell in cells
        for epilogue, kind in ids.items()
    ]


def make_pack(library: Path, cells: Sequence[KernelKey]) -> Path:
    """A pack of these cells with the trees."""
    source = source_of("atomr_cutlass_gemm_args", KERNEL) + table_of(keys_of(cells))
    return compile_library(source, library)


def source_of(args: str, kernel: str) -> str:
    """The source of kernels with these arguments, which know the block's inputs as BIAS and RESIDUAL."""
    names = [operand.name for operand in BLOCK.inputs]
    defines = {"ARGS": args, "BIAS": names.index("bias"), "RESIDUAL": names.index("residual")}
    return "".join(f"#define {name} {value}\n" for name, value in defines.items()) + PREAMBLE + kernel


def table_of(rows: Sequence[tuple[KernelKey, str]]) -> str:
    """The table of a pack whose source defines Args and the functions of a row: keys, each with its context."""
    source = ""
    for i, (key, context) in enumerate(rows):
        source += (
            f"static const atomr_cutlass_row row_{i} = {{{json.dumps(key.name)}, {json.dumps(key.to_json())}, "
            f"{CONTENT}, sizeof(Args), 16, 1024, 128, 0, 13000, "
            f'"{context}", supports, workspace_size, prepare, launch}};\n'
        )
    source += (
        f"static const atomr_cutlass_row* const rows[] = {{{', '.join(f'&row_{i}' for i in range(len(rows)))}}};\n"
        f"{exported(len(rows))}"
    )
    return source


def tree_named(**names: str) -> EpilogueVisitorTree:
    """The block with other names for its operands: the same kernels serve it."""
    own = [operand.name for operand in (*BLOCK.inputs, *BLOCK.outputs)]
    return EpilogueVisitorTree.parse(BLOCK.program, [names.get(name, name) for name in own])
