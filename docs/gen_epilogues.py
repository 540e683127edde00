# ruff: noqa: INP001 - a script
"""Writes what docs/epilogues.md shows of the rules and of its example; with --check, says whether it is up to date.

That is the tables of what is admitted where, from the kernel matrix, and the drawing of the page's example, as
Graphviz's text and as docs/epilogue.svg; the latter takes `dot`. Needs the installed package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from gen_coverage import operands_of

from atomr_cutlass.epilogue import EpilogueVisitorTree
from atomr_cutlass.generator import trees
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.epilogue.common import COMMON_ACTIVATIONS
from atomr_cutlass.generator.epilogue.lower import COMMON, SCALED_COMMON, SOURCE, has_tree, is_common, is_gated, split
from atomr_cutlass.generator.epilogue.tree import MATRIX, SCALAR
from atomr_cutlass.generator.families import FAMILIES
from atomr_cutlass.generator.families.base import DEFAULT, FULL, ON_DEMAND, Family
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import OPS, PRESETS, cells, families, supports, with_epilogue
from atomr_cutlass.generator.rules import LAYOUTS
from atomr_cutlass.generator.tree_table import COMPILED, TREES, Served, served
from atomr_cutlass.pipeline.verification import NOT_VERIFIED, tally

PAGE = Path(__file__).with_name("epilogues.md")
PICTURE = Path(__file__).with_name("epilogue.svg")

TREE = "lc+evt:acc;relu:0;out:1"
"""A tree without operands, of which nothing but its types can be refused."""
WHOLE = "lc+evt:acc;input:column:f32;multiply:0:1;out:2;reduce:2:scalar:amax:f32"
"""One with an operand and an output that some operations have no place for."""
INFIX = {"add": " + ", "multiply": " * "}
CUTLASS = {"sm80": "CUTLASS 2.x", "gemm_few_sm90": "for few rows"}
"""The library that a generation's kernels, or a template's, are written with, if not CUTLASS 3.x."""


def fuses(family: Family, key: KernelKey, epilogue: str, d: CutlassDtype) -> bool:
    """Whether the family compiles a cell with this epilogue and a D of this type."""
    wanted = with_epilogue(key, epilogue, d)
    # A template that knows nothing of an epilogue leaves it out.
    return bool(supports(wanted)) and family.values(wanted) != family.values(dataclasses.replace(wanted, epilogue="lc"))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ["---"] * len(head), *rows])


def _archs(archs: Iterable[SmArch]) -> str:
    return ", ".join(arch.value for arch in archs)


def by_operation() -> str:
    """Operation and generation -> whether bias, activations and trees are fused there."""
    rows: dict[tuple[str, str, str, str], dict[str, None]] = {}
    for op in OPS:
        for family in families():
            if family.op != op:
                continue
            keys = [key for arch in family.archs for _, key in family.cells(arch) if not key.is_elementwise]
            if not keys:
                continue
            some, whole = (
                any(fuses(family, key, tree, d) for key in keys for d in CutlassDtype) for tree in (TREE, WHOLE)
            )
            plain = some or any(fuses(family, key, epilogue, key.d) for key in keys for epilogue in ("lc_relu", COMMON))
            fused = "yes" if whole else ("of rows and scalars, D alone" if some else "-")
            made = CUTLASS.get(family.template) or CUTLASS.get(family.generation, "CUTLASS 3.x")
            generation = f"{family.generation}, {made}"
            row = (generation, _archs(family.archs), "yes" if plain else "-", fused)
            rows.setdefault(row, {})[op] = None  # several families of an operation may have the same row
    head = ("operation", "generation", "cells for", "`bias=`, `activation=`", "trees")
    found = ((", ".join(ops), *row) for row, ops in rows.items())
    return _table(head, sorted(found, key=lambda row: OPS.index(row[0].partition(",")[0])))


def by_type() -> str:
    """Operands of GEMM -> element types of D, and the layouts of A and B that each generation takes."""
    generations = [first for (op, _), (first, *_) in FAMILIES.items() if op == "gemm"]
    results: dict[str, dict[CutlassDtype, None]] = {}
    places: dict[tuple[str, str], dict[str, None]] = {}
    archs: dict[tuple[str, str], dict[SmArch, None]] = {}
    for family in (family for family in families() if family.op == "gemm"):
        for arch in family.archs:
            for _, key in family.cells(arch):
                name, outputs = operands_of(key), [d for d in CutlassDtype if fuses(family, key, TREE, d)]
                place = (name, family.generation)
                if outputs:
                    results.setdefault(name, {}).update(dict.fromkeys(outputs))
                    places.setdefault(place, {})[key.layout_a + key.layout_b] = None
                    archs.setdefault(place, {})[arch] = None

    def shown(name: str, family: Family) -> str:
        place = (name, family.generation)
        if place not in places:
            return "-"
        layouts = "any" if len(places[place]) == len(LAYOUTS) else ", ".join(sorted(places[place]))
        return layouts if tuple(archs[place]) == family.archs else f"{layouts} on {_archs(archs[place])}"

    order = list(CutlassDtype)
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, outputs in results.items():
        dtypes = ", ".join(d.value for d in sorted(outputs, key=order.index))
        row = (dtypes, *(shown(name, generation) for generation in generations))
        rows.setdefault(row, []).append(name)
    head = ("A and B", "D", *(family.generation for family in generations))
    return _table(head, ((", ".join(names), *row) for row, names in rows.items()))


def by_preset() -> str:
    """The functions that cells' trees compute, and the smallest preset that has them, by operation."""
    found: dict[tuple[str, str], dict[int, dict[str, None]]] = {}
    archs: dict[tuple[str, str], dict[SmArch, None]] = {}
    for arch in SmArch:
        least: dict[tuple[str, str, str], int] = {}
        for tier, key in cells([arch]):
            if has_tree(key.epilogue):
                layouts = "" if key.convolves else f" {key.layout_a}{key.layout_b}"
                place = (computed(key.epilogue), key.op, f"{operands_of(key)}{layouts}")
                least[place] = min(tier, least.get(place, tier))
        for (function, op, operands), tier in least.items():
            archs.setdefault((function, op), {})[arch] = None
            # Smoke tests have one here and there.
            found.setdefault((function, op), {}).setdefault(max(tier, DEFAULT), {})[operands] = None

    def shown(place: tuple[str, str], tier: int) -> str:
        named = found[place].get(tier, {})
        return ", ".join(x for x in named if tier == DEFAULT or x not in found[place].get(DEFAULT, {})) or "-"

    rows = (
        (f"`{function}`", op, shown((function, op), DEFAULT), shown((function, op), FULL), _archs(archs[function, op]))
        for function, op in found
    )
    return _table(("D, and what is beside it", "operation", "default", "full besides", "cells for"), rows)


def by_tree() -> str:
    """Where presets have a kernel for the trees that programs usually want, and why not elsewhere."""
    found = {arch: list(served(arch)) for arch in SmArch}
    reasons: dict[str, int] = {COMPILED: 0}
    parts = []
    for op in trees.OPS:
        columns: dict[tuple[str, ...], list[SmArch]] = {}
        for arch, all_ops in found.items():
            column = tuple(
                _shown([cell for cell in all_ops if (cell.op, cell.tree) == (op, tree)], reasons) for tree in TREES
            )
            if any(column):
                columns.setdefault(column, []).append(arch)
        rows: dict[tuple[str, ...], list[str]] = {}
        for tree, *cells_of_row in zip(TREES, *columns, strict=True):
            if any(cells_of_row):
                rows.setdefault(tuple(cells_of_row), []).append(tree)
        head = (op, *(_archs(archs) for archs in columns.values()))
        parts.append(_table(head, ((", ".join(names), *row) for row, names in rows.items())))
    notes = "\n".join(f"- ({number}) {reason}" for reason, number in reasons.items() if number)
    return "\n".join([*parts, notes]) + "\n"


def _shown(found: list[Served], reasons: dict[str, int]) -> str:
    """The presets with the element types that they have a tree for, and numbers of reasons with those that none has."""
    texts: dict[str, dict[CutlassDtype, list[str]]] = {}
    for cell in found:
        if cell.tier < ON_DEMAND:
            text = f"`{PRESETS[max(cell.tier, DEFAULT)]}`"
        elif cell.reason == COMPILED:
            text = "JIT"
        else:
            text = f"({reasons.setdefault(cell.reason, len(reasons))})"
        texts.setdefault(text, {}).setdefault(cell.a, []).append(cell.layouts)
    widths = {cell.a: len({other.layouts for other in found if other.a is cell.a}) for cell in found}

    def types(of: dict[CutlassDtype, list[str]]) -> str:
        return ", ".join(a.value + ("" if len(layouts) == widths[a] else f" {layouts[0]}") for a, layouts in of.items())

    return "; ".join(
        f"{text} {types(of)}" if len(texts) > 1 else text for text, of in sorted(texts.items(), reverse=True)
    )


def computed(epilogue: str) -> str:
    """The function that the epilogue of a cell with a tree computes."""
    if is_common(epilogue):
        names = " \\| ".join(name or "identity" for name in COMMON_ACTIVATIONS)
        scaled = epilogue == SCALED_COMMON
        return f"{'scalar? * ' * scaled}({names})(acc{' * column? * row?' * scaled} + row? + C?){', amax?' * scaled}"
    text = expression(split(epilogue)[1])
    return f"{text.replace('acc', 'even columns')} * odd columns" if is_gated(epilogue) else text


def expression(program: str) -> str:
    """The function that a tree computes, as Python would write it, with the kinds of its operands for their names."""
    tree = EpilogueVisitorTree.parse(program.replace(f"input:{SOURCE}:", f"input:{MATRIX}:"))
    texts: list[str] = []
    for node in tree.nodes:
        inputs = [texts[tree.index(operand)] for operand in node.inputs]
        if node.op == "input":
            texts.append(str(node.attributes[1]))
        elif node.op in INFIX:
            texts.append(INFIX[node.op].join(f"({text})" if " " in text else text for text in inputs))
        else:
            words = [*inputs, *map(str, node.attributes)]
            texts.append(f"{node.op}({', '.join(words)})" if words else node.op)
    beside = []
    for output, node in tree.stores:
        text = texts[tree.index(node)]
        along = "total" if output.kind == SCALAR else output.kind
        beside.append(f"{along}_{output.reduction}({text})" if output.reduction else text)
    return ", ".join([texts[tree.index(tree.result)], *beside])


def by_arch() -> str:
    """How the cells with a tree have been verified, for each arch."""
    said = []
    for arch in SmArch:
        keys = {key for _, key in cells([arch]) if has_tree(key.epilogue)}
        counts = {state: count for state, (count, _) in tally(keys).items()} or {NOT_VERIFIED: 0}
        said.append(f"{arch.value}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    return f"Of the cells with a tree, by what is recorded ([Coverage](coverage.md)): {'; '.join(said)}.\n"


def example(page: str) -> EpilogueVisitorTree:
    """The tree that the page's example makes: its block after the mark, which needs no other."""
    found = re.search(r"<!-- drawn -->\n+```python\n(.*?)```", page, re.DOTALL)
    if found is None:
        raise ValueError(f"{PAGE.name} has no block of Python after <!-- drawn -->")
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(found[1], names)  # noqa: S102 - our own page
    tree = names["tree"]
    if not isinstance(tree, EpilogueVisitorTree):
        raise TypeError(f"tree is a {type(tree).__name__} in {PAGE.name}")
    return tree


def written(page: str) -> str:
    """The page with its generated parts as they have to be."""
    parts = {
        "operations": by_operation(),
        "types": by_type(),
        "archs": by_arch(),
        "presets": by_preset(),
        "trees": by_tree(),
        "drawing": f"```dot\n{example(page).to_dot()}```\n",
    }
    for name, text in parts.items():
        begin, end = f"<!-- {name}: docs/gen_epilogues.py -->\n", f"<!-- end of {name} -->"
        head, mark, rest = page.partition(begin)
        _, last, tail = rest.partition(end)
        if not (mark and last):
            raise ValueError(f"{PAGE.name} has no place for {name}: {begin.strip()} ... {end}")
        page = f"{head}{begin}\n{text}\n{end}{tail}"
    return page


def mark_of(tree: EpilogueVisitorTree) -> str:
    """The text under the picture of a tree."""
    return f"<!-- {tree.id} -->"


def picture(tree: EpilogueVisitorTree) -> str:
    """The tree as Graphviz draws it, without the comments that say which version of it did."""
    drawn = subprocess.run(["dot", "-Tsvg"], input=tree.to_dot(), capture_output=True, text=True, check=True).stdout
    body = re.sub(r"<!--.*?-->\n?", "", drawn[drawn.index("<svg") :], flags=re.DOTALL)
    return f"{body.rstrip()}\n{mark_of(tree)}\n"


def main() -> int:
    """Writes the page's parts, and the picture if it shows another tree; with --check, says what is out of date."""
    page = PAGE.read_text(encoding="utf-8")
    tree = example(page)
    drawn = PICTURE.exists() and mark_of(tree) in PICTURE.read_text(encoding="utf-8")
    stale = [*([] if written(page) == page else [PAGE.name]), *([] if drawn else [PICTURE.name])]
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"{', '.join(stale)}: out of date: run python docs/gen_epilogues.py", file=sys.stderr)
        return int(bool(stale))
    PAGE.write_text(written(page), encoding="utf-8")
    if not drawn:
        PICTURE.write_text(picture(tree), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
