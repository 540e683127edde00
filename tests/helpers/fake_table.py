"""A kernel table without compiled kernels: the matrix's own cells, as rows."""

import functools
from collections.abc import Iterable

import pytest

from atomr_cutlass import SmArch
from atomr_cutlass.generator.key import KernelKey, shared_memory
from atomr_cutlass.generator.matrix import ARCHS, expand
from atomr_cutlass.pipeline import table
from atomr_cutlass.pipeline.devices import Device
from atomr_cutlass.pipeline.table import KernelInfo

H200 = Device(0, "a Hopper GPU", (9, 0), 132, SmArch.SM90A.shared_memory, 50 << 20, 140 << 30, 4917 * 10**9)
A100 = Device(0, "an Ampere GPU", (8, 0), 108, SmArch.SM80.shared_memory, 40 << 20, 80 << 30, 2039 * 10**9)
ADA = Device(0, "an Ada GPU", (8, 9), 142, SmArch.SM89.shared_memory, 72 << 20, 48 << 30, 864 * 10**9)


def row(
    key: KernelKey, *, ptx: bool = False, pack: str = "", shared_bytes: int | None = None, cuda_version: int = 13000
) -> KernelInfo:
    """A row for a key; without a size, shared memory is what such kernels take."""
    shared = shared_memory(key) if key.generation == "sm80" else 200 << 10
    size = shared if shared_bytes is None else shared_bytes
    return KernelInfo(key.name, key, pack, ptx, size, 128, cuda_version, content="")


def rows_of(
    preset: str = "full", archs: Iterable[SmArch] = ARCHS["gemm"], *, ptx: Iterable[SmArch] = ()
) -> list[KernelInfo]:
    """The cells of a preset as rows; those of the archs in `ptx` carry PTX."""
    return list(_rows_of(preset, tuple(archs), frozenset(ptx)))


@functools.cache
def _rows_of(preset: str, archs: tuple[SmArch, ...], ptx: frozenset[SmArch]) -> list[KernelInfo]:
    return [row(key, ptx=key.arch in ptx) for key in expand(preset, archs)]


def install(monkeypatch: pytest.MonkeyPatch, rows: Iterable[KernelInfo]) -> None:
    """Makes `rows` the kernel table."""
    kept = tuple(rows)
    monkeypatch.setattr(table, "rows", lambda: kept)
