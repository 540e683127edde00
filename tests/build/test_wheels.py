"""Wheels side by side in a fresh environment: the package without kernels, and packs of kernels for two archs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

import pytest

from cmake_build import ROOT, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

FEW = {"CMAKE_ARGS": "-DATOMR_CUTLASS_KERNELS=simt*align1 -DCMAKE_CXX_FLAGS_RELEASE=-O0"}
"""Of each arch two kernels, of those that compile fastest."""

ALONE = {"PYTHONPATH": ""}
"""The environment of a Python that does not see the checkout."""

NOWHERE = {
    "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_INDEX_URL": "",
    "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9",
}  # fmt: skip
"""The environment of a machine that reaches no network."""

LIST = """
import json, warnings
warnings.simplefilter("error")
import atomr_cutlass as ac
print(json.dumps([[kernel.key.arch.value, kernel.pack] for kernel in ac.kernels()]))
"""


@dataclass
class Environment:
    """A virtual environment."""

    folder: Path

    def pip(self, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        python = self.folder / "bin" / "python"
        return run(python, "-m", "pip", "--disable-pip-version-check", *words, env=ALONE | env)

    def packs(self) -> list[list[str]]:
        """(arch, pack) of each kernel of the table."""
        said = run(self.folder / "bin" / "python", "-c", LIST, env=ALONE, cwd=self.folder)
        assert said.returncode == 0, said.stderr
        found: list[list[str]] = json.loads(said.stdout)
        return found


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three wheels, built as `make wheels` builds them."""
    out = tmp_path_factory.mktemp("wheels")
    words = ["--archs", "80;90a", "--out", out, "--build", out / "build", "--no-build-isolation"]
    said = run(sys.executable, ROOT / "tools" / "build_wheels.py", *words, env=FEW)
    assert said.returncode == 0, said.stdout + said.stderr
    return out


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    made = Environment(tmp_path / "venv")
    assert run(sys.executable, "-m", "venv", made.folder).returncode == 0
    return made


def test_packs_are_wheels_for_every_python(wheels: Path) -> None:
    for arch in ("sm80", "sm90a"):
        [wheel] = wheels.glob(f"atomr_cutlass_{arch}-*.whl")
        assert "-py3-none-linux_" in wheel.name
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            [metadata] = (name for name in names if name.endswith(".dist-info/METADATA"))
            said = HeaderParser().parsestr(archive.read(metadata).decode())
            entries = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode().split()
        assert {f"atomr_cutlass_{arch}/{arch}.so", f"atomr_cutlass_{arch}/CUTLASS-LICENSE.txt"} <= set(names)
        assert any(name.endswith("/licenses/LICENSE") for name in names)
        assert said["Requires-Dist"] == f"atomr-cutlass=={said['Version']}"
        assert entries == ["[atomr_cutlass.packs]", arch, "=", f"atomr_cutlass_{arch}:path"]


def test_wheels_install_side_by_side_and_find_each_other(wheels: Path, environment: Environment) -> None:
    said = environment.pip("install", "--quiet", "--find-links", wheels, "atomr-cutlass-sm90a")
    assert said.returncode == 0, said.stderr  # which brings the package itself
    assert environment.packs() == [["sm_90a", "sm90a"]] * 2
    said = environment.pip("install", "--quiet", "--find-links", wheels, "atomr-cutlass-sm80")
    assert said.returncode == 0, said.stderr
    assert sorted(environment.packs()) == [["sm_80", "sm80"]] * 2 + [["sm_90a", "sm90a"]] * 2
    assert environment.pip("check").returncode == 0
    assert environment.pip("uninstall", "--yes", "--quiet", "atomr-cutlass-sm90a").returncode == 0
    assert environment.packs() == [["sm_80", "sm80"]] * 2


def test_the_sdist_installs_offline(tmp_path: Path, environment: Environment) -> None:
    """Given its requirements, those of the build among them, in a folder."""
    checkout, house = tmp_path / "checkout", tmp_path / "house"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        target = checkout / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    hook = "import sys; from scikit_build_core import build; print(build.build_sdist(sys.argv[1]))"
    said = run(sys.executable, "-c", hook, tmp_path, cwd=checkout)
    assert said.returncode == 0, said.stderr
    source = tmp_path / said.stdout.split()[-1]
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"packs/template/pyproject.toml.in", "tools/build_wheels.py", "generator/emit.py", "LICENSE"} <= names
    assert not any(name.startswith((".github", "build/")) for name in names)

    pin = ROOT / "third_party" / "cutlass" / "PIN"
    arrays = re.findall(r"^(?:requires|dependencies) = (\[.+\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    wanted = [name for array in arrays for name in json.loads(array)] + ["cmake", "ninja"]
    for requirements in (wanted, ["--no-deps", "--require-hashes", "--requirement", pin]):
        assert environment.pip("download", "--quiet", "--dest", house, *requirements).returncode == 0
    none = {"CMAKE_ARGS": "-DATOMR_CUTLASS_PRESET=none -DCMAKE_CXX_FLAGS_RELEASE=-O0"}
    said = environment.pip("install", source, PIP_FIND_LINKS=str(house), **NOWHERE, **none)
    assert said.returncode == 0, said.stdout + said.stderr
    assert environment.packs() == []
