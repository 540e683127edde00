"""The examples of README, of docs/ and of examples/, as programs that run: what they leave to their readers is here."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from atomr_cutlass import _core
from atomr_cutlass.arrays import operands
from atomr_cutlass.jit import kernels

ROOT = Path(__file__).resolve().parents[2]

ABSENT = {
    ("jit.md", "with ac.record("): "the programs themselves are run by it",
    ("jit.md", "try:"): "it passes the table over, and what compiles is what a frozen process does not have",
    ("selection.md", "request = ac.GemmRequest"): "it names a kernel of the table, which may be empty",
    ("selection.md", "requests = ["): "it measures kernels, and what is the fastest differs from run to run",
}
"""The blocks that are left out, by page and beginning, and why."""

_ON_GPU = """
import ml_dtypes
import numpy as np
from atomr_cutlass import _core
from atomr_cutlass.arrays import operands

def bf16(*shape, order=None):
    # In memory the axes are in this order.
    order = order or range(len(shape))
    dense = (np.arange(np.prod(shape)) % 7 - 3).reshape([shape[axis] for axis in order]).astype(ml_dtypes.bfloat16)
    view = operands.upload(dense, 0)
    strides = [view.strides[list(order).index(axis)] for axis in range(len(shape))]
    return _core.Operand(view.pointer, shape, strides, view.dtype, operands.CUDA, 0, False, view)
"""
_BEFORE = {
    ("actor.md", "mailbox = actor.start()"): f"{_ON_GPU}\na, b = bf16(512, 4096), bf16(4096, 4096, order=(1, 0))",
    ("actor.md", "shape = ac.ConvShape"): """
x, w = bf16(8, 64, 56, 56, order=(0, 2, 3, 1)), bf16(64, 64, 3, 3, order=(0, 2, 3, 1))
""",
    # PyTorch is no requirement of the tests: the one tensor that the page makes is a piece of the GPU's memory.
    ("actor.md", "tree = ac.EvtBuilder"): """
import types
bias = bf16(4096)
torch = types.SimpleNamespace(
    empty=lambda *shape, dtype, device: operands.upload(np.zeros(shape, dtype), 0), uint8=np.uint8
)
""",
    ("actor.md", "from dataclasses import"): "weights, new_weight = [b, b], bf16(4096, 4096, order=(1, 0))",
    ("quickstart.md", "plan = ac.plan(request)"): (
        f"{_ON_GPU}\na, b, out = bf16(4096, 4096), bf16(4096, 4096, order=(1, 0)), bf16(4096, 4096)"
    ),
    ("selection.md", "out = ac.gemm(x, w"): """
import atomr_cutlass as ac
import ml_dtypes
import numpy as np
x, w = ((np.arange(rows * 512) % 7 - 3).reshape(rows, 512).astype(ml_dtypes.bfloat16) for rows in (8, 512))
""",
}
"""The code that a block presupposes, by its page and beginning."""


_PUT_IN = {"quickstart.md": ("d = plan(a, b)", "d = plan(a, b, out=out)")}
"""The page's arrays there are of a framework, which allocates results."""


def blocks_of_pages() -> dict[str, list[str]]:
    """The examples of README and of each page of docs/ that has some, as they stand there."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    found = {
        path.name: re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL) for path in pages
    }
    return {name: blocks for name, blocks in found.items() if blocks}


def programs(*, torch: bool = False) -> dict[str, list[str]]:
    """The blocks of each page that has examples, in order, and each file of examples/, by name.

    Args:
        torch: also those that use PyTorch where there is a GPU.
    """
    found = {}
    for page, blocks in blocks_of_pages().items():
        old, new = _PUT_IN.get(page, ("", ""))
        left = [block for block in blocks if not any(of == page and block.startswith(start) for of, start in ABSENT)]
        if left:
            found[page] = [_before(page, block) + block.replace(old, new) for block in left]
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = path.read_text(encoding="utf-8")
        if torch or "import torch" not in code:
            found[f"examples/{path.name}"] = [code]
    return found


def _before(page: str, block: str) -> str:
    return next((code + "\n" for (of, start), code in _BEFORE.items() if of == page and block.startswith(start)), "")


def run(name: str, blocks: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Runs a program, and returns every array that it holds after one of its blocks.

    Its own checks (`assert`, NumPy's `assert_allclose`) are left out: on a GPU that takes notes nothing is computed.
    """
    module = types.ModuleType("__main__" if name.startswith("examples/") else "a_page")
    results: dict[str, np.ndarray[Any, Any]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(mock.patch.object(sys, "argv", [name]))
        # Annotations of dataclasses are looked up in the module of the class.
        before = sys.modules.get(module.__name__, module)
        sys.modules[module.__name__] = module
        stack.callback(sys.modules.__setitem__, module.__name__, before)
        warnings.simplefilter("ignore")
        stack.enter_context(mock.patch.object(np.testing, "assert_allclose"))
        for number, block in enumerate(blocks):
            exec(compile(block, f"{name}, block {number}", "exec", optimize=1), vars(module))
            for label, array in _arrays(vars(module)).items():
                results[f"{number} {label}"] = array.copy()
    return results


def _arrays(values: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays among named values, and in tuples, lists, dicts and quantized arrays."""
    found = {}
    for label, value in values.items():
        if label.startswith("__"):
            continue
        if isinstance(value, np.ndarray):
            found[label] = value
        elif isinstance(value, _core.Operand):
            found[label] = operands.download(value)
        elif isinstance(value, (list, tuple)):
            found |= _arrays({f"{label}[{i}]": part for i, part in enumerate(value)})
        elif isinstance(value, dict):
            found |= _arrays({f"{label}[{i}]": part for i, part in value.items()})
        elif hasattr(value, "values") and hasattr(value, "scales"):
            found |= _arrays({f"{label}.values": value.values, f"{label}.scales": value.scales})
    return found


def main(path: str, *how: str) -> None:
    """Runs the programs on a real GPU and writes their arrays; `freeze`: frozen from the beginning; `torch`: all."""
    import atomr_cutlass as ac

    if "freeze" in how:
        ac.freeze()
    compiled: list[str] = []
    load = kernels.load
    kernels.load = lambda key, target: (compiled.append(key.name), load(key, target))[1]
    results = {}
    for name, blocks in programs(torch="torch" in how).items():
        for label, array in run(name, blocks).items():
            if array.dtype.kind in "biuf":
                results[f"{name} {label}"] = array
            elif array.dtype.kind == "V":  # element types that NumPy does not store
                results[f"{name} {label}"] = array.astype(np.float32)
    np.savez(path, **{label.replace("/", " "): array for label, array in results.items()})
    print(json.dumps({"compiled": compiled, "looked": kernels.toolchain.cache_info().misses}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
