"""Plans: the kernels of a problem with their memory and arguments, so that a call only launches."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _core
from ..arrays import symbols
from ..arrays.layouts import MatrixSpec, row_major
from ..errors import UnsupportedError
from ..generator.dtypes import CutlassDtype
from ..generator.matrix import arguments_of
from ..generator.render import render
from ..jit import kernels, record
from . import devices, table
from .plan_cache import PlanKey
from .search import Candidate
from .table import KernelInfo
from .tuning import RecordedProblem

BACKENDS = ("auto", "prebuilt", "jit")

Address = tuple[str, int, int]
"""(`operand`, `temporary` or `zeros`; its index; offset in bytes)."""

ALWAYS, PRODUCT, NO_PRODUCT = "always", "product", "no product"
"""The calls that run a step: all, those whose alpha is not 0, or those whose alpha is 0."""


class Plan(_core.LaunchPlan):
    """The launches that compute one problem: `plan(*arrays, out=None, alpha=None, beta=None, stream=None)`.

    Arrays are given in the order of `slots`, or by name, and must have the shape, strides, dtype, device and address
    alignment that the plan was made for; they may be other arrays at every call. C of a plain GEMM is left out where
    beta is 0. Scalars default to the request's. Without `out`, the last slot, the result comes from the framework of
    the first array that is not bound. A call enqueues `launches` kernels, clears and copies on `stream`, or on that
    framework's current stream, and does not synchronize; it may be captured into a CUDA graph, and a workspace that a
    graph uses is never freed.

    Attributes:
        request: the request that the plan was made from, if it was made from one.
        key: the PlanKey of that request.
        candidates: the kernels, in the order of their launches.
        rewrite: how the problem was rewritten for kernels that do not compute it as it stands; empty otherwise.
        cached_launch: of a traced plan (`arrays.symbols`): its blueprint, and a function that makes a plan from one.
        checked: whether the epilogue has been validated or needs no validation. A plan made while its stream is
            captured may not be, and is then not kept for later calls.
        kernel_name: name of the kernel that does the products.
        kernel_handle: the identity of that kernel in this process, once loaded.

    Raises:
        InvalidOperandError: an operand differs from what the plan was made for, or a result overlaps an input.
        LibraryError, ContextPoisonedError: CUDA refused the launch.
    """

    request: Any = None
    key: PlanKey | None = None
    candidates: tuple[Candidate[Any], ...]
    rewrite: str
    cached_launch: tuple[_core.Blueprint, Callable[[_core.Blueprint, Any], Plan]] | None = None
    checked: bool = True
    _main: int
    _next: Plan | None = None

    def replace(self, next: Plan) -> None:  # type: ignore[override] # noqa: A002
        """Redirects launches to another plan of the same operands, but never during the capture of a graph.

        A graph that begins with this plan's kernels stays with them. Operands that are not aligned enough for the other
        plan's kernels are served by this one's.

        Raises:
            InvalidOperandError: the other plan has other operands.
        """
        super().replace(next)
        self._next = next

    @property
    def main(self) -> Candidate[Any]:
        """The kernel that does the products, with its launch options and estimated time."""
        if self.replaced and self._next is not None:
            return self._next.main
        return self.candidates[self._main]

    @property
    def kernel(self) -> KernelInfo | None:
        """Its row of the table; None when it was compiled at run time."""
        return self.main.info

    @property
    def source(self) -> str:
        """Its source for NVRTC."""
        return render(self.main.key, flavour="nvrtc")[0]

    @property
    def origin(self) -> str:
        """Its origin: `prebuilt`, `pack NAME` or `jit`."""
        return self.main.origin


class Steps:
    """A plan under construction: the caller's arrays, the plan's memory, and the steps on them."""

    def __init__(self, device: int, stream: int | None = None) -> None:
        """Begins a plan without steps; `stream` is that of the first launch."""
        self.device, self._stream = device, stream
        self._slots: list[tuple[str, Sequence[int], Sequence[int], tuple[int, int], int, str]] = []
        self._temporaries: list[int] = []
        self._steps: list[tuple[Any, ...]] = []
        self._candidates: list[Candidate[Any]] = []
        self._main = (0, 0)
        self._zeros = 0

    def slot(
        self,
        name: str,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dtype: tuple[int, int],
        *,
        alignment: int = 1,
        role: str = "input",
    ) -> Address:
        """Adds the caller's next array, in the order of a call.

        Strides are in elements (None: row-major), `dtype` is DLPack's (type code, bits), the alignment in bytes. Roles
        are `input`, `source` (an input that a result may overwrite in place), `optional source` (one that is given
        where beta is not 0, and only there) and `output`.
        """
        strides = row_major(shape) if strides is None else strides
        self._slots.append((name, shape, strides, dtype, max(1, alignment), role))
        return ("operand", len(self._slots) - 1, 0)

    def matrix(self, name: str, spec: MatrixSpec, align: int = 1, role: str = "input") -> Address:
        """Adds an array of this layout, whose address is a multiple of `align` elements."""
        alignment = align * spec.dtype.bits // 8
        return self.slot(name, spec.shape, spec.strides, spec.dtype.dlpack, alignment=alignment, role=role)

    def temporary(self, size: int) -> Address:
        """Adds device memory of the plan, aligned to 256 bytes, undefined when a call begins."""
        self._temporaries.append(size)
        return ("temporary", len(self._temporaries) - 1, 0)

    def zeros(self, size: int) -> Address:
        """Adds device memory that holds zeros, allocated at the first call that needs it."""
        self._zeros = max(self._zeros, size)
        return ("zeros", 0, 0)

    def launch(
        self, candidate: Candidate[Any], args: Mapping[str, Any], *, main: bool = False, when: str = ALWAYS
    ) -> None:
        """Adds the launch of a kernel; the plan is named after its `main` one.

        Arguments are the fields of kernel_abi.h by name: numbers, addresses for pointers, `"alpha"` or `"beta"` for
        scalars of the call, `settled` for bits. Fields that are left out are 0.
        """
        if candidate.info is None:
            if self._stream is not None and _core.capturing(self.device, self._stream):
                raise UnsupportedError(
                    f"{candidate.key.name} is compiled at run time, and such plans cannot be made while a CUDA graph "
                    "is captured: make the plan before, with ac.plan or by one call outside the capture"
                )
            symbols.refuse()
        if main or not self._candidates:
            self._main = (len(self._steps), len(self._candidates))
        device = devices.get(self.device)
        kernel = table.launchable(candidate.info) if candidate.info else kernels.kernel(candidate.key, device)
        fields = {"sm_count": device.multiprocessors, **args}
        self._steps.append(("launch", kernel, arguments_of(candidate.key), fields, when))
        self._candidates.append(candidate)

    def clear(self, address: Address, size: int, value: int = 0) -> None:
        """Adds a step that sets bytes to a value."""
        self._steps.append(("clear", address, size, value))

    def copy(self, address: Address, table: bytes, patches: Sequence[tuple[int, Address]]) -> None:
        """Adds a step that writes host bytes to device memory, with addresses at the offsets of the patches."""
        self._steps.append(("copy", address, table, list(patches)))

    def plan(
        self,
        *,
        like: Any = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        integral: bool = False,
        rewrite: str = "",
        problem: RecordedProblem | None = None,
    ) -> Plan:
        """The plan. The framework of `like` allocates its memory; alpha and beta are the defaults of its calls.

        Recordings have the problem, if one is given, with the plan's main kernel.
        """
        step, index = self._main
        options = {
            "device": self.device, "integral": integral, "alpha": float(alpha), "beta": float(beta), "main": step,
            "zeros": self._zeros,
        }  # fmt: skip
        traced, facts = symbols.current() is not None, []
        if traced and problem is not None:
            problem = problem.traced()
            facts = problem.facts()
        described = (self._slots, self._temporaries, self._steps, options, facts)
        blueprint = _core.Blueprint(*(symbols.symbolic(described) if traced else described))
        extents = [
            (number, [name for name in record.EXTENTS if isinstance(fields.get(name), int)])
            for number, (fields, when) in enumerate(step[3:] for step in self._steps if step[0] == "launch")
            if when != NO_PRODUCT
        ]
        candidates = tuple(map(_alone, self._candidates) if traced else self._candidates)

        def make(blueprint: _core.Blueprint, like: Any, *, keep: bool = False) -> Plan:
            noted = [(candidates[number].key, blueprint.arguments(number, names)) for number, names in extents]
            planned = None
            if problem is not None:
                planned = candidates[index].key, functools.partial(problem.text, blueprint.facts)
            plan = Plan(blueprint, like, keep)
            plan.candidates, plan.rewrite = candidates, rewrite
            plan._main = index  # noqa: SLF001 - this module's own
            record.note(plan, noted, planned)
            return plan

        made = make(blueprint, like, keep=traced)
        if traced:
            made.cached_launch = blueprint, make
        return made


def _alone(candidate: Candidate[Any]) -> Candidate[Any]:
    """A candidate without its problem, so that a plan for many extents does not keep one."""
    numbers = ("seconds", "split_k", "swizzle", "raster", "width")
    plain = {name: symbols.plain(getattr(candidate, name)) for name in numbers}
    return dataclasses.replace(candidate, formulation=None, **plain)


def settled(address: Address, bits: int) -> tuple[str, int, int]:
    """Bits of an argument that are set where no launch in flight may still write the operand."""
    return ("settled", address[1], bits)


def moved(address: Address, elements: int, dtype: CutlassDtype) -> Address:
    """The address so many elements further."""
    kind, index, start = address
    return (kind, index, start + elements * dtype.bits // 8)


def bytes_of(shape: Sequence[int], dtype: CutlassDtype) -> int:
    """Bytes of a dense array."""
    return -(-math.prod(shape) * dtype.bits // 8)
