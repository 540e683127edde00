"""Objects that are kept by what they are made of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from generator import objects
from generator.emit import emit, members
from generator.selection import Selection

COMPILER = """#!{python}
import pathlib, sys
if "--version" in sys.argv:
    print(pathlib.Path(sys.argv[0]).name, pathlib.Path({version!r}).read_text())
    raise SystemExit
follows = dict(zip(sys.argv, sys.argv[1:]))
with open({log!r}, "a") as log:
    log.write(follows["-c"] + "\\n")
pathlib.Path(follows["-o"]).write_bytes(pathlib.Path(follows["-c"]).read_bytes())
raise SystemExit("-DBROKEN" in sys.argv)
"""


class Builds:
    """Build folders side by side, with a compiler that notes what it compiles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = folder / "objects"
        self.log, self.version, self.compiler = folder / "log", folder / "version", folder / "nvcc"
        self.version.write_text("13.0")
        self.compiler.write_text(
            COMPILER.format(python=sys.executable, version=str(self.version), log=str(self.log)), encoding="utf-8"
        )
        self.compiler.chmod(0o755)

    def unit(self, build: str, preset: str = "smoke") -> Path:
        """A unit of a build folder, which is emitted."""
        emit(Selection(preset=preset, archs="80", ops="gemm"), self.folder / build)
        return max((self.folder / build).glob("units/*/*.cu"), key=lambda path: len(members(path)))

    def compile(self, unit: Path, *options: str, status: int = 0, host: Path | None = None) -> tuple[bool, Path]:
        """Whether the compiler was asked, and the object."""
        made = unit.with_suffix(".o")
        made.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        command = [str(self.compiler), f"-ccbin={host or self.compiler}", "-O3", *options, f"-I{unit.parent}", "-MD"]
        command += ["-MT", str(made), "-MF", f"{made}.d", "-x", "cu", "-c", str(unit), "-o", str(made)]
        assert objects.main([str(self.kept), *command]) == status
        return self.log.exists(), made


@pytest.fixture
def builds(tmp_path: Path) -> Builds:
    """Two build folders, or more."""
    return Builds(tmp_path)


def test_another_build_folder_compiles_nothing_again(builds: Builds) -> None:
    first, second = builds.unit("first"), builds.unit("second")
    assert len(members(first)) > 1
    asked, made = builds.compile(first)
    assert asked
    renamed = builds.compiler.with_name("g++")
    renamed.symlink_to(builds.compiler)
    asked, copied = builds.compile(second, host=renamed)
    assert not asked
    assert copied.read_bytes() == made.read_bytes()
    # What Ninja compiles again where it changes: the unit and its cells, of this folder.
    target, _, sources = Path(f"{copied}.d").read_text().partition(": ")
    assert target == str(copied)
    cells = {second.parents[2] / "src" / "sm_80" / f"{name}.cu" for name in members(second)}
    assert {Path(source) for source in sources.split()} == {second, *cells}


@pytest.mark.parametrize("changed", ["option", "cell", "unit", "version", "environment"])
def test_what_an_object_is_made_of_is_compiled_again_when_it_changes(
    changed: str, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = builds.unit("build")
    assert builds.compile(unit)[0]
    assert not builds.compile(unit)[0]
    options = ()
    if changed == "option":
        options = ("-DATOMR_CUTLASS_HEADERS_DIGEST=other",)
    elif changed == "cell":
        cell = unit.parents[2] / "src" / "sm_80" / f"{members(unit)[-1]}.cu"
        cell.write_text(f"{cell.read_text()}// changed\n")
    elif changed == "unit":
        unit.write_text(f"{unit.read_text()}// changed\n")
    elif changed == "version":
        builds.version.write_text("13.1")
    else:
        monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    assert builds.compile(unit, *options)[0]
    assert not builds.compile(unit, *options)[0]


def test_what_does_not_compile_is_not_kept(builds: Builds) -> None:
    unit = builds.unit("build")
    for _ in range(2):
        assert builds.compile(unit, "-DBROKEN", status=1)[0]
    assert not builds.kept.exists()


def test_a_folder_that_cannot_be_written_stops_no_build(builds: Builds) -> None:
    unit = builds.unit("build")
    builds.kept.write_text("a file")
    assert builds.compile(unit)[0]
    assert builds.compile(unit)[0]


def test_other_commands_are_passed_on(builds: Builds) -> None:
    command = [sys.executable, objects.__file__, str(builds.kept), sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(command, check=False, timeout=60).returncode == 7
