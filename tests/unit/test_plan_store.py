"""The store of plans: which calls find the plan of an earlier one, of functions that were never part of the package."""

from __future__ import annotations

import enum
import inspect
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import dlpack_arrays
from atomr_cutlass import InvalidOperandError, _core, gemm
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.jit.kernels import POLICY_VARIABLE
from atomr_cutlass.pipeline import call as call_module
from atomr_cutlass.pipeline.call import Call, stored
from atomr_cutlass.pipeline.call_options import CallOptions

VARIABLE = "ATOMR_CUTLASS_TEST_STORED"
ADDRESS = 1 << 32


def array(*shape: int, address: int = ADDRESS, dtype: CutlassDtype = CutlassDtype.F16, **more: Any) -> _core.Operand:
    """An array on a GPU, which nobody reads."""
    given: dict[str, Any] = {"strides": None, "device": 0} | more
    return _core.Operand(address, shape, given["strides"], dtype.dlpack, 2, given["device"])


def tensor(*shape: int, requires_grad: bool = False) -> dlpack_arrays.Tensor:
    """An array with DLPack's exchange API, said to be on a GPU."""
    return dlpack_arrays.Tensor(np.zeros(shape, np.float16), device=(2, 0), requires_grad=requires_grad)


@dataclass
class Plan:
    """A plan that takes notes.

    Attributes:
        calls: the pointers of its operands, and the scalars, at every launch.
        superseded: see `_core.LaunchPlan`.
        refusing: what it raises in the place of launching.
    """

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    superseded: bool = False
    refusing: BaseException | None = None
    device = 0

    def __call__(self, *arrays: Any, out: Any, alpha: float, beta: float, stream: int) -> None:
        if self.refusing is not None:
            raise self.refusing
        self.calls.append((*(member.pointer for member in arrays), out.pointer, alpha, beta, stream))


@dataclass
class Served:
    """What `_serve` was called for: the calls that no kept plan served, and the plans that it had kept of them."""

    calls: list[Any] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    pending: list[Any] = field(default_factory=list)
    parsed: bool = False


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """The calls of stored functions of this module, whose plans are kept in the order of their arguments."""
    notes = Served()

    def serve(call: Call, pending: Any) -> Any:
        notes.calls.append(call)
        notes.pending.append(pending)
        arrays = {name: given for name, given in (call.arrays | call.others).items() if isinstance(given, _ARRAYS)}
        if pending is not None and call.out is not None:
            notes.plans.append(Plan())
            views = [_core.Operand.of(given) for given in (*arrays.values(), call.out)]
            scalars = call.options.alpha, call.options.beta
            pending.keep(notes.plans[-1], [*arrays, "out"], views, [], None, [], scalars, notes.parsed)
        return call.out

    monkeypatch.setattr(call_module, "_serve", serve)
    call_module.kept_plans.clear()
    yield notes
    call_module.kept_plans.clear()


_ARRAYS = (_core.Operand, dlpack_arrays.Tensor)


@pytest.fixture
def function(served: Served) -> Callable[..., Any]:
    """A function that is stored."""
    del served

    @stored(VARIABLE, a="x", b="y")
    def compute(
        x: Any, y: Any = None, *, out: Any = None, alpha: Any = 1.0, beta: Any = 0.0, scale_a: Any = None,
        scale_d: Any = None, option: Any = None, stream: Any = None, **others: Any,
    ) -> Any:  # fmt: skip
        arrays = {"a": x, "b": y, "scale_a": scale_a, "scale_d": scale_d}
        options = CallOptions(alpha=alpha, beta=beta, stream=stream)
        return Call(_never, arrays, out, options, others=others, own=(option,))

    return compute


def _never(call: Call) -> Any:
    raise AssertionError(call)


class Color(enum.Enum):
    """Options."""

    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Value:
    """An option that is compared."""

    number: int


@dataclass(eq=False)
class Switches:
    """An option that hashes by its identity, whatever it holds."""

    on: bool = True


BASE: dict[str, Any] = {"y": array(8, 8, address=ADDRESS + 4096), "out": array(8, 8, address=ADDRESS + 8192)}
CHANGES: dict[str, dict[str, Any]] = {
    "an extent": {"y": array(8, 9)},
    "a stride": {"y": array(8, 8, strides=(1, 8))},
    "an element type": {"y": array(8, 8, dtype=CutlassDtype.BF16)},
    "an alignment": {"y": array(8, 8, address=ADDRESS + 2)},
    "a rank": {"y": array(1, 8, 8)},
    "a device": {"y": array(8, 8, device=1)},
    "fewer arrays": {"y": None},
    "an array of the epilogue": {"row": array(8)},
    "another array of the epilogue": {"column": array(8)},
    "a scale": {"scale_a": array(1, dtype=CutlassDtype.F32)},
    "a scale that is a number": {"scale_a": 2.0},
    "another scale": {"scale_d": 2.0},
    "a scale that changes nothing": {"scale_d": 1},
    "a list of scales": {"scale_a": [2.0, 2.0]},
    "a tuple of scales": {"scale_a": (2.0, 2.0)},
    "no product": {"alpha": 0},
    "no product, by a scale": {"scale_a": 0},
    "a C": {"beta": 1.0},
    "a C that a scale leaves out": {"beta": 1.0, "scale_d": 0.0},
    **{f"option {value!r}": {"option": value} for value in (
        0, 1, True, False, 1.0, -1, 2**62, "", "a", "a much longer text", "a much longer texT", (), (1,), [1], (1, 2),
        ((1, 2), (3, 4)), (1, (2, 3, 4)), Color.RED, Color.BLUE, Value(1), Value(2), CutlassDtype.F16, np.int64(1),
        (True,), (Color.RED,), tuple(range(200)), tuple(range(201)),
    )},
}  # fmt: skip


def test_a_changed_view_or_option_has_a_plan_of_its_own(function: Callable[..., Any], served: Served) -> None:
    x = array(8, 8)
    for _ in range(3):
        function(x, **BASE)
        for change in CHANGES.values():
            function(x, **{**BASE, **change})
    assert len(served.calls) == len(served.plans) == 1 + len(CHANGES) == len(call_module.kept_plans)
    assert {len(plan.calls) for plan in served.plans} == {2}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_like_an_earlier_one_has_its_plan(
    function: Callable[..., Any], served: Served, change: dict[str, Any]
) -> None:
    given = {**BASE, **change}
    function(array(8, 8), **given)
    again = {name: moved(value) for name, value in given.items()}
    assert function(array(8, 8, address=ADDRESS + 256), **again) is again["out"]
    (plan,) = served.plans
    (call,) = plan.calls
    *pointers, alpha, beta, _ = call
    assert pointers[0] == ADDRESS + 256
    assert pointers[-1] == again["out"].pointer
    scales = [
        given[name] for name in ("scale_a", "scale_d") if not isinstance(given.get(name), (_core.Operand, type(None)))
    ]
    factor = np.prod([np.mean(scale) for scale in scales])
    assert alpha == given.get("alpha", 1.0) * factor
    assert beta == given.get("beta", 0.0) * given.get("scale_d", 1.0)


def moved(value: Any) -> Any:
    """An argument that is equal to another, and not the same where that may be."""
    if isinstance(value, _core.Operand):
        return _core.Operand(value.pointer + 1024, value.shape, value.strides, value.dtype, 2, value.device)
    if isinstance(value, (Value, str, tuple, list)) and not isinstance(value, enum.Enum):
        return pickle.loads(pickle.dumps(value))
    return value


def test_scalars_are_read_at_every_call(function: Callable[..., Any], served: Served) -> None:
    numbers = (2, 3.5, -1, np.float16(0.5), np.float32(0.25), np.float64(7), np.int8(3), np.int64(9), np.uint8(200))
    for number in (1.0, *numbers):
        function(array(8, 8), **BASE, alpha=number)
    (plan,) = served.plans
    assert [call[-3] for call in plan.calls] == [float(number) for number in numbers]
    for scale in (2.0, np.float32(3), 4):
        function(array(8, 8), **BASE, scale_a=scale, alpha=2)
    assert [call[-3] for call in served.plans[1].calls] == [6.0, 8.0]
    assert len(served.calls) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": True}, {"alpha": "2"}, {"alpha": None}, {"alpha": 10**400}, {"alpha": np.ones(1)}, {"beta": 1j},
        {"scale_a": True}, {"scale_a": [1, 2]}, {"option": {}}, {"option": str.upper}, {"option": print},
        {"option": 2**64}, {"option": [{}]}, {"option": np.ones(2)}, {"x": np.ones((8, 8), np.float16)}, {"x": "x"},
        {"x": None}, {"x": []}, {"y": np.ones((8, 8), np.float16)}, {"y": 1}, {"row": 2.0}, {"stream": "a"},
        {"option": Switches()}, {"option": (1, Switches())},
    ],
    ids=str,
)  # fmt: skip
def test_what_only_parsing_can_judge_is_never_served(
    function: Callable[..., Any], served: Served, wrong: dict[str, Any]
) -> None:
    given = {"x": array(8, 8), **BASE, **wrong}
    for _ in range(2):
        function(**given)
    assert len(served.calls) == 2
    assert not served.plans or all(not plan.calls for plan in served.plans)


def test_a_list_that_holds_itself_ends_no_process(function: Callable[..., Any], served: Served) -> None:
    endless: list[Any] = []
    endless.append(endless)
    for _ in range(2):
        function(array(8, 8), **BASE, option=endless)
    assert len(served.calls) == 2
    assert len(call_module.kept_plans) == 0


def test_arguments_that_do_not_fit_are_the_functions_to_refuse(function: Callable[..., Any]) -> None:
    for call in (
        function,
        lambda: function(array(8), array(8), array(8)),
        lambda: function(array(8), x=array(8)),
        lambda: gemm(array(8, 8), array(8, 8), no_such=array(8), epilogue=None, alfa=1),
    ):
        with pytest.raises((TypeError, InvalidOperandError)):
            call()


def test_gradients_are_looked_for_at_every_call(
    function: Callable[..., Any], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled = [True]
    torch = type("torch", (), {"is_grad_enabled": staticmethod(lambda: enabled[0])})
    monkeypatch.setitem(__import__("sys").modules, "torch", torch)
    x, y = tensor(8, 8), tensor(8, 8)
    for _ in range(2):
        function(x, y, out=tensor(8, 8))
    assert len(served.calls) == 1
    for requires in (x, y):
        requires._requires_grad = True
        function(x, y, out=tensor(8, 8))
        assert served.pending[-1] is None
        enabled[0] = False
        before = len(served.calls)
        function(x, y, out=tensor(8, 8))
        assert len(served.calls) == before
        enabled[0], requires._requires_grad = True, False
    assert len(served.calls) == 3


def test_a_plan_that_refuses_leaves_the_call_to_parsing(function: Callable[..., Any], served: Served) -> None:
    function(array(8, 8), **BASE)
    served.plans[0].refusing = InvalidOperandError("a overlaps out")
    function(array(8, 8), **BASE)
    assert len(served.calls) == 2
    assert served.pending[1].plan is not None
    call_module.kept_plans.clear()
    assert served.pending[1].plan is None
    for error in (RuntimeError("lost"), KeyboardInterrupt()):
        function(array(8, 8), **BASE)
        served.plans[-1].refusing = error
        with pytest.raises(type(error)):
            function(array(8, 8), **BASE)
        call_module.kept_plans.clear()


def test_superseded_plans_and_those_to_be_parsed_are_not_served(function: Callable[..., Any], served: Served) -> None:
    function(array(8, 8), **BASE)
    served.plans[0].superseded = True
    function(array(8, 8), **BASE)
    function(array(8, 8), **BASE)
    assert [len(plan.calls) for plan in served.plans] == [0, 1]
    assert len(call_module.kept_plans) == 1
    served.parsed = True
    for _ in range(3):
        function(array(8, 8), **BASE, option=5)
    assert len(served.calls) == 5
    assert served.pending[-1].plan is not None


def test_the_environment_is_part_of_a_call(
    function: Callable[..., Any], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (None, "1", "0", "1", None):
        if value is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, value)
        function(array(8, 8), **BASE)
    assert len(served.calls) == 3
    assert VARIABLE not in os.environ


def test_whether_kernels_may_be_compiled_is_part_of_a_call(
    function: Callable[..., Any], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy in ("auto", "off", "background", "off", "auto"):
        monkeypatch.setenv(POLICY_VARIABLE, policy)
        function(array(8, 8), **BASE)
    assert len(served.calls) == 3


def test_interrupts_pass(function: Callable[..., Any], served: Served) -> None:
    class Interrupting:
        def __dlpack_device__(self) -> tuple[int, int]:
            raise KeyboardInterrupt

        def __dlpack__(self, **_: Any) -> object:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        function(array(8, 8), Interrupting())
    assert not served.calls


def test_lists_are_arrays_one_by_one(function: Callable[..., Any], served: Served) -> None:
    x, out = [array(8, 8), array(4, 8)], array(8, 8)
    function(x, out=out)
    assert served.pending[0] is not None
    function(x[:1], out=out)
    function([*x, array(2, 8)], out=out)
    assert len(served.calls) == 3


def test_the_plans_used_last_are_kept(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "kept_plans", _core.PlanStore(2))

    @stored(a="a")
    def compute(a: Any, *, out: Any, option: int = 0) -> Any:
        return Call(_never, {"a": a}, out, CallOptions(), own=(option,))

    def call(option: int) -> bool:
        before = len(served.calls)
        compute(array(8, 8), out=array(8, 8), option=option)
        return len(served.calls) == before

    assert [call(option) for option in (1, 2, 1, 3, 1, 2, 3)] == [False, False, True, False, True, False, False]
    assert len(call_module.kept_plans) == 2
    assert call_module.kept_plans.plans == served.plans[:-3:-1]
    call_module.kept_plans.clear()
    assert not call(3)


def test_a_stored_function_is_a_function_to_everybody() -> None:
    assert gemm.__name__ == "gemm"
    assert "batch dimensions broadcast" in str(gemm.__doc__).lower()
    assert list(inspect.signature(gemm).parameters)[:3] == ["a", "b", "c"]
    assert inspect.isroutine(gemm)
    assert callable(gemm)
    assert pickle.loads(pickle.dumps(gemm)) is gemm

    class Model:
        product = gemm

    assert Model().product.__self__.__class__ is Model


@pytest.mark.parametrize("kind", [_core.StoredFunction, _core.LaunchPlan])
def test_what_new_made_alone_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match="__init__ was not called"):
        kind.__new__(kind)(1)
