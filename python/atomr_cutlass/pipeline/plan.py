"""Plans: a problem with its kernel chosen and everything allocated, so that calling it only launches."""

from __future__ import annotations

from typing import Any

from .. import _core
from ..generator.render import render
from .candidate import Candidate
from .plan_cache import PlanKey
from .problem import GemmFormulation
from .table import KernelInfo

BACKENDS = ("auto", "prebuilt", "jit")


class Plan(_core.GemmPlan):
    """One kernel and one problem; `plan(a, b, c=None, *, out=None, alpha=None, beta=None, stream=None)` launches.

    Operands must have the shape, strides, dtype, device and address alignment that the plan was made for, and may be
    other arrays at every call. `alpha` and `beta` default to the request's. Without `out` the result comes from the
    framework of `a`. A call launches one kernel (stream-K and split-K: a memory clear before it; batches that no single
    stride reaches or a grid cannot hold: several kernels) on `stream`, or on the framework's current stream; it does
    not synchronize, and may be captured into a CUDA graph; a workspace that a graph uses is never freed.

    Attributes:
        request: what the plan was made from, where that was a request.
        key: the request's PlanKey, likewise.
        kernel_name: of the kernel that calls launch.
        kernel_handle: what identifies the loaded kernel in this process.

    Raises:
        InvalidOperandError: an operand differs from what the plan was made for, or `out` overlaps an input.
        LibraryError, ContextPoisonedError: CUDA refused the launch.
    """

    request: Any
    key: PlanKey | None
    _candidate: Candidate[GemmFormulation]
    _next: Plan | None

    def replace(self, next: Plan) -> None:  # type: ignore[override] # noqa: A002
        """Has launches go to another plan of the same problem, but never during the capture of a graph.

        A graph that begins with this plan's kernel stays with it. Operands that the other plan's kernel cannot read,
        for want of alignment, are served by this one's.
        """
        super().replace(next)
        self._next = next

    @property
    def candidate(self) -> Candidate[GemmFormulation]:
        """The kernel that calls launch, with its launch options and estimated time."""
        other = self._next
        return other.candidate if other is not None and other.kernel_handle == self.kernel_handle else self._candidate

    @property
    def kernel(self) -> KernelInfo | None:
        """The kernel's row of the table; None when it was compiled at run time."""
        return self.candidate.info

    @property
    def source(self) -> str:
        """The kernel's source, as it is compiled at run time."""
        return render(self.candidate.key, flavour="nvrtc")[0]

    @property
    def origin(self) -> str:
        """Where the kernel comes from: `prebuilt`, `pack NAME` or `jit`."""
        return self.candidate.origin
