"""Candidates: kernels for a problem, with how the problem is put to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from ..generator.key import KernelKey
from .table import KernelInfo
from .tile_scheduler import HEURISTIC

F = TypeVar("F")


@dataclass(frozen=True)
class Candidate(Generic[F]):
    """A kernel for a problem, its launch options, and how the problem is put to it.

    Attributes:
        key: the kernel's key.
        info: the kernel's row of the table, or None where it has to be compiled at run time.
        seconds: the model's estimate of one launch.
        formulation: how the problem is put to the kernel: operands swapped, an operand of a tree as C, operands cast, a
            convolution as a GEMM. None for kernels of one task, such as casts.
        split_k: slices of K.
        swizzle, raster: for the persistent scheduler (sm90 generation); see `tile_scheduler`.
        tuned: whether a record of `tuning` says so, and not the model.
    """

    key: KernelKey
    info: KernelInfo | None
    seconds: float
    formulation: F
    split_k: int = 1
    swizzle: int = 1
    raster: int = HEURISTIC
    tuned: bool = False

    @property
    def origin(self) -> str:
        """Where the kernel comes from: `prebuilt`, `pack NAME` or `jit`."""
        return "jit" if self.info is None else self.info.origin
