"""The kernels that an operation has for a problem, as `select` asks for them."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from .. import _core
from ..errors import CutlassError, KernelNotFoundError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.key import KernelKey
from ..generator.matrix import cells, supports
from ..generator.rules import OK, Status, no
from . import devices
from .candidate import ALONG_M, ALONG_N, HEURISTIC, Candidate
from .devices import Device
from .reduction import BatchInvariant

F = TypeVar("F")

OTHER_OP = no("it is a kernel of another operation")

Rule: TypeAlias = tuple[bool, str]
"""Whether a kernel meets a rule, and the reason that it is refused for otherwise."""

LEAST_SECONDS = 1e-6
"""That no launch is estimated to stay below."""


class KernelSearch(abc.ABC, Generic[F]):
    """The kernels that an operation has for one problem.

    Attributes:
        op: operation of the kernels' keys.
        device: where the problem is computed.
        arch: keep to cells of this arch; None takes cells of any arch that run on the device, native ones before
            others.
        problem: all that decides about kernels, as a dataclass, by which tuned choices are found; None has no such.
        formulations: how the problem can be put to kernels, in groups. A group is passed over where an earlier one is
            served; within a group the estimated time decides.
        batch_invariant: whether only kernels of one reduction serve it, the same for every number of rows.
        named: the kernel that a user has named for it (`heuristics`), which is taken where it can be had and serves.
    """

    op: str
    device: Device
    arch: SmArch | None
    problem: Any = None
    formulations: Sequence[Sequence[F]]
    batch_invariant: bool = False
    named: KernelKey | None = None

    @abc.abstractmethod
    def traits(self, formulation: F) -> Hashable:
        """All that `matches` and `cells` depend on: problems with the same traits have the same kernels."""

    @abc.abstractmethod
    def matches(self, key: KernelKey, formulation: F) -> Status:
        """Whether a kernel serves such problems; the reason says why not."""

    def supports(self, key: KernelKey, formulation: F) -> Status:
        """Whether a kernel serves the problem as it is put here: it matches, and the extents suit it."""
        return self.matches(key, formulation)

    def extents(self, formulation: F) -> tuple[int, ...]:
        """The extents that the model estimates the problem by, as it is put here; see `estimate.Extents`."""
        return ()

    @abc.abstractmethod
    def reason(self) -> str:
        """Why no cell of the matrix serves the problem, and what would cure it."""

    @property
    def tuned_problem(self) -> Any:
        """The problem that tuned choices are found by; None has no such."""
        return BatchInvariant(self.problem) if self.batch_invariant and self.problem is not None else self.problem

    def of_many_rows(self) -> Sequence[Sequence[F]]:
        """The formulations that any other number of rows would have too: they settle the reduction (`select`)."""
        return self.formulations

    def op_of(self, formulation: F) -> str:
        """The operation whose kernels take a formulation."""
        return self.op

    def cells(self, arch: SmArch, group: Sequence[F]) -> Iterable[Iterable[KernelKey]]:
        """Keys that can be compiled for an arch, in sets: one is looked at where those before it serve nothing."""
        yield matrix(self.op, arch)

    def launches(self, candidate: Candidate[F]) -> Iterable[Candidate[F]]:
        """A candidate with its launch options: swizzles and raster orders of the persistent scheduler, then widths."""
        if candidate.raster == HEURISTIC:
            return (candidate,)
        options = itertools.product(_core.SWIZZLES, (ALONG_M, ALONG_N))
        ordered = (dataclasses.replace(candidate, swizzle=swizzle, raster=raster) for swizzle, raster in options)
        others = (width for width in self.widths(candidate) if width != candidate.width)
        return itertools.chain(ordered, (dataclasses.replace(candidate, width=width) for width in others))

    def widths(self, candidate: Candidate[F]) -> Sequence[int]:
        """The columns of a tile that a candidate may be launched with; 0 where its kernel decides."""
        return (0,)

    def helpers(self, formulation: F) -> Sequence[KernelSearch[Any]]:
        """Kernels that are launched beside the one of a formulation, such as casts."""
        return ()

    def least(self, candidate: Candidate[F]) -> float:
        """A time that no kernel is estimated to stay below, whatever its tile and generation."""
        return LEAST_SECONDS

    def epilogue_of(self, candidate: Candidate[F]) -> str:
        """The epilogue that a candidate's kernel computes for the problem; empty where operations have none."""
        return ""

    def note(self, formulation: F) -> str:
        """The note of `explain` on a formulation; empty if the problem is computed as it stands."""
        return ""

    def serves(self, key: KernelKey) -> Status:
        """Whether a kernel serves the problem in any formulation, whatever it is compiled for.

        The reason is that of the formulation which it comes closest to serving.
        """
        closest = OTHER_OP
        for formulation in itertools.chain.from_iterable(self.formulations):
            if self.op_of(formulation) == key.op:
                status = self.supports(key, formulation)
                if status:
                    return status
                closest = max(closest, status, key=lambda refusal: refusal.passed)
        return closest

    def closest(self, arch: SmArch) -> str:
        """Why the matrix's cell that comes closest to serving the problem on an arch does not serve it."""
        keys = dict.fromkeys(key for group in self.formulations for cells in self.cells(arch, group) for key in cells)
        refused = [status for key in keys if not (status := self.serves(key))]
        if not refused:
            alike = " with its element types and epilogue" if matrix(self.op, arch) else ""
            return f"there are no {self.op} cells for {arch.value}{alike}"
        closest = max(refused, key=lambda refusal: refusal.passed)
        return f"the closest of {len(refused)} cells is refused: {closest.reason}"

    def nearest(self, arch: SmArch, best: Candidate[F] | None) -> KernelKey | None:
        """The key that an installation without a kernel for the problem is told of.

        Args:
            arch: the compile target.
            best: the candidate that is compiled instead, where there is one.
        """
        return None if best is None else best.key

    def refusal(self, best: Candidate[F] | None, remedy: str) -> CutlassError:
        """The error where the table has no kernel and none may be compiled.

        Args:
            best: the matrix's best cell; None where no cell serves the problem.
            remedy: how that is had; see `select.remedy`.
        """
        if best is None:
            return UnsupportedError(self.reason())
        return KernelNotFoundError(f"no kernel in the table serves this {best.key.op}; {best.key.name} would: {remedy}")


class ExactSearch(KernelSearch[None]):
    """A kernel whose key is known but for its arch: helpers, of which there is one for each task."""

    formulations = ((None,),)

    def __init__(self, make: Callable[[SmArch], KernelKey], device: Device, arch: SmArch | None = None) -> None:
        """The kernel of the key that `make` gives for a compile target."""
        self.device, self.arch = device, arch
        self.make = make
        self._wanted = make(devices.require_arch(device))
        self.op = self._wanted.op

    def traits(self, formulation: None) -> Hashable:
        """The key."""
        return self._wanted

    def matches(self, key: KernelKey, formulation: None) -> Status:
        """Whether it is the key, whatever its arch."""
        return OK if key == self.make(key.arch) else no("its element types or form differ", 1)

    def cells(self, arch: SmArch, group: Sequence[None]) -> Iterable[Iterable[KernelKey]]:
        """The key alone."""
        yield (self.make(arch),)

    def reason(self) -> str:
        """Why there is none."""
        return f"{self._wanted.name} does not run on {self.device.name}"

    def refusal(self, best: Candidate[None] | None, remedy: str) -> CutlassError:
        """The error where the table lacks it and it must not be compiled."""
        if best is None:
            return UnsupportedError(self.reason())
        return KernelNotFoundError(f"the table lacks {best.key.name}, and it must not be compiled: {remedy}")


def checked(rules: Iterable[Rule]) -> Status:
    """The refusal by the first rule that is not met, which came the closer the more were; OK where all are."""
    for passed, (met, reason) in enumerate(rules):
        if not met:
            return _refused(reason, passed)
    return OK


_refused = functools.cache(no)
"""Thousands of kernels are refused for a few reasons."""


@functools.cache
def matrix(op: str, arch: SmArch) -> tuple[KernelKey, ...]:
    """The matrix's keys of an operation for an arch."""
    return tuple(key for _, key in cells([arch]) if key.op == op and supports(key))
