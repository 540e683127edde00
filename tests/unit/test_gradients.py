"""Tensors that require a gradient: refused while PyTorch records gradients, since what is computed has none."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass import _core
from atomr_cutlass.arrays import operands
from atomr_cutlass.pipeline.bindings import Binding, Weights
from dlpack_arrays import Tensor

F32, E4M3 = np.float32, ml_dtypes.float8_e4m3fn
REFERENCE: dict[str, Any] = {"backend": "reference"}


def ones(*shape: int, dtype: Any = F32) -> np.ndarray[Any, Any]:
    return np.ones(shape, dtype)


def biased(acc: Any, row: Any) -> Any:
    return acc + row


def grouped(**given: Any) -> Any:
    lists = {name[0] if name != "out" else name: [array] for name, array in given.items()}
    return ac.grouped_gemm(**lists, **REFERENCE, beta=1.0)


def product(**given: Any) -> Any:
    epilogue = ac.MatmulEpilogue.GELU_AUX_BIAS
    return ac.matmul(ac.MatmulRequest(**given, m=4, n=4, k=4, beta=1.0, epilogue=epilogue, **REFERENCE))


SQUARE = {"a": ones(4, 4), "b": ones(4, 4), "c": ones(4, 4)}
IMAGES = {"x": ones(1, 4, 4, 8), "w": ones(8, 1, 1, 8), "dy": ones(1, 4, 4, 8)}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, np.ndarray[Any, Any]]]] = {
    "gemm": (
        lambda **given: ac.gemm(**given, beta=1.0, **REFERENCE),
        {**SQUARE, "bias": ones(4), "out": ones(4, 4)},
    ),
    "gemm, scaled": (
        lambda **given: ac.gemm(**given, out_dtype=ac.CutlassDtype.F32, **REFERENCE),
        {"a": ones(4, 16, dtype=E4M3), "b": ones(16, 4, dtype=E4M3)}
        | {name: ones(1) for name in ("scale_a", "scale_b", "scale_d", "amax")},
    ),
    "gemm, epilogue": (
        lambda **given: ac.gemm(**given, epilogue=biased, **REFERENCE),
        {"a": ones(4, 4), "b": ones(4, 4), "row": ones(4)},
    ),
    "grouped_gemm": (grouped, {**{f"{name}[0]": array for name, array in SQUARE.items()}}),
    "gated_gemm": (
        lambda **given: ac.gated_gemm(**given, **REFERENCE),
        {"a": ones(4, 8, dtype=np.float16), "b": ones(8, 16, dtype=np.float16)},
    ),
    "conv2d": (
        lambda x, w, **given: ac.conv2d(x, w, beta=1.0, **given, **REFERENCE),
        {"x": IMAGES["x"], "w": IMAGES["w"], "c": IMAGES["dy"], "bias": ones(8), "out": ones(1, 4, 4, 8)},
    ),
    "conv2d_dgrad": (
        lambda dy, w: ac.conv2d_dgrad(dy, w, (1, 4, 4, 8), **REFERENCE),
        {"dy": IMAGES["dy"], "w": IMAGES["w"]},
    ),
    "conv2d_wgrad": (
        lambda dy, x: ac.conv2d_wgrad(dy, x, (8, 1, 1, 8), **REFERENCE),
        {"dy": IMAGES["dy"], "x": IMAGES["x"]},
    ),
    "matmul": (product, {**SQUARE, "d": ones(4, 4), "bias": ones(4), "gelu_aux": ones(4, 4)}),
    "quantize": (ac.quantize, {"x": ones(4, 32)}),
    "dequantize": (ac.dequantize, {"values": ones(4, 32, dtype=E4M3), "scales": ones(1)}),
    "weights": (Weights, {"weights": ones(4, 4)}),
}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Whether PyTorch, which is not there, records gradients."""
    state = types.SimpleNamespace(now=True)
    module = types.ModuleType("torch")
    vars(module)["is_grad_enabled"] = lambda: state.now
    monkeypatch.setitem(sys.modules, "torch", module)
    return state


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, (_, arrays) in CALLS.items() for name in arrays])
def test_what_requires_a_gradient_is_refused(call: str, name: str, recorded: types.SimpleNamespace) -> None:
    function, arrays = CALLS[call]

    def given() -> dict[str, Tensor]:
        return {label: Tensor(array.copy(), requires_grad=label == name) for label, array in arrays.items()}

    with pytest.raises(ac.InvalidOperandError) as caught:
        function(**given())
    said = str(caught.value)
    assert said.startswith(f"{name} requires a gradient")
    assert "`with torch.no_grad():`" in said
    assert ".detach()" in said
    recorded.now = False
    function(**given())


def test_what_requires_none_is_taken(recorded: types.SimpleNamespace) -> None:
    assert recorded.now
    for function, arrays in CALLS.values():
        function(**{name: Tensor(array.copy()) for name, array in arrays.items()})


def test_a_result_that_requires_a_gradient_is_left_alone(recorded: types.SimpleNamespace) -> None:
    out = Tensor(np.full((4, 4), 7, F32), requires_grad=recorded.now)
    with pytest.raises(ac.InvalidOperandError, match="out requires a gradient"):
        ac.gemm(ones(4, 4), ones(4, 4), out=out, backend="reference")
    assert (out.memory == 7).all()


@pytest.mark.usefixtures("recorded")
def test_messages_and_bindings_refuse_them() -> None:
    request = ac.GemmRequest(ac.GemmShape(4, 4, 4), dtype=ac.CutlassDtype.F32)
    plain, tensor = (Tensor(ones(4, 4), device=(operands.CUDA, 0), requires_grad=needed) for needed in (False, True))
    with pytest.raises(ac.InvalidOperandError, match=r"^b requires a gradient"):
        Binding(request, tensor, 0)
    for name, given in (("a", {"a": tensor, "b": plain}), ("b", {"a": plain, "b": tensor})):
        with pytest.raises(ac.InvalidOperandError, match=f"^{name} requires a gradient"):
            ac.CutlassActor(2).handle(ac.CutlassMsg.Gemm(request, given, stream=0))
    with pytest.raises(ac.InvalidOperandError, match=r"^out requires a gradient"):
        ac.CutlassActor(2).handle(ac.CutlassMsg.Gemm(request, (plain, plain), out=tensor, stream=0))


def test_arrays_of_other_frameworks_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert _core.Operand.of(Tensor(ones(2, 3), requires_grad=True)).shape == (2, 3)
    assert operands.as_operand(Tensor(ones(2, 3), requires_grad=True)).shape == (2, 3)


@pytest.mark.usefixtures("recorded")
def test_arrays_that_are_imported_by_python_are_asked_too() -> None:
    class Old:
        """Of a PyTorch without the exchange API."""

        requires_grad = property(lambda _: True)

        def __dlpack__(self, **_: Any) -> object:
            raise AssertionError

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    with pytest.raises(ac.InvalidOperandError, match=r"^a requires a gradient"):
        ac.gemm(Old(), ones(4, 4), backend="reference")


def test_pytorch_is_not_imported() -> None:
    code = (
        "import sys, numpy as np, atomr_cutlass as ac\n"
        "ac.gemm(np.ones((4, 4), np.float32), np.ones((4, 4), np.float32), backend='reference')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
