"""Calls of every operation with each option of the table of options, on arrays of the host or of a GPU.

`test_operations.py` makes them with the reference, and runs this file in a process whose GPU only takes notes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import atomr_cutlass as ac
import call_cases
import fake_cases
import golden_gpu
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import MatmulEpilogue, SmArch
from atomr_cutlass.pipeline.operation import CALL_OPTIONS, Operation, operations

ARCH = SmArch.SM90A
BACKGROUND = "background"
OF_FP8 = {("gemm", "amax"), ("conv2d_fprop", "out_dtype"), ("conv2d_dgrad", "out_dtype")}
"""Operations and options whose kernels are those of fp8; all multiply bf16 otherwise."""
Make = Callable[..., Any]
"""Makes an array of an element type's name and extents; `columns`: column-major."""


@dataclass(frozen=True)
class Call:
    """A call without options.

    Attributes:
        function: what is called.
        given: its arguments.
        shape: extents of the result.
    """

    function: Callable[..., Any]
    given: dict[str, Any]
    shape: tuple[int, ...]


def host(dtype: str, *shape: int, columns: bool = False) -> Any:
    """An array of NumPy."""
    made = np.zeros(shape[::-1] if columns else shape, golden_gpu.DTYPES[dtype][0])
    return made.T if columns else made


def _matmul(**given: Any) -> Any:
    return ac.matmul(ac.MatmulRequest(**given))


def _call(name: str, make: Make, dtype: str) -> Call:
    image, filters = (1, 8, 8, 64), (64, 3, 3, 64)
    a, weights = make(dtype, 64, 128), make(dtype, 128, 256, columns=True)
    first, second = make(dtype, *image), make(dtype, *filters)
    calls = {
        "gemm": Call(ac.gemm, {"a": a, "b": weights}, (64, 256)),
        "gated_gemm": Call(ac.gated_gemm, {"a": a, "b": weights}, (64, 128)),
        "gemv": Call(ac.gemv, {"a": a, "x": make(dtype, 128)}, (64,)),
        "grouped_gemm": Call(
            ac.grouped_gemm, {"a": a, "b": make(dtype, 2, 128, 256), "offsets": make("i32", 2)}, (64, 256)
        ),
        "conv2d_fprop": Call(ac.conv2d, {"x": first, "w": second, "padding": 1}, image),
        "conv2d_dgrad": Call(ac.conv2d_dgrad, {"dy": first, "w": second, "x_shape": image, "padding": 1}, image),
        "conv2d_wgrad": Call(
            ac.conv2d_wgrad, {"dy": first, "x": make(dtype, *image), "w_shape": filters, "padding": 1}, filters
        ),
        "matmul": Call(_matmul, {"a": a, "b": weights, "m": 64, "n": 256, "k": 128, "transa": True}, (256, 64)),
        "quantize": Call(ac.quantize, {"x": a, "scaling": "row"}, (64, 128)),
        "dequantize": Call(
            ac.dequantize,
            {"values": make("u8", 64, 64), "scales": make("e4m3", 1024), "scaling": "nvfp4", "out_dtype": D.BF16},
            (64, 128),
        ),
    }
    return calls[name]


def _value(operation: Operation, option: str, call: Call, make: Make, result: str) -> dict[str, Any]:
    """The arguments that give an option."""
    d = functools.partial(make, result, *call.shape)
    values: dict[str, Callable[[], dict[str, Any]]] = {
        "c": lambda: {"c": d(), "beta": 1.0},
        "out": lambda: {"out": d()},
        "beta": lambda: {"c": d(), "beta": 0.5},
        "bias": lambda: {"bias": make(result, call.shape[-1])},
        "epilogue": lambda: {"epilogue": ac.EvtBuilder().activation("relu").build()},
        "amax": lambda: {"amax": make("f32", 1)},
    }
    plain = {
        "alpha": 2.0, "activation": "relu", "scale_a": 2.0, "scale_b": 2.0, "scale_d": 1.0, "out_dtype": D.F32,
        "precision": "ieee", "fast_accum": True, "stream": 0, "backend": "prebuilt", "jit": "off",
        "workspace_size": 1 << 30, "batch_invariant": True, "check": True,
    }  # fmt: skip
    of_matmul: dict[str, Callable[[], dict[str, Any]]] = {
        "out": lambda: {"d": d()},
        "bias": lambda: {"bias": make(result, 64), "epilogue": MatmulEpilogue.BIAS},
        "activation": lambda: {"epilogue": MatmulEpilogue.RELU},
        "epilogue": lambda: {"epilogue": MatmulEpilogue.GELU},
        "scale_a": lambda: {"scales": ac.ScaleSet(2.0)},
        "scale_b": lambda: {"scales": ac.ScaleSet(b=2.0)},
        "scale_d": lambda: {"scales": ac.ScaleSet(d=2.0)},
        "amax": lambda: {"scales": ac.ScaleSet(amax_d=make("f32", 1))},
    }
    others: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
        "matmul": of_matmul,
        "gated_gemm": {"out_dtype": lambda: {"out_dtype": D.BF16}},
        "conv2d_fprop": {"out_dtype": lambda: {"out_dtype": D.F16}},
        "conv2d_dgrad": {"out_dtype": lambda: {"out_dtype": D.F16}},
        "quantize": {
            "out": lambda: {"out": (make("e4m3", *call.shape), make("f32", 64, 1))},
            "out_dtype": lambda: {"dtype": D.F8E5M2},
        },
        "dequantize": {
            "alpha": lambda: {"global_scale": 0.5}, "scale_d": lambda: {"global_scale": 0.5},
            "scale_a": lambda: {"scales": make("e4m3", 1024)},
        },
    }  # fmt: skip
    found = others.get(operation.name, {}).get(option) or values.get(option)
    return {option: plain[option]} if found is None else found()


def call(name: str, option: str, make: Make, **more: Any) -> Any:
    """The result of an operation's function with an option, under the option's own name where it is refused.

    Args:
        name: of the operation.
        option: of CALL_OPTIONS, or BACKGROUND.
        make: makes the arrays.
        more: further arguments, which count before the option.
    """
    operation = operations()[name]
    dtype = "f32" if option == "precision" else "e4m3" if (name, option) in OF_FP8 else "bf16"
    made = _call(name, make, dtype)
    if option == BACKGROUND:
        given: dict[str, Any] = {"jit": BACKGROUND}
    elif option in operation.refuses:
        given = {option: 1}
    else:
        given = _value(operation, option, made, make, "bf16" if dtype == "e4m3" else dtype)
        name = operation.spelled.get(option, option)
        assert name in given, f"{option} is to be given as {name}"
    return made.function(**{**made.given, **given, **more})


def taken(operation: Operation) -> Iterator[str]:
    """The options that an operation's function takes."""
    yield from (option for option in CALL_OPTIONS if option not in operation.refuses)
    yield BACKGROUND


def _gpu(dtype: str, *shape: int, columns: bool = False) -> Any:
    return call_cases.operand(dtype, *shape, columns=columns)


if __name__ == "__main__":
    gpu = golden_gpu.Gpu(Path(sys.argv[1]), ARCH)
    gpu._table = "full"

    def launches(name: str, option: str) -> None:
        gpu._library.golden_notes()
        call(name, option, _gpu)
        assert gpu._steps(()), "nothing is launched"

    fake_cases.run(
        {
            f"case_{name}_{option}": functools.partial(launches, name, option)
            for name, operation in operations().items()
            for option in taken(operation)
        }
    )
