"""The ATOMR_CUTLASS_* names that users set: variables of the environment, and knobs of the build.

`python -m generator.variables` prints them as the tables of the pages; with `check NAME...`, CMake asks whether these
are knobs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

from .archs import SmArch
from .dtypes import CutlassDtype
from .matrix import OPS, PRESETS
from .trees import NAMED

PREFIX = "ATOMR_CUTLASS_"
TEST_PREFIX = f"{PREFIX}TEST_"
"""The prefix of variables for the package's own tests."""


class Variable(NamedTuple):
    """A variable and its meaning.

    Attributes:
        name: the whole name.
        meaning: the meaning of its value, as Markdown.
        default: the value if it is not set, as Markdown.
    """

    name: str
    meaning: str
    default: str


def _list(values: Iterable[str]) -> str:
    return f"`{';'.join(values)}`"


KNOBS = (
    Variable(
        f"{PREFIX}PRESET", f"{', '.join(f'`{p}`' for p in PRESETS)}: which [cells](coverage.md) to compile", "`default`"
    ),
    Variable(
        f"{PREFIX}ARCHS",
        f"compile targets: {_list(a.target for a in SmArch)} (100 and 120 mean 100a and 120a)",
        "`CMAKE_CUDA_ARCHITECTURES`, else the GPUs present, else `80;90a`",
    ),
    Variable(
        f"{PREFIX}PTX",
        "those of them to ship as PTX too, which newer GPUs translate: "
        + _list(arch.target for arch in SmArch if arch.portable),
        "none",
    ),
    Variable(f"{PREFIX}OPS", f"operations: {_list(OPS)}", "all"),
    Variable(
        f"{PREFIX}DTYPES",
        f"element types of A: {_list(d.value for d in CutlassDtype if d is not CutlassDtype.I32)}; `tf32` means fp32 "
        "multiplied in TF32",
        "all",
    ),
    Variable(
        f"{PREFIX}KERNELS", "names to keep, as in CUTLASS: comma-separated, `*` between ordered substrings", "all"
    ),
    Variable(f"{PREFIX}KERNEL_FILTER_FILE", "a file of regular expressions, one a line; a name must match one", "none"),
    Variable(f"{PREFIX}EXCLUDE_KERNELS", f"names to leave out, as in `{PREFIX}KERNELS`", "none"),
    Variable(
        f"{PREFIX}EPILOGUES",
        f"[trees](epilogues.md#kernels) whose kernels are built beside the preset's: {_list(NAMED)}, and files of "
        "trees, as `atomr-cutlass epilogue` and `ac.record` write them",
        "those of the preset",
    ),
    Variable(
        f"{PREFIX}KEYS",
        "a [file of keys](jit.md#keys-as-data): exactly those kernels, whatever the preset; without "
        f"`{PREFIX}ARCHS` for the archs of the keys, with it those of other archs are named and left out; no other "
        "filter beside it",
        "none",
    ),
    Variable(
        f"{PREFIX}BUDGET_CELLS",
        f"with [tuned choices](selection.md#tuning) as `{PREFIX}KEYS`: as many kernels at most, those that save "
        "most of the time measured",
        "no limit",
    ),
    Variable(f"{PREFIX}BUDGET_MB", "with tuned choices too: so many MB of GPU code at most", "no limit"),
    Variable(
        f"{PREFIX}OBJECTS",
        "a folder that keeps compiled kernels, for the bindings of another Python and for new build folders; empty: "
        "none. Not used with ccache or sccache, which do the same",
        "`build/objects`",
    ),
    Variable(f"{PREFIX}PACK", "a name: builds a [pack](#packs) of it, without Python bindings", "the bindings"),
    Variable(
        "CUTLASS_DIR", "a checkout of CUTLASS 4.2, 4.4 or 4.5, or its include folder", "the pinned headers (4.2.0)"
    ),
)
"""The knobs of a build, given in CMAKE_ARGS."""

_OWN_KNOBS = (f"{PREFIX}TESTS", f"{PREFIX}COMPILER_CACHE")
"""Knobs of CMakeLists.txt for developers of the project."""

ENVIRONMENT = (
    Variable(
        f"{PREFIX}JIT",
        "where the table lacks a kernel: `auto`, `background`, `off` ([policies](jit.md#policies)), or `warn`: the "
        "process is [frozen](jit.md#record-build-freeze), and warns",
        "`auto`",
    ),
    Variable(f"{PREFIX}CACHE_DIR", "folder of the kernels that were compiled at run time", "`~/.cache/atomr_cutlass`"),
    Variable(f"{PREFIX}PACKS", "[packs](#packs) to load, separated like `PATH`", "none"),
    Variable(f"{PREFIX}RECORD", "file of keys that notes every kernel the process uses", "none"),
    Variable(
        f"{PREFIX}TUNED", "files of [tuned choices](selection.md#tuning) to follow, separated like `PATH`", "none"
    ),
    Variable(
        f"{PREFIX}BATCH_INVARIANT",
        "`1`: each row of a product has the same bits [whatever the other rows](selection.md#batch-invariance), of "
        "operations that have the option and calls that leave it out",
        "`0`",
    ),
    Variable(f"{PREFIX}MISS_LOG", "file of keys that notes what the table lacked", "none"),
    Variable(f"{PREFIX}QUIET", "`1`: compilations are not announced", "`0`"),
    Variable(f"{PREFIX}CHECK", "`1`: grouped GEMM looks at offsets and counts before each launch", "`0`"),
    Variable(
        f"{PREFIX}CHECK_EPILOGUES",
        "`off`: an epilogue's kernel is not compared with the reference at its first use",
        "`on`",
    ),
    Variable(
        f"{PREFIX}DEPENDENT_LAUNCH",
        "`off`: GEMM kernels of sm_90a start after the launch before them has ended",
        "`on`",
    ),
    Variable(f"{PREFIX}NVCC", "`pypi`: a build compiles with nvcc from PyPI, whatever is installed", "`system`"),
)
"""The environment variables: builds read the last one, programs the others."""


def objections(names: Iterable[str], *, to_build: bool = False) -> list[str]:
    """The complaints about set names: a line for each that nothing reads.

    Args:
        names: those of other prefixes are passed over, and those of the package's tests.
        to_build: whether they are knobs of a build rather than environment variables.
    """
    knobs, environment = ({variable.name for variable in some} for some in (KNOBS, ENVIRONMENT))
    valid = knobs | set(_OWN_KNOBS) if to_build else environment
    found = []
    for name in sorted(set(names)):
        if not name.startswith(PREFIX) or name.startswith(TEST_PREFIX) or name in valid:
            continue
        if name in environment:
            found.append(f"{name} is a variable of the environment, and no knob of the build: export {name}=...")
        elif name in knobs:
            found.append(f'{name} is a knob of the build, and not read from the environment: CMAKE_ARGS="-D{name}=..."')
        else:
            import difflib  # needed for misspelled names only

            # Of two that are equally near, the kind that was given.
            endings = [known.removeprefix(PREFIX) for known in (*sorted(valid), *sorted((knobs | environment) - valid))]
            ending = name.removeprefix(PREFIX)
            near = PREFIX + max(endings, key=lambda known: difflib.SequenceMatcher(None, known, ending).ratio())
            other = "a variable of the environment" if to_build else "a knob of the build"
            found.append(
                f"nothing reads {name}: did you mean {near}{'' if near in valid else f', {other}'}? "
                f"Valid: {', '.join(sorted(valid))}"
            )
    return found


def plain(text: str) -> str:
    """Markdown without links and code marks."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")


def table(variables: Iterable[Variable], head: str) -> str:
    """The variables as a table in Markdown, under a head for their names."""
    rows = [f"| `{variable.name}` | {variable.meaning} | {variable.default} |" for variable in variables]
    return "\n".join([f"| {head} | meaning | default |", "| --- | --- | --- |", *rows]) + "\n"


def main(arguments: list[str]) -> int:
    """Prints the tables, or complaints about the knobs given to a build; 1 for unknown knobs."""
    if arguments[:1] != ["check"]:
        print(table(KNOBS, "knob"), table(ENVIRONMENT, "variable"), sep="\n")
        return 0
    for warning in objections(os.environ):
        print(f"warning: {warning}", file=sys.stderr)
    wrong = objections(arguments[1:], to_build=True)
    print("\n".join(wrong), end="", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
