"""Common parts of the families of our own sm90 GEMM kernels: keys and schedules."""

from __future__ import annotations

from ..archs import SmArch
from ..dtypes import CutlassDtype
from ..epilogue.lower import LINEAR
from ..key import KernelKey, Triple
from ..rules import OK, Status, no
from .base import tma_key


def supports_schedule(key: KernelKey, kernels: str) -> Status:
    """Whether a key has the schedule of these kernels, which add sums up through distributed shared memory.

    Args:
        key: the key.
        kernels: the kernels of the family, as the reason names them.
    """
    if (key.epilogue_schedule, key.scheduler, key.stages) != ("dsmem", "persistent", 0):
        return no(f"{kernels} have the epilogue dsmem, the scheduler persistent and 0 stages")
    if key.warps != (0, 0, 0) or key.swizzle:
        return no(f"{kernels} take neither warps nor a swizzle")
    return OK


def cell(
    a: CutlassDtype,
    layouts: str,
    mainloop: str,
    tile: Triple,
    cluster: Triple,
    *,
    d: CutlassDtype | None = None,
    math: str = "default",
    epilogue: str = LINEAR,
) -> KernelKey:
    """A key of such a kernel, which loads 16 bytes of A and B at once, and needs no alignment of D.

    Args:
        a: the element type of A and B.
        layouts: of A and B.
        mainloop: that of the family.
        tile: extents of a thread block's tile.
        cluster: thread blocks of a cluster along M or N, and along K.
        d: the element type of D; None is that of A.
        math: the math mode.
        epilogue: the epilogue's id.
    """
    return tma_key(
        "gemm", SmArch.SM90A, a, d or a, layouts, tile, cluster, mainloop, align_d=1,
        epilogue_schedule="dsmem", math=math, epilogue=epilogue,
    )  # fmt: skip
