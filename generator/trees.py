"""Cells with epilogue trees: the named trees, the kernels that get them, and their presets.

A tree is added to the usual kernel of its operands: the first cell of a family that reads aligned operands of a type
and of layouts directly. Builds select further trees by name or by a file of trees.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .archs import SmArch
from .dtypes import CutlassDtype
from .epilogue import common
from .epilogue.lower import (
    COMMON,
    GATED,
    GATED_SCALED,
    LINEAR,
    SCALED,
    SCALED_COMMON,
    SOURCE,
    epilogue_id,
    is_gated,
    operand_kinds,
    split,
    with_source,
)
from .epilogue.tree import MATRIX, EpilogueVisitorTree
from .families import FAMILIES
from .families.base import DEFAULT, FULL, SMOKE, Cell
from .key import ANYWHERE, COLUMN, KernelKey
from .rules import COMMON_LAYOUTS, FEW, FP8_TYPES, HALF_TYPES, SLICED, SPLIT, is_fallback

D = CutlassDtype

Tree = tuple[str, D]
"""The epilogue of a key, and the element type of its D."""

OPS = tuple(dict.fromkeys(op for (op, _), (family, *_) in FAMILIES.items() if family.trees))
"""The operations whose cells get trees."""


def _common(base: KernelKey) -> Tree:
    return SCALED_COMMON if base.epilogue == SCALED else COMMON, base.d


def _common_scaled(base: KernelKey) -> Tree:
    return SCALED_COMMON, _wide(base)


def _common_quantized(_: KernelKey) -> Tree:
    return SCALED_COMMON, D.F8E4M3


def _biased(activation: str) -> Callable[[KernelKey], Tree]:
    def of(base: KernelKey) -> Tree:
        if base.generation == "sm80" and base.op != "gemm":
            # Such kernels have the bias as an argument, or in place of C.
            return f"{base.epilogue}_{activation}" if activation else base.epilogue, base.d
        return common.on(base.epilogue, common.bias(base.d, activation or None)), base.d

    return of


def _activated(activation: str) -> Callable[[KernelKey], Tree]:
    def of(base: KernelKey) -> Tree:
        if base.generation == "sm80" and base.op != "gemm":
            return f"{base.epilogue}_{activation}", base.d
        return common.on(base.epilogue, common.bias(None, activation)), base.d

    return of


def _gated(activation: str) -> Callable[[KernelKey], Tree]:
    def of(base: KernelKey) -> Tree:
        on = GATED_SCALED if base.epilogue == SCALED else GATED
        return epilogue_id(on, split(common.bias(None, activation))[1]), base.d

    return of


def _residual(base: KernelKey) -> Tree:
    return common.on(base.epilogue, common.residual(base.d)), base.d


def _row_scale(base: KernelKey) -> Tree:
    return common.on(base.epilogue, common.scaled(column=False)), _wide(base)


def _row_column_scale(base: KernelKey) -> Tree:
    return common.on(base.epilogue, common.scaled(column=True)), _wide(base)


def _quantize(base: KernelKey) -> Tree:
    return common.on(base.epilogue, common.quantize()), D.F8E4M3


def _narrow(base: KernelKey) -> Tree:
    return common.on(base.epilogue, common.narrowed()), D.F8E4M3


def _wide(base: KernelKey) -> D:
    return D.BF16 if base.d is D.I32 else base.d


NAMED: dict[str, Callable[[KernelKey], Tree]] = {
    "common": _common,
    "bias": _biased(""),
    **{f"bias_{name}": _biased(name) for name in common.COMMON_ACTIVATIONS if name},
    **{name: _activated(name) for name in common.COMMON_ACTIVATIONS if name},
    "residual": _residual,
    **{f"gated_{name}": _gated(name) for name in ("silu", "gelu", "gelu_tanh")},
    "row_scale": _row_scale,
    "row_column_scale": _row_column_scale,
    "quantize": _quantize,
    "narrow": _narrow,
    "common_scaled": _common_scaled,
    "common_quantized": _common_quantized,
}
"""Trees by name. `common` is bias and activations in one kernel, `common_scaled` has factors and amax besides, and
`common_quantized` is that with D in e4m3. Each of the others is one tree alone."""


def bases(plain: Iterable[Cell]) -> list[KernelKey]:
    """The cells that get trees, of an arch's cells without trees: the first of each kind."""
    found: dict[tuple[Any, ...], KernelKey] = {}
    for _, key in plain:
        if _is_usual(key):
            layouts = key.layout_a + key.layout_b
            kind = (key.op, key.generation, key.a, key.b, key.math, layouts, key.epilogue)
            found.setdefault(kind, key)
    return list(found.values())


def _is_usual(key: KernelKey) -> bool:
    """Whether a kernel reads aligned operands in a common layout directly, and gives their usual result type."""
    narrow = min(key.align_a * key.a.bits, key.align_b * key.b.bits)
    result = {D.I8: D.I32, D.F8E4M3: D.BF16, D.F8E5M2: D.BF16}.get(key.a, key.a)
    layouts = key.convolves or key.layout_a + key.layout_b in COMMON_LAYOUTS
    common = key.op in OPS and key.a is key.b and layouts and key.d is result and narrow == 128
    special = key.scale_type or key.group_mode or key.mainloop in (FEW, SPLIT, *ANYWHERE) or is_fallback(key)
    scheduled = key.epilogue_schedule != "nosmem" and key.scheduler not in ("streamk", SLICED)
    return common and scheduled and not special and key.epilogue in (LINEAR, SCALED)


_BIASED = ("bias", "bias_relu", "bias_gelu", "bias_gelu_tanh", "bias_silu")

_PRESETS: tuple[tuple[int, str, str, tuple[D, ...], tuple[str, ...]], ...] = (
    (DEFAULT, "gemm", "common", HALF_TYPES, COMMON_LAYOUTS),
    (DEFAULT, "gemm", "quantize", (D.BF16,), ("rc",)),
    (DEFAULT, "grouped_gemm", "common", (D.BF16,), COMMON_LAYOUTS),
    (DEFAULT, "conv2d_fprop", "common", (D.F16,), ("rc",)),
    *((FULL, "gemm", name, (D.BF16,), ("rc",)) for name in (*_BIASED, "residual")),
    (FULL, "gemm", "common", (D.F8E4M3, D.F32), COMMON_LAYOUTS),
    *((FULL, "gemm", f"gated_{name}", (*HALF_TYPES, D.F8E4M3), COMMON_LAYOUTS) for name in ("silu", "gelu")),
    (FULL, "gemm", "gated_gelu_tanh", (D.BF16,), COMMON_LAYOUTS),
    (FULL, "gemm", "row_scale", HALF_TYPES, COMMON_LAYOUTS),
    (FULL, "gemm", "row_column_scale", (*HALF_TYPES, D.I8), COMMON_LAYOUTS),
    (FULL, "gemm", "quantize", (*HALF_TYPES, D.F8E4M3), COMMON_LAYOUTS),
    (FULL, "grouped_gemm", "common", (*HALF_TYPES, D.F8E4M3), COMMON_LAYOUTS),
    *((FULL, "grouped_gemm", name, (*HALF_TYPES, D.F8E4M3), COMMON_LAYOUTS) for name in _BIASED[1:]),
    (FULL, "grouped_gemm", "row_scale", HALF_TYPES, COMMON_LAYOUTS),
    (FULL, "grouped_gemm", "narrow", (D.BF16,), COMMON_LAYOUTS),
    (FULL, "conv2d_fprop", "common", (*HALF_TYPES, D.F8E4M3), ("rc",)),
    *((FULL, "conv2d_fprop", name, (*HALF_TYPES, D.F8E4M3), ("rc",)) for name in _BIASED[1:]),
    *((FULL, "conv2d_fprop", name, (*HALF_TYPES, D.F8E4M3), ("rc",)) for name in ("row_scale", "row_column_scale")),
    (FULL, "conv2d_fprop", "quantize", (*HALF_TYPES, D.F8E4M3), ("rc",)),
    (FULL, "conv2d_dgrad", "common", HALF_TYPES, ("rr",)),
    *((FULL, "conv2d_dgrad", name, HALF_TYPES, ("rr",)) for name in _BIASED[1:]),
)
"""The first preset of a tree: its tier, operation, name, element types of A, and layouts."""

_FEW_ROWS = ((D.BF16, "rc"), (D.BF16, "rr"), (D.F16, "rc"), (D.F8E4M3, "rc"))
"""Element types and layouts for which presets have `common`, and but for f16 `gated_silu`, on a kernel for few rows."""

_NOT_OF_F16 = (
    *(("gemm", name) for name in ("row_scale", "row_column_scale", "quantize", "gated_gelu")),
    ("grouped_gemm", "row_scale"),
    *(("conv2d_fprop", name) for name in ("row_scale", "row_column_scale", "quantize")),
)
"""Operations and trees that f16 lacks on sm_90a, where a preset has so many kernels and no more: compiled on demand."""


def cells(plain: Sequence[Cell]) -> Iterator[tuple[int, KernelKey, Tree]]:
    """The trees that presets have: the first preset as its tier, the key that the tree extends, and the tree.

    Args:
        plain: the cells of an arch without trees.
    """
    found = bases(plain)
    for base in found:
        for tier, op, name, types, layouts in _PRESETS:
            if base.op != op or base.a not in types or base.layout_a + base.layout_b not in layouts:
                continue
            if base.math == "ieee":  # compiled at run time, or where a build asks for them
                continue
            # Scales that are left out are 1; convolutions have none, nor groups of the sm80 generation.
            unscaled = op.startswith("conv2d") or (op == "grouped_gemm" and base.generation == "sm80")
            if base.a in FP8_TYPES and base.epilogue != SCALED and not unscaled:
                continue
            # `common` costs 0 to 2% of large products there (docs/epilogues.md). Of the sm80 generation, kernels
            # without trees add a convolution's bias.
            newer = (
                base.generation == "sm90" or base.arch is SmArch.SM90A or (op != "gemm" and base.generation != "sm80")
            )
            if name.startswith("bias") and newer:
                continue
            if (op, name) in _NOT_OF_F16 and base.a is D.F16 and base.arch is SmArch.SM90A:
                continue
            tree = NAMED[name](base)
            smoke = base.generation == "sm80" and base.a is D.BF16 and tree[0] == COMMON and layouts == COMMON_LAYOUTS
            yield SMOKE if smoke and base.layout_b == COLUMN else tier, base, tree
    for tier, key in plain:
        # Further tiles.
        if key in found or key.a not in HALF_TYPES or not _is_usual(key):
            continue
        if key.op == "gemm" and tier <= DEFAULT:
            yield FULL, key, NAMED["common"](key)
        if key.op == "conv2d_fprop" and key.generation == "sm90":
            # Half of the usual tile would be wasted on 64 filters.
            yield DEFAULT if key.a is D.F16 else FULL, key, NAMED["common"](key)
    few = [cell for cell in plain if cell[1].mainloop == FEW and cell[0] <= FULL and not cell[1].scale_type]
    for kind in _FEW_ROWS:
        alike = [(tier, key) for tier, key in few if (key.a, key.layout_a + key.layout_b) == kind]
        if alike:
            # On random shapes the widest cluster alone is estimated 1% slower than all of them.
            tier, key = max(alike, key=lambda cell: cell[1].cluster[2])
            yield tier, key, NAMED["common"](key)
            if key.a is not D.F16:
                yield FULL, key, NAMED["gated_silu"](key)


class RequestedTree(NamedTuple):
    """A tree that a build asks for.

    Attributes:
        epilogue: of a key: the tree on `lc`, or on the base epilogue of a recorded kernel.
        d: element type of D; None: that of the kernel.
        types: element types of A.
    """

    epilogue: str
    d: D | None
    types: tuple[D, ...]


def requested(base: KernelKey, *, tree: RequestedTree) -> Tree | None:
    """A tree on one of `bases`; None if it is not for such operands."""
    on, program = split(tree.epilogue)
    d = tree.d or (D.F32 if base.d is D.I32 else base.d)
    if base.a not in tree.types or (on not in (LINEAR, base.epilogue) and not is_gated(tree.epilogue)):
        return None
    if is_gated(tree.epilogue):
        return epilogue_id(GATED_SCALED if base.epilogue == SCALED else GATED, program), d
    if SOURCE not in (kind for kind, _ in operand_kinds(program)[0]):
        # Kernels are looked up in this form first: a matrix with the type of D is loaded as the C operand.
        kinds = operand_kinds(program)[0]
        if base.op != "grouped_gemm" and (MATRIX, d.value) in kinds:
            program = with_source(program, kinds.index((MATRIX, d.value)))
    return epilogue_id(base.epilogue, program), d


def read(path: Path) -> list[RequestedTree]:
    """The trees of a file: one object, as `atomr-cutlass epilogue` writes it, or an object a line, such as keys.

    Of an object `program` is the tree, `out_dtype` the element type of D, `dtypes` those of A (without it f16 and
    bf16); of a key its epilogue, D and A.

    Raises:
        ValueError: the file cannot be read or has no tree; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"cannot read the file of trees {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    try:
        objects = [(1, json.loads(text))]
    except ValueError:
        objects = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    objects.append((number, json.loads(line)))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
    found: dict[RequestedTree, None] = {}
    for number, values in objects:
        try:
            tree = _parsed(values)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: no epilogue tree: {error}") from error
        if tree is not None:
            found[tree] = None
    if not found:
        raise ValueError(f"{path} holds no epilogue tree: `atomr-cutlass epilogue` writes such files")
    return list(found)


def _parsed(values: Any) -> RequestedTree | None:
    if not isinstance(values, dict):
        raise ValueError(f"{json.dumps(values)[:60]} is no JSON object")  # noqa: TRY004
    if "program" in values:
        dtype, types = values.get("out_dtype"), values.get("dtypes", [element.value for element in HALF_TYPES])
        epilogue, program = epilogue_id(LINEAR, values["program"]), values["program"]
    else:
        dtype, types, epilogue = values["d"], [values["a"]], values["epilogue"]
        program = split(epilogue)[1]
        if not program:
            return None  # the key of another kernel
    EpilogueVisitorTree.parse(program.replace(f"input:{SOURCE}:", f"input:{MATRIX}:"))
    return RequestedTree(epilogue, None if dtype is None else D(dtype), tuple(D(element) for element in types))


def wanted(names: Iterable[str]) -> Iterator[Callable[[KernelKey], Tree | None]]:
    """The trees that a build compiles on each of `bases`.

    Args:
        names: of NAMED, or paths of files of trees.

    Raises:
        ValueError: neither; names the valid ones.
    """
    for name in names:
        if name in NAMED:
            yield NAMED[name]
        elif Path(name).suffix or "/" in name:
            yield from (functools.partial(requested, tree=tree) for tree in read(Path(name)))
        else:
            raise ValueError(
                f"unknown epilogue {name!r}; valid: {', '.join(NAMED)}, or a file of trees, such as x.json"
            )
