"""Frameworks: launch streams over a fake driver, and what each framework's class says.

The cases that launch are in `tests/helpers/framework_cases.py`; one process of its own runs them all.
"""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
import fake_kernels
import fake_pack
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, _core
from atomr_cutlass.arrays import frameworks, operands
from atomr_cutlass.generator.matrix import expand
from dlpack_arrays import Array, capsule_name

CASES_FILE = "framework_cases.py"
ADDRESS = 0x7F00_0000_0000


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text; empty where it passed."""
    folder = tmp_path_factory.mktemp("fake")
    cells = [k for k in expand("full", [SmArch.SM80]) if k.math == "ieee" and k.d is D.F32]
    pack = fake_kernels.make_pack(folder / "pack.so", cells)
    return fake_cases.outcome(CASES_FILE, fake_pack.make_driver(folder / "driver"), [pack])


@pytest.mark.parametrize("case", fake_cases.names(CASES_FILE))
def test_streams_on_a_fake_gpu(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""


# ----------------------------------------------------------------------------------------------------------------------
# Frameworks


def test_a_framework_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Matrix:
        def __init__(self, memory: np.ndarray[Any, Any]) -> None:
            self.memory = memory

    class Matrices(frameworks.Framework):
        def recognizes(self, array: Any) -> bool:
            return isinstance(array, Matrix)

        def import_array(self, array: Any, name: str, launch: frameworks.LaunchStream) -> _core.Operand:
            return frameworks.NUMPY.import_array(array.memory, name, launch)

        def from_host(self, result: np.ndarray[Any, Any], like: Any) -> Any:
            return type(like)(result)

    a, b = Matrix(np.ones((2, 3), np.float32)), Matrix(np.ones((3, 4), np.float32))
    with pytest.raises(ac.InvalidOperandError, match="a Matrix is not an array"):
        ac.gemm(a, b, backend="reference")
    monkeypatch.setattr(frameworks, "FRAMEWORKS", (*frameworks.FRAMEWORKS, Matrices()))
    got = ac.gemm(a, b, backend="reference")
    assert isinstance(got, Matrix)
    np.testing.assert_array_equal(got.memory, np.full((2, 4), 3.0, np.float32))


@pytest.mark.parametrize("place", [(operands.CPU, 0), (operands.CUDA, 0)])
def test_an_old_pytorch_is_refused_by_name(place: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.ModuleType("torch")
    tensor = type("Tensor", (Array,), {"__module__": "torch"})
    parameter = type("Parameter", (tensor,), {"__module__": "elsewhere"})
    vars(torch).update(Tensor=tensor, __version__="2.9.1", is_grad_enabled=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", torch)
    good = np.ones((4, 4), np.float32)
    for kind in (tensor, parameter):
        old = kind(good, device=place)
        with pytest.raises(
            ac.UnsupportedError, match=r"b is a tensor of PyTorch 2\.9\.1, .*pip install 'torch>=2\.10'"
        ):
            ac.gemm(good, old, backend="reference")
        assert old.asked == []


def test_a_stream_that_is_none_is_refused_first() -> None:
    array = Array(np.zeros((4, 4), np.float32), device=(operands.CUDA, 0))
    with pytest.raises(ac.InvalidOperandError, match="expected an integer handle or a stream"):
        ac.gemm(array, array, stream="default")
    assert array.asked == []


def test_calls_do_not_share_launch_streams() -> None:
    with operands.launching(5, None) as outer:
        assert operands.launch_stream() is outer
        with operands.launching(7, None):
            assert operands.launch_stream().handle == 7
        assert operands.launch_stream() is outer
    assert operands.launch_stream().handle == 0


# ----------------------------------------------------------------------------------------------------------------------
# Operands as producers


def _operand(*, kind: int = operands.CPU, read_only: bool = False) -> tuple[_core.Operand, np.ndarray[Any, Any]]:
    memory = np.arange(24, dtype=np.float32).reshape(4, 6)
    view = memory[1:, ::2]
    strides = [stride // 4 for stride in view.strides]
    pointer = view.ctypes.data if kind == operands.CPU else ADDRESS
    return _core.Operand(pointer, view.shape, strides, D.F32.dlpack, kind, 0, read_only, memory), view


@pytest.mark.parametrize(
    ("version", "name"),
    [(None, "dltensor"), ((0, 8), "dltensor"), ((1, 0), "dltensor_versioned"), ((2, 0), "dltensor_versioned")],
)
def test_capsules_are_of_the_version_that_is_asked_for(version: tuple[int, int] | None, name: str) -> None:
    operand, view = _operand()
    capsule: Any = operand.__dlpack__(max_version=version)
    assert capsule_name(capsule) == name
    back = _core.Operand.from_capsule(capsule)
    assert (back.pointer, back.shape, back.strides) == (operand.pointer, view.shape, operand.strides)
    assert not back.read_only


def test_read_only_operands_are_exported_as_such_or_not_at_all() -> None:
    operand, _ = _operand(read_only=True)
    assert _core.Operand.from_capsule(operand.__dlpack__(max_version=(1, 0))).read_only
    for version in (None, (0, 8)):
        with pytest.raises(BufferError, match=r"read-only, which only DLPack 1\.0 can say: ask with max_version"):
            operand.__dlpack__(max_version=version)
    assert not np.from_dlpack(_operand()[0]).flags.owndata  # type: ignore[arg-type]


def test_copies_are_memory_of_their_own() -> None:
    operand, view = _operand(read_only=True)
    for version in (None, (1, 0)):
        back = _core.Operand.from_capsule(operand.__dlpack__(max_version=version, copy=True))
        assert back.pointer != operand.pointer
        np.testing.assert_array_equal(operands.to_numpy(back), view)
    assert _core.Operand.from_capsule(operand.__dlpack__(max_version=(1, 0), copy=False)).pointer == operand.pointer
    empty = _core.Operand(0, (0, 4), None, D.F32.dlpack, operands.CPU, 0)
    assert _core.Operand.from_capsule(empty.__dlpack__(copy=True)).shape == (0, 4)
    del operand
    gc.collect()
    np.testing.assert_array_equal(operands.to_numpy(back), view)


def test_operands_are_exported_on_their_own_device_only() -> None:
    operand, _ = _operand()
    assert operand.__dlpack__(dl_device=(operands.CPU, 0)) is not None
    with pytest.raises(BufferError, match=r"on device \(1, 0\), and exports no copy on another"):
        operand.__dlpack__(dl_device=(operands.CUDA, 0))


def test_streams_of_exports_are_those_of_the_protocol() -> None:
    host, device = _operand()[0], _operand(kind=operands.CUDA)[0]
    with pytest.raises(ac.InvalidOperandError, match="the operand is in host memory"):
        host.__dlpack__(stream=1)
    for stream in (0, -2):
        with pytest.raises(ac.InvalidOperandError, match=f"stream is {stream}; DLPack has 1 for the legacy"):
            device.__dlpack__(stream=stream)
    for given in (None, -1, 1, 2, 42):
        assert device.__dlpack__(stream=given) is not None
