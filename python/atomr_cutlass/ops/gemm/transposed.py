"""Transposed copies of operands, for kernels that read them contiguous along K alone: 8-bit types and tf32 on sm_90."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from ...generator.archs import SmArch
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

MOST_K = 65535 * 64
"""Elements along K of an operand that one launch copies: the y extent of a CUDA grid, in the smaller of its tiles."""

LINE_BYTES = 16
"""Rows of a copy begin at multiples of it, as TMA asks."""


def with_copies(found: Iterable[GemmFormulation], device: Device) -> list[GemmFormulation]:
    """The formulations, and at the end those in which one operand is copied before, so that both lie along K."""
    found = list(found)
    if device.capability != (9, 0):
        return found
    return found + [copied for formulation in found for copied in _copied(formulation)]


def _copied(formulation: GemmFormulation) -> Iterator[GemmFormulation]:
    problem, layouts = formulation.problem, (formulation.layout_a, formulation.layout_b)
    dtype = problem.a.dtype
    turned = problem.b.dtype.bits == dtype.bits == 8 or (dtype, problem.math) == (CutlassDtype.F32, "tf32")
    if not turned or layouts not in ((ROW, ROW), (COLUMN, COLUMN)):
        return
    if formulation.k > MOST_K or formulation.batches.count > MOST_BATCHES:
        return
    square, line = transpose.SQUARE_BYTES * 8 // dtype.bits, LINE_BYTES * 8 // dtype.bits
    first, leading, strides = layouts == (COLUMN, COLUMN), round_up(formulation.k, line), formulation.batch_strides
    if (formulation.align_a if first else formulation.align_b) < square:
        return
    source = formulation.lda if first else formulation.ldb
    batch_stride = strides[0 if first else 1]
    extent = formulation.m if first else formulation.n
    size = extent * formulation.k * dtype.bits // 8 * (formulation.batches.count if batch_stride else 1)
    copied = TransposedCopy("a" if first != formulation.swapped else "b", source, batch_stride, size)
    stride = extent * leading if batch_stride else 0
    changes: dict[str, Any]
    if first:
        changes = {"layout_a": ROW, "lda": leading, "align_a": line, "batch_strides": (stride, *strides[1:])}
    else:
        changes = {"layout_b": COLUMN, "ldb": leading, "align_b": line}
        changes["batch_strides"] = (strides[0], stride, *strides[2:])
    yield formulation._replace(copied=copied, **changes)


def helper(formulation: GemmFormulation, device: Device) -> ExactSearch:
    """The kernel that copies the operand of a formulation."""
    return _helper(transpose.standing_for(formulation.problem.a.dtype), device)


@functools.lru_cache(64)
def _helper(dtype: CutlassDtype, device: Device) -> ExactSearch:
    def make(arch: SmArch) -> KernelKey:
        return transpose.transpose(arch, dtype)

    return ExactSearch(make, device)


def _bits(formulation: GemmFormulation) -> int:
    """Of an element of the operand that is copied: both operands have as many."""
    return formulation.problem.a.dtype.bits


def alignments(key: KernelKey, formulation: GemmFormulation) -> tuple[int, int]:
    """Elements that A and B must be aligned to, as the caller has them."""
    found = {"a": key.align_a, "b": key.align_b}
    if formulation.swapped:
        found = {"a": key.align_b, "b": key.align_a}
    if formulation.copied is not None:
        found[formulation.copied.operand] = transpose.SQUARE_BYTES * 8 // _bits(formulation)
    return found["a"], found["b"]


class Copies:
    """The copies of a plan in the making, one before each of its products."""

    def __init__(self, steps: Steps, formulation: GemmFormulation, *, backend: str, jit: str | None) -> None:
        """For a plan of a formulation, which may want no copy; `backend` and `jit` are the plan's."""
        self._steps, self._formulation, self._copied = steps, formulation, formulation.copied
        if self._copied is None:
            return
        # Whether it is the first operand of the kernel.
        first = (self._copied.operand == "a") != formulation.swapped
        self._extent = formulation.m if first else formulation.n
        self._leading = formulation.lda if first else formulation.ldb
        self._elements = self._extent * self._leading
        batches = formulation.batches.count if self._copied.batch_stride else 1
        self._target = steps.temporary(batches * self._elements * _bits(formulation) // 8)
        self._kernel = select.choose(helper(formulation, devices.get(steps.device)), backend=backend, jit=jit)

    def of(self, a: Address, b: Address, batches: int) -> tuple[Address, Address]:
        """A and B of so many batches as the kernel reads them, which the next step does."""
        copied = self._copied
        if copied is None:
            return a, b
        args = {
            "m": self._formulation.k, "n": 1, "k": self._extent, "batch": batches if copied.batch_stride else 1,
            "a": a if copied.operand == "a" else b, "lda": copied.leading, "batch_stride_a": copied.batch_stride,
            "d": self._target, "ldd": self._leading, "batch_stride_d": self._elements,
        }  # fmt: skip
        self._steps.launch(self._kernel, args, when=PRODUCT)
        return (self._target, b) if copied.operand == "a" else (a, self._target)
