"""What is sent to a CutlassActor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from . import _core, operands
from .bindings import Weights, check_operand, take_up
from .errors import CutlassError, InvalidOperandError
from .plan_cache import PlanKey
from .problem import MatrixSpec
from .requests import (
    ConvDgradRequest,
    ConvFwdRequest,
    ConvWgradRequest,
    GemmLayout,
    GemmRequest,
    GroupedGemmRequest,
)


class CutlassMsg:
    """A message to a CutlassActor; what there is are its attributes.

    * `CutlassMsg.Gemm(request, operands=None, *, out=None, stream=None)`
    * `CutlassMsg.GroupedGemm(request, operands=None, *, out=None, stream=None)`
    * `CutlassMsg.Conv(request, operands=None, *, out=None, stream=None)`
    * `CutlassMsg.Refit(msg)`

    Operands are taken up where the message is made: in that thread their framework says what its current stream is, and
    allocates the result for it. They have to stay as they are until the answer comes. What is wrong with them is said
    in the answer.
    """

    Gemm: ClassVar[type[GemmMsg]]
    GroupedGemm: ClassVar[type[GroupedGemmMsg]]
    Conv: ClassVar[type[ConvMsg]]
    Refit: ClassVar[type[RefitMessage]]


@dataclass(frozen=True)
class Launch:
    """A GEMM's operands, checked against its request.

    Attributes:
        device: index of their GPU.
        stream: where to launch.
        a, b, c, out: views that keep the arrays alive; no `b` where the plan has one bound.
        result: what the sender gets: the array behind `out`, or None for JAX (see `operands.finished`).
    """

    device: int
    stream: int
    a: _core.Operand
    b: _core.Operand | None
    c: _core.Operand | None
    out: _core.Operand
    result: Any


RequestT = TypeVar("RequestT")


@dataclass(frozen=True, eq=False)
class _Compute(CutlassMsg, Generic[RequestT]):
    """What messages that compute something have in common.

    Attributes:
        request: what to compute.
        operands: None; or a mapping with `a`, `b` and (exactly where the request's beta is not 0) `c`; or such a tuple.
            GPU arrays, dense as the request says, which stay alive until the work has completed. `b` may be left out
            once the request's binding has it.
        out: where to write the result; None has it allocated by the framework of `a`, here and now.
        stream: where to launch: a handle or a stream object; None is the current stream, here and now, of the framework
            of `a`.

    Raises:
        InvalidOperandError: `request` is of another kind.
    """

    _requests: ClassVar[tuple[type, ...]]

    request: RequestT
    operands: Any = field(default=None, repr=False)
    out: Any = field(default=None, kw_only=True, repr=False)
    stream: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.request, self._requests):
            expected = " or ".join(kind.__name__ for kind in self._requests)
            raise InvalidOperandError(f"request is a {type(self.request).__name__}; expected a {expected}")


class GemmMsg(_Compute[GemmRequest]):
    """Computes a GEMM, or without operands renders and caches its kernel.

    Operands, `out` and `stream` are taken up where the message is made; what is wrong with them is kept for the answer.
    """

    _requests = (GemmRequest,)
    _launch: Launch | CutlassError | None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_launch", self._take_up())

    @property
    def launch(self) -> Launch:
        """The operands. There are some where the message has any.

        Raises:
            InvalidOperandError: they are not what the request says.
        """
        if isinstance(self._launch, Launch):
            return self._launch
        raise self._launch or InvalidOperandError("the message has no operands")

    def _take_up(self) -> Launch | CutlassError | None:
        if self.operands is None:
            return None
        try:
            return _launch(self.request, self.operands, self.out, self.stream)
        except CutlassError as error:
            # Kept without the frames that led here, which hold the operands.
            return error.with_traceback(None)


class GroupedGemmMsg(_Compute[GroupedGemmRequest]):
    """Computes a grouped GEMM. Refused with UnsupportedError until there are kernels."""

    _requests = (GroupedGemmRequest,)


class ConvMsg(_Compute["ConvFwdRequest | ConvDgradRequest | ConvWgradRequest"]):
    """Computes a convolution or a gradient of one. Refused with UnsupportedError until there are kernels."""

    _requests = (ConvFwdRequest, ConvDgradRequest, ConvWgradRequest)


@dataclass(frozen=True, eq=False)
class RefitMsg:
    """New values for the operand that a plan binds.

    Attributes:
        plan_key: the plan's key: `request.plan_key()` of the request with the binding.
        weights: an array of the operand's dtype and shape, or its bytes; see `bindings.Weights`.
        stream: where weights in GPU memory are ready: a handle or a stream object; None is the current stream, here and
            now, of their framework.

    Raises:
        InvalidOperandError: `plan_key` is no PlanKey.
    """

    plan_key: PlanKey
    weights: Any = field(repr=False)
    stream: Any = None
    _staged: Weights | CutlassError = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.plan_key, PlanKey):
            raise InvalidOperandError(
                f"plan_key is a {type(self.plan_key).__name__}; expected a PlanKey, from request.plan_key()"
            )
        object.__setattr__(self, "_staged", self._stage())

    @property
    def staged(self) -> Weights:
        """The values, ready to be copied.

        Raises:
            InvalidOperandError: they are neither bytes nor an array.
        """
        if isinstance(self._staged, Weights):
            return self._staged
        raise self._staged

    def _stage(self) -> Weights | CutlassError:
        try:
            return Weights(self.weights, self.stream)
        except CutlassError as error:
            return error.with_traceback(None)


@dataclass(frozen=True, eq=False)
class RefitMessage(CutlassMsg):
    """Writes new values into the operand that a plan binds.

    Attributes:
        msg: which plan, and the values.

    Raises:
        InvalidOperandError: `msg` is no RefitMsg.
    """

    msg: RefitMsg

    def __post_init__(self) -> None:
        if not isinstance(self.msg, RefitMsg):
            raise InvalidOperandError(f"msg is a {type(self.msg).__name__}; expected a RefitMsg")


for _name, _kind in (
    ("Gemm", GemmMsg), ("GroupedGemm", GroupedGemmMsg), ("Conv", ConvMsg), ("Refit", RefitMessage)
):  # fmt: skip
    # Known by the names under which they are sent, in messages and tracebacks too.
    _kind.__name__, _kind.__qualname__ = _name, f"CutlassMsg.{_name}"
    setattr(CutlassMsg, _name, _kind)


def _launch(request: GemmRequest, given: Any, out: Any, stream: Any) -> Launch:
    arrays = _named(given)
    _check_names(request, arrays)
    views = {name: take_up(array) for name, array in arrays.items()}
    device = views["a"].device
    what = request.problem(device)
    specs = {"a": what.a, "b": what.b, "c": what.c or what.d, "out": what.d}
    for name, view in views.items():
        _check_view(view, specs[name], name, device)
    handle = operands.current_stream(arrays["a"], views["a"]) if stream is None else operands.stream_handle(stream)
    if out is None:
        if request.layout_c is not GemmLayout.ROW_MAJOR:
            raise InvalidOperandError("out is needed: results are allocated row-major, and layout_c is COL_MAJOR")
        out, view = operands.empty(what.d.shape, what.d.dtype, device, arrays["a"])
    else:
        if operands.is_jax(out):
            raise InvalidOperandError("out is a JAX array, which cannot be written: leave out away")
        view = operands.as_operand(out)
        _check_view(view, what.d, "out", device)
        if view.read_only:
            raise InvalidOperandError("out is read-only: give an array that may be written")
    return Launch(device, handle, views["a"], views.get("b"), views.get("c"), view, out)


def _named(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in ("a", "b", "c")]
        if unknown:
            raise InvalidOperandError(f"operands has {', '.join(map(repr, unknown))}; expected a, b and c")
        return {name: array for name, array in given.items() if array is not None}
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) and 1 <= len(given) <= 3:
        return {name: array for name, array in zip("abc", given, strict=False) if array is not None}
    raise InvalidOperandError(
        f"operands is a {type(given).__name__}; expected a mapping of a, b and c, or a tuple (a, b) or (a, b, c)"
    )


def _check_names(request: GemmRequest, arrays: dict[str, Any]) -> None:
    if "a" not in arrays:
        raise InvalidOperandError("operands has no a")
    if "b" not in arrays and request.binding is None:
        raise InvalidOperandError("operands has no b: it may be left out once a request's binding has it")
    if "c" in arrays and request.epilogue.beta == 0:
        raise InvalidOperandError("operands has c, but the request's beta is 0, so that it would not be read")
    if "c" not in arrays and request.epilogue.beta != 0:
        raise InvalidOperandError(f"the request's beta is {request.epilogue.beta}, so operands needs c")


def _check_view(view: _core.Operand, spec: MatrixSpec, name: str, device: int) -> None:
    check_operand(view, spec, name)
    if view.device != device:
        raise InvalidOperandError(f"a is on cuda:{device} and {name} on cuda:{view.device}: both must be on one GPU")
