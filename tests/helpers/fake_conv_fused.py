"""A pack of float32 convolutions with an epilogue tree that run on the host, for `fake_pack`'s driver.

They read and write the operands of their tree where the arguments say that these lie.
"""

from pathlib import Path

import fake_fused
from atomr_cutlass import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.lower import COMMON, LINEAR, epilogue_id, with_source
from atomr_cutlass.generator.families.conv_sm90 import conv_sm90
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.ops.conv2d.geometry import DGRAD, FPROP
from fake_fused import BIASED, BLOCK, source_of, table_of
from fake_pack import compile_library

KERNEL = """
static float* at(const Operand* one, int64_t i, int64_t j) {
  return (float*)one->pointer + i * one->stride_m + j * one->stride_n;
}
static double sum_at(const Args* g, int fprop, int64_t n, int64_t row, int64_t column, int64_t channel) {
  const float *a = g->a, *b = g->b;
  double sum = 0;
  for (int64_t r = 0; r < g->r; ++r) {
    for (int64_t s = 0; s < g->s; ++s) {
      int64_t const y = fprop ? row * g->stride_h - g->pad_h + r : row + g->pad_h - r;
      int64_t const x = fprop ? column * g->stride_w - g->pad_w + s : column + g->pad_w - s;
      if (y < 0 || x < 0 || y >= (fprop ? g->h : g->p) || x >= (fprop ? g->w : g->q)) continue;
      const float* pixel = fprop ? a + n * g->x_stride_n + y * g->x_stride_h + x * g->x_stride_w
                                 : a + n * g->y_stride_n + y * g->y_stride_p + x * g->y_stride_q;
      const float* tap = b + r * g->w_stride_r + s * g->w_stride_s;
      for (int64_t k = 0; k < (fprop ? g->c : g->k); ++k) {
        sum += (double)pixel[k] * (double)(fprop ? tap[channel * g->w_stride_k + k] : tap[k * g->w_stride_k + channel]);
      }
    }
  }
  return g->alpha * sum;
}
/* context: f or d, then 0 for bias and relu alone, 1 for the block, 2 for it with C as the residual, and 3 for what the
   arguments say: in the first operand's stride_m 1 for a bias, 4 for relu */
static int launch(const atomr_cutlass_row* row, const void* params, const atomr_cutlass_launch* how, void* stream) {
  const Args* g = params;
  const char* kind = row->context;
  const Operand *bias = &g->operands[BIAS], *residual = &g->operands[RESIDUAL];
  const Operand *bits = &g->operands[2], *sums = &g->operands[3];
  int const fprop = kind[0] == 'f';
  int64_t const rows = fprop ? g->p : g->h, columns = fprop ? g->q : g->w, channels = fprop ? g->k : g->c;
  int64_t const step = fprop ? g->y_stride_q : g->x_stride_w;
  int64_t const row_step = fprop ? g->y_stride_p : g->x_stride_h, image = fprop ? g->y_stride_n : g->x_stride_n;
  (void)how, (void)stream;
  for (int64_t i = 0; i < g->n * rows * columns; ++i) {
    int64_t const n = i / (rows * columns), y = i / columns % rows, x = i % columns;
    int64_t const place = n * image + y * row_step + x * step;
    const float* c = (const float*)g->c_source;
    for (int64_t j = 0; j < channels; ++j) {
      double value = sum_at(g, fprop, n, y, x, j);
      if (kind[1] != '2' && g->beta != 0) value += g->beta * (double)c[place + j];
      if (kind[1] == '3') {
        const Operand told = {g->operands[0].pointer, 0, g->operands[0].stride_n, 0};
        if (g->operands[0].stride_m & 1) value += (double)*at(&told, 0, j);
        if (value < 0 && g->operands[0].stride_m >> 2 == 1) value = 0;
      } else {
        value += (double)*at(kind[1] == '0' ? &g->operands[0] : bias, i, j);
        if (value < 0) value = 0;
      }
      if (kind[1] != '0' && kind[1] != '3') {
        uint8_t* bytes = (uint8_t*)bits->pointer + i * bits->stride_m;
        if (j % 8 == 0) bytes[j / 8 * bits->stride_n] = 0;
        bytes[j / 8 * bits->stride_n] |= (uint8_t)((value != 0) << j % 8);
        *at(sums, i, j) += (float)value;
        value += (double)(kind[1] == '2' ? c[place + j] : *at(residual, i, j));
      }
      ((float*)g->d)[place + j] = (float)value;
    }
  }
  return 0;
}
"""


def keys() -> list[tuple[KernelKey, str]]:
    """The keys, each with what its kernel computes."""
    residual = [operand.name for operand in BLOCK.inputs].index("residual")
    programs = {BIASED.program: "0", BLOCK.program: "1", with_source(BLOCK.program, residual): "2"}
    ids = {**{epilogue_id(LINEAR, program): kind for program, kind in programs.items()}, COMMON: "3"}
    return [
        (conv_sm90(op, D.F32, D.F32, (128, 128), epilogue=epilogue), letter + kind)
        for op, letter in ((FPROP, "f"), (DGRAD, "d"))
        for epilogue, kind in ids.items()
    ]


def make_pack(library: Path) -> Path:
    """A pack of these kernels."""
    return compile_library(source_of("atomr_cutlass_conv_args", KERNEL) + table_of(keys()), library)


def make_gemm_pack(library: Path) -> Path:
    """A pack of GEMM kernels with the same trees, for filters of one tap."""
    cells = {
        key.layout_a + key.layout_b: key
        for key in expand("full", [SmArch.SM90A])
        if (key.op, key.generation, key.math, key.d, key.align_a, key.align_d) == ("gemm", "sm80", "tf32", D.F32, 4, 4)
    }
    return fake_fused.make_pack(library, list(cells.values()))
