"""Kernels that run on the host, for `fake_pack`'s driver: of a pack, or "compiled at run time".

One C source has them all. What a kernel computes follows from its key alone: the operation, layouts, element types,
scales, and the tree of its epilogue, which becomes C. So what plans tell kernels is tested without a GPU: they find
groups, scales and the operands of trees where the arguments say that these lie, as real ones do. `golden_gpu` has
launches of the same rows noted, not computed.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import _core
from atomr_cutlass.generator.epilogue.lower import SCALED, SOURCE, base_of, is_common, operand_kinds, split
from atomr_cutlass.generator.epilogue.tree import MASK, PREFIX
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import arguments_of
from fake_pack import CONTENT, compile_library, exported

SOURCE_TEXT = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "atomr_cutlass/jit_abi.h"
#include "atomr_cutlass/kernel_abi.h"

typedef atomr_cutlass_gemm_args Gemm;
typedef atomr_cutlass_conv_args Conv;
typedef atomr_cutlass_grouped_args Grouped;
typedef atomr_cutlass_group Group;
typedef atomr_cutlass_cast_args Cast;
typedef atomr_cutlass_quantize_args Quantize;

/* An element of D, and what its epilogue reads and writes. */
typedef struct {
  const atomr_cutlass_tree_operand* operands;
  int64_t batch, i, j;
  int listed; /* whether operands are tables with an address for each batch */
  const void* source;
  void* d;
  const Gemm* scaled; /* a GEMM with scales; NULL: of others, or of none */
} Element;
typedef struct Kernel Kernel;
/* What the kernels of an operation compute, and whether they take arguments; NULL: any. */
typedef struct {
  void (*compute)(const Kernel*, const void* args);
  int (*takes)(const Kernel*, const void* args);
} Operation;
/* The struct of a kernel's arguments: its bytes, and where fields of it lie; 0 where it has no such field. */
typedef struct { uint32_t bytes, workspace, slices, table; } Arguments;
struct Kernel {
  const Operation* operation; /* NULL: launches are noted */
  Arguments arguments;
  uint64_t workspace;
  char layout_a, layout_b;
  char type, type_d; /* of what products read and write: f (all but those that follow), d, b (bf16) or x (fp4) */
  char exact, exact_d; /* of what casts and the like do: also q (e4m3), r (e5m2) and c (bytes) */
  char scales;       /* s: of tensors and vectors, b: of blocks, in float; n (nvfp4), m (mxfp4); 0: none */
  int fresh;         /* whether bits are written without having been cleared */
  void (*finish)(double acc, const Element* e);
  char form;         /* of quantization: a (amax), t (tensor) or b; how many rows and columns share a scale, 0: all */
  int rows, columns;
  char arguments_name[64], name[400]; /* of the struct and the kernel, where launches are noted */
};

/* Element types */

static double power(int exponent) {
  double value = 1;
  for (; exponent > 0; --exponent) value *= 2;
  for (; exponent < 0; ++exponent) value /= 2;
  return value;
}
/* The value of a narrow type's code without its sign, and the largest code that is a number. */
static double magnitude(char type, int code) {
  static const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  if (type == 'q') return code >> 3 ? (8 + (code & 7)) * power((code >> 3) - 10) : (code & 7) * power(-9);
  if (type == 'r') return code >> 2 ? (4 + (code & 3)) * power((code >> 2) - 17) : (code & 3) * power(-16);
  return values[code];
}
static int largest_code(char type) { return type == 'q' ? 0x7e : type == 'r' ? 0x7b : 7; }
/* The nearest code, of two the even one. */
static int code_of(char type, double value) {
  const double wanted = value < 0 ? -value : value;
  int best = 0;
  for (int code = 1; code <= largest_code(type); ++code) {
    const double low = wanted - magnitude(type, best), high = magnitude(type, code) - wanted;
    if (high < low || (high == low && code % 2 == 0)) best = code;
  }
  return best;
}
static double load(char type, const void* from, int64_t i) {
  uint32_t bits;
  float value;
  switch (type) {
    case 'q': case 'r':
      bits = ((const uint8_t*)from)[i];
      return bits & 128 ? -magnitude(type, bits & 127) : magnitude(type, (int)bits);
    case 'f': return ((const float*)from)[i];
    case 'd': return ((const double*)from)[i];
    case 'b':
      bits = (uint32_t)((const uint16_t*)from)[i] << 16;
      memcpy(&value, &bits, 4);
      return value;
    default:
      bits = ((const uint8_t*)from)[i / 2] >> (i % 2 * 4) & 15;
      return bits & 8 ? -magnitude('x', bits & 7) : magnitude('x', (int)bits);
  }
}
static void store(char type, void* to, double value) {
  float narrow = (float)value;
  uint32_t bits;
  memcpy(&bits, &narrow, 4);
  switch (type) {
    case 'f': *(float*)to = narrow; break;
    case 'd': *(double*)to = value; break;
    default: *(uint16_t*)to = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}
static void store_at(char type, void* to, int64_t i, double value) {
  uint8_t* const byte = (uint8_t*)to + (type == 'x' ? i / 2 : i);
  const int sign = value < 0;
  switch (type) {
    case 'q': case 'r': *byte = (uint8_t)(code_of(type, value) | sign << 7); break;
    case 'x': *byte = (uint8_t)((*byte & (i % 2 ? 15 : 240)) | (code_of(type, value) | sign << 3) << i % 2 * 4); break;
    default: store(type, (char*)to + i * (type == 'b' ? 2 : 4), value);
  }
}
static int64_t size_of(char type) { return type == 'd' ? 8 : type == 'b' ? 2 : 4; }
/* The scale of a row and a vector of fp4, among those of `columns` vectors, in the swizzled order. */
static int64_t swizzled(int64_t row, int64_t column, int64_t columns) {
  const int64_t tile = row / 128 * ((columns + 3) / 4) + column / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}
static double vector_scale(char type, const void* scales, int64_t row, int64_t column, int64_t columns) {
  const uint8_t bits = ((const uint8_t*)scales)[swizzled(row, column, columns)];
  return type == 'm' ? power(bits - 127) : magnitude('q', bits);
}

/* Epilogues */

static void* at(const Element* e, int o, int64_t j, int64_t bytes) {
  const atomr_cutlass_tree_operand* one = &e->operands[o];
  char* from = one->pointer;
  from = e->listed ? ((char* const*)from)[e->batch] : from + e->batch * one->batch_stride * bytes;
  return from + (e->i * one->stride_m + j * one->stride_n) * bytes;
}
/* Without libm: a series, and squares. */
static double exponential(double x) {
  double term = 1, sum = 1;
  x = x < -60 ? -60 : x > 60 ? 60 : x;
  for (int i = 1; i < 20; ++i) sum += term *= x / 256 / i;
  for (int i = 0; i < 8; ++i) sum *= sum;
  return sum;
}
static double tangent(double x) { return 1 - 2 / (exponential(2 * x) + 1); }
static double op_absolute(double x) { return x < 0 ? -x : x; }
static double op_add(double x, double y) { return x + y; }
static double op_multiply(double x, double y) { return x * y; }
static double op_greater(double x, double y) { return x > y; }
static double op_relu(double x) { return x < 0 ? 0 : x; }
static double op_d_relu(double dy, double x) { return x > 0 ? dy : 0; }
static double inner(double x) { return 0.7978845608028654 * (x + 0.044715 * x * x * x); }
static double op_gelu_tanh(double x) { return 0.5 * x * (1 + tangent(inner(x))); }
static double op_d_gelu_tanh(double dy, double x) {
  const double t = tangent(inner(x));
  return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x));
}
static void store_bit(const Element* e, int o, int set, int fresh) {
  uint8_t* byte = at(e, o, e->j / 8, 1);
  if (fresh && e->j % 8 == 0) *byte = 0;
  *byte |= (uint8_t)(set << e->j % 8);
}
/* What the arguments tell: in the first operand's stride_m 1 for a bias, 4 for relu. */
static double told(double acc, const Element* e) {
  const int64_t what = e->operands[0].stride_m;
  Element row = *e;
  row.i = 0;
  if (what & 1) acc += *(float*)at(&row, 0, e->j, 4);
  return what >> 2 == 1 ? op_relu(acc) : acc;
}

static void store_told(char type, const Element* e, double value) {
  if (e->scaled != NULL && e->scaled->amax != NULL) {
    float* amax = e->scaled->amax;
    if (op_absolute(value) > *amax) *amax = (float)op_absolute(value);
  }
  if (e->scaled != NULL && e->scaled->scale_d != NULL) value *= *(const float*)e->scaled->scale_d;
  store(type, e->d, value);
}

/* Products. A product of `of_row` sees element (i, k) of A and (k, j) of B. Slices of K have every so many elements. */

static double product(
    const Kernel* kernel, const Gemm* g, int64_t l, int64_t i, int64_t j, int64_t slice, int64_t slices) {
  const int64_t a = l * g->batch_stride_a, b = l * g->batch_stride_b, vector = kernel->scales == 'n' ? 16 : 32;
  const int narrow = kernel->type == 'x';
  double sum = 0;
  for (int64_t k = slice; k < g->k; k += slices) {
    double x = load(kernel->type, g->a, a + (kernel->layout_a == 'r' ? i * g->lda + k : i + k * g->lda));
    double y = load(kernel->type, g->b, b + (kernel->layout_b == 'r' ? k * g->ldb + j : k + j * g->ldb));
    if (narrow) x *= vector_scale(kernel->scales, g->scale_a, i, k / vector, (g->k + vector - 1) / vector);
    if (narrow) y *= vector_scale(kernel->scales, g->scale_b, j, k / vector, (g->k + vector - 1) / vector);
    sum += x * y;
  }
  return sum;
}
extern Gemm last_args;
extern int launches;
Gemm last_args;
int launches = 0;
static void gemm(const Kernel* kernel, const void* args) {
  const Gemm* g = args;
  const int64_t size = size_of(kernel->type_d);
  /* As many results as slices, or as batches. */
  const int64_t slices = g->batch == 1 && g->batch_stride_d != 0 ? g->split_k : 1;
  last_args = *g;
  for (int64_t l = 0; l < g->batch * slices; ++l)
    for (int64_t i = 0; i < g->m; ++i)
      for (int64_t j = 0; j < g->n; ++j) {
        const char* c = g->c == NULL ? NULL : (const char*)g->c + (l * g->batch_stride_c + i * g->ldc + j) * size;
        char* d = (char*)g->d + (l * g->batch_stride_d + i * g->ldd + j) * size;
        double sum = g->alpha * product(kernel, g, slices > 1 ? 0 : l, i, j, slices > 1 ? l : 0, slices);
        if (kernel->scales == 's' && g->scale_a) sum *= ((const float*)g->scale_a)[g->scale_form_a ? i : 0];
        if (kernel->scales == 's' && g->scale_b) sum *= ((const float*)g->scale_b)[g->scale_form_b ? j : 0];
        const Element e = {g->operands, l, i, j, 0, c, d, kernel->scales == 's' ? g : NULL};
        kernel->finish(sum + (g->beta != 0 ? g->beta * load(kernel->type_d, c, 0) : 0), &e);
      }
}

/* Float32: every product is added where it belongs, those of a pixel in one slice. */
enum { FPROP, DGRAD, WGRAD };
static void conv(const Kernel* kernel, const Conv* g, int op) {
  const int64_t depth = g->c / g->groups, width = g->k / g->groups;
  const int64_t extents[3][4] = {{g->n, g->p, g->q, g->k}, {g->n, g->h, g->w, g->c}, {g->k, g->r, g->s, depth}};
  const int64_t strides[3][3] = {{g->y_stride_n, g->y_stride_p, g->y_stride_q},
                                 {g->x_stride_n, g->x_stride_h, g->x_stride_w},
                                 {g->w_stride_k, g->w_stride_r, g->w_stride_s}};
  const int64_t *extent = extents[op], *stride = strides[op], count = extent[0] * extent[1] * extent[2] * extent[3];
  const float *a = g->a, *b = g->b, *bias = g->bias;
  const int64_t slices = g->split_parallel ? g->split_k : 1; /* of K, one after the other in D */
  double* sums = calloc((size_t)(count * slices), sizeof(double));
  for (int64_t n = 0; n < g->n; ++n) for (int64_t k = 0; k < g->k; ++k)
  for (int64_t p = 0; p < g->p; ++p) for (int64_t q = 0; q < g->q; ++q)
  for (int64_t r = 0; r < g->r; ++r) for (int64_t s = 0; s < g->s; ++s)
  for (int64_t i = 0; i < depth; ++i) {
    const int64_t h = p * g->stride_h - g->pad_h + r * g->dilation_h, channel = k / width * depth + i;
    const int64_t w = q * g->stride_w - g->pad_w + s * g->dilation_w;
    if (h < 0 || h >= g->h || w < 0 || w >= g->w) continue;
    const int64_t y = n * g->y_stride_n + p * g->y_stride_p + q * g->y_stride_q + k;
    const int64_t f = k * g->w_stride_k + r * g->w_stride_r + s * g->w_stride_s + i;
    const int64_t x = n * g->x_stride_n + h * g->x_stride_h + w * g->x_stride_w + channel;
    const int64_t place[3] = {((n * g->p + p) * g->q + q) * g->k + k, ((n * g->h + h) * g->w + w) * g->c + channel,
                              ((k * g->r + r) * g->s + s) * depth + i};
    const double term = (double)a[op == FPROP ? x : y] * (double)b[op == WGRAD ? x : f];
    sums[(p * g->q + q) % slices * count + place[op]] += term;
  }
  for (int64_t part = 0; part < count * slices; ++part) {
    const int64_t place = part % count, j = place % extent[3], i = place / extent[3];
    const int64_t column = i % extent[2], row = i / extent[2] % extent[1], outer = i / extent[2] / extent[1];
    const int64_t lies = outer * stride[0] + row * stride[1] + column * stride[2] + j;
    const float* c = g->c_source == NULL ? NULL : (const float*)g->c_source + lies;
    const Element e = {g->operands, 0, i, j, 0, c, (float*)g->d + part / count * count + lies, NULL};
    double sum = g->alpha * sums[part] + (g->beta != 0 && c != NULL ? g->beta * (double)*c : 0);
    kernel->finish(sum + (bias != NULL ? (double)bias[j] : 0), &e);
  }
  free(sums);
}
static void conv2d_fprop(const Kernel* kernel, const void* args) { conv(kernel, args, FPROP); }
static void conv2d_dgrad(const Kernel* kernel, const void* args) { conv(kernel, args, DGRAD); }
static void conv2d_wgrad(const Kernel* kernel, const void* args) { conv(kernel, args, WGRAD); }

/* Groups in float32 are found as the setup kernel of real ones does (grouped_setup.h). */
static int64_t clamp(int64_t value, int64_t limit) { return value < 0 ? 0 : (value > limit ? limit : value); }
static const float* moved(const void* from, int64_t elements) {
  return from == NULL ? NULL : (const float*)from + elements;
}
static Group find(const Kernel* kernel, const Grouped* p, int g, int64_t* before) {
  Group group;
  if (p->form == ATOMR_CUTLASS_GROUPED_LIST) return p->table[g];
  const int contiguous = p->form == ATOMR_CUTLASS_GROUPED_CONTIGUOUS, along_k = p->form == ATOMR_CUTLASS_GROUPED_K;
  const int64_t limit = along_k ? p->k : p->m;
  int64_t start = 0, count;
  if (!contiguous && !along_k) {
    count = clamp(p->offsets[g], limit);
  } else if (p->rows_are_counts) {
    start = clamp(*before, limit);
    count = clamp(clamp(p->offsets[g], limit), limit - start);
    *before += count;
  } else {
    start = g == 0 ? 0 : clamp(p->offsets[g - 1], limit);
    count = clamp(p->offsets[g] - start, limit - start);
  }
  memset(&group, 0, sizeof(group));
  group.m = along_k ? p->m : (int32_t)count, group.n = p->n, group.k = along_k ? (int32_t)count : p->k;
  group.lda = p->lda, group.ldb = p->ldb, group.ldc = p->ldc, group.ldd = p->ldd;
  int64_t a = g * p->group_stride_a, b = g * p->group_stride_b, c = g * p->group_stride_c, d = g * p->group_stride_d;
  if (along_k) {
    a = kernel->layout_a == 'r' ? start : start * p->lda;
    b = kernel->layout_b == 'r' ? start * p->ldb : start;
  } else if (contiguous) {
    a = kernel->layout_a == 'r' ? start * p->lda : start;
    c += start * p->ldc, d = start * p->ldd;
  }
  int64_t scale_a = g * p->scale_group_stride_a, scale_b = g * p->scale_group_stride_b;
  if (kernel->scales == 'b') {
    if (contiguous) scale_a = start * p->scale_stride_a;
  } else {
    if (p->scale_form_a == 1 && contiguous) scale_a = start;
    if (p->scale_form_a != 1) scale_a = p->scale_form_a == 2 ? g : 0;
    if (p->scale_form_b != 1) scale_b = p->scale_form_b == 2 ? g : 0;
  }
  group.a = moved(p->a, a), group.b = moved(p->b, b), group.c = moved(p->c, c), group.d = (float*)p->d + d;
  group.scale_a = moved(p->scale_a, scale_a), group.scale_b = moved(p->scale_b, scale_b);
  return group;
}
static void multiply_group(const Kernel* kernel, const Grouped* p, const Group* g, int number) {
  const float *a = g->a, *b = g->b, *c = g->c, *scale_a = g->scale_a, *scale_b = g->scale_b;
  const int listed = p->form == ATOMR_CUTLASS_GROUPED_LIST;
  for (int64_t i = 0; i < g->m; ++i)
    for (int64_t j = 0; j < g->n; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < g->k; ++k) {
        double term = (double)(kernel->layout_a == 'r' ? a[i * g->lda + k] : a[i + k * g->lda]) *
                      (double)(kernel->layout_b == 'r' ? b[k * g->ldb + j] : b[k + j * g->ldb]);
        if (kernel->scales == 'b') {
          term *= (double)scale_a[i * p->scale_stride_a + k / 128 * p->scale_k_stride_a] *
                  (double)scale_b[j / 128 * p->scale_stride_b + k / 128 * p->scale_k_stride_b];
        }
        sum += term;
      }
      if (kernel->scales == 's' && scale_a != NULL) sum *= scale_a[p->scale_form_a == 1 ? i : 0];
      if (kernel->scales == 's' && scale_b != NULL) sum *= scale_b[p->scale_form_b == 1 ? j : 0];
      /* Operands of the tree do not vary along M. */
      const Element e = {p->operands, number, 0, j, listed, NULL, (float*)g->d + i * g->ldd + j, NULL};
      kernel->finish(p->alpha * sum + (p->beta != 0 ? p->beta * c[i * g->ldc + j] : 0), &e);
    }
}
static void grouped_gemm(const Kernel* kernel, const void* args) {
  const Grouped* p = args;
  int64_t before = 0;
  for (int g = 0; g < p->groups; ++g) {
    const Group group = find(kernel, p, g, &before);
    multiply_group(kernel, p, &group, g);
  }
}
/* Helpers: casts, which add slices up, transposed copies, quantization and its inverse. */
static void cast(const Kernel* kernel, const void* args) {
  const Cast* g = args;
  const double scale = g->alpha * (g->scale == NULL ? 1 : (double)*(const float*)g->scale);
  for (int64_t i = 0; i < g->count; ++i) {
    double sum = 0;
    for (int slice = 0; slice < g->slices; ++slice) sum += load(kernel->exact, g->a, slice * g->slice_stride + i);
    store_at(kernel->exact_d, g->d, i, scale * sum + (g->beta != 0 ? g->beta * load(kernel->exact_d, g->c, i) : 0));
  }
}
static void transpose(const Kernel* kernel, const void* args) {
  const Gemm* g = args;
  const int64_t size = kernel->exact == 'c' ? 1 : 4;
  for (int64_t l = 0; l < g->batch; ++l)
    for (int64_t i = 0; i < g->m; ++i)
      for (int64_t j = 0; j < g->k; ++j)
        memcpy((char*)g->d + (l * g->batch_stride_d + j * g->ldd + i) * size,
               (const char*)g->a + (l * g->batch_stride_a + i * g->lda + j) * size, (size_t)size);
}
static int in_float(const Kernel* kernel) { return kernel->scales != 'n' && kernel->scales != 'm'; }
static double scale_of(const Kernel* kernel, double amax, double second) {
  const double largest = magnitude(kernel->exact_d, largest_code(kernel->exact_d));
  int exponent = -127;
  if (!(amax > 0)) return 1;
  if (kernel->scales == 'm') {
    while (power(exponent + 3) <= amax) ++exponent;  /* 4 is the largest power of 2 of the values */
    return power(exponent);
  }
  if (in_float(kernel)) return (float)(amax / largest);
  amax = amax / largest / second;
  return magnitude('q', code_of('q', amax < power(-9) ? power(-9) : amax));
}
static void quantize(const Kernel* kernel, const void* args) {
  const Quantize* g = args;
  const int64_t height = kernel->rows ? kernel->rows : g->rows, width = kernel->columns ? kernel->columns : g->columns;
  const int64_t across = (g->columns + width - 1) / width;
  for (int64_t top = 0; top < g->rows; top += height)
    for (int64_t left = 0; left < g->columns; left += width) {
      const int64_t bottom = top + height < g->rows ? top + height : g->rows;
      const int64_t right = left + width < g->columns ? left + width : g->columns;
      const int64_t row = top / height, column = left / width;
      double amax = kernel->form == 't' ? (double)*(float*)g->amax : 0;
      for (int64_t i = top; i < bottom && kernel->form != 't'; ++i)
        for (int64_t j = left; j < right; ++j) {
          const double value = load(kernel->exact, g->a, i * g->lda + j);
          if (value > amax || -value > amax) amax = value < 0 ? -value : value;
        }
      if (kernel->form == 'a') {
        *(float*)g->amax = (float)amax;
        return;
      }
      const double second = kernel->scales == 'n' ? g->alpha : 1, scale = scale_of(kernel, amax, second);
      uint8_t* const byte = (uint8_t*)g->scales + swizzled(row, column, across);
      if (in_float(kernel)) ((float*)g->scales)[row * across + column] = (float)scale;
      if (kernel->scales == 'n') *byte = (uint8_t)code_of('q', scale);
      if (kernel->scales == 'm') for (*byte = 0; power(*byte - 127) < scale;) ++*byte;
      for (int64_t i = top; i < bottom; ++i)
        for (int64_t j = left; j < right; ++j) {
          const double value = load(kernel->exact, g->a, i * g->lda + j) / (scale * second);
          store_at(kernel->exact_d, g->d, i * g->columns + j, value);
        }
    }
}
static void dequantize(const Kernel* kernel, const void* args) {
  const Quantize* g = args;
  const int64_t across = (g->columns + g->block_columns - 1) / g->block_columns;
  for (int64_t i = 0; i < g->rows; ++i)
    for (int64_t j = 0; j < g->columns; ++j) {
      const int64_t row = i / g->block_rows, column = j / g->block_columns;
      const double scale = in_float(kernel) ? (double)((const float*)g->scales)[row * across + column]
                                                 : vector_scale(kernel->scales, g->scales, row, column, across);
      store_at(kernel->exact_d, g->d, i * g->columns + j,
               load(kernel->exact, g->a, i * g->columns + j) * scale * g->alpha);
    }
}
/* Operations */

static int takes_product(const Kernel* kernel, const void* args) {
  const Gemm* g = args;
  if (kernel->type != 'x') return g->m <= FAKE_LARGEST_M;
  const int d = kernel->type_d == 'f' ? 4 : 8;
  const int whole = g->k % 32 == 0 && g->lda % 32 == 0 && g->ldb % 32 == 0 && g->ldd % d == 0 && g->n % d == 0;
  return whole && g->batch == 1 && g->scale_a && g->scale_b && !g->scale_d && !g->amax;
}
static int takes_groups(const Kernel* kernel, const void* args) {
  const Grouped* p = args;
  return p->groups >= 1 && (kernel->scales || (p->scale_a == NULL && p->scale_b == NULL));
}
__attribute__((unused)) static const Operation
    operation_gemm = {gemm, takes_product}, operation_gemv = {gemm, takes_product},
    operation_grouped_gemm = {grouped_gemm, takes_groups}, operation_conv2d_fprop = {conv2d_fprop, NULL},
    operation_conv2d_dgrad = {conv2d_dgrad, NULL}, operation_conv2d_wgrad = {conv2d_wgrad, NULL},
    operation_cast = {cast, NULL}, operation_transpose = {transpose, NULL}, operation_quantize = {quantize, NULL},
    operation_dequantize = {dequantize, NULL};

/* size and the offsets of the fields that a table of a list is written with */
extern const int32_t group_layout[14];
const int32_t group_layout[14] = {
    sizeof(Group), offsetof(Group, a), offsetof(Group, b), offsetof(Group, c), offsetof(Group, d),
    offsetof(Group, scale_a), offsetof(Group, scale_b), offsetof(Group, lda), offsetof(Group, ldb),
    offsetof(Group, ldc), offsetof(Group, ldd), offsetof(Group, m), offsetof(Group, n), offsetof(Group, k),
};

/* Rows */

/* Sets it where launches are noted, not computed. */
static void (*note_launch)(const Kernel* kernel, const void* args, void* stream) = NULL;

static void run(const Kernel* kernel, const void* args) {
  ++launches;
  kernel->operation->compute(kernel, args);
}
static int supports(const atomr_cutlass_row* row, const void* args) {
  const Kernel* kernel = row->context;
  const int takes = note_launch || !kernel->operation->takes || kernel->operation->takes(kernel, args);
  return takes ? ATOMR_CUTLASS_OK : ATOMR_CUTLASS_CANNOT_IMPLEMENT;
}
/* Those that add up slices in memory have a workspace. */
static uint64_t workspace_of(const Kernel* kernel, const void* args) {
  const uint32_t slices = kernel->arguments.slices;
  return slices && *(const int32_t*)((const char*)args + slices) > 1 ? 4096 : kernel->workspace;
}
static int workspace_size(const atomr_cutlass_row* row, const void* args, uint64_t* bytes) {
  *bytes = workspace_of(row->context, args);
  return 0;
}
static int prepare(const atomr_cutlass_row* row, const void* args, void* params, atomr_cutlass_launch* launch) {
  memcpy(params, args, row->params_bytes);
  memset(launch, 0, sizeof(*launch));
  launch->grid[0] = launch->grid[1] = launch->grid[2] = 1;
  launch->clear_bytes = workspace_of(row->context, args);
  return 0;
}
static int launch(const atomr_cutlass_row* row, const void* params, const atomr_cutlass_launch* how, void* stream) {
  const Kernel* kernel = row->context;
  char* workspace = *(char* const*)((const char*)params + kernel->arguments.workspace);
  (void)how;
  if (note_launch) {
    note_launch(kernel, params, stream);
    return 0;
  }
  if (stream == (void*)666) return FAKE_ERROR;
  for (uint64_t i = kernel->workspace; i-- > 0;) {
    if (workspace[i] != 0) return 1;
    workspace[i] = 1;
  }
  run(kernel, params);
  return 0;
}
"""

JIT = """
const atomr_cutlass_jit_info NAME_info = {LAYOUT_DIGEST, BYTES, 8, 0, 128, {1, 1, 1}, 0};
void NAME(void** arguments) { run(&kernel_0, arguments[0]); }
void NAME_evaluate(void** arguments) {
  const char* problems = *(void**)arguments[0];
  char* results = *(char**)arguments[1];
  uint64_t stride = *(uint64_t*)arguments[2];
  for (int i = 0; i < 2; ++i) {
    atomr_cutlass_jit_evaluation* answer = (void*)(results + i * stride);
    memset(answer, 0, sizeof(*answer));
    answer->implementable = 1;
    answer->grid[0] = answer->grid[1] = answer->grid[2] = 1;
    memcpy(results + i * stride + ATOMR_CUTLASS_JIT_PARAMS_OFFSET, problems + i * BYTES, BYTES);
  }
}
"""

_C_TYPES = {D.F32.value: "float", D.F64.value: "double"}
_LETTERS = {D.F64: "d", D.BF16: "b"}
"""Of element types of products; all others are float32 to them, but fp4 operands."""
_EXACT_LETTERS = {D.BF16: "b", D.F8E4M3: "q", D.F8E5M2: "r", D.F4E2M1: "x", D.I8: "c"}
"""Of element types of other operations, whose others are float32."""
_SCALE_LETTERS = {"f32": "b", "ue4m3": "n", "ue8m0": "m"}
_ARGUMENTS = re.compile(r"atomr_cutlass_(\w+)_args")


def make_pack(
    library: Path,
    keys: Sequence[KernelKey | tuple[str, str]],
    *,
    name: str = "fake",
    abi: str = "ATOMR_CUTLASS_ABI_VERSION",
    workspace: int = 0,
    largest_m: int = 2**31 - 1,
    error: int = 1,
) -> Path:
    """A pack of these keys, which also exports `last_args` of a GEMM, `launches` and `group_layout`.

    Args:
        library: where.
        keys: of any operation, of helpers in f32, bf16 and narrower types; or the (name, key as JSON) of a row that is
            only looked at.
        name: of the pack.
        abi: the version that the pack says.
        workspace: bytes that each kernel wants to find cleared.
        largest_m: that a GEMM implements.
        error: the status of launches on the stream 666.
    """
    source = source_of(keys, workspace=workspace, largest_m=largest_m, error=error)
    for i, key in enumerate(keys):
        row, text = key if isinstance(key, tuple) else (key.name, key.to_json())
        source += (
            f"static const atomr_cutlass_row row_{i} = {{{json.dumps(row)}, {json.dumps(text)}, {CONTENT}, "
            f"{Arguments.of(key).bytes}, 16, 1024, 128, 0, 13000, &kernel_{i}, supports, workspace_size, prepare, "
            "launch};\n"
        )
    entries = ", ".join(f"&row_{i}" for i in range(len(keys)))
    source += f"static const atomr_cutlass_row* const rows[] = {{{entries or 'NULL'}}};\n"
    return compile_library(source + exported(len(keys), name, abi), library)


def compile_at_run_time(library: Path, key: KernelKey) -> bytes:
    """The image of a kernel, and of its companion, for the driver of `fake_pack.make_driver`."""
    names = "".join(f"#define NAME{end} {key.name}{end}\n" for end in ("", "_evaluate", "_info"))
    source = source_of([key])
    jit = JIT.replace("BYTES", str(Arguments.of(key).bytes))
    return str(compile_library(source + names + jit, library)).encode() + b"\0"


@dataclass(frozen=True)
class Arguments:
    """The struct of a kernel's arguments, as the extension was built with it.

    Attributes:
        name: of the struct.
        bytes: its size.
        workspace: offset of the workspace's address.
        slices: of the number of slices of K, which products add up in memory; 0 where it has none, or where slices may
            be written one after the other.
        table: of the address of a list's table; 0 where it has none.
    """

    name: str
    bytes: int
    workspace: int
    slices: int
    table: int

    @classmethod
    def of(cls, key: KernelKey | tuple[str, str]) -> Arguments:
        """Those of a key; of a row that is only looked at, those of a product."""
        return cls._of("gemm" if isinstance(key, tuple) else arguments_of(key))

    @classmethod
    @functools.cache
    def _of(cls, op: str) -> Arguments:
        layout = _core.layout()
        # A struct has the name of its operation, or what the names of several have in common.
        kinds = {found[1]: name for name in layout if (found := _ARGUMENTS.fullmatch(name)) and found[1] in op}
        name = kinds[max(kinds, key=len)]
        offsets = {field: offset for field, offset, _, _ in layout[name]}
        slices = 0 if "split_parallel" in offsets else offsets.get("split_k", 0)
        size = max(offset + size for _, offset, size, _ in layout[name])
        return cls(name, size, offsets["workspace"], slices, offsets.get("table", 0))


def source_of(
    keys: Sequence[KernelKey | tuple[str, str]] = (), *, workspace: int = 0, largest_m: int = 2**31 - 1, error: int = 1
) -> str:
    """The C of all kernels, and of what tells those of these keys apart; arguments are as for `make_pack`."""
    source = f"#define FAKE_LARGEST_M {largest_m}\n#define FAKE_ERROR {error}\n{SOURCE_TEXT}"
    epilogues: dict[tuple[str, D, int], str] = {}
    for i, key in enumerate(keys):
        at = Arguments.of(key)
        fields: dict[str, object] = {
            "arguments": f"{{{at.bytes}, {at.workspace}, 0, {at.table}}}", "workspace": workspace
        }  # fmt: skip
        if isinstance(key, tuple):
            fields["operation"] = "&operation_gemm"
        else:
            epilogue = (key.epilogue, key.d, int(key.generation == "sm90"))
            if epilogue not in epilogues:
                finish = epilogues[epilogue] = f"finish_{len(epilogues)}"
                source += f"static void {finish}(double acc, const Element* e) {{ {_finish(*epilogue)} }}\n"
            rows, _, columns = key.scale_granularity
            letters = {
                "layout_a": key.layout_a, "layout_b": key.layout_b, "type_d": _LETTERS.get(key.d, "f"),
                "type": "x" if key.a is D.F4E2M1 else _LETTERS.get(key.a, "f"),
                "exact": _EXACT_LETTERS.get(key.a, "f"), "exact_d": _EXACT_LETTERS.get(key.d, "f"),
                "scales": _SCALE_LETTERS.get(key.scale_type, "s" if base_of(key.epilogue) == SCALED else ""),
                "form": key.mainloop[0] if key.mainloop in ("amax", "tensor") else "b",
            }  # fmt: skip
            fields |= {name: f"'{letter}'" if letter else 0 for name, letter in letters.items()}
            fields |= {"operation": f"&operation_{key.op}", "finish": epilogues[epilogue], "fresh": epilogue[2]}
            fields |= {"rows": rows, "columns": columns}
        text = ", ".join(f".{name} = {value}" for name, value in fields.items())
        source += f"static const Kernel kernel_{i} = {{{text}}};\n"
    return source


def _finish(epilogue: str, d: D, fresh: int) -> str:
    """The C of an epilogue, for one element."""
    program = split(epilogue)[1]
    if not program:
        if is_common(epilogue):
            return f"store_told('{_LETTERS.get(d, 'f')}', e, told(acc, e));"
        value = "op_relu(acc)" if epilogue.endswith("_relu") else "acc"
        return f"store('{_LETTERS.get(d, 'f')}', e->d, {value});"
    known = {"acc", "constant", "input", "out", "store", "reduce", *re.findall(r"double op_(\w+)", SOURCE_TEXT)}
    ops = {line.partition(":")[0] for line in program.removeprefix(PREFIX).split(";")}
    return body_of(program, d, fresh) if ops <= known else "(void)acc, (void)e; abort();"  # of kernels only looked at


def body_of(program: str, d: D, fresh: int) -> str:
    """The C of a tree's program, for one element."""
    inputs, outputs = operand_kinds(program)
    letter = _LETTERS.get(d, "f")
    lines, read, values, written = [], 0, 0, len(inputs)
    for line in program.removeprefix(PREFIX).split(";"):
        op, *words = line.split(":")
        if op == "out":
            lines.append(f"store('{letter}', e->d, v{words[0]});")
        elif op in ("store", "reduce"):
            kind, dtype, reduction = outputs[written - len(inputs)]
            if kind == MASK:
                lines.append(f"store_bit(e, {written}, v{words[0]} != 0, {fresh});")
            else:
                of, size = _C_TYPES[dtype], {"float": 4, "double": 8}[_C_TYPES[dtype]]
                target, value = f"*({of}*)at(e, {written}, e->j, {size})", f"({of})v{words[0]}"
                greater = f"if (op_absolute({value}) > {target}) {target} = ({of})op_absolute({value});"
                lines.append({"": f"{target} = {value};", "sum": f"{target} += {value};", "amax": greater}[reduction])
            written += 1
        else:
            made = f"op_{op}({', '.join(f'v{word}' for word in words)})"
            if op == "acc":
                made = "acc"
            elif op == "constant":
                made = str(float.fromhex(words[0]))
            elif op == "input":
                kind, dtype = inputs[read]
                made = {
                    SOURCE: f"load('{letter}', e->source, 0)",
                    MASK: f"*(const uint8_t*)at(e, {read}, e->j / 8, 1) >> e->j % 8 & 1",
                }.get(kind) or f"*(const {_C_TYPES[dtype]}*)at(e, {read}, e->j, {8 if dtype == D.F64.value else 4})"
                read += 1
            lines.append(f"const double v{values} = (double)({made});")
            values += 1
    return " ".join(lines)
