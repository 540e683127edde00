"""The C++ of an epilogue tree: a struct for `epilogue_tree.h`, straight-line code from the tree's program."""

from __future__ import annotations

import math

from ..dtypes import CutlassDtype
from .ops import OPS
from .tree import ACCUMULATOR, COLUMN, MASK, MATRIX, PREFIX, ROW, SCALAR

LINEAR, SCALED = "lc", "scaled"
GATED, GATED_SCALED = "gated", "gated_scaled"
"""The base epilogues of trees. Gated D is half as wide as A B: f(column 2j) * column 2j + 1, f being the tree."""
COMMON, SCALED_COMMON = "common", "scaled_common"
"""The most common trees, in one kernel: see `common`."""
SOURCE = "source"

_LAYOUTS = {
    SCALAR: "kScalar",
    ROW: "kRow",
    COLUMN: "kColumn",
    MATRIX: "kMatrix",
    MASK: "kMask",
    SOURCE: "kSource",
}
_REDUCTIONS = {"sum": "kSum", "max": "kMax", "amax": "kAmax"}
_SWAPPED = {ROW: COLUMN, COLUMN: ROW}


def epilogue_id(base: str, program: str) -> str:
    """The epilogue of a kernel's key: a tree on top of `lc` or of `scaled`."""
    return f"{base}+{program}"


def split(epilogue: str) -> tuple[str, str]:
    """The epilogue of a key as (base epilogue, program of the tree or an empty string)."""
    base, _, program = epilogue.partition("+")
    return base, program


def is_gated(epilogue: str) -> bool:
    """Whether D is half as wide as A B."""
    return split(epilogue)[0] in (GATED, GATED_SCALED)


def is_common(epilogue: str) -> bool:
    """Whether a kernel's epilogue computes several trees, one of which is selected at launch."""
    return epilogue in (COMMON, SCALED_COMMON)


def base_of(epilogue: str) -> str:
    """The base epilogue of a kernel's epilogue, without its tree: `lc`, `scaled` or one of the others."""
    base = split(epilogue)[0]
    return {COMMON: LINEAR, SCALED_COMMON: SCALED}.get(base, base)


def has_tree(epilogue: str) -> bool:
    """Whether a kernel's epilogue computes a tree, given by its key or by the arguments."""
    return is_common(epilogue) or bool(split(epilogue)[1])


def with_source(program: str, number: int) -> str:
    """The program of a tree whose input of this number, a matrix like D, is loaded as the C operand."""
    lines = program.split(";")
    places = [place for place, line in enumerate(lines) if _words(line)[0] == "input"]
    lines[places[number]] = lines[places[number]].replace(f"input:{MATRIX}:", f"input:{SOURCE}:")
    return ";".join(lines)


def swapped(program: str) -> str:
    """The program for D^T: rows are columns and columns rows.

    Raises:
        ValueError: masks are packed along rows only.
    """
    lines = []
    for line in program.split(";"):
        words = _words(line)
        if MASK in words:
            raise ValueError("masks lie along the rows of D: D must be row-major")
        place = {"input": 1, "reduce": 2}.get(words[0])
        if place is not None:
            words[place] = _SWAPPED.get(words[place], words[place])
        lines.append((PREFIX if line.startswith(PREFIX) else "") + ":".join(words))
    return ";".join(lines)


def operand_kinds(program: str) -> tuple[list[tuple[str, str]], list[tuple[str, str, str]]]:
    """The (kind, dtype) of each input of a program, and (kind, dtype, reduction or empty) of each output."""
    inputs, outputs = [], []
    for words in map(_words, program.split(";")):
        if words[0] == "input":
            inputs.append((words[1], words[2]))
        elif words[0] == "store":
            outputs.append((MASK if words[2] == MASK else MATRIX, words[2], ""))
        elif words[0] == "reduce":
            outputs.append((words[2], words[4], words[3]))
    return inputs, outputs


def is_narrow(program: str, d: CutlassDtype) -> bool:
    """Whether D and every stored matrix are at most 16 bits wide, so that activations need no float32 accuracy.

    Kernels then compute in the narrow forms of `epilogue_ops.h`, for which the reference's tolerances allow.
    Reductions do not count.

    Args:
        program: of the tree.
        d: the element type of D.
    """
    stored = (CutlassDtype(dtype) for kind, dtype, _ in operand_kinds(program)[1] if kind == MATRIX)
    return all(dtype.bits <= 16 for dtype in (d, *stored))


def lower(program: str, value: CutlassDtype, *, narrow: bool = False) -> str:
    """The definition of `struct Tree`.

    Args:
        program: of the tree, with a source where there is one.
        value: the element type that values are computed in, F32 or F64.
        narrow: the result of `is_narrow`.
    """
    inputs, outputs = operand_kinds(program)
    body = ["namespace ops = atomr_cutlass::ops::narrow;"] if narrow else []
    read = written = values = 0
    for words in map(_words, program.split(";")):
        op, *rest = words
        if op == "out":
            body.append(f"return v{rest[0]};")
            continue
        if op in ("store", "reduce"):
            # Before the result: it ends the function.
            body.insert(-1, f"out[{written}] = v{rest[0]};")
            written += 1
            continue
        if op == ACCUMULATOR:
            made = "acc"
        elif op == "input":
            made = f"in[{read}]"
            read += 1
        elif op == "constant":
            made = _literal(rest[0])
        elif op == "cast":
            made = f"rounded<{CutlassDtype(rest[1]).cpp}>(v{rest[0]})"
        else:
            arity = OPS[op].arity
            arguments = [f"v{number}" for number in rest[:arity]] + [_literal(number) for number in rest[arity:]]
            made = f"ops::{op}({', '.join(arguments)})"
        body.append(f"Value const v{values} = {made};")
        values += 1
    lines = [
        f"using Value = {value.cpp};",
        f"using Inputs = Operands<{', '.join(_input(*operand) for operand in inputs)}>;",
        f"using Outputs = Operands<{', '.join(_output(*output) for output in outputs)}>;",
        "CUTLASS_DEVICE static Value evaluate(Value acc, Value const* in, Value* out) {",
        *(f"  {line}" for line in body),
        "}",
    ]
    return "\n".join(["struct Tree {", *(f"  {line}" for line in lines), "};"])


def _words(line: str) -> list[str]:
    return line.removeprefix(PREFIX).split(":")


def _literal(number: str) -> str:
    value = float.fromhex(number)
    if math.isinf(value):
        sign = "-" if value < 0 else ""
        return f"Value({sign}cutlass::platform::numeric_limits<float>::infinity())"
    return f"Value({value!r})"


def _input(kind: str, dtype: str) -> str:
    element = "uint8_t" if kind == MASK else CutlassDtype(dtype).cpp
    return f"TreeInput<OperandLayout::{_LAYOUTS[kind]}, {element}>"


def _output(kind: str, dtype: str, reduction: str) -> str:
    element = "uint8_t" if kind == MASK else CutlassDtype(dtype).cpp
    words = [f"OperandLayout::{_LAYOUTS[kind]}", element]
    if reduction:
        words.append(f"Reduction::{_REDUCTIONS[reduction]}")
    return f"TreeOutput<{', '.join(words)}>"
