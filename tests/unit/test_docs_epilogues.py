"""The pages on epilogues: what they show of the rules is current, and their code runs and computes what it says."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
from atomr_cutlass.arrays import operands
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.arrays.numerics import numpy_dtype
from atomr_cutlass.epilogue import functions
from atomr_cutlass.epilogue.bind import BoundEpilogue, bind
from atomr_cutlass.epilogue.results import ImageResult, MatrixResult
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.epilogue.ops import OPS
from atomr_cutlass.generator.epilogue.tree import MAX_NODES, MAX_OPERANDS
from atomr_cutlass.generator.rules import FP8_TYPES, accumulator
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.problem import GemmProblem, fused_problems
from atomr_cutlass.pipeline import devices, select
from atomr_cutlass.pipeline.call import Call
from atomr_cutlass.pipeline.call_options import CallOptions

DOCS = Path(__file__).resolve().parents[2] / "docs"
EPILOGUES, COOKBOOK = ((DOCS / name).read_text(encoding="utf-8") for name in ("epilogues.md", "cookbook.md"))

_ELSEWHERE = {"negate", "add", "subtract", "multiply", "divide", "select"} | {
    "less", "less_equal", "greater", "greater_equal", "equal", "not_equal"
}  # fmt: skip
"""Operations that functions write with operators, or by another name."""


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def recipes() -> list[tuple[str, str]]:
    """(title, code) of each recipe; the page's first block belongs to all of them."""
    found = []
    for section in re.split(r"^##+ ", COOKBOOK, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        found += [(title, "\n".join(blocks(section)))] if blocks(section) else []
    return found


@pytest.fixture
def on_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ac, "gemm", functools.partial(ac.gemm, backend="reference"))


def test_the_page_is_what_the_rules_say() -> None:
    script = DOCS / "gen_epilogues.py"
    said = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr


def test_the_page_names_every_operation_and_limit() -> None:
    for name in OPS:
        assert name in _ELSEWHERE or re.search(rf"`{name}\b", EPILOGUES), name
    for name in vars(functions):
        if name.startswith(("row_", "column_", "total_")):
            assert f"`{name}`" in EPILOGUES, name
    assert f"more than {MAX_NODES} distinct values, more than {MAX_OPERANDS} operands and outputs" in EPILOGUES


@pytest.mark.usefixtures("on_reference")
def test_code_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for code in blocks(EPILOGUES):
        exec(code, names)
    # The last block prints the drawing that follows it.
    printed = capsys.readouterr().out
    assert f"```dot\n{printed.rstrip()}\n```" in EPILOGUES


@pytest.mark.parametrize(("title", "code"), recipes(), ids=[title for title, _ in recipes()])
def test_recipe(title: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes what NumPy does unfused, and each of its products has a kernel."""
    calls: list[dict[str, Any]] = []
    convolutions: list[dict[str, Any]] = []
    on_reference = functools.partial(ac.gemm, backend="reference")
    conv_on_reference = functools.partial(ac.conv2d, backend="reference")

    def gemm(a: Any, b: Any, **arguments: Any) -> Any:
        returned = on_reference(a, b, **arguments)
        calls.append({"a": a, "b": b, "returned": returned, **arguments})
        return returned

    def conv2d(x: Any, w: Any, **arguments: Any) -> Any:
        returned = conv_on_reference(x, w, **arguments)
        convolutions.append({"x": x, "w": w, "returned": returned, **arguments})
        return returned

    monkeypatch.setattr(ac, "gemm", gemm)
    monkeypatch.setattr(ac, "conv2d", conv2d)
    monkeypatch.setattr(ac, "gated_gemm", functools.partial(ac.gated_gemm, backend="reference"))
    names: dict[str, Any] = {}
    beginning, linear, *_ = blocks(COOKBOOK)
    exec(beginning, names)
    exec(linear, names)  # makes `hidden`
    calls.clear()
    exec(code, names)
    assert "close(" in code
    assert calls or convolutions, title
    for call in calls:
        for arch in (SmArch.SM80, SmArch.SM90A):
            if arch is SmArch.SM90A or operands.as_operand(call["a"]).dtype != CutlassDtype.F8E4M3.dlpack:
                assert_served(arch, **call)
    for call in convolutions:
        assert_convolution_served(**call)


def test_there_are_recipes() -> None:
    assert len(recipes()) >= 10


def assert_served(arch: SmArch, **call: Any) -> None:
    """Some cell of the arch computes a call of `gemm`, were its arrays on the GPU."""
    views = {name: operands.as_operand(call.pop(name)) for name in ("a", "b")}
    returned, tree = call.pop("returned"), call.pop("epilogue", None)
    out = returned["out"] if isinstance(returned, dict) else returned[0] if isinstance(returned, tuple) else returned
    shape, d = out.shape, operands.dtype_of(operands.as_operand(out), "out")
    dtype = operands.dtype_of(views["a"], "a")
    for name in ("scale_a", "scale_b", "out_dtype"):
        call.pop(name, None)
    options = CallOptions(activation=call.pop("activation", None))
    epilogue = bound(tree, call, MatrixResult(shape), views, d, options)
    written = {
        output.name: operands.as_operand(
            np.empty(epilogue.result.array_shape(output), numpy_dtype(output.dtype) if output.dtype else np.uint8)
        )
        for output in epilogue.tree.outputs
    }
    fusion = epilogue.result.fusion(epilogue.tree, {**epilogue.inputs, **written})

    def spec(view: Any) -> MatrixSpec:
        # As a framework allocates it.
        return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, "an array"), 16)

    dense = operands.as_operand(np.empty(shape, out.dtype))
    problem = GemmProblem(spec(views["a"]), spec(views["b"]), None, spec(dense), "default", 0)
    base = "scaled" if dtype in FP8_TYPES else "lc"
    # The last way is the one that asks least of the kernel.
    search = GemmSearch(fused_problems(problem, fusion, base)[-1], devices.imagined(arch), arch)
    assert select.choose(search, backend="jit")


def bound(
    epilogue: Any,
    arrays: dict[str, Any],
    result: MatrixResult,
    views: dict[str, Any],
    d: CutlassDtype,
    options: CallOptions = CallOptions(),  # noqa: B008 - a tuple
) -> BoundEpilogue:
    acc = accumulator(operands.dtype_of(views["a"], "a"))
    own = {name: arrays.pop(name, None) for name in ("bias", "c")}
    call = Call(pytest.fail, own, None, options, epilogue, arrays)
    return bind(call, result, views, taken=views, out_dtype=d, acc=acc)


def assert_convolution_served(x: Any, w: Any, *, returned: Any, epilogue: Any, padding: int = 0, **arrays: Any) -> None:
    """Some cell of sm_90a computes a call of `conv2d`."""
    dtype = operands.dtype_of(operands.as_operand(x), "x")
    d = operands.dtype_of(operands.as_operand(returned), "out")
    shape = ac.ConvShape.nhwc(*x.shape, *w.shape[:3], padding=padding)
    views = {"a": operands.as_operand(x), "b": operands.as_operand(w)}
    how = ac.GemmEpilogue(tree=bound(epilogue, arrays, ImageResult(returned.shape), views, d).tree)
    source, _ = ac.ConvFwdRequest(shape, dtype=dtype, arch=SmArch.SM90A, out_dtype=d, epilogue=how).render_cu()
    assert "struct Tree" in source
