# ruff: noqa: INP001 - a script
"""Writes docs/coverage.md from the kernel matrix; with --check, says whether it is up to date.

Needs the installed package, since how each arch has been verified is stated there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from atomr_cutlass.explain import VERIFICATION
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import GEMM_ARCHS, OPS, PRESETS, cells

PAGE = Path(__file__).with_name("coverage.md")

HEAD = """# Coverage

<!-- Written by docs/gen_coverage.py from generator/matrix.py: change that, not this page. -->

A **cell** is one compiled kernel: element types, layouts, alignments, tile, schedule and target. Its **generation** is
its template family (sm80: CUTLASS 2.x with `mma.sync`; sm90: CUTLASS 3.x with TMA and WGMMA), its **arch** what it is
compiled for. A preset holds the cells of the presets before it: smoke, default, full.

There is one operation, GEMM, batched or not. Every cell computes `alpha * A B + beta * C` with a row-major D; a
column-major D is computed as `D^T = B^T A^T`.
"""

LEGEND = """
*runs on sm_90a*: the GPU tests run cells of this arch natively. *runs as PTX on sm_90*: they run them from the PTX of
their own arch, which the driver translates; this proves the numbers, not the instruction or the speed. *compiled and
audited*: nvcc compiles them, and the tests find the expected instruction and no register spills in the machine code.
"""

CELLS = """
## Cells

One row for all cells that share a generation and element types. Layouts are those of A and B: `r` row-major, `c`
column-major. The alignments are the least that a cell of the row asks of A and B and of D, in elements.
"""

NOT_YET = """
## Compiled at run time

Every cell above can also be compiled at run time by NVRTC, from the same source ([run-time compilation](jit.md)). On an
H200 all of sm_90a give the prebuilt cells' results bit for bit (2026-11-20); those of sm_80 ran there as PTX where
requests chose them; sm_86 and sm_89 differ from sm_80 in the target alone and were not run.

## Not there yet

fp8 and fp4 operands, {archs} cells, grouped GEMM, convolution, fused epilogues (bias, activation,
quantization).
"""


def _dtype(key: KernelKey) -> CutlassDtype:
    return CutlassDtype.TF32 if key.math == "tf32" else key.a


def _operands(key: KernelKey) -> str:
    return key.a.value if key.math == "default" else f"{key.a.value} ({key.math})"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _unique(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _overview(matrix: dict[SmArch, list[tuple[int, KernelKey]]]) -> str:
    """Operation x dtype x arch -> the smallest preset, and how each arch has been verified."""
    rows = []
    operands = dict.fromkeys(_operands(key) for keys in matrix.values() for _, key in keys)
    for op in OPS:
        for operand in operands:
            row = [op.upper(), operand]
            for keys in matrix.values():
                tiers = [tier for tier, key in keys if key.op == op and _operands(key) == operand]
                row.append(PRESETS[min(tiers)] if tiers else "none")
            rows.append(row)
    rows.append(["", "*verified*", *(f"*{VERIFICATION[arch]}*" for arch in matrix)])
    return _table(["op", "A and B", *(arch.value for arch in matrix)], rows)


def _sections(matrix: dict[SmArch, list[tuple[int, KernelKey]]]) -> str:
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
    groups: dict[tuple[str, str], list[tuple[int, KernelKey]]] = {}
    for tier, key in keys:
        groups.setdefault((key.generation, _operands(key)), []).append((tier, key))
    rows = []
    for (generation, operand), members in groups.items():

        def within(
            preset: str, show: Callable[[KernelKey], str], members: list[tuple[int, KernelKey]] = members
        ) -> str:
            return _unique(show(key) for tier, key in members if tier <= PRESETS.index(preset)) or "none"

        rows.append(
            (
                generation,
                operand,
                within("full", lambda key: key.d.value),
                within("default", lambda key: key.layout_a + key.layout_b),
                within("full", lambda key: key.layout_a + key.layout_b),
                str(min(key.align_a for _, key in members)),
                str(min(key.align_d for _, key in members)),
                within("full", lambda key: "x".join(map(str, key.tile[:2]))),
                " / ".join(str(_count(members, preset)) for preset in PRESETS[1:]),
            )
        )
    head = (
        "generation",
        "A and B",
        "D",
        "layouts in default",
        "in full",
        "align A, B",
        "D",
        "tiles",
        "cells by preset",
    )
    return _table(head, rows)


def page() -> str:
    """The page's text."""
    matrix = {arch: list(cells([arch])) for arch in GEMM_ARCHS}
    other = " and ".join(arch.value for arch in SmArch if arch not in GEMM_ARCHS)
    return (
        f"{HEAD}\nThe smallest preset that has a cell:\n\n{_overview(matrix)}{LEGEND}{CELLS}{_sections(matrix)}"
        f"{NOT_YET.format(archs=other)}"
    )


def main() -> int:
    """Writes the page, or with --check compares it."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE.name} is not what the matrix says: run python docs/gen_coverage.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
