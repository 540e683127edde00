"""A pack of grouped GEMM kernels in float32 that run on the host, for `fake_pack`'s driver.

They find their groups as the setup kernel of real ones does (grouped_setup.h), so that what plans tell kernels is
tested without a GPU.
"""

import json
from pathlib import Path
from typing import Any

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass import epilogue as evt
from atomr_cutlass.generator.epilogue.common import bias_and_activation
from atomr_cutlass.generator.epilogue.lower import COMMON, SCALED_COMMON, epilogue_id
from atomr_cutlass.generator.key import KernelKey
from fake_pack import CONTENT, compile_library, exported

KERNEL = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "atomr_cutlass/kernel_abi.h"

typedef atomr_cutlass_grouped_args Args;
typedef atomr_cutlass_group Group;

static int64_t clamp(int64_t value, int64_t limit) { return value < 0 ? 0 : (value > limit ? limit : value); }
static const float* moved(const void* from, int64_t elements) {
  return from == NULL ? NULL : (const float*)from + elements;
}

/* layouts of A and B; what is done with scales: "-" none, "s" scaled, "b" blocks; the tree: "-" none, "+" a bias, "t"
 * without one, "q" AFFINE below, "m" what the arguments say; "r" is relu */
static Group find(const Args* p, const char* how, int g, int64_t* before) {
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
    a = how[0] == 'r' ? start : start * p->lda;
    b = how[1] == 'r' ? start * p->ldb : start;
  } else if (contiguous) {
    a = how[0] == 'r' ? start * p->lda : start;
    c += start * p->ldc, d = start * p->ldd;
  }
  int64_t scale_a = g * p->scale_group_stride_a, scale_b = g * p->scale_group_stride_b;
  if (how[2] == 'b') {
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

/* element j of an operand of the tree, which does not vary along M */
static float operand(const Args* p, int number, int group, int64_t j) {
  const atomr_cutlass_tree_operand* one = &p->operands[number];
  const float* from = (const float*)one->pointer + group * one->batch_stride;
  if (p->form == ATOMR_CUTLASS_GROUPED_LIST) from = ((const float* const*)one->pointer)[group];
  return from[j * one->stride_n];
}

static void multiply(const Args* p, const char* how, const Group* g, int number) {
  const float *a = g->a, *b = g->b, *c = g->c, *scale_a = g->scale_a, *scale_b = g->scale_b;
  for (int64_t i = 0; i < g->m; ++i) {
    for (int64_t j = 0; j < g->n; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < g->k; ++k) {
        double term = (double)(how[0] == 'r' ? a[i * g->lda + k] : a[i + k * g->lda]) *
                      (double)(how[1] == 'r' ? b[k * g->ldb + j] : b[k + j * g->ldb]);
        if (how[2] == 'b') {
          term *= (double)scale_a[i * p->scale_stride_a + k / 128 * p->scale_k_stride_a] *
                  (double)scale_b[j / 128 * p->scale_stride_b + k / 128 * p->scale_k_stride_b];
        }
        sum += term;
      }
      if (how[2] == 's') {
        if (scale_a != NULL) sum *= scale_a[p->scale_form_a == 1 ? i : 0];
        if (scale_b != NULL) sum *= scale_b[p->scale_form_b == 1 ? j : 0];
      }
      sum = p->alpha * sum + (p->beta != 0 ? p->beta * c[i * g->ldc + j] : 0);
      int64_t const told = how[3] == 'm' ? p->operands[0].stride_m : 0; /* 1 for a bias, 4 for relu */
      if (told & 1) sum += operand(p, 0, number, j);
      if (told >> 2 == 1 && sum < 0) sum = 0;
      if (how[3] == '+') sum += operand(p, 0, number, j);
      if (how[3] == 'q') sum = sum * operand(p, SCALAR, number, j) + operand(p, ROW, number, j);
      ((float*)g->d)[i * g->ldd + j] = (float)(how[4] == 'r' && sum < 0 ? 0 : sum);
    }
  }
}

static int supports(const atomr_cutlass_row* row, const void* given) {
  const Args* p = given;
  const char* how = row->context;
  if (how[2] == '-' && (p->scale_a != NULL || p->scale_b != NULL)) return ATOMR_CUTLASS_CANNOT_IMPLEMENT;
  return p->groups < 1 ? ATOMR_CUTLASS_CANNOT_IMPLEMENT : ATOMR_CUTLASS_OK;
}
static int workspace_size(const atomr_cutlass_row* row, const void* args, uint64_t* bytes) {
  (void)row, (void)args;
  *bytes = 64;
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
  const Args* p = params;
  int64_t before = 0;
  (void)how, (void)stream;
  for (int g = 0; g < p->groups; ++g) {
    const Group group = find(p, row->context, g, &before);
    multiply(p, row->context, &group, g);
  }
  return 0;
}
"""

LAYOUT = """
/* size and the offsets of the fields that a table of a list is written with */
const int32_t group_layout[] = {
    sizeof(Group), offsetof(Group, a), offsetof(Group, b), offsetof(Group, c), offsetof(Group, d),
    offsetof(Group, scale_a), offsetof(Group, scale_b), offsetof(Group, lda), offsetof(Group, ldb),
    offsetof(Group, ldc), offsetof(Group, ldd), offsetof(Group, m), offsetof(Group, n), offsetof(Group, k),
};
"""


def affine(acc: Any, row: Any, factor: Any) -> Any:
    """A tree of a row and of a scalar."""
    return acc * factor + row


AFFINE = evt.trace(affine, {"row": evt.Operand("row", D.F32), "factor": evt.Operand("scalar", D.F32)}).tree
_PLACES = {one.kind: number for number, one in enumerate(AFFINE.inputs)}


def key(layouts: str, kind: str, align: int, tree: str = "-", activation: str = "-") -> KernelKey:
    """A cell in float32, which no real one multiplies. `kind`, `tree` and `activation` are as in the C text.

    Those with trees are called sm90's, whose kernels have such, those that are told theirs sm100's, the others sm80's.
    """
    epilogue = "scaled" if kind == "s" else "lc"
    named = "relu" if activation == "r" else None
    if tree == "m":
        epilogue = SCALED_COMMON if kind == "s" else COMMON
    elif tree == "q":
        epilogue = epilogue_id(epilogue, AFFINE.program)
    elif tree != "-":
        epilogue = epilogue_id(epilogue, bias_and_activation(D.F32 if tree == "+" else None, named).program)
    elif named:
        epilogue += f"_{named}"
    return KernelKey(
        op="grouped_gemm", generation={"-": "sm80", "m": "sm100"}.get(tree, "sm90"), arch=SmArch.SM80,
        a=D.F32, b=D.F32, d=D.F32, acc=D.F32,
        layout_a=layouts[0], layout_b=layouts[1], layout_d="r", align_a=align, align_b=align, align_d=align,
        tile=(64, 64, 32), cluster=(1, 1, 1), warps=(2, 2, 1), stages=2 if align == 1 else 4,
        mainloop="twostage" if align == 1 else "multistage", epilogue_schedule="", scheduler="grouped", swizzle=0,
        math="ieee", epilogue=epilogue,
        scale_granularity=(1, 128, 128) if kind == "b" else (0, 0, 0), scale_type="f32" if kind == "b" else "",
    )  # fmt: skip


_SCALED = [
    *((layouts, "s") for layouts in ("rr", "rc", "cr")),
    *((layouts, "b") for layouts in ("rr", "rc")),
]
_WAYS = {
    way: key(*way)
    for way in [
        *((layouts, "-", align, "-", one) for layouts in ("rr", "rc", "cr") for align in (1, 4) for one in "-r"),
        *((layouts, kind, 1, "-", "-") for layouts, kind in _SCALED),
        *(
            (layouts, kind, 1, *fused)
            for layouts, kind in (*((one, "-") for one in ("rr", "rc", "cr")), *_SCALED)
            for fused in (("+", "-"), ("+", "r"), ("t", "r"), ("q", "-"), *([("m", "-")] if kind != "b" else []))
        ),
    ]
}
KEYS = list(_WAYS.values())


def make_pack(library: Path) -> Path:
    """The pack of `KEYS`; also exports `group_layout`."""
    source = "".join(f"#define {kind.upper()} {place}\n" for kind, place in _PLACES.items()) + KERNEL + LAYOUT
    for i, ((layouts, kind, _, tree, activation), one) in enumerate(_WAYS.items()):
        how = layouts + kind + tree + activation
        source += (
            f"static const atomr_cutlass_row row_{i} = {{{json.dumps(one.name)}, {json.dumps(one.to_json())}, "
            f"{CONTENT}, sizeof(Args), 16, 1024, 128, 0, 13000, "
            f"{json.dumps(how)}, supports, workspace_size, prepare, launch}};\n"
        )
    entries = ", ".join(f"&row_{i}" for i in range(len(KEYS)))
    source += f"static const atomr_cutlass_row* const rows[] = {{{entries}}};\n{exported(len(KEYS))}"
    return compile_library(source, library)
