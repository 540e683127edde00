# ruff: noqa: INP001 - a script
"""Writes docs/coverage.md, docs/coverage.svg and what docs/install.md says of presets' costs, from the kernel matrix.

With --check, says whether they are up to date. Needs the installed package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.costs import cost_of, costs
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import OPS, PRESETS, cells, preset_of
from atomr_cutlass.pipeline import verification
from atomr_cutlass.pipeline.operation import CALL_OPTIONS, IN_BACKGROUND, Operation, operations
from atomr_cutlass.pipeline.verification import AUDITED, MEANINGS, RUNS, RUNS_AS_PTX

PAGE = Path(__file__).with_name("coverage.md")
PICTURE = Path(__file__).with_name("coverage.svg")
COSTS_PAGE = Path(__file__).with_name("install.md")
COSTS_PLACE = re.compile(r"(?<=<!-- costs: docs/gen_coverage.py -->\n).*?(?=<!-- end of costs -->)", re.DOTALL)

HEAD = """# Coverage

<!-- Written by docs/gen_coverage.py from generator/: change that, not this page. -->

A **cell** is one compiled kernel: operation, element types, layouts, alignments, tile, schedule and target. Its
**generation** is its template family (sm80: CUTLASS 2.x with `mma.sync`; sm90, sm100, sm120: CUTLASS 3.x), its
**arch** what it is compiled for. A preset holds the cells of the presets before it: smoke, default, full. Every cell of
the table can also be compiled at run time by NVRTC, from the same source ([run-time compilation](jit.md)). Rare
problems, such as bf16 products of f16 operands, have cells of no preset, compiled when first needed. No preset has
a **fallback** (a kernel that reads single elements, has two stages or takes any channels, and serves everything slowly)
without a cell of the same operands that serves aligned ones.

![Cells by operation, operands and arch](coverage.svg)

The smallest preset that has a cell of a row, how many cells there are in `full`, and how these were verified, by the
letters explained below, with the number where it is not all of them; a dash where there is none:

"""

LIMITS = """
## Limits

Each is a refusal with its reason, or a rewrite that `explain` names:

- 8-bit operands (int8, fp8) are contiguous along K (A row-major, B column-major) but for sm_90a cells that pass an
  operand through registers: with fp8 those accumulate fast only.
- fp8 with scales of blocks (1 x 128 of A, 128 x 128 of B) has sm_90a and sm_100a cells. sm_89 has no template.
- Convolutions of the sm90 generation (TMA) have one group, and no stride in dgrad; the sm80 generation serves the rest.
  Strided dgrad has no dilation.
- fp8 convolutions without a kernel (dgrad, wgrad, and fprop before sm_89) cast their operands to fp16 or bf16, which
  hold them exactly.
- wgrad of 2-byte types in slices of K adds them up in float32 and casts.
- [Epilogues](epilogues.md#where-it-works) says what is fused where, and what D it makes. The commonest trees are cells;
  kernels of others are compiled at run time.
"""

CELLS = """
## Cells

One row for all cells that share an operation, a generation and operands. Layouts are those of A and B: `r` row-major,
`c` column-major. The alignments are the least that a cell of the row asks of A and B and of D, in elements.
"""

OPTIONS = """
## Options

The options of each operation's function; where it refuses one, the reason:

"""

LETTERS = {RUNS: "R", RUNS_AS_PTX: "P", AUDITED: "A"}

RECORDS = """
Every number counts records of single kernels, which the passes over GPUs and over machine code write and the package
holds: `atomr-cutlass explain` and `atomr-cutlass list` say what GPU or compiler, and when. A kernel whose source or
headers are others by now counts as *changed since* the day of its record; of the rest nothing is recorded.
"""

COLOURS = {"smoke": "#1b7837", "default": "#5aae61", "full": "#a6dba0", "": "#f0f0f0"}

Matrix = dict[SmArch, list[tuple[int, KernelKey]]]


def operands_of(key: KernelKey) -> str:
    """The operands of a key's row on the coverage page: their types and how they are multiplied."""
    types = key.a.value if key.a is key.b else f"{key.a.value} x {key.b.value}"
    if key.scale_type in ("ue4m3", "ue8m0"):
        return f"{types} ({'nvfp4' if key.scale_type == 'ue4m3' else 'mxfp4'})"
    if key.a in (CutlassDtype.F8E4M3, CutlassDtype.F8E5M2):
        return f"{types} (blocks)" if key.scale_type else types
    return types if key.math == "default" else f"{types} ({key.math})"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _unique(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _rows(matrix: Matrix) -> list[tuple[str, str]]:
    """(op, operands) of every row of the overview, in the matrix's order: of what multiplies."""
    found = dict.fromkeys(
        (key.op, operands_of(key)) for keys in matrix.values() for _, key in keys if not key.is_elementwise
    )
    return sorted(found, key=lambda row: OPS.index(row[0]))


def _members(keys: Iterable[tuple[int, KernelKey]], op: str, operand: str) -> list[tuple[int, KernelKey]]:
    return [(tier, key) for tier, key in keys if key.op == op and operands_of(key) == operand]


def _overview(matrix: Matrix) -> str:
    """Operation x operands x arch -> the smallest preset and the count, and how they have been verified."""
    rows = []
    for op, operand in _rows(matrix):
        row = [op, operand]
        for keys in matrix.values():
            members = _members(keys, op, operand)
            smallest = PRESETS[min(tier for tier, _ in members)] if members else ""
            found = {key for _, key in members}
            row.append(" ".join([f"{smallest}, {len(found)}", *_letters(found)]) if members else "-")
        rows.append(row)
    totals = [{key for _, key in keys} for keys in matrix.values()]
    for state in (*MEANINGS, verification.CHANGED, verification.NOT_VERIFIED):
        counts = [(verification.tally(keys).get(state, (0, "")), len(keys)) for keys in totals]
        shown = [f"{n} of {m}" + (f" ({day})" if day else "") if n else "-" for (n, day), m in counts]
        rows.append(["", f"*{state}*", *shown])
    return _table(["op", "A and B", *(arch.value for arch in matrix)], rows)


def _letters(keys: Iterable[KernelKey]) -> list[str]:
    keys = list(keys)
    counts = verification.tally(keys)
    found = [(letter, counts[how][0]) for how, letter in LETTERS.items() if how in counts]
    return [letter if count == len(keys) else f"{letter} {count}" for letter, count in found]


def _legend() -> str:
    lines = [f"- **{LETTERS[how]}** (*{how}*): {meaning}." for how, meaning in MEANINGS.items()]
    return "\n" + "\n".join(lines) + f"\n{RECORDS}"


def picture(matrix: Matrix) -> str:
    """The overview as a heat map: darker for a smaller preset, the number of cells inside."""
    rows = _rows(matrix)
    left, top, width, height = 250, 30, 84, 20
    shapes = []
    for column, arch in enumerate(matrix):
        x = left + column * width + width // 2
        shapes.append(f'<text x="{x}" y="{top - 10}" text-anchor="middle">{arch.value}</text>')
    for number, (op, operand) in enumerate(rows):
        y = top + number * height
        shapes.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{op} {operand}</text>')
        for column, keys in enumerate(matrix.values()):
            members = _members(keys, op, operand)
            colour = COLOURS[PRESETS[min(tier for tier, _ in members)] if members else ""]
            x = left + column * width
            shapes.append(f'<rect x="{x}" y="{y}" width="{width - 2}" height="{height - 2}" fill="{colour}"/>')
            if members:
                count = len({key for _, key in members})
                shapes.append(f'<text x="{x + width // 2}" y="{y + 14}" text-anchor="middle">{count}</text>')
    y = top + len(rows) * height + 8
    for number, (preset, colour) in enumerate(COLOURS.items()):
        x = left + number * 2 * width // 2
        shapes.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>')
        shapes.append(f'<text x="{x + 18}" y="{y + 12}">{preset or "none"}</text>')
    size = f'width="{left + len(matrix) * width}" height="{y + 24}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def _sections(matrix: Matrix) -> str:
    """A table of cells for each group of archs that have the same ones."""
    grouped: dict[str, list[SmArch]] = {}
    for arch, keys in matrix.items():
        grouped.setdefault(_cells(keys), []).append(arch)
    return "".join(
        f"\n### {', '.join(arch.value for arch in archs)}\n\n{text}" + _totals(matrix[archs[0]], several=len(archs) > 1)
        for text, archs in grouped.items()
    )


def _totals(keys: list[tuple[int, KernelKey]], *, several: bool) -> str:
    counts = ", ".join(f"{_count(keys, preset)} in {preset}" for preset in PRESETS[1:])
    return f"\nCells{' for each arch' if several else ''}: {counts}.\n"


def _count(keys: Iterable[tuple[int, KernelKey]], preset: str) -> int:
    return len({key for tier, key in keys if tier <= PRESETS.index(preset)})


def _cells(keys: list[tuple[int, KernelKey]]) -> str:
    groups: dict[tuple[str, str, str], list[tuple[int, KernelKey]]] = {}
    for tier, key in keys:
        groups.setdefault((key.op, key.generation, operands_of(key)), []).append((tier, key))
    rows = []
    for (op, generation, operand), members in groups.items():

        def shown(show: Callable[[KernelKey], str], members: list[tuple[int, KernelKey]] = members) -> str:
            return _unique(show(key) for _, key in members)

        rows.append(
            (
                op,
                generation,
                operand,
                shown(lambda key: key.d.value),
                shown(lambda key: key.layout_a + key.layout_b),
                str(min(min(key.align_a, key.align_b) for _, key in members)),
                str(min(key.align_d for _, key in members)),
                shown(lambda key: "x".join(map(str, key.tile[:2]))),
                " / ".join(str(_count(members, preset)) for preset in PRESETS[1:]),
            )
        )
    head = ("op", "generation", "A and B", "D", "layouts", "align A, B", "D", "tiles", "smoke / default / full")
    return _table(head, rows)


def _options() -> str:
    """Option x operation: taken, under what name where it is another, or the reason why not."""
    known = operations()
    rows = [
        ["`plan`, `explain`, `tune`, binding", *(operation.unplanned or "yes" for operation in known.values())],
        ["messages to actors", *("yes" if operation.message else operation.unplanned for operation in known.values())],
        ["[`heuristics`](selection.md#naming-a-kernel)", *(_named(operation) for operation in known.values())],
    ]
    for option in CALL_OPTIONS:
        cells = []
        for operation in known.values():
            spelled = operation.spelled.get(option)
            cells.append(operation.refuses.get(option, f"as `{spelled}`" if spelled else "yes"))
        rows.append([f"`{option}`", *cells])
        if option == "jit":  # what every function that compiles can do meanwhile
            instead = (operation.spelled.get(IN_BACKGROUND) for operation in known.values())
            in_background = (f"as `{other}`" if other else cell for other, cell in zip(instead, cells, strict=True))
            rows.append([f"`{IN_BACKGROUND}`", *in_background])
    return _table(["option", *known], rows)


def _named(operation: Operation) -> str:
    if not operation.unplanned:
        return "yes"
    return "by `HeuristicKey`" if operation.message else operation.unplanned


def _costs(matrix: Matrix) -> str:
    """Arch x preset -> cells, how many of them were measured where not all, seconds, and bytes."""
    rows = []
    for arch, keys in matrix.items():
        row = [arch.value]
        for preset in range(1, len(PRESETS)):
            found = dict.fromkeys(key for tier, key in keys if tier <= preset)  # a sum of floats has an order
            measured = sum(key.name in costs() for key in found)
            known = "" if measured == len(found) else f" ({measured or 'none'} measured)"
            seconds, size = (sum(getattr(cost_of(key), field) for key in found) for field in ("seconds", "size"))
            row.append(f"{len(found)}{known}, {seconds:.0f} s, {size / 1e3:.0f} kB")
        rows.append(row)
    return _table(["arch", *(f"`{preset}`" for preset in PRESETS[1:])], rows)


def _with_costs(page: str, matrix: Matrix) -> str:
    """The page with the table of costs in its place."""
    text, places = COSTS_PLACE.subn(f"\n{_costs(matrix)}\n", page)
    if places != 1:
        raise ValueError(f"{COSTS_PAGE.name} has {places} places that match {COSTS_PLACE.pattern}; expected one")
    return text


def pages() -> dict[Path, str]:
    """The texts of the pages and the picture."""
    matrix = {arch: [(tier, key) for tier, key in cells([arch]) if preset_of(key)] for arch in SmArch}
    text = f"{HEAD}{_overview(matrix)}{_legend()}{LIMITS}{CELLS}{_sections(matrix)}{OPTIONS}{_options()}"
    install = _with_costs(COSTS_PAGE.read_text(encoding="utf-8"), matrix)
    return {PAGE: text, PICTURE: picture(matrix), COSTS_PAGE: install}


def main() -> int:
    """Writes the pages and the picture, or with --check compares them."""
    for path, text in pages().items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path.name} is not what the matrix says: run python docs/gen_coverage.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
