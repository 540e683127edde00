"""Valid calls of every public name, values to spoil their arguments with, and what may come out of such a call.

`test_fuzz.py` draws from these at random; a process over a fake driver runs the same calls on GPU arrays.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import atomr_cutlass as ac
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import _core, epilogue
from atomr_cutlass.arrays import operands
from atomr_cutlass.generator.epilogue.tree import Node, Output
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.jit import kernels

Arguments = dict[str, Any]
Values = np.ndarray[Any, Any]
Maker = Callable[[], Any]

# ----------------------------------------------------------------------------------------------------------------------
# Values that do not belong where they are given
# ----------------------------------------------------------------------------------------------------------------------


class Exports:
    """Says that it is an array in one of the array protocols, and then is none."""

    def __init__(self, **names: Any) -> None:
        for name, value in names.items():
            setattr(self, name, value)


class DlpackOf(Exports):
    """Calls to `__dlpack__` and `__dlpack_device__` return these values, whatever they are asked."""

    def __init__(self, device: Any, capsule: Any) -> None:
        super().__init__(given=(device, capsule))

    def __dlpack_device__(self) -> Any:
        return self.given[0]

    def __dlpack__(self, **_: Any) -> Any:
        return self.given[1]


def interface(**fields: Any) -> Exports:
    """An object with a `__cuda_array_interface__`."""
    whole = {"version": 3, "shape": (2, 2), "typestr": "<f4", "data": (0, False), "strides": None}
    return Exports(__cuda_array_interface__={**whole, **fields})


def _ragged() -> Values:
    array = np.empty(2, object)
    array[:] = [1, [2, 3]]
    return array


def _read_only() -> Values:
    array = np.ones((2, 2), np.float32)
    array.flags.writeable = False
    return array


SPOILS: dict[str, Maker] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "3": lambda: 3,
    "-1": lambda: -1,
    "-2**31": lambda: -(2**31),
    "2**31": lambda: 2**31,
    "2**31 - 1": lambda: 2**31 - 1,
    "2**63": lambda: 2**63,
    "2**64": lambda: 2**64,
    "10**400": lambda: 10**400,
    "10**5000": lambda: 10**5000,
    "0.0": lambda: 0.0,
    "0.5": lambda: 0.5,
    "-1.5": lambda: -1.5,
    "1e300": lambda: 1e300,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "1j": lambda: 1j,
    "Decimal": lambda: Decimal("1.5"),
    "Fraction": lambda: Fraction(1, 3),
    "empty str": lambda: "",
    "str": lambda: "nonsense",
    "str auto": lambda: "auto",
    "str relu": lambda: "relu",
    "str bf16": lambda: "bf16",
    "str row": lambda: "row",
    "str NUL": lambda: "a\0b",
    "str surrogate": lambda: "\ud800",
    "str identifier": lambda: "a",
    "bytes": lambda: b"bytes",
    "bytearray": lambda: bytearray(16),
    "memoryview": lambda: memoryview(bytes(16)),
    "object": object,
    "class": lambda: int,
    "function": lambda: lambda acc: acc,
    "function of nothing": lambda: lambda: 1,
    "generator": lambda: (i for i in range(2)),
    "iterator": lambda: iter([1, 2]),
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "slice": lambda: slice(1, 2),
    "range": lambda: range(2),
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset({1}),
    "dict": dict,
    "dict of str": lambda: {"a": 1},
    "dict of object": lambda: {1: object()},
    "exception": lambda: ValueError("given as an argument"),
    "module": lambda: np,
    "path": lambda: Path("/nonexistent/place"),
    "()": tuple,
    "(1,)": lambda: (1,),
    "(1, 1)": lambda: (1, 1),
    "(0, 0)": lambda: (0, 0),
    "(1, 2, 3)": lambda: (1, 2, 3),
    "(1, 2, 3, 4)": lambda: (1, 2, 3, 4),
    "((1, 1), (1, 1))": lambda: ((1, 1), (1, 1)),
    "((1, 2, 3), 1)": lambda: ((1, 2, 3), 1),
    "('a', 'b')": lambda: ("a", "b"),
    "(None, None)": lambda: (None, None),
    "(2**70, -1)": lambda: (2**70, -1),
    "(nan, inf)": lambda: (float("nan"), float("inf")),
    "[]": list,
    "[1]": lambda: [1],
    "[1, 1]": lambda: [1, 1],
    "[None]": lambda: [None],
    "[[1, 2], [3, 4]]": lambda: [[1.0, 2.0], [3.0, 4.0]],
    "[[1], [2, 3]]": lambda: [[1], [2, 3]],
    "[array]": lambda: [np.ones((2, 2), np.float32)],
    "[array, None]": lambda: [np.ones((2, 2), np.float32), None],
    "(array, array)": lambda: (np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)),
    "float32": lambda: np.float32(1.5),
    "float32 nan": lambda: np.float32("nan"),
    "float64": lambda: np.float64(1.5),
    "longdouble": lambda: np.longdouble(1.5),
    "int64": lambda: np.int64(3),
    "uint64": lambda: np.uint64(2**64 - 1),
    "int8": lambda: np.int8(-1),
    "bool_": lambda: np.bool_(True),
    "str_": lambda: np.str_("auto"),
    "complex64": lambda: np.complex64(1j),
    "bfloat16": lambda: ml_dtypes.bfloat16(1.5),
    "datetime64": lambda: np.datetime64("2020-01-01"),
    "0-d": lambda: np.array(1.0, np.float32),
    "0-d int": lambda: np.array(3),
    "0-d str": lambda: np.array("auto"),
    "0-d object": lambda: np.array(None, object),
    "1-d": lambda: np.arange(4.0, dtype=np.float32),
    "1-d of one": lambda: np.ones(1, np.float32),
    "1-d int": lambda: np.arange(4),
    "1-d int32": lambda: np.array([2, 4], np.int32),
    "1-d bool": lambda: np.ones(4, bool),
    "1-d str": lambda: np.array(["a", "b"]),
    "ragged": _ragged,
    "2-d": lambda: np.ones((4, 4), np.float32),
    "2-d f16": lambda: np.ones((4, 4), np.float16),
    "2-d f64": lambda: np.ones((4, 4)),
    "2-d nan": lambda: np.full((4, 4), np.nan, np.float32),
    "2-d complex": lambda: np.ones((4, 4), np.complex64),
    "2-d i8": lambda: np.ones((4, 4), np.int8),
    "2-d u8": lambda: np.ones((4, 4), np.uint8),
    "2-d int64": lambda: np.ones((4, 4), np.int64),
    "2-d swapped": lambda: np.ones((4, 4), np.dtype(np.float32).newbyteorder()),
    "2-d e4m3": lambda: np.ones((4, 4), ml_dtypes.float8_e4m3fn),
    "2-d e8m0": lambda: np.ones((4, 4), ml_dtypes.float8_e8m0fnu),
    "2-d e2m1": lambda: np.ones((4, 4), ml_dtypes.float4_e2m1fn),
    "2-d bf16": lambda: np.ones((4, 4), ml_dtypes.bfloat16),
    "2-d empty": lambda: np.ones((0, 4), np.float32),
    "2-d broadcast": lambda: np.broadcast_to(np.float32(1.0), (4, 4)),
    "2-d backwards": lambda: np.ones((4, 4), np.float32)[::-1, ::-1],
    "2-d read-only": _read_only,
    "2-d strided bytes": lambda: np.ones((4, 4), [("x", "f4"), ("y", "u1")])["x"],
    "2-d structured": lambda: np.ones((4, 4), [("x", "f4"), ("y", "u1")]),
    "4-d": lambda: np.ones((1, 4, 4, 4), np.float32),
    "40-d": lambda: np.ones((1,) * 40, np.float32),
    "matrix": lambda: np.matrix([[1.0, 2.0], [3.0, 4.0]], dtype=np.float32),
    "masked": lambda: np.ma.masked_array(np.ones((4, 4), np.float32), mask=np.eye(4)),
    "recarray": lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
    "numpy dtype": lambda: np.dtype(np.float32),
    "numpy type": lambda: np.float32,
    "struct dtype": lambda: np.dtype([("x", "f4")]),
    "GPU array": lambda: _core.Operand(4096, (4, 4), None, (2, 32), operands.CUDA, 0),
    "GPU array elsewhere": lambda: _core.Operand(4096, (4, 4), None, (2, 32), operands.CUDA, 7),
    "GPU array unaligned": lambda: _core.Operand(4097, (4, 4), None, (2, 32), operands.CUDA, 0),
    "array of no device": lambda: _core.Operand(4096, (4, 4), None, (2, 32), 99, 0),
    "array of no dtype": lambda: _core.Operand(4096, (4, 4), None, (77, 13), operands.CPU, 0),
    "interface None": lambda: Exports(__cuda_array_interface__=None),
    "interface int": lambda: Exports(__cuda_array_interface__=5),
    "interface empty": lambda: Exports(__cuda_array_interface__={}),
    "interface shape": lambda: interface(shape=5),
    "interface negative shape": lambda: interface(shape=(-1, 2**70)),
    "interface float shape": lambda: interface(shape=(1.5, 2)),
    "interface typestr": lambda: interface(typestr="nonsense"),
    "interface no typestr": lambda: interface(typestr=None),
    "interface data": lambda: interface(data=5),
    "interface str data": lambda: interface(data=("x", False)),
    "interface negative data": lambda: interface(data=(-1, False)),
    "interface strides": lambda: interface(strides=5),
    "interface str strides": lambda: interface(strides=("a", "b")),
    "interface stream": lambda: interface(stream="x"),
    "interface negative stream": lambda: interface(stream=-1),
    "interface mask": lambda: interface(mask=1),
    "dlpack None": lambda: DlpackOf((2, 0), None),
    "dlpack no device": lambda: DlpackOf(None, None),
    "dlpack device": lambda: DlpackOf(("x", "y", "z"), object()),
    "dlpack dunder": lambda: Exports(__dlpack__=5, __dlpack_device__=5),
    "stream": lambda: Exports(cuda_stream=0),
    "stream str": lambda: Exports(cuda_stream="x"),
    "stream negative": lambda: Exports(ptr=-1),
    "stream None": lambda: Exports(handle=object()),
    "stream protocol": lambda: Exports(__cuda_stream__=lambda: (0, 0)),
    "stream protocol None": lambda: Exports(__cuda_stream__=lambda: None),
    "stream protocol int": lambda: Exports(__cuda_stream__=5),
    "stream protocol str": lambda: Exports(__cuda_stream__=lambda: ("a", "b")),
    "D.F32": lambda: D.F32,
    "D.TF32": lambda: D.TF32,
    "D.F4E2M1": lambda: D.F4E2M1,
    "SM80": lambda: ac.SmArch.SM80,
    "SM90A": lambda: ac.SmArch.SM90A,
    "GemmLayout": lambda: ac.GemmLayout.COL_MAJOR,
    "ConvLayout": lambda: ac.ConvLayout.NCHW,
    "MatmulEpilogue": lambda: ac.MatmulEpilogue.RELU_BIAS,
    "GemmShape": lambda: ac.GemmShape(4, 4, 4),
    "GemmShape batch": lambda: ac.GemmShape(4, 4, 4, 2),
    "GemmShape empty": lambda: ac.GemmShape(0, 0, 0, 0),
    "ConvShape": lambda: ac.ConvShape(1, 4, 4, 4, 4, 1, 1),
    "GemmEpilogue": lambda: ac.GemmEpilogue(2.0, 1.0, bias=True, activation="relu"),
    "Node": lambda: Node("acc"),
    "Operand": lambda: epilogue.Operand("row"),
    "ScaleSet": ac.ScaleSet,
    "QuantizedArray": lambda: ac.quantize(np.ones((4, 4), np.float32)),
}
"""The invalid values of arguments, by the name with which a failure is reproduced."""

# ----------------------------------------------------------------------------------------------------------------------
# Valid arguments
# ----------------------------------------------------------------------------------------------------------------------


def gemm_request(**changes: Any) -> ac.GemmRequest:
    """A small request."""
    how: Arguments = {"shape": ac.GemmShape(16, 16, 16), "dtype": D.F32, "arch": ac.SmArch.SM80}
    return ac.GemmRequest(**{**how, **changes})


def grouped_request() -> ac.GroupedGemmRequest:
    """A request of two groups."""
    shape = ac.GroupedGemmShape([ac.GemmShape(8, 16, 16), ac.GemmShape(0, 16, 16)])
    return ac.GroupedGemmRequest(shape, dtype=D.BF16, arch=ac.SmArch.SM90A)


def conv_request(kind: type[Any] = ac.ConvFwdRequest) -> Any:
    """A request of a convolution."""
    return kind(ac.ConvShape(1, 8, 8, 8, 8, 3, 3), dtype=D.BF16, arch=ac.SmArch.SM80)


def bias_tree() -> ac.EpilogueVisitorTree:
    """A tree that reads a row."""
    return ac.EvtBuilder().add_bias("bias").activation("relu").build()


def mask_tree() -> ac.EpilogueVisitorTree:
    """A tree that reads and writes more."""
    builder = ac.EvtBuilder().add_bias("bias").mask_store("positive").reduce("sums", "row")
    return builder.quantize("e4m3", "scale", "amax").build()


SPOILS |= {
    "GemmRequest": gemm_request,
    "PlanKey": lambda: gemm_request().plan_key(),
    "tree": bias_tree,
    "tree of masks": mask_tree,
}


def random(*shape: int, dtype: Any = np.float32) -> Values:
    """Small numbers."""
    values = np.arange(np.prod(shape, dtype=int)) % 5 - 2.0
    return values.reshape(shape).astype(dtype)


def fp4() -> Arguments:
    """Operands of an fp4 product on the host."""
    a = ac.quantize(random(16, 32), scaling="nvfp4")
    b = ac.quantize(random(16, 32), scaling="nvfp4")
    return {"a": a.values, "b": b.values.T, "scale_a": a.scales, "scale_b": b.scales}


def images(**changes: Any) -> Arguments:
    """Operands of a convolution."""
    return {"x": random(1, 5, 5, 4), "w": random(4, 3, 3, 4), "backend": "reference", **changes}


def matmul_request(**changes: Any) -> Arguments:
    """Arguments of a MatmulRequest."""
    how: Arguments = {"a": random(4, 8), "b": random(4, 4), "m": 8, "n": 4, "k": 4, "backend": "reference"}
    return {**how, **changes}


# ----------------------------------------------------------------------------------------------------------------------
# Calls
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A callable with valid arguments.

    Attributes:
        name: of the callable; several calls may have one.
        function: the callable.
        arguments: makes valid arguments, anew for every call.
        then: what else is done with a result that came out.
        more: names of arguments that the signature does not tell.
        leave: names that are not spoiled.
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], Arguments] = dict
    then: Callable[[Any], Any] = repr
    more: tuple[str, ...] = ()
    leave: frozenset[str] = frozenset()

    @property
    def parameters(self) -> list[str]:
        """Names of the arguments that can be spoiled."""
        every = inspect.signature(self.function).parameters.values()
        named = [each.name for each in every if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        return [name for name in (*named, *self.more) if name not in self.leave]

    def run(self, spoiled: Mapping[str, Any]) -> None:
        """Calls with some arguments spoiled, and then uses what came out."""
        keywords = {**self.arguments(), **spoiled}
        positional: list[Any] = []
        parameters = inspect.signature(self.function).parameters.values()
        rest = next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL), None)
        if rest in keywords:
            last = keywords.pop(rest)
            leading = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
            positional = [keywords.pop(name) for name in leading if name in keywords]
            positional += last if isinstance(last, tuple) else (last,)
        self.then(self.function(*positional, **keywords))


def outcome(call: Call, spoils: Mapping[str, str]) -> str:
    """The forbidden exception of a call, with its traceback; empty for a result or a CutlassError.

    Args:
        call: the call.
        spoils: names of SPOILS by those of arguments.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call.run({name: SPOILS[spoil]() for name, spoil in spoils.items()})
        except ac.CutlassError:
            return ""
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
            frames = traceback.extract_tb(error.__traceback__)
            places = [
                f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "/atomr_cutlass/" in frame.filename
            ]
            where = places[-1] if places else "no line of the package"
            return f"{type(error).__name__} at {where}: {re.sub(r'0x[0-9a-f]+', '0x', str(error))[:200]}"
    return ""


def _unused(_: Any) -> None:
    """For what only keeps what it is given: its text is that of anything."""


def _used(request: Any) -> None:
    """Does with a request what does not need a GPU."""
    request.plan_key()
    repr(request)
    hash(request)
    assert request == request  # noqa: PLR0124 - comparing itself must not fail
    ac.explain(request)
    actor = ac.CutlassActor(2, mock=True)
    send = {
        ac.GemmRequest: ac.CutlassMsg.Gemm,
        ac.GatedGemmRequest: ac.CutlassMsg.GatedGemm,
        ac.GemvRequest: ac.CutlassMsg.Gemv,
        ac.GroupedGemmRequest: ac.CutlassMsg.GroupedGemm,
    }
    actor.handle(send.get(type(request), ac.CutlassMsg.Conv)(request))


def _repeated(value: Any) -> None:
    repr(value)
    hash(value)
    assert value == value  # noqa: PLR0124 - comparing itself must not fail


def _handled(message: Any) -> None:
    ac.CutlassActor(2, mock=True).handle(message)
    ac.CutlassActor(2).handle(message)


def _built(builder: ac.EvtBuilder) -> None:
    tree = builder.build()
    repr(tree)
    hash(tree)
    tree.to_dot()
    gemm_request(epilogue=ac.GemmEpilogue(tree=tree))


def _read(name: str, builder: ac.EvtBuilder) -> None:
    _built(builder.node("read", "add", "acc", name).output("out", "read"))


def _result_of_node(builder: ac.EvtBuilder) -> None:
    _built(builder.output("out", "n"))


def _computed(request: ac.MatmulRequest) -> None:
    repr(request)
    ac.matmul(request)
    ac.CutlassActor(2).handle(ac.CutlassMsg.Matmul(request))


def _method(kind: Callable[[], Any], name: str) -> Callable[..., Any]:
    """A method of a new object at every call, with the method's own signature."""
    shown = inspect.signature(getattr(kind(), name))

    def call(*positional: Any, **keywords: Any) -> Any:
        return getattr(kind(), name)(*positional, **keywords)

    call.__signature__ = shown  # type: ignore[attr-defined]
    return call


def _actor() -> ac.CutlassActor:
    return ac.CutlassActor(2, mock=True)


def _cache() -> ac.PlanCache[Any]:
    cache: ac.PlanCache[Any] = ac.PlanCache(2)
    key = gemm_request().plan_key()
    cache.insert(ac.CachedPlan(key, "", "kernel"))
    return cache


def _heuristic_key() -> ac.HeuristicKey:
    return ac.HeuristicKey(8, 8, 8, D.F32, False, False, ac.MatmulEpilogue.DEFAULT, None)


def _traced(function: Callable[..., Any], *others: Any) -> Callable[..., Any]:
    """A function of values, called with the accumulator of a trace and these."""
    names = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]

    def call(**given: Any) -> Any:
        def body(acc: Any) -> Any:
            whole = dict(zip([parameter.name for parameter in names], (acc, *others), strict=False))
            made = function(**{**whole, **given})
            return (acc, made) if type(made).__name__ == "Stored" else made

        return epilogue.trace(body)

    call.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        parameter.replace(kind=parameter.KEYWORD_ONLY, default=None) for parameter in names
    ])  # fmt: skip
    return call


def _error(kind: type[Exception]) -> Callable[..., Any]:
    def call(message: Any) -> Exception:
        return kind(message)

    return call


def _of_value(kind: Any) -> Callable[..., Any]:
    def call(value: Any) -> Any:
        return kind(value)

    return call


def _key_of_plan() -> Arguments:
    return {
        "op": "gemm", "shape": (16, 16, 16, 1), "layouts": ("row",) * 3, "dtypes": (D.F32,) * 3, "math": "ieee",
        "epilogue": "linear", "arch": None,
    }  # fmt: skip


def _grouped(**changes: Any) -> Arguments:
    how: Arguments = {"a": random(8, 8, dtype=np.float16), "b": random(2, 8, 4, dtype=np.float16)}
    how["offsets"] = np.array([3, 8], np.int32)
    return {**how, "backend": "reference", **changes}


def _followed(acc: Any, row: Any, slope: Any) -> Any:
    return epilogue.relu(acc + row) * slope


def _scalar_calls() -> Iterable[Call]:
    matrices: Arguments = {"a": random(4, 8), "b": random(8, 4)}
    fp8 = {name: array.astype(ml_dtypes.float8_e4m3fn) for name, array in matrices.items()}
    small = {name: array.astype(np.int8) for name, array in matrices.items()}
    unit = np.ones(1, np.float32)
    base: list[Arguments] = [
        matrices,
        {**matrices, "c": random(4, 4), "beta": 0.5, "out": random(4, 4), "precision": "tf32"},
        {**matrices, "bias": random(4), "activation": "relu"},
        {**matrices, "epilogue": bias_tree(), "bias": random(4)},
        {
            **matrices,
            "epilogue": lambda acc, row, slope: epilogue.relu(acc + row) * slope,
            "row": random(4),
            "slope": 2,
        },
        {**fp8, "scale_a": unit, "scale_b": unit, "scale_d": unit, "amax": unit.copy(), "fast_accum": True},
        {**small, "alpha": 2},
    ]
    for given, backend in itertools.product(base, ("reference", "auto", "prebuilt")):
        whole = {**given, "backend": backend}
        yield Call("gemm", ac.gemm, lambda whole=whole: whole, more=("row",))
    yield Call("gemm", ac.gemm, lambda: {**fp4(), "backend": "reference"})
    for given in (matrices, fp8 | {"scale_a": unit, "scale_b": unit, "scale_d": unit}):
        half = {name: value.astype(np.float16) if value.dtype == np.float32 and value.ndim == 2 else value
                for name, value in given.items()}  # fmt: skip
        yield Call("gated_gemm", ac.gated_gemm, lambda half=half: {**half, "backend": "reference"})
    vectors: Arguments = {"a": random(6, 8), "x": random(8), "c": random(6), "beta": 1.0, "bias": random(6)}
    scaled: Arguments = {"a": random(2, 6, 8), "x": random(8), "scale_a": 0.5, "scale_d": 2.0}
    for given, backend in itertools.product((vectors, scaled), ("reference", "auto")):
        vector = {**given, "backend": backend}
        yield Call("gemv", ac.gemv, lambda vector=vector: vector, more=("row",))
    yield Call("interleave", ac.interleave, lambda: {"gate": random(4, 8), "up": random(4, 8)})


def _grouped_calls() -> Iterable[Call]:
    half = np.float16
    lists: Arguments = {"a": [random(3, 8, dtype=half)] * 2, "b": [random(8, 4, dtype=half)] * 2}
    masked: Arguments = {"a": random(2, 4, 8, dtype=half), "offsets": None, "counts": np.array([1, 4], np.int32)}
    fp8: Arguments = {name: random(*shape, dtype=ml_dtypes.float8_e4m3fn)
                      for name, shape in (("a", (8, 8)), ("b", (2, 8, 4)))}  # fmt: skip
    followed: Arguments = {"c": random(8, 4, dtype=half), "beta": 1.0, "bias": random(4, dtype=half)}
    base: list[Callable[[], Arguments]] = [
        _grouped,
        lambda: _grouped(**followed, activation="relu", out=random(8, 4, dtype=half), check=True),
        lambda: _grouped(**masked),
        lambda: {**lists, "backend": "reference"},
        lambda: _grouped(**fp8, scale_a=np.ones(1, np.float32), scale_b=2.0, scale_d=0.5, fast_accum=True),
        lambda: _grouped(epilogue=bias_tree(), bias=random(4)),
        lambda: _grouped(backend="auto"),
    ]
    for made in base:
        yield Call("grouped_gemm", ac.grouped_gemm, made, more=("row",))


def _conv_calls() -> Iterable[Call]:
    followed: Arguments = {"c": random(1, 3, 3, 4), "beta": 1.0, "bias": random(4), "activation": "relu"}
    tree: Arguments = {"epilogue": bias_tree(), "bias": random(4)}
    gradient = {"dy": random(1, 3, 3, 4), "backend": "reference"}
    for made in (images, lambda: images(**followed, out=random(1, 3, 3, 4)), lambda: images(**tree),
                 lambda: images(backend="auto", stride=(1, 2), padding=((1, 0), (0, 1)))):  # fmt: skip
        yield Call("conv2d", ac.conv2d, made, more=("row",))
    shape = (1, 5, 5, 4)
    yield Call("conv2d_dgrad", ac.conv2d_dgrad, lambda: {**gradient, "w": random(4, 3, 3, 4), "x_shape": shape})
    yield Call("conv2d_wgrad", ac.conv2d_wgrad, lambda: {**gradient, "x": random(*shape), "w_shape": (4, 3, 3, 4)})


def _request_calls() -> Iterable[Call]:
    yield Call("GemmShape", ac.GemmShape, lambda: {"m": 4, "n": 4, "k": 4}, _repeated)
    yield Call("GemmEpilogue", ac.GemmEpilogue, lambda: {"bias": True, "activation": "relu"}, _epilogue_used)
    yield Call("GemmEpilogue", ac.GemmEpilogue, lambda: {"tree": bias_tree()}, _epilogue_used)
    gemm: Arguments = {"shape": ac.GemmShape(16, 16, 16), "dtype": D.BF16, "arch": ac.SmArch.SM90A}
    fp8: Arguments = {"dtype": D.F8E4M3, "layout_b": ac.GemmLayout.COL_MAJOR, "scaling": "vector", "quantized": True}
    yield Call("GemmRequest", ac.GemmRequest, lambda: gemm, _used)
    yield Call("GemmRequest", ac.GemmRequest, lambda: {**gemm, **fp8}, _used)
    yield Call("GatedGemmRequest", ac.GatedGemmRequest, lambda: gemm, _used)
    yield Call("GatedGemmRequest", ac.GatedGemmRequest, lambda: {**gemm, **fp8}, _used)
    yield Call("GemvShape", ac.GemvShape, lambda: {"m": 4, "k": 4}, _repeated)
    yield Call("GemvRequest", ac.GemvRequest, lambda: {**gemm, "shape": ac.GemvShape(16, 16, 2)}, _used)
    yield Call("GroupedGemmShape", ac.GroupedGemmShape, lambda: {"groups": [ac.GemmShape(4, 4, 4)]}, _repeated)
    shape = ac.GroupedGemmShape([ac.GemmShape(16, 16, 16)])
    yield Call("GroupedGemmRequest", ac.GroupedGemmRequest, lambda: {**gemm, "shape": shape}, _used)
    extents: Arguments = {"n": 1, "h": 8, "w": 8, "c": 8, "k": 8, "r": 3, "s": 3}
    yield Call("ConvShape", ac.ConvShape, lambda: extents, _repeated)
    yield Call("ConvShape.nhwc", ac.ConvShape.nhwc, lambda: extents, _repeated)
    for kind in (ac.ConvFwdRequest, ac.ConvDgradRequest, ac.ConvWgradRequest):
        yield Call(kind.__name__, kind, lambda: {**gemm, "shape": ac.ConvShape(1, 8, 8, 8, 8, 3, 3)}, _used)
    for request in (gemm_request, grouped_request, conv_request):
        yield Call("explain", ac.explain, lambda request=request: {"request": request()}, str)
        yield Call("plan", ac.plan, lambda request=request: {"request": request()})
    for kind in (ac.GemmRequest, ac.GroupedGemmRequest, ac.ConvFwdRequest):
        made = {ac.GemmRequest: gemm_request, ac.GroupedGemmRequest: grouped_request}.get(kind, conv_request)
        yield Call(f"{kind.__name__}.problem", _method(made, "problem"), lambda: {"device": 0})


def _epilogue_used(made: ac.GemmEpilogue) -> None:
    repr(made)
    hash(made)
    _used(gemm_request(epilogue=made))
    ac.ConvFwdRequest(ac.ConvShape(1, 8, 8, 8, 8, 3, 3), dtype=D.BF16, arch=ac.SmArch.SM90A, epilogue=made).plan_key()


def _matmul_calls() -> Iterable[Call]:
    fp8 = {name: random(*shape, dtype=ml_dtypes.float8_e4m3fn) for name, shape in (("a", (8, 4)), ("b", (4, 4)))}
    followed: Arguments = {"c": random(4, 8), "d": random(4, 8), "beta": 1.0, "bias": random(8), "ldd": 8, "lda": 8}
    followed["epilogue"] = ac.MatmulEpilogue.GELU_AUX_BIAS
    unit = np.ones(1, np.float32)
    base: list[Callable[[], Arguments]] = [
        matmul_request,
        lambda: matmul_request(**followed, gelu_aux=random(4, 8), ldaux=8),
        lambda: matmul_request(epilogue=ac.MatmulEpilogue.DRELU_BGRAD, bias=random(8), gelu_aux=random(4, dtype="u1")),
        lambda: matmul_request(epilogue=ac.MatmulEpilogue.BGRADA, bias=random(8), backend="auto"),
        lambda: matmul_request(**fp8, transa=True, fast_accum=True, scales=ac.ScaleSet(unit, unit, unit, unit.copy())),
        lambda: matmul_request(stream=0, reply=Future(), workspace_size=1 << 20, precision="tf32", backend="auto"),
        lambda: matmul_request(out_dtype=D.BF16),
    ]
    for made in base:
        yield Call("MatmulRequest", ac.MatmulRequest, made, _computed)
    yield Call("matmul", ac.matmul, lambda: {"request": ac.MatmulRequest(**matmul_request())})

    def scaled(scales: ac.ScaleSet) -> None:
        ac.matmul(ac.MatmulRequest(**matmul_request(scales=scales)))
        ac.matmul(ac.MatmulRequest(**matmul_request(**fp8, transa=True, scales=scales)))

    yield Call("ScaleSet", ac.ScaleSet, lambda: {"a": 2.0, "b": 0.5, "d": 1.5}, scaled)
    values = {"m": 8, "n": 8, "k": 8, "dtype": D.F32, "transa": False, "transb": False}
    values |= {"epilogue": ac.MatmulEpilogue.DEFAULT, "arch": ac.SmArch.SM80}
    yield Call("HeuristicKey", ac.HeuristicKey, lambda: values, _repeated)
    yield Call("HeuristicCache", ac.HeuristicCache, lambda: {"capacity": 4})
    key = {"key": _heuristic_key()}
    yield Call("HeuristicCache.get", _method(ac.HeuristicCache, "get"), lambda: key)
    put = {**key, "kernel": expand("smoke", [ac.SmArch.SM80])[0]}
    yield Call("HeuristicCache.put", _method(ac.HeuristicCache, "put"), lambda: put)
    of_request = {"key": gemm_request()}
    yield Call("HeuristicCache.get", _method(ac.HeuristicCache, "get"), lambda: of_request)
    yield Call("HeuristicCache.put", _method(ac.HeuristicCache, "put"), lambda: put | of_request)
    yield Call("HeuristicCache.wanted", _method(ac.HeuristicCache, "wanted"), lambda: key)
    yield Call("HeuristicCache.note", _method(ac.HeuristicCache, "note"), lambda: put)
    yield Call("HeuristicCache.__contains__", _method(ac.HeuristicCache, "__contains__"), lambda: key)


def _actor_calls() -> Iterable[Call]:
    plain = {"request": gemm_request(), "operands": (random(16, 16), random(16, 16))}
    yield Call("CutlassActor", ac.CutlassActor, lambda: {"plan_cache_capacity": 4}, lambda actor: actor.handle(
        ac.CutlassMsg.Gemm(gemm_request())
    ))  # fmt: skip
    yield Call("props", ac.props, lambda: {"plan_cache_capacity": 4}, lambda made: made.create(mock=True))
    yield Call("mock_props", ac.mock_props, lambda: {"plan_cache_capacity": 4}, lambda made: made.create())
    yield Call("CutlassProps", ac.CutlassProps, lambda: {"plan_cache_capacity": 4}, lambda made: made.create(mock=True))
    yield Call("CutlassProps.create", _method(lambda: ac.props(4), "create"), lambda: {"mock": True})
    yield Call("CutlassActor.handle", _method(_actor, "handle"), lambda: {"msg": ac.CutlassMsg.Gemm(gemm_request())})
    yield Call("CutlassActor.unbind", _method(_actor, "unbind"), lambda: {"key": gemm_request().plan_key()})
    yield Call("CutlassMsg.Gemm", ac.CutlassMsg.Gemm, lambda: plain, _handled)
    yield Call("CutlassMsg.Gemm", ac.CutlassMsg.Gemm, lambda: {"request": gemm_request()}, _handled)
    pair = {"a": [random(8, 16)] * 2, "b": [random(16, 16)] * 2}
    grouped = {"request": grouped_request(), "operands": pair}
    yield Call("CutlassMsg.GroupedGemm", ac.CutlassMsg.GroupedGemm, lambda: grouped, _handled)
    image = {"request": conv_request(), "operands": (random(1, 8, 8, 8), random(8, 3, 3, 8))}
    yield Call("CutlassMsg.Conv", ac.CutlassMsg.Conv, lambda: image, _handled)
    yield Call("CutlassMsg.Matmul", ac.CutlassMsg.Matmul, lambda: {"request": ac.MatmulRequest(**matmul_request())})
    weights = {"plan_key": gemm_request().plan_key(), "weights": bytes(1024)}
    yield Call("RefitMsg", ac.RefitMsg, lambda: weights, lambda made: _handled(ac.CutlassMsg.Refit(made)))
    yield Call("CutlassMsg.Refit", ac.CutlassMsg.Refit, lambda: {"msg": ac.RefitMsg(**weights)}, _handled)
    yield Call("PlanCache", ac.PlanCache, lambda: {"capacity": 4})
    for name in ("get", "peek", "__contains__"):
        yield Call(f"PlanCache.{name}", _method(_cache, name), lambda: {"key": gemm_request().plan_key()})
    plan = {"plan": ac.CachedPlan(gemm_request().plan_key(), "", "kernel")}
    yield Call("PlanCache.insert", _method(_cache, "insert"), lambda: plan)
    yield Call("PlanKey", ac.PlanKey, _key_of_plan, _repeated)
    yield Call("CachedPlan", ac.CachedPlan, lambda: {"key": None, "source": "", "kernel_name": ""}, _unused)
    yield Call("BoundPlan", ac.BoundPlan, lambda: {"plan": ac.CachedPlan(gemm_request().plan_key(), "", ""), "b": 1})
    # With a pause that is refused, since others start processes.
    refused = {"target": print, "restarts": 0, "pause": -1.0}
    yield Call("supervise", ac.supervise, lambda: refused, leave=frozenset({"pause"}))


def _freeze(policy: Any) -> None:
    """Freezes the process for a moment."""
    before = kernels._frozen
    try:
        ac.freeze(policy)
    finally:
        kernels._frozen = before


def _other_calls() -> Iterable[Call]:
    for scaling in ("tensor", "tile", "nvfp4"):
        how: Arguments = {"x": random(8, 32), "scaling": scaling, "backend": "auto"}
        yield Call("quantize", ac.quantize, lambda how=how: how)
        made = ac.quantize(**how)
        back = {"values": made.values, "scales": made.scales, "scaling": scaling}
        yield Call("dequantize", ac.dequantize, lambda back=back: back)
    yield Call("QuantizedArray", ac.QuantizedArray, lambda: {"values": 1, "scales": 1}, _unused)
    yield Call("is_supported_for", ac.is_supported_for, lambda: {"dtype": D.F32, "arch": ac.SmArch.SM80})
    yield Call("is_fp8_supported", ac.is_fp8_supported, lambda: {"arch": ac.SmArch.SM80})
    yield Call("is_fp4_supported", ac.is_fp4_supported, lambda: {"arch": ac.SmArch.SM80})
    yield Call("kernels", ac.kernels, lambda: {"op": "gemm", "dtype": D.F32, "arch": ac.SmArch.SM80, "filter": "*"})
    yield Call("load_pack", ac.load_pack, lambda: {"path": "/nonexistent/pack.so"})
    yield Call("load_tuning", ac.load_tuning, lambda: {"path": "/nonexistent/tuned.jsonl"})
    yield Call("recorded_requests", ac.recorded_requests, lambda: {"path": "/nonexistent/keys.jsonl"})
    yield Call(
        "suite_requests",
        ac.suite_requests,
        lambda: {"models": "llama-3-8b", "like": ac.GemmRequest(ac.GemmShape(1, 1, 1), dtype=D.BF16), "rows": [1, 16]},
    )
    yield Call("freeze", _freeze, lambda: {"policy": "warn"})
    yield Call("version", ac.version)
    for kind in (ac.CutlassDtype, ac.SmArch, ac.GemmLayout, ac.ConvLayout, ac.MatmulEpilogue):
        yield Call(kind.__name__, _of_value(kind), lambda kind=kind: {"value": next(iter(kind)).value})
    for kind in (ac.CutlassDtype, ac.SmArch):
        yield Call(f"{kind.__name__}.parse", kind.parse, lambda kind=kind: {"text": next(iter(kind)).value})
    yield Call("SmArch.from_capability", ac.SmArch.from_capability, lambda: {"major": 8, "minor": 0})
    yield Call("CutlassDtype.from_dlpack", ac.CutlassDtype.from_dlpack, lambda: {"code": 2, "bits": 32})
    for name in ("CacheError", "ContextPoisonedError", "CutlassError", "DeviceUnavailableError", "InvalidOperandError",
                 "KernelNotFoundError", "UnsupportedError"):  # fmt: skip
        yield Call(name, _error(getattr(ac, name)), lambda: {"message": "x"}, _unused)
    yield Call("CompileError", ac.CompileError, lambda: {"message": "x"}, _unused)
    yield Call("LibraryError", ac.LibraryError, lambda: {"lib": "x", "msg": "y"}, leave=frozenset({"lib", "msg"}))


def _tree_calls() -> Iterable[Call]:
    steps: dict[str, Arguments] = {
        "input": {"name": "row", "kind": "row", "dtype": "f16"},
        "constant": {"name": "one", "x": 1.0},
        "node": {"name": "n", "op": "add", "inputs": ("acc", "acc")},
        "output": {"name": "out", "node": "acc", "dtype": "bf16"},
        "reduce_node": {"name": "sums", "node": "acc", "kind": "row"},
        "scale": {"by": 2.0},
        "add_bias": {"name": "bias", "dtype": "f32"},
        "add_matrix": {"name": "other", "scale": 2.0},
        "activation": {"name": "leaky_relu", "slope": 0.5},
        "binary": {"op": "multiply", "other": "row", "kind": "row"},
        "aux_load": {"name": "unused", "dtype": "f32"},
        "aux_store": {"name": "stored", "dtype": "f32"},
        "mask_store": {"name": "bits"},
        "reduce": {"name": "sums", "kind": "row"},
        "quantize": {"dtype": "e4m3", "scale": "scale", "amax": "amax"},
        "cast": {"dtype": "bf16"},
    }
    for name, given in steps.items():
        more = tuple(label for label in ("inputs", "slope") if label in given)
        then = functools.partial(_read, given["name"]) if name in ("input", "constant", "aux_load") else _built
        then = _result_of_node if name == "node" else then
        yield Call(f"EvtBuilder.{name}", _method(ac.EvtBuilder, name), lambda given=given: given, then, more)
    yield Call("EvtBuilder.build", _method(ac.EvtBuilder, "build"))
    yield Call(
        "EvtBuilder", ac.EvtBuilder, lambda: {"compute_dtype": D.F32}, lambda made: _built(made.reduce("x", "row"))
    )
    tree = {"result": Node("relu", (Node("acc"),)), "stores": [(Output("sums", "row", D.F32, "sum"), Node("acc"))]}
    yield Call("EpilogueVisitorTree", ac.EpilogueVisitorTree, lambda: tree, repr)
    program = {"program": bias_tree().program, "names": ["bias"]}
    yield Call("EpilogueVisitorTree.parse", ac.EpilogueVisitorTree.parse, lambda: program, repr)
    known = bias_tree()
    for name in ("index", "kind"):
        yield Call(f"EpilogueVisitorTree.{name}", getattr(known, name), lambda: {"node": known.result})
    yield Call("epilogue.Operand", epilogue.Operand, lambda: {"kind": "row", "dtype": "f32"})
    shape: Arguments = {"shape": (4,), "m": 8, "n": 4, "dtype": "f32", "name": "row"}
    yield Call("epilogue.operand_of", epilogue.operand_of, lambda: shape)
    yield Call("epilogue.readings", epilogue.readings, lambda: {"shape": (4,), "m": 8, "n": 4})

    def body(acc: Any, row: Any, slope: Any) -> Any:
        return acc * slope + row

    traced = {"function": body, "operands": {"row": epilogue.Operand("row"), "slope": 2.0}, "out_dtype": "bf16"}
    yield Call("epilogue.trace", epilogue.trace, lambda: traced)
    others: dict[str, tuple[Any, ...]] = {
        "cast": ("bf16",), "where": (1.0, 2.0), "fma": (1.0, 2.0), "maximum": (1.0,), "minimum": (1.0,),
        "clamp": (0.0, 1.0), "leaky_relu": (0.5,),
    }  # fmt: skip
    for name in sorted(set(epilogue.__all__)):
        function = getattr(epilogue, name)
        if isinstance(function, types.FunctionType) and function.__module__ == "atomr_cutlass.epilogue.functions":
            given = others.get(name, (1.0,) if name.startswith("d_") else ())
            yield Call(f"epilogue.{name}", _traced(function, *given))


def calls() -> list[Call]:
    """Every call, on host arrays."""
    return [
        *_scalar_calls(), *_grouped_calls(), *_conv_calls(), *_request_calls(), *_matmul_calls(), *_actor_calls(),
        *_other_calls(), *_tree_calls(),
    ]  # fmt: skip
