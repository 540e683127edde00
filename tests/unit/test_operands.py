"""Operands: what is read off an array, whoever made it, and how long its memory is kept."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import _core
from atomr_cutlass.arrays import frameworks, numerics, operands
from atomr_cutlass.errors import InvalidOperandError
from dlpack_arrays import Array, CudaArray, capsule_name

CPU, CUDA = operands.CPU, operands.CUDA
ADDRESS = 0x7F00_0000_0000  # of no memory: operands are described, never read


# ----------------------------------------------------------------------------------------------------------------------
# NumPy
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [d for d in D if d is not D.TF32])
def test_numpy_arrays_of_every_dtype(dtype: D) -> None:
    array = np.zeros((3, 5), numerics.numpy_dtype(dtype))
    operand = operands.as_operand(array)
    assert operands.dtype_of(operand, "a") is dtype
    assert (operand.shape, operand.strides) == ((3, 5), (5, 1))
    assert (operand.device_type, operand.device, operand.read_only) == (CPU, 0, False)
    assert operand.pointer == array.ctypes.data


@pytest.mark.parametrize("dtype", [d for d in D if d is not D.TF32])
def test_operands_of_every_dtype_become_numpy_arrays_again(dtype: D) -> None:
    array = numerics.saturating_cast(np.arange(-6, 6).reshape(3, 4), dtype)
    for view in (array, array.T, array[::-1, 1::2]):
        back = operands.to_numpy(operands.as_operand(view))
        assert back.dtype == view.dtype
        np.testing.assert_array_equal(numerics.to_float64(back), numerics.to_float64(view))


@given(st.lists(st.integers(0, 4), max_size=5), st.data())
@settings(max_examples=150, deadline=None)
def test_views_come_back_as_they_were(shape: list[int], data: st.DataObject) -> None:
    base = np.arange(np.prod([n + 2 for n in shape], dtype=int), dtype=np.int32).reshape([n + 2 for n in shape])
    slices: list[Any] = [
        slice(data.draw(st.integers(0, 2)), None, data.draw(st.sampled_from([1, 1, 2, -1]))) for _ in shape
    ]
    view = base[(*slices, ...)]
    view = view.transpose(data.draw(st.permutations(range(view.ndim))))
    back = operands.to_numpy(operands.as_operand(view))
    np.testing.assert_array_equal(back, view)
    if view.size:
        assert np.shares_memory(back, view)
        back[...] = -1
        assert (view == -1).all()


def test_strides_of_extent_1_are_not_kept() -> None:
    array = np.zeros((1, 5), np.float32)[:, ::2]
    assert operands.as_operand(array).strides == (0, 2)


def test_a_read_only_array_stays_read_only() -> None:
    array = np.zeros((2, 2))
    array.flags.writeable = False
    operand = operands.as_operand(array)
    assert operand.read_only
    assert not operands.to_numpy(operand).flags.writeable


@pytest.mark.parametrize("dtype", ["complex64", "uint16", "int16", "bool", "S4", "object", ">f4", "float128"])
def test_dtypes_that_no_kernel_knows_are_refused(dtype: str) -> None:
    if not hasattr(np, "float128") and dtype == "float128":
        pytest.skip("this platform has no float128")
    with pytest.raises(InvalidOperandError, match="no kernel knows elements of type"):
        operands.as_operand(np.zeros((2, 2), dtype))


def test_elements_that_do_not_lie_on_a_grid_are_refused() -> None:
    record = np.zeros((4, 4), np.dtype([("x", "<f4"), ("y", "<i2")]))["x"]
    with pytest.raises(InvalidOperandError, match="no multiples of the element size"):
        operands.as_operand(record)


def test_too_many_dimensions_are_refused() -> None:
    assert operands.as_operand(np.zeros((1,) * 8)).shape == (1,) * 8
    with pytest.raises(InvalidOperandError, match="9 dimensions; at most 8"):
        operands.as_operand(np.zeros((1,) * 9))


@pytest.mark.parametrize("thing", [None, 3, 2.5, "abc", [[1.0, 2.0]], object()])
def test_what_is_no_array_is_refused(thing: object) -> None:
    with pytest.raises(InvalidOperandError, match="is not an array: expected NumPy"):
        operands.as_operand(thing)


def test_an_operand_is_taken_as_it_is() -> None:
    operand = operands.as_operand(np.zeros((2, 2)))
    assert operands.as_operand(operand) is operand


@pytest.mark.parametrize(("offset", "alignment"), [(0, 16), (1, 1), (2, 2), (4, 4), (6, 2), (8, 8), (12, 4), (24, 8)])
def test_alignment_is_the_largest_power_of_two_up_to_16(offset: int, alignment: int) -> None:
    operand = _core.Operand(ADDRESS + offset, (4,), None, D.I8.dlpack, CUDA, 0)
    assert operand.alignment == alignment


def test_an_operand_describes_itself() -> None:
    operand = _core.Operand(ADDRESS, (4, 1, 6), (6, 6, 1), D.BF16.dlpack, CUDA, 3)
    assert repr(operand) == "<Operand bfloat16 of shape (4, 1, 6), strides (6, 0, 1) on cuda:3>"
    assert "float8_e4m3fn of shape (4,)" in repr(_core.Operand(0, (4,), None, D.F8E4M3.dlpack, CPU, 0))


# ----------------------------------------------------------------------------------------------------------------------
# DLPack
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("versioned", [True, False])
def test_capsules_are_taken_over_once(versioned: bool) -> None:
    array = Array(np.zeros((3, 4), np.float16), versioned=versioned)
    capsule = array.__dlpack__()
    operand = _core.Operand.from_capsule(capsule)
    assert capsule_name(capsule) == ("used_dltensor_versioned" if versioned else "used_dltensor")
    with pytest.raises(InvalidOperandError, match="has been used"):
        _core.Operand.from_capsule(capsule)
    assert (operand.shape, operand.strides, operand.dtype) == ((3, 4), (4, 1), (2, 16))


@pytest.mark.parametrize("versioned", [True, False])
def test_the_deleter_is_called_once_when_the_operand_goes(versioned: bool) -> None:
    array = Array(np.zeros((3, 4), np.float16), versioned=versioned)
    operand = operands.as_operand(array)
    view = operands.to_numpy(operand)
    del operand
    gc.collect()
    assert array.deleted == 0  # the NumPy view still points into it
    assert view.shape == (3, 4)
    del view
    gc.collect()
    assert array.deleted == 1


def test_a_capsule_that_is_refused_stays_the_producers() -> None:
    wrongs: list[dict[str, Any]] = [{"lanes": 4}, {"version": 2}, {"shape": (1,) * 9, "strides": False}]
    for wrong in wrongs:
        array = Array(np.zeros((1,), np.float32), **wrong)
        capsule = array.__dlpack__()
        with pytest.raises(InvalidOperandError):
            _core.Operand.from_capsule(capsule)
        assert capsule_name(capsule) == "dltensor_versioned"
        assert array.deleted == 0


def test_capsules_without_strides_are_row_major() -> None:
    operand = operands.as_operand(Array(np.zeros((2, 3, 4), np.float32), strides=False))
    assert operand.strides == (12, 4, 1)


def test_the_byte_offset_counts() -> None:
    memory = np.arange(16, dtype=np.float32).reshape(4, 4)
    operand = operands.as_operand(Array(memory, byte_offset=64))
    assert operand.pointer == memory.ctypes.data
    np.testing.assert_array_equal(operands.to_numpy(operand), memory)


def test_the_read_only_flag_counts() -> None:
    assert operands.as_operand(Array(np.zeros((2, 2)), read_only=True)).read_only
    assert not operands.as_operand(Array(np.zeros((2, 2)))).read_only


def test_producers_from_before_dlpack_1_are_asked_again_without_a_version() -> None:
    array = Array(np.zeros((2, 2)), versioned=False, knows_versions=False)
    assert operands.as_operand(array).shape == (2, 2)
    assert array.asked == [{}]


def test_gpu_arrays_are_asked_to_order_their_work_before_the_legacy_stream() -> None:
    array = Array(np.zeros((2, 2)), device=(CUDA, 1), pointer=ADDRESS)
    operand = operands.as_operand(array)
    assert array.asked == [{"max_version": (1, 0), "copy": False, "stream": 1}]
    assert (operand.device_type, operand.device, operand.pointer) == (CUDA, 1, ADDRESS)


def test_host_arrays_are_not_given_a_stream() -> None:
    array = Array(np.zeros((2, 2)))
    operands.as_operand(array)
    assert array.asked == [{"max_version": (1, 0), "copy": False}]


@pytest.mark.parametrize(("given", "seen"), [(frameworks.MANAGED, CUDA), (frameworks.PINNED, CPU)])
def test_managed_and_pinned_memory_count_as_gpu_and_host(given: int, seen: int) -> None:
    array = Array(np.zeros((2, 2)), device=(given, 0))
    operand = operands.as_operand(array)
    assert operand.device_type == seen
    del operand
    gc.collect()
    assert array.deleted == 1


@pytest.mark.parametrize("error", [BufferError, ValueError, RuntimeError])
def test_an_array_that_does_not_export_itself_is_refused_with_its_reason(error: type[Exception]) -> None:
    class Refusing:
        def __dlpack_device__(self) -> tuple[int, int]:
            return CPU, 0

        def __dlpack__(self, **_: Any) -> object:
            message = "requires a gradient"
            raise error(message)

    with pytest.raises(InvalidOperandError, match="Refusing does not export itself: requires a gradient"):
        operands.as_operand(Refusing())


def test_an_unknown_dlpack_type_is_named() -> None:
    operand = operands.as_operand(Array(np.zeros((2, 2), np.complex64)))
    with pytest.raises(InvalidOperandError, match="b has elements of DLPack type 5 with 64 bits; kernels know float64"):
        operands.dtype_of(operand, "b")


def test_operands_are_dlpack_producers_themselves() -> None:
    memory = np.arange(12, dtype=np.float32).reshape(3, 4)
    operand = operands.as_operand(memory[:, ::2])
    back = np.from_dlpack(operand)  # type: ignore[arg-type]
    np.testing.assert_array_equal(back, memory[:, ::2])
    assert operand.__dlpack_device__() == (CPU, 0)


def test_an_export_keeps_the_memory_alive_and_lets_it_go() -> None:
    memory = np.zeros((3, 4), np.float32)
    alive = weakref.ref(memory)
    capsule: Any = operands.as_operand(memory).__dlpack__()
    del memory
    gc.collect()
    assert alive() is not None
    del capsule  # nobody took it over
    gc.collect()
    assert alive() is None


def test_an_operand_keeps_its_owner_alive_and_lets_it_go() -> None:
    memory = np.zeros((3, 4), np.float32)
    alive = weakref.ref(memory)
    operand = operands.as_operand(memory)
    view = operands.to_numpy(operand)
    del memory, operand
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


# ----------------------------------------------------------------------------------------------------------------------
# __cuda_array_interface__
# ----------------------------------------------------------------------------------------------------------------------


def test_cuda_arrays_are_described() -> None:
    operand = operands.as_operand(CudaArray(ADDRESS + 6, (2, 3), "<f2", (16, 2), read_only=True))
    assert (operand.pointer, operand.shape, operand.strides) == (ADDRESS + 6, (2, 3), (8, 1))
    assert (operand.device_type, operand.device, operand.read_only, operand.alignment) == (CUDA, 0, True, 2)
    assert operands.dtype_of(operand, "a") is D.F16


def test_cuda_arrays_without_strides_are_row_major() -> None:
    assert operands.as_operand(CudaArray(ADDRESS, (2, 3, 4), "<f4")).strides == (12, 4, 1)


def test_the_device_of_a_cuda_array_is_its_own() -> None:
    array = CudaArray(ADDRESS, (2, 3))
    array.device = types.SimpleNamespace(id=5)  # type: ignore[attr-defined]
    assert operands.as_operand(array).device == 5


def test_a_cuda_array_is_kept_alive() -> None:
    array = CudaArray(ADDRESS, (2, 3))
    alive = weakref.ref(array)
    operand = operands.as_operand(array)
    del array
    gc.collect()
    assert alive() is not None
    del operand
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"typestr": "<c8"}, "no kernel knows elements of type complex64"),
        ({"typestr": ">f4"}, "no kernel knows elements of type"),
        ({"typestr": ","}, "has typestr ','; expected one such as '<f4'"),
        ({"strides": (13, 2)}, "no multiples of the element size"),
        ({"strides": (2,)}, "strides"),
        ({"shape": (1,) * 9}, "9 dimensions"),
        ({"mask": object()}, "mask"),
    ],
)
def test_cuda_arrays_that_no_kernel_can_read_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidOperandError, match=says):
        operands.as_operand(CudaArray(ADDRESS, **({"shape": (2, 3)} | arguments)))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("shape", {2: 1, 3: 2}, "a tuple of integers"),
        ("shape", {2, 3}, "a tuple of integers"),
        ("strides", iter((6, 2)), "a tuple of integers"),
        ("data", {ADDRESS: 1, 2: 2}, r"\(address, whether it is read-only\)"),
    ],
)
def test_fields_of_a_cuda_array_are_sequences(field: str, value: Any, says: str) -> None:
    array = CudaArray(ADDRESS, (2, 3))
    array.__cuda_array_interface__[field] = value
    with pytest.raises(InvalidOperandError, match=f"has {field} .*; expected {says}"):
        operands.as_operand(array)


@pytest.mark.parametrize(
    ("stream", "ordered"), [(None, []), (1, []), (2, [(0, 2, 0, False)]), (0x55AA, [(0, 0x55AA, 0, False)])]
)
def test_launches_wait_for_the_stream_of_a_cuda_array(
    stream: int | None, ordered: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def order(device: int, before: int, after: int, *, fork: bool) -> None:
        calls.append((device, before, after, fork))

    monkeypatch.setattr(_core, "order_streams", order)
    operands.as_operand(CudaArray(ADDRESS, (2, 3), stream=stream))
    assert calls == ordered


# ----------------------------------------------------------------------------------------------------------------------
# Streams, signatures, results
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stream",
    [
        42,
        types.SimpleNamespace(__cuda_stream__=lambda: (0, 42)),
        types.SimpleNamespace(__cuda_stream__=(0, 42)),
        types.SimpleNamespace(cuda_stream=42),
        types.SimpleNamespace(ptr=42),
        types.SimpleNamespace(handle=42),
    ],
)
def test_streams_of_every_kind(stream: object) -> None:
    assert operands.stream_handle(stream) == 42


@pytest.mark.parametrize("stream", ["default", 1.5, object()])
def test_what_is_no_stream_is_refused(stream: object) -> None:
    with pytest.raises(InvalidOperandError, match="expected an integer handle or a stream"):
        operands.stream_handle(stream)


def _gpu(
    *shape: int, address: int = ADDRESS, dtype: D = D.F16, strides: tuple[int, ...] | None = None
) -> _core.Operand:
    return _core.Operand(address, shape, strides, dtype.dlpack, CUDA, 0)


def test_frameworks_are_known_by_the_type_of_the_array() -> None:
    array_type = type("Array", (), {"__module__": "jaxlib._jax"})
    assert frameworks.framework_of(array_type()) is frameworks.JAX
    assert frameworks.framework_of(np.zeros(2)) is frameworks.NUMPY
    assert operands.current_stream(np.zeros(2)) == 0


def test_a_host_result_is_of_the_callers_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    result = np.ones((2, 2), np.float32)
    assert operands.host_result(result, np.zeros(2)) is result
    framework = types.ModuleType("some_framework")
    framework.from_dlpack = lambda x: ("imported", np.from_dlpack(x))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_framework", framework)
    like = type("Array", (), {"__module__": "some_framework.core"})()
    kind, back = operands.host_result(result, like)
    assert kind == "imported"
    np.testing.assert_array_equal(back, result)
    stranger = type("Array", (), {"__module__": "nowhere_to_be_found"})()
    assert operands.host_result(result, stranger) is result
    subclass = type("Parameter", (type(like),), {"__module__": "elsewhere"})
    kind, _ = operands.host_result(result, object.__new__(subclass))
    assert kind == "imported"


def test_bf16_survives_the_way_through_an_operand() -> None:
    values = np.array([[1.5, -2.0], [3.0, 0.25]], ml_dtypes.bfloat16)
    back = operands.to_numpy(operands.as_operand(Array(values)))
    assert back.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(back.astype(np.float32), values.astype(np.float32))


def test_strides_that_an_exporter_took_for_unsigned_are_negative() -> None:
    operand = _core.Operand(4096, (40, 48), ((1 << 62) - 48, 1), D.F32.dlpack, 2, 0)
    assert operand.strides == (-48, 1)
