"""Plan keys: what is launched, apart from pointers and scalars."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .generator.archs import SmArch
from .generator.dtypes import CutlassDtype

Extents: TypeAlias = "tuple[int | tuple[int, ...], ...]"


@dataclass(frozen=True, repr=False)
class PlanKey:
    """The identity of a plan: everything of what is launched except pointers and the values of scalars.

    Two requests that differ in alpha alone have one key, and so one plan; what the epilogue *does* (whether C is read,
    a bias, an activation) is another matter and part of it. Which kernel serves the plan is not: that is chosen.

    Attributes:
        op: `gemm`, `grouped_gemm`, `conv2d_fprop`, `conv2d_dgrad` or `conv2d_wgrad`.
        shape: the operation's extents: (m, n, k, batch), a tuple of such for groups, or a convolution's.
        layouts: of the operands and the result, in that order. Requests have dense operands, whose strides follow.
        dtypes: element types of the operands and the result, in that order.
        math: math mode of the kernel's key.
        epilogue: what happens to the accumulator, such as `linear` or `linear+c+bias+relu`.
        arch: the target that was asked for; None is the GPU's own, whichever that is.
        binding: name of the operand that the plan keeps, or None.
    """

    op: str
    shape: Extents
    layouts: tuple[str, ...]
    dtypes: tuple[CutlassDtype, ...]
    math: str
    epilogue: str
    arch: SmArch | None
    binding: str | None = None
    _hash: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Computed once: a look-up would otherwise spend most of its time hashing enumerations.
        fields = (self.op, self.shape, self.layouts, self.dtypes, self.math, self.epilogue, self.arch, self.binding)
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # A process's hashes of strings are its own: a copy made elsewhere has to compute them again.
        return PlanKey, (
            self.op, self.shape, self.layouts, self.dtypes, self.math, self.epilogue, self.arch, self.binding,
        )  # fmt: skip

    def __repr__(self) -> str:
        shape = ",".join("x".join(map(str, e)) if isinstance(e, tuple) else str(e) for e in self.shape)
        words = [self.op, f"({shape})", "/".join(self.layouts), "/".join(d.value for d in self.dtypes)]
        words += [self.math, self.epilogue, self.arch.value if self.arch else "any-arch"]
        words += [f"binding={self.binding!r}"] if self.binding is not None else []
        return f"PlanKey({' '.join(words)})"
