"""Shared by the requests of all operations: checks of their fields, and rendering."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

from ..arrays.numerics import FAST, math_mode
from ..checks import check_name, expect, shown
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.archs import SmArch
from ..generator.dtypes import CutlassDtype
from ..generator.render import render
from ..generator.rules import FP8_TYPES
from ..pipeline import devices, select

if TYPE_CHECKING:
    from ..pipeline.devices import Device
    from ..pipeline.search import KernelSearch

Members: TypeAlias = "tuple[CutlassDtype, ...] | tuple[SmArch, ...]"


class Rendered(ABC):
    """A request whose kernel can be rendered."""

    arch: SmArch | None

    @abstractmethod
    def search(self, device: Device) -> KernelSearch[Any]:
        """The kernels for the request on a device.

        Raises:
            CutlassError: no kernel ever serves it; says why.
        """

    def render_cu(self) -> tuple[str, str]:
        """The source for NVRTC of the matrix's best cell for this request, whether or not it is built in.

        Nothing is compiled, and no GPU is needed where the request names its arch: the choice is then made for a GPU
        of that arch as `devices.imagined` has it, so that it is the same everywhere.

        Returns:
            (source text, name of the kernel that does the products).

        Raises:
            InvalidOperandError: the request names no arch, and there is no GPU to take it from.
            UnsupportedError: no cell of the matrix serves the request; the reason names the cure.
        """
        device = devices.for_arch(None) if self.arch is None else devices.imagined(self.arch)
        return render(select.best_key(self.search(device)), flavour="nvrtc")


def expect_fields(request: Any, **kinds: type) -> None:
    """Checks fields of a request, in this order, and its binding. A target and a result's dtype may be None.

    Raises:
        InvalidOperandError: a value is not of its kind.
    """
    for name, kind in kinds.items():
        value = getattr(request, name)
        if value is not None or name not in ("arch", "out_dtype", "dtype_b"):
            expect(value, kind, name)
    expect_name(request.binding, "binding")


def expect_served(op: str, dtype: CutlassDtype, arch: SmArch | None, dtypes: Members, archs: Members) -> None:
    """Refuses a dtype or a target that an operation has no kernels for.

    Raises:
        UnsupportedError: names the valid ones.
    """
    for value, served in ((dtype, dtypes), (arch, archs)):
        if value is not None and value not in served:
            valid = ", ".join(member.name for member in served)
            raise UnsupportedError(f"{op} has no kernels for {value.name}; valid: {valid}")


def expect_extent(value: Any, name: str, least: int = 0) -> None:
    """Refuses a value that is no extent of a dimension.

    Raises:
        InvalidOperandError: the value is no integer, below `least`, or too large for kernels to count.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise InvalidOperandError(f"{name} is {shown(value)}; expected an integer from {least} to 2^31 - 1")


def expect_name(value: Any, name: str) -> None:
    """Refuses a value that is neither a name nor None.

    Raises:
        InvalidOperandError: the value is something else, or an empty name.
    """
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidOperandError(f"{name} is {shown(value)}; expected a name, or None")


def math_of(dtype: CutlassDtype, precision: str | None, *, fast_accum: bool = False) -> str:
    """The math mode of the kernel's key, for a request's dtype (TF32 included), precision and fp8 accumulation.

    Raises:
        InvalidOperandError: they contradict each other.
    """
    if precision is not None:
        check_name(precision, "precision")
    if dtype is CutlassDtype.TF32 and precision not in (None, "tf32"):
        raise InvalidOperandError(f"dtype TF32 means precision='tf32', not {precision!r}")
    math = math_mode(dtype.storage, "tf32" if dtype is CutlassDtype.TF32 else precision)
    return FAST if fast_accum and dtype in FP8_TYPES else math
