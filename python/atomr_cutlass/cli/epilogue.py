"""`epilogue`: a Python function as a file of trees, which the build takes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Annotated, Any

import typer

from ..epilogue import EpilogueVisitorTree, Operand, Traced, trace
from ..errors import InvalidOperandError
from ..generator.dtypes import CutlassDtype
from ..generator.epilogue.tree import MASK
from ..generator.rules import HALF_TYPES
from ..jit import files
from .options import AsJson
from .output import report


def epilogue_command(
    function: Annotated[str, typer.Argument(help="FILE.py:NAME: a function of acc and operands, or a tree.")],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file of trees to write.")],
    operand: Annotated[
        list[str], typer.Option(help="NAME=KIND:DTYPE, such as bias=row:f32, or NAME=mask; of a function, once each.")
    ] = [],  # noqa: B006 - typer makes a new one
    dtype: Annotated[list[str], typer.Option(help="Element type of A, any number of them; f16 and bf16 without.")] = [],  # noqa: B006 - typer makes a new one
    out_dtype: Annotated[str, typer.Option(help="Element type of D; empty: what it casts to, else A's.")] = "",
    as_json: AsJson = False,
) -> None:
    """Writes an epilogue as JSON: ATOMR_CUTLASS_EPILOGUES builds kernels of it ahead of time."""
    types = [CutlassDtype.parse(entry) for entry in dtype] or list(HALF_TYPES)
    tree = _tree(_found(function), dict(map(_operand, operand)))
    decided = CutlassDtype.parse(out_dtype) if out_dtype else tree.result_dtype
    made = {
        "name": function.rpartition(":")[2],
        "program": tree.program,
        "inputs": {
            entry.name: f"{entry.kind}:{entry.dtype.value}" if entry.dtype else entry.kind for entry in tree.inputs
        },
        "outputs": [entry.name for entry in tree.outputs],
        "out_dtype": decided.value if decided else None,
        "dtypes": [entry.value for entry in types],
    }
    files.write(output, f"{json.dumps(made, indent=1)}\n".encode(), output.absolute().parent, mode=0o644)
    built = f"build with CMAKE_ARGS='-DATOMR_CUTLASS_EPILOGUES={output.absolute()}'"
    report({"path": output, **made}, f"{output}: {tree!r}; {built}", as_json=as_json)


def _found(place: str) -> Any:
    """Returns the object that a file defines under a name.

    Raises:
        InvalidOperandError: there is no such file or name, or the file does not run.
    """
    path, colon, name = place.rpartition(":")
    if not colon or not name.isidentifier():
        raise InvalidOperandError(f"function is {place!r}; expected FILE.py:NAME")
    try:
        names = runpy.run_path(path)
    except Exception as error:
        raise InvalidOperandError(f"{path} does not run: {type(error).__name__}: {error}") from error
    if name not in names:
        there = ", ".join(symbol for symbol, value in names.items() if callable(value) and not symbol.startswith("_"))
        raise InvalidOperandError(f"{path} has no {name!r}; it has {there or 'no functions'}")
    return names[name]


def _operand(text: str) -> tuple[str, Operand]:
    name, equals, declaration = text.partition("=")
    kind, colon, dtype = declaration.partition(":")
    if not equals or not name.isidentifier() or (not colon and kind != MASK):
        raise InvalidOperandError(f"operand is {text!r}; expected NAME=KIND:DTYPE, such as bias=row:f32, or NAME=mask")
    return name, Operand(kind, dtype if colon else None)


def _tree(found: Any, operands: dict[str, Operand]) -> EpilogueVisitorTree:
    if isinstance(found, Traced):
        return found.tree
    if isinstance(found, EpilogueVisitorTree):
        return found
    if not callable(found):
        raise InvalidOperandError(f"it is a {type(found).__name__}; expected a function, or a tree")
    return trace(found, operands).tree
