"""The identity of what a kernel is compiled from: what changes it, and what does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from generator import content, headers
from generator.archs import SmArch
from generator.key import KernelKey
from generator.matrix import expand
from generator.rules import FEW, SPLIT

OURS = Path(__file__).resolve().parents[2] / "cpp" / "include" / "atomr_cutlass"
OWN = (FEW, SPLIT)  # kernels without CUTLASS's collectives
KEYS = {key.generation: key for key in expand("full", [SmArch.SM90A]) if key.op == "gemm" and key.mainloop not in OWN}
SM80, SM90 = KEYS["sm80"], KEYS["sm90"]


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A copy of the headers."""
    return Path(shutil.copytree(OURS, tmp_path / "include" / "atomr_cutlass"))


@pytest.fixture
def cutlass(tmp_path: Path) -> Path:
    """Headers of CUTLASS 4.2, as far as it matters here."""
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "version.h").write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n")
    return tmp_path


def digest(key: KernelKey, ours: Path) -> str:
    content._header.cache_clear()
    return content.source_digest(key, ours)


def cutlass_digest(cutlass: Path, ours: Path) -> str:
    content._header.cache_clear()
    return content.cutlass_digest(cutlass, ours, "0123")


def change(header: Path, text: str = "static_assert(true);\n") -> None:
    header.write_text(header.read_text() + text)


def test_every_cell_has_one_of_its_own() -> None:
    keys = expand("full", [SmArch.SM90A])
    assert len({content.source_digest(key, OURS) for key in keys}) == len(keys)


def test_comments_of_macros_are_no_part_of_it(ours: Path) -> None:
    before = digest(SM90, ours)
    header = ours / "kernel_abi.h"
    text = header.read_text()
    field = "  FIELD(int32_t, swizzle) \\\n"
    assert field in text
    header.write_text(
        text.replace(field, "  /* Of some, \\\n   * and of others */ \\\n  FIELD(int32_t, swizzle) /* here */ \\\n")
    )
    assert digest(SM90, ours) == before
    header.write_text(text.replace(field, "  FIELD(int32_t, swizzles) \\\n"))
    assert digest(SM90, ours) != before


def test_folders_dates_comments_and_blanks_are_no_part_of_it(ours: Path) -> None:
    before = digest(SM90, OURS)
    assert digest(SM90, ours) == before
    header = ours / "gemm_sm90.h"
    first, _, rest = header.read_text().partition("#pragma once\n")
    header.write_text(f"// Another comment.\n{first}#pragma once\n\n\n/* and\n one */ {rest}\n// the end")
    assert digest(SM90, ours) == before


def test_a_header_counts_for_the_kernels_that_reach_it(ours: Path) -> None:
    before = {key: digest(key, ours) for key in (SM80, SM90)}
    change(ours / "gemm_sm90.h")
    assert digest(SM80, ours) == before[SM80]
    assert digest(SM90, ours) != before[SM90]


@pytest.mark.parametrize("name", ["epilogue_scaled.h", "kernel_abi.h", "row.h", "nvrtc/evaluate.h"])
def test_headers_of_headers_count(ours: Path, name: str) -> None:
    """Of the code ahead of time and of that at run time."""
    before = digest(SM90, ours)
    change(ours / name)
    assert digest(SM90, ours) != before


def test_literals_are_no_comments() -> None:
    text = 'a = "// no";  b = R"json({"x": "/* nor this"})json"; // one\nc = \'"\'; /* d */ e = 1\'000;\n\n\n f\n'
    assert content.normalized(text) == (
        'a = "// no"; b = R"json({"x": "/* nor this"})json";\nc = \'"\'; e = 1\'000;\nf'
    )


@pytest.mark.parametrize(
    "name", ["nvrtc/cuda.h", "nvrtc/cstdint", "shadows/cutlass_4.2/faster/cute/layout.hpp",
             "shadows/cutlass_4/required/cutlass/util/packed_stride.hpp"]
)  # fmt: skip
def test_headers_that_stand_in_for_others_are_a_part_of_cutlass(cutlass: Path, ours: Path, name: str) -> None:
    before = cutlass_digest(cutlass, ours)
    assert before.startswith("4.2-")
    change(ours / name, "// a remark\n")
    assert cutlass_digest(cutlass, ours) == before
    change(ours / name)
    assert cutlass_digest(cutlass, ours) != before


def test_shadows_of_another_cutlass_are_no_part_of_it(cutlass: Path, ours: Path) -> None:
    before = cutlass_digest(cutlass, ours)
    folder = ours / "shadows" / "cutlass_4.3" / "faster"
    folder.mkdir(parents=True)
    (folder / "layout.hpp").write_text("#pragma once\n")
    assert cutlass_digest(cutlass, ours) == before
    assert content.cutlass_digest(cutlass, ours, "4567") != before
    shutil.rmtree(cutlass / "cutlass")
    with pytest.raises(headers.HeadersError, match=r"has no cutlass/version.h"):
        cutlass_digest(cutlass, ours)
