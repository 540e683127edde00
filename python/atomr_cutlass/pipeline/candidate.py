"""Kernels as the table lists them, and as candidates: with how a problem is put to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..generator.key import KernelKey

F = TypeVar("F")

HEURISTIC, ALONG_M, ALONG_N = range(3)
"""Raster orders, as kernels' arguments have them: along which side of the result neighbours in the list of tiles lie.
With the first, CUTLASS chooses."""


@dataclass(frozen=True)
class KernelInfo:
    """A row of the table.

    Attributes:
        name: CUTLASS's procedural name with the key's digest.
        key: the kernel's key.
        pack: name of the pack that it came from; empty for the extension's own.
        ptx: whether it carries PTX, which newer GPUs translate.
        shared_bytes: dynamic shared memory of a thread block.
        threads: threads of a thread block.
        cuda_version: the toolkit that compiled it; 13000 means 13.0.
        content: what it was compiled from and by: the digests of its source and of CUTLASS, and the compiler.
    """

    name: str
    key: KernelKey
    pack: str
    ptx: bool
    shared_bytes: int
    threads: int
    cuda_version: int
    content: str

    @property
    def origin(self) -> str:
        """`prebuilt`, or `pack NAME`."""
        return f"pack {self.pack}" if self.pack else "prebuilt"

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-ready values, the key's fields among them."""
        row = dict(vars(self))
        return {"name": row.pop("name"), **row.pop("key").to_dict(), **row}


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
        swizzle, raster: for the persistent scheduler (sm90 generation); see cpp/src/tile_scheduler.h.
        width: columns of a tile (of D^T: rows of D), for kernels whose launch chooses them; 0 of others.
        tuned: whether a record of `tuning` says so, and not the model.
        named: whether a user has named the kernel (`heuristics`).
    """

    key: KernelKey
    info: KernelInfo | None
    seconds: float
    formulation: F
    split_k: int = 1
    swizzle: int = 1
    raster: int = HEURISTIC
    width: int = 0
    tuned: bool = False
    named: bool = False

    @property
    def options(self) -> tuple[int, int, int, int]:
        """The launch options: slices of K, swizzle, raster order and width."""
        return self.split_k, self.swizzle, self.raster, self.width

    @property
    def origin(self) -> str:
        """Where the kernel comes from: `prebuilt`, `pack NAME` or `jit`."""
        return "jit" if self.info is None else self.info.origin
