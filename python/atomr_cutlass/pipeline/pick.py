"""Which kernel of an op serves a problem: the table's best, or the matrix's best where the table has none.

For ops whose cells differ in what they can read and how fast they are, and in nothing else: the op says both with one
function of the key. Dense GEMM, where a problem may be put to a kernel in several ways, has `select`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import KernelNotFoundError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.key import KernelKey
from ..generator.matrix import cells, preset_of, supports
from ..jit import kernels
from . import devices, table
from .devices import Device
from .select import cure, knob, nearest_built, require_target, too_new
from .table import KernelInfo

Cost = Callable[[KernelKey], "float | None"]
"""Estimated seconds of a kernel for the problem; None when it cannot serve it."""

Derive = Callable[[KernelKey], KernelKey]
"""What is made of a cell of the matrix: its key with the epilogue of the problem."""


@dataclass(frozen=True)
class Picked:
    """A kernel for a problem.

    Attributes:
        key: what is compiled.
        info: its row of the table, or None where it has to be compiled at run time.
        seconds: the model's estimate of one launch.
    """

    key: KernelKey
    info: KernelInfo | None
    seconds: float

    @property
    def origin(self) -> str:
        """Where it comes from: `prebuilt`, `pack NAME` or `jit`."""
        return "jit" if self.info is None else self.info.origin


def rank(op: str, cost: Cost, device: Device, arch: SmArch | None) -> list[Picked]:
    """The kernels of the table that serve the problem on the device, best first; native ones before others."""
    found = []
    for info in table.kernels(op=op):
        if arch is not None and info.key.arch is not arch:
            continue
        way = devices.rank_arch(info.key.arch, device, ptx=info.ptx, cuda_version=info.cuda_version)
        if way is None or info.shared_bytes > device.shared_memory:
            continue
        seconds = cost(info.key)
        if seconds is not None:
            found.append((way, Picked(info.key, info, seconds)))
    found.sort(key=lambda pair: (pair[0], pair[1].seconds, pair[1].key.name))
    return [picked for _, picked in found]


def best_cell(op: str, cost: Cost, device: Device, arch: SmArch | None, derive: Derive | None = None) -> Picked | None:
    """The matrix's best cell for the problem, whether or not it is built; None when no cell serves it.

    Args:
        op: operation of its key.
        cost: which kernels serve it, and how fast.
        device: where.
        arch: the compile target; None is the device's own.
        derive: what is made of the cells; None leaves them as they are.
    """
    target = require_target(device, arch, lambda key: key.op == op and cost(key) is not None)
    if devices.rank_arch(target, device, ptx=True) is None:
        return None
    keys = _matrix(op, target)
    if derive is not None:
        keys = tuple(key for key in dict.fromkeys(map(derive, keys)) if supports(key))
    return _best(keys, cost)


def pick(
    op: str,
    cost: Cost,
    device: Device,
    *,
    refusal: str,
    arch: SmArch | None = None,
    backend: str = "auto",
    jit: str | None = None,
    record: bool = True,
    derive: Derive | None = None,
) -> Picked:
    """The kernel for a problem.

    Args:
        op: operation of its key.
        cost: which kernels serve it, and how fast.
        device: where.
        refusal: what to say when no cell of the matrix serves it.
        arch: keep to cells of this arch.
        backend: `prebuilt`: the table's best; `jit`: the matrix's best; `auto`: the table's best, or the matrix's best
            where the table has none.
        jit: `auto`, `background` (which is `auto` here) or `off`; None leaves it to ATOMR_CUTLASS_JIT.
        record: whether a kernel that the table lacks goes into the log of misses.
        derive: as for `best_cell`.

    Raises:
        UnsupportedError: no cell of the matrix serves it.
        KernelNotFoundError: one does, but the table lacks it and it must not be compiled; names the knob that adds it.
    """
    if backend != "jit":
        ranked = rank(op, cost, device, arch)
        if ranked:
            return ranked[0]
    best = best_cell(op, cost, device, arch, derive)
    if best is None:
        raise UnsupportedError(refusal)
    if backend != "jit" and record:
        kernels.record_miss(best.key)
    if backend == "prebuilt" or kernels.policy(jit) == "off":
        nearest = nearest_built(best.key)
        differs = f"; the nearest there is {nearest[0]}, which differs in {', '.join(nearest[1])}" if nearest else ""
        cured = f"build with {knob(best.key)}" if derive is None and preset_of(best.key) else cure(best.key)
        passed_over = too_new(device, arch, lambda key: key.op == op and cost(key) is not None)
        passed_over = f"; {passed_over}" if passed_over else ""
        raise KernelNotFoundError(
            f"no kernel in the table serves this {op}; {best.key.name} would: {cured}{differs}{passed_over}"
        )
    return best


def pick_exactly(
    make: Callable[[SmArch], KernelKey], device: Device, *, backend: str = "auto", jit: str | None = None
) -> Picked:
    """The kernel of a key that is known but for its arch: helpers, of which there is one for each task.

    Args:
        make: the key for a compile target.
        device: where.
        backend: as for `pick`.
        jit: as for `pick`.

    Raises:
        KernelNotFoundError: the table lacks it and it must not be compiled.
    """
    target = devices.require_arch(device)
    wanted = make(target)
    if backend != "jit":
        ranked = rank(wanted.op, lambda key: 0.0 if key == make(key.arch) else None, device, None)
        if ranked:
            return ranked[0]
        kernels.record_miss(wanted)
    if backend == "prebuilt" or kernels.policy(jit) == "off":
        raise KernelNotFoundError(f"the table lacks {wanted.name}, and it must not be compiled")
    return Picked(wanted, None, 0.0)


def _best(keys: Iterable[KernelKey], cost: Cost) -> Picked | None:
    priced = ((key, cost(key)) for key in keys)
    found = [Picked(key, None, seconds) for key, seconds in priced if seconds is not None]
    return min(found, key=lambda picked: (picked.seconds, picked.key.name), default=None)


@functools.cache
def _matrix(op: str, arch: SmArch) -> tuple[KernelKey, ...]:
    return tuple(key for _, key in cells([arch]) if key.op == op and supports(key))
