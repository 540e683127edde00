"""GEMMs whose K is divided into slices: a kernel computes them side by side, another one adds them up.

For few results and a long K, where the tiles of D alone leave multiprocessors idle. Slices are whole steps of the
kernel and all as long; steps beyond the end of K are zeros. Sums are added in the order of K: the same bits every time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.lower import LINEAR, SCALED
from ...generator.families.cast import PAIRS, cast
from ...generator.rules import FP8_TYPES, HALF_TYPES
from ...pipeline import devices, estimate, problem, select
from ...pipeline.devices import Device
from ...pipeline.plan import NO_PRODUCT, PRODUCT, Address, Steps, bytes_of
from ...pipeline.problem import GemmFormulation, GemmProblem, is_dense
from ...pipeline.search import Candidate, ExactSearch

ALIGNMENT = 16
"""Bytes that C and D are aligned to, which are read and written so."""
LEAST_K = 1024
"""Of a problem that is divided."""


def formulations(whole: GemmProblem) -> list[GemmFormulation]:
    """The ways to put a problem to kernels that divide K; none where no kernel adds up such a result, or K is short."""
    d = whole.d
    if (
        whole.epilogue not in (LINEAR, SCALED)
        or whole.scale_type
        or whole.quantized
        or whole.batch != 1
        or whole.k < LEAST_K
        or not (whole.a.dtype in (*HALF_TYPES, *FP8_TYPES, CutlassDtype.F64) or whole.math in ("tf32", "ieee"))
        or (whole.acc, d.dtype) not in PAIRS
        or 2 * bytes_of(d.shape, whole.acc) > estimate.DIVIDED_MOST_BYTES
        or d.alignment % ALIGNMENT
        or not any(is_dense(d.shape[-2:][::step], d.strides[-2:][::step]) for step in (1, -1))
        or (whole.c is not None and (whole.c.alignment % ALIGNMENT or whole.c.strides[-2:] != d.strides[-2:]))
    ):
        return []
    sums = dataclasses.replace(d, dtype=whole.acc, alignment=256)
    found = problem.formulations(dataclasses.replace(whole, c=None, d=sums))
    return [formulation._replace(divided=True, problem=whole) for formulation in found]


@functools.lru_cache(64)
def sums(acc: CutlassDtype, dtype: CutlassDtype, device: Device, arch: SmArch | None = None) -> ExactSearch:
    """The kernel that adds slices of one type up into another; of one slice, the cast."""
    return ExactSearch(lambda arch: cast(arch, acc, dtype), device, arch)


def alignment(candidate: Candidate[GemmFormulation], dtype: CutlassDtype) -> int:
    """Elements of a type that C and D must be aligned to: for the kernel itself, or for the one that adds up."""
    return ALIGNMENT * 8 // dtype.bits if candidate.formulation.divided else candidate.key.align_d


def add_steps(
    steps: Steps,
    whole: GemmProblem,
    candidate: Candidate[GemmFormulation],
    args: dict[str, Any],
    addresses: tuple[Address, Address, Address | None, Address],
    *,
    unmultiplied: bool,
    backend: str,
    jit: str | None,
) -> None:
    """Adds the launches of both kernels to a plan.

    Args:
        steps: of the plan.
        whole: the problem as the caller has it.
        candidate: the kernel, with its slices.
        args: its arguments; those of addresses and scalars are set here.
        addresses: of a, b, c where there may be one, and out.
        unmultiplied: whether there are calls whose alpha is 0.
        backend: of the plan, like `jit`.
        jit: see there.
    """
    a, b, c, out = addresses
    adder = select.choose(sums(whole.acc, whole.d.dtype, devices.get(whole.device)), backend=backend, jit=jit)
    count, formulation = math.prod(whole.d.shape), candidate.formulation
    # The kernel that adds up reads vectors of each slice.
    stride = problem.round_up(count, ALIGNMENT * 8 // whole.acc.bits)
    sliced = steps.temporary(candidate.split_k * stride * whole.acc.bits // 8)
    first, second = (b, a) if formulation.swapped else (a, b)
    steps.launch(
        candidate,
        args | {
            "batch": 1, "a": first, "b": second, "c": None, "d": sliced, "alpha": 1.0, "beta": 0.0,
            "batch_stride_d": stride,
        },
        main=True,
        when=PRODUCT,
    )  # fmt: skip
    result = {"count": count, "slice_stride": stride, "c": c, "d": out, "alpha": "alpha", "beta": "beta"}
    steps.launch(adder, result | {"slices": candidate.split_k, "a": sliced}, when=PRODUCT)
    if unmultiplied:
        zeros = steps.zeros(bytes_of(whole.d.shape, whole.acc))
        steps.launch(adder, result | {"slices": 1, "a": zeros}, when=NO_PRODUCT)
