"""Transposed copies of operands on sm_90, for kernels that read them in the other layout alone, or faster.

WGMMA reads 8-bit types and tf32 contiguous along K alone, FFMA kernels are faster if no operand is, and TMA needs rows
of whole vectors, which f16 and bf16 have along K though M or N is odd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...generator.dtypes import CutlassDtype
from ...generator.families import transpose
from ...generator.key import COLUMN, ROW, KernelKey
from ...pipeline import devices, select
from ...pipeline.devices import Device
from ...pipeline.plan import PRODUCT, Address, Steps
from ...pipeline.problem import GemmFormulation, TransposedCopy, round_up
from ...pipeline.search import ExactSearch

MOST_BATCHES = 65535
"""That one launch copies: the z extent of a CUDA grid."""

MOST_ROWS = 65535 * 64
"""Of an operand that one launch copies: the y extent of a CUDA grid, in the smaller of its tiles."""

LEAST_PRODUCTS = 1 << 24
"""Multiply-adds of IEEE f32 that are worth a copy: fewer take no longer than its launch."""

LINE_BYTES = 16
"""Rows of a copy begin at multiples of it, as TMA asks."""


def with_copies(found: Iterable[GemmFormulation], device: Device) -> list[GemmFormulation]:
    """The formulations, and at the end those in which one operand is copied before, into its other layout."""
    found = list(found)
    if device.capability != (9, 0):
        return found
    return found + [copied for formulation in found for copied in _copied(formulation)]


def _copied(formulation: GemmFormulation) -> Iterator[GemmFormulation]:
    """Formulations that copy one operand first, where that may be faster."""
    problem = formulation.problem
    dtype, bits = problem.a.dtype, problem.a.dtype.bits
    if problem.b.dtype.bits != bits or formulation.batches.count > MOST_BATCHES:
        return
    along_k = formulation.layout_a == ROW, formulation.layout_b == COLUMN
    if (dtype, problem.math) == (CutlassDtype.F32, "ieee"):
        # FFMA kernels that load no vectors load elements that lie along K one by one, a few of each row at a time.
        # Copies of A do not pay.
        products = formulation.m * formulation.n * formulation.k
        vectors = along_k[0] and min(formulation.align_a, formulation.align_b) * bits >= LINE_BYTES * 8
        if along_k[1] and formulation.layout_d == ROW and products >= LEAST_PRODUCTS and not vectors:
            for copied in _copy_of(formulation, first=False):
                yield copied._replace(align_b=1)  # N may be a multiple of nothing
    elif bits == 16:
        # Rows of odd length, say, which TMA does not read.
        aligned = formulation.align_a * bits == LINE_BYTES * 8, formulation.align_b * bits == LINE_BYTES * 8
        if aligned[0] != aligned[1] and not along_k[0 if aligned[1] else 1]:
            yield from _copy_of(formulation, first=aligned[1])
    elif (bits == 8 or (dtype, problem.math) == (CutlassDtype.F32, "tf32")) and along_k[0] != along_k[1]:
        # WGMMA reads such operands along K alone.
        yield from _copy_of(formulation, first=along_k[1])


def _copy_of(formulation: GemmFormulation, *, first: bool) -> Iterator[GemmFormulation]:
    """The formulation with the kernel's first or second operand copied, in its other layout."""
    dtype = formulation.problem.a.dtype
    line, strides = LINE_BYTES * 8 // dtype.bits, formulation.batch_strides
    if (formulation.align_a if first else formulation.align_b) < transpose.alignment(dtype):
        return
    extent, source = (formulation.m, formulation.lda) if first else (formulation.n, formulation.ldb)
    onto_k = formulation.layout_a == COLUMN if first else formulation.layout_b == ROW
    rows, columns = (extent, formulation.k) if onto_k else (formulation.k, extent)
    if columns > MOST_ROWS:
        return
    batch_stride, leading = strides[0 if first else 1], round_up(columns, line)
    size = rows * columns * dtype.bits // 8 * (formulation.batches.count if batch_stride else 1)
    copied = TransposedCopy("a" if first != formulation.swapped else "b", source, batch_stride, size)
    stride = rows * leading if batch_stride else 0
    strides = (stride, *strides[1:]) if first else (strides[0], stride, *strides[2:])
    letter, layout = ("a", ROW if onto_k else COLUMN) if first else ("b", COLUMN if onto_k else ROW)
    changes: dict[str, Any] = {f"layout_{letter}": layout, f"ld{letter}": leading, f"align_{letter}": line}
    yield formulation._replace(copied=copied, batch_strides=strides, **changes)


def is_first(formulation: GemmFormulation) -> bool:
    """Whether the operand that is copied is the kernel's first."""
    return formulation.copied is not None and (formulation.copied.operand == "a") != formulation.swapped


def lies_along_k(formulation: GemmFormulation) -> bool:
    """Whether the copy is contiguous along K; else it is along M or N."""
    return formulation.layout_a == ROW if is_first(formulation) else formulation.layout_b == COLUMN


@functools.lru_cache(64)
def helper(dtype: CutlassDtype, device: Device) -> ExactSearch:
    """The kernel that copies operands of a type."""
    return ExactSearch(lambda arch: transpose.transpose(arch, dtype), device)


def alignments(key: KernelKey, formulation: GemmFormulation) -> tuple[int, int]:
    """Elements that A and B must be aligned to, as the caller has them."""
    found = {"a": key.align_a, "b": key.align_b}
    if formulation.swapped:
        found = {"a": key.align_b, "b": key.align_a}
    if formulation.copied is not None:
        found[formulation.copied.operand] = transpose.alignment(formulation.problem.a.dtype)
    return found["a"], found["b"]


def copies(
    steps: Steps, formulation: GemmFormulation, *, backend: str, jit: str | None
) -> Callable[[Address, Address, int], tuple[Address, Address]]:
    """A function that adds the copy before a product to a plan, if any, and returns where the kernel reads A and B.

    Its arguments are where the caller has them, and the number of batches; `backend` and `jit` are the plan's.
    """
    copied = formulation.copied
    if copied is None:
        return lambda a, b, _batches: (a, b)
    extent, leading = (formulation.m, formulation.lda) if is_first(formulation) else (formulation.n, formulation.ldb)
    rows, columns = (extent, formulation.k) if lies_along_k(formulation) else (formulation.k, extent)
    dtype = formulation.problem.a.dtype  # both operands have as many bits
    each = rows * leading
    target = steps.temporary((formulation.batches.count if copied.batch_stride else 1) * each * dtype.bits // 8)
    kernel = select.choose(helper(dtype, devices.get(steps.device)), backend=backend, jit=jit)

    def copy(a: Address, b: Address, batches: int) -> tuple[Address, Address]:
        args = {
            "m": columns, "n": 1, "k": rows, "batch": batches if copied.batch_stride else 1,
            "a": a if copied.operand == "a" else b, "lda": copied.leading, "batch_stride_a": copied.batch_stride,
            "d": target, "ldd": leading, "batch_stride_d": each,
        }  # fmt: skip
        steps.launch(kernel, args, when=PRODUCT)
        return (target, b) if copied.operand == "a" else (a, target)

    return copy
