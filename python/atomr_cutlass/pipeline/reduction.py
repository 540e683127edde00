"""Batch invariance: kernels that add up the products of a row in one order, whatever the other rows are.

The order of a kernel is its `Reduction`, a function of its key and, of a long K, of the slices that the problem fixes.
Two kernels of one reduction give a row of D the same bits, whichever tile, cluster or schedule they have, and with
operands swapped or not (tests/gpu/test_batch_invariant.py compares them). One reduction serves a problem for every
number of rows; `select.reduction` chooses it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..generator.epilogue.lower import base_of, is_common
from ..generator.key import ANYWHERE, KernelKey, instruction_shape
from ..generator.rules import SPLIT

VARIABLE = "ATOMR_CUTLASS_BATCH_INVARIANT"

INSTRUCTION_BYTES = 32
"""Of K in one WGMMA or tcgen05 instruction."""


class Reduction(NamedTuple):
    """The order in which a kernel adds up the products of an element of D, and the arithmetic of its epilogue.

    Attributes:
        instruction_k: elements of K in one instruction.
        tile_k: elements of K in a step of the mainloop; the sm80 generation begins with the remainder of K.
        warps_k: warps that divide a step among them.
        epilogue: the scaling that the epilogue begins with, and whether its operations are arguments of the launch.
        iteration: the order of a convolution's taps and channels; empty elsewhere.
        slices: parts of K that are added up by themselves first, where the problem fixes their number: as many, or
            fewer of whole steps that come to K.
    """

    arch: str
    generation: str
    math: str
    instruction_k: int
    tile_k: int
    warps_k: int
    epilogue: str
    op: str
    iteration: str = ""
    slices: int = 1

    def __str__(self) -> str:
        order = f"{self.instruction_k} elements of K at a time in steps of {self.tile_k}"
        slices = f" in up to {self.slices} slices, which are then added in their order" if self.slices > 1 else ""
        kind = f"{self.generation} for {self.arch}, {self.math} math, {self.epilogue}"
        return f"{order}, one after the other{slices} ({kind})"


@dataclass(frozen=True)
class BatchInvariant:
    """A problem that is served batch-invariantly: its tuned choices are kept apart from those of the problem itself."""

    problem: Any


def reduction_of(key: KernelKey) -> Reduction | None:
    """The reduction of a kernel, of one slice where it adds up several; None where its order depends on the rows.

    Stream-K and split kernels, and those whose operands begin anywhere, cut K by the number of tiles. Kernels for few
    rows are launched to add up in the order of K (gemm_few_sm90.h).
    """
    if key.scheduler == "streamk" or key.mainloop in (SPLIT, *ANYWHERE):
        return None
    sm80 = key.generation == "sm80"
    instruction_k = instruction_shape(key)[2] if sm80 else INSTRUCTION_BYTES * 8 // key.a.bits
    epilogue = f"{base_of(key.epilogue)}+common" if is_common(key.epilogue) else base_of(key.epilogue)
    iteration = " ".join(filter(None, (key.iterator, key.stride_support, key.group_mode)))
    if key.group_mode:  # a tile of several groups adds zeros to the sums of each
        iteration += f" {key.tile[1]}"
    return Reduction(
        key.arch.value, key.generation, key.math, instruction_k, key.tile[2], max(1, key.warps[2]), epilogue, key.op,
        iteration,
    )  # fmt: skip


def is_batch_invariant(option: bool | None) -> bool:
    """Whether a call or request is batch-invariant: its option, or if that is None the environment variable."""
    return os.environ.get(VARIABLE) == "1" if option is None else bool(option)


def refuse_sums(names: Iterable[str]) -> None:
    """Refuses results, of these names, that are sums or maxima of a batch-invariant product."""
    found = ", ".join(names)
    if found:
        raise UnsupportedError(
            f"{found} cannot be batch-invariant: it is reduced over elements of D, over rows or in the order in which "
            f"tiles end; leave it out, or leave batch_invariant (or {VARIABLE}) out"
        )
