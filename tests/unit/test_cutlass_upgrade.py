"""docs/cutlass-upgrade.md lists what depends on CUTLASS's internals, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ROOT / "cpp" / "include" / "atomr_cutlass"
PAGE = (ROOT / "docs" / "cutlass-upgrade.md").read_text(encoding="utf-8")
INSIDE = re.compile(r"::detail::|Base::|collective::(Sm\d|Collective(Mma|Epilogue))|kernel::detail|CUTE_\w+_ENABLED")
"""What names something that CUTLASS does not promise."""


def test_every_shadow_is_listed() -> None:
    shadows = [path.relative_to(OURS.parent).as_posix() for path in (OURS / "shadows").rglob("*") if path.is_file()]
    assert shadows
    assert [name for name in shadows if f"`{name}`" not in PAGE] == []


def test_every_header_that_reaches_inside_is_listed() -> None:
    found = [path.name for path in OURS.glob("*.h") if INSIDE.search(path.read_text(encoding="utf-8"))]
    assert len(found) > 5
    assert [name for name in found if f"`{name}`" not in PAGE] == []


def test_the_files_and_tests_that_it_names_exist() -> None:
    files, tests = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE), set(re.findall(r"`(tests/[\w/.]+)`", PAGE))
    names = {name for line in files for name in re.findall(r"`([^`]+)`", line)}
    assert [name for name in names if not (OURS / name).exists() and not (OURS.parent / name).exists()] == []
    assert [name for name in tests if not (ROOT / name).exists()] == []
    assert all(re.search(r"`tests/", row) for row in re.findall(r"^\| `.*$", PAGE, re.MULTILINE))


def test_the_cure_of_small_tensor_maps_comes_before_cute() -> None:
    """What CuTe's header calls is settled where that header is read."""
    blackwell = [path for path in OURS.glob("*.h") if re.search(r"_sm1[02]0|blackwell", path.name)]
    assert len(blackwell) > 4
    for path in blackwell:
        first = re.findall(r'#include "([^"]+)"', path.read_text(encoding="utf-8"))[0]
        wanted = "small_tensor_map.h" if path.name == "blackwell.h" else "blackwell.h"
        assert first == f"atomr_cutlass/{wanted}", path.name
