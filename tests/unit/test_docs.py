"""The pages against the code: names, files, links, knobs, targets and folders that they speak of are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import atomr_cutlass as ac
from atomr_cutlass.generator import variables
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.matrix import ARCHS, OPS, PRESETS, cells
from atomr_cutlass.jit.files import SUBFOLDERS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {"README.md": (ROOT / "README.md").read_text(encoding="utf-8")} | {
    path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))
}
PORTABLE = [arch.target for arch in SmArch if arch.portable]
TARGETS = [arch.target for arch in SmArch]
CMAKE = [ROOT / "CMakeLists.txt", ROOT / "cmake" / "cells.cmake", ROOT / "third_party" / "cutlass" / "cutlass.cmake"]
SUFFIXES = ("py", "md", "h", "cpp", "json", "toml", "svg", "ipynb")


def _anchor(heading: str) -> str:
    """A heading as links name it."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
    return kept.strip().replace(" ", "-")


def _row(page: str, first: str) -> str:
    """The row of a table that begins with this cell."""
    found = [line for line in PAGES[page].splitlines() if line.startswith(f"| {first} |")]
    assert len(found) == 1, f"{page} has {len(found)} rows of {first}"
    return found[0]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page if page == "README.md" else DOCS / page
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)", PAGES[page]):
        path = file.parent / target if target else file
        assert path.exists(), f"{page} links to {target}"
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor[1:] in {_anchor(heading) for heading in headings}, f"{page} links to {target}{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_public_names_exist(page: str) -> None:
    for name in set(re.findall(r"\bac\.(\w+)", PAGES[page])):
        assert hasattr(ac, name), f"{page} speaks of ac.{name}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "performance-log.md"])
def test_files_exist(page: str) -> None:
    for name in set(re.findall(rf"`((?:[\w.-]+/)+[\w.-]+\.(?:{'|'.join(SUFFIXES)}))`", PAGES[page])):
        places = [ROOT, ROOT / "python", ROOT / "cpp", ROOT / "cpp" / "include"]
        assert any((place / name).exists() for place in places) or name.startswith(("build/", "cutlass/")), (
            f"{page} speaks of {name}"
        )


def test_variables_and_knobs_are_read_by_something() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for pattern in (
            "python/**/*.py",
            "generator/**/*.py",
            "cpp/src/*.cpp",
            "cmake/*.cmake",
            "CMakeLists.txt",
            "pyproject.toml",
        )
        for path in ROOT.glob(pattern)
    ]
    for page, text in PAGES.items():
        for name in set(re.findall(r"\b(ATOMR_CUTLASS_[A-Z_]+[A-Z])\b", text)):
            assert any(name in source for source in sources), f"{page} speaks of {name}"


@pytest.mark.parametrize("page", ["README.md", "install.md"])
def test_knobs_name_their_values(page: str) -> None:
    assert f"`{';'.join(TARGETS)}`" in _row(page, "`ATOMR_CUTLASS_ARCHS`")
    assert f"`{';'.join(PORTABLE)}`" in _row(page, "`ATOMR_CUTLASS_PTX`")
    for knob, values in (
        ("`ATOMR_CUTLASS_PRESET`", PRESETS),
        ("`ATOMR_CUTLASS_OPS`", OPS),
        ("`ATOMR_CUTLASS_DTYPES`", [dtype.value for dtype in CutlassDtype if dtype is not CutlassDtype.I32]),
    ):
        row = re.split(r"[`;,|\s]+", _row(page, knob))
        assert [value for value in values if value not in row] == []


@pytest.mark.parametrize("page", ["README.md", "install.md"])
def test_the_tables_of_variables_are_those_of_the_code(page: str) -> None:
    """`python -m generator.variables` prints them."""
    knobs = variables.table(variables.KNOBS, "knob")
    if page == "install.md":
        assert knobs in PAGES[page]
        assert variables.table(variables.ENVIRONMENT, "variable") in PAGES[page]
    else:
        assert re.sub(r"\]\((?=\w+\.md)", "](docs/", knobs).replace("(#", "(docs/install.md#") in PAGES[page]


def test_the_code_reads_the_variables_and_no_others() -> None:
    sources = [*ROOT.glob("python/**/*.py"), *ROOT.glob("generator/**/*.py"), *ROOT.glob("cpp/src/*.cpp")]
    # What is an environment variable has its name in a string, alone.
    names = {
        name
        for path in sources
        if path.name != "variables.py"
        for name in re.findall(r'"(ATOMR_CUTLASS_[A-Z_]+)"', path.read_text(encoding="utf-8"))
    }
    listed = {variable.name for variable in (*variables.ENVIRONMENT, *variables.KNOBS)}
    assert {variable.name for variable in variables.ENVIRONMENT} <= names
    assert names <= listed
    knobs = set(re.findall(r"^set\((\w+) .*CACHE", "".join(map(Path.read_text, CMAKE)), re.MULTILINE))
    assert {variable.name for variable in variables.KNOBS} == knobs - set(variables._OWN_KNOBS)


def test_an_installation_states_every_knob() -> None:
    """All but that of packs, which no installation builds, with the defaults of CMake: its cache remembers others."""
    stated = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[tool.scikit-build.cmake.define]\n")[1]
    defines = dict(re.findall(r'^(\w+) = "(.*)"$', stated.split("\n\n")[0], re.MULTILINE))
    assert list(defines) == [variable.name for variable in variables.KNOBS if variable.name != "ATOMR_CUTLASS_PACK"]
    sets = re.findall(r'^set\((\w+) "(.*?)" CACHE', "".join(map(Path.read_text, CMAKE)), re.MULTILINE)
    assert {name: default for name, default in sets if name in defines} == defines


def test_variables_that_nothing_reads_are_reported_with_the_nearest() -> None:
    said = variables.objections(["ATOMR_CUTLASS_JITT", "ATOMR_CUTLASS_TEST_JIT", "ATOMR_CUTLASS_JIT", "HOME"])
    assert len(said) == 1
    assert said[0].startswith("nothing reads ATOMR_CUTLASS_JITT: did you mean ATOMR_CUTLASS_JIT? Valid: ATOMR_")
    (said,) = variables.objections(["ATOMR_CUTLASS_PRESETT"])
    assert "did you mean ATOMR_CUTLASS_PRESET, a knob of the build? Valid: ATOMR_" in said
    (said,) = variables.objections(["ATOMR_CUTLASS_JITT"], to_build=True)
    assert "did you mean ATOMR_CUTLASS_JIT, a variable of the environment? Valid: ATOMR_" in said
    (said,) = variables.objections(["ATOMR_CUTLASS_PRESET"])
    assert 'CMAKE_ARGS="-DATOMR_CUTLASS_PRESET=..."' in said
    ran = subprocess.run(
        [sys.executable, "-c", "import atomr_cutlass"],
        env=os.environ | {"ATOMR_CUTLASS_PACK_S": "a.pack"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stderr.count("did you mean ATOMR_CUTLASS_PACKS?") == 1


def test_the_help_names_every_variable() -> None:
    code = "from atomr_cutlass.cli.app import app; app()"
    text = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True).stdout
    assert [variable.name for variable in variables.ENVIRONMENT if f"  {variable.name}: " not in text] == []


def test_helps_name_every_target() -> None:
    helps = [
        subprocess.run([sys.executable, *line, "--help"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for line in (
            ("-m", "generator"),
            ("-c", "from atomr_cutlass.cli.app import app; app()", "run"),
            ("-c", "from atomr_cutlass.cli.app import app; app()", "list"),
        )
    ]
    for text in helps:
        assert [target for target in TARGETS if not re.search(rf"\b{target}\b", text)] == []


def test_the_cache_has_the_folders_of_the_page() -> None:
    table = re.findall(r"^\| (`\w+/`.*?) \|", PAGES["jit.md"], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)/`", " ".join(table))) == sorted(SUBFOLDERS)


def test_convolutions_of_f32_have_the_precisions_of_the_page() -> None:
    maths = {
        key.math for _, key in cells(list(SmArch)) if key.op in ARCHS and "conv" in key.op and key.a is CutlassDtype.F32
    }
    row = next(line for line in PAGES["conv.md"].splitlines() if line.startswith("| f32, as `precision`"))
    assert set(re.findall(r"`(ieee|tf32|3xtf32)`", row)) == maths
