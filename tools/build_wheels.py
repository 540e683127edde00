"""Builds wheels that install side by side: one of the package without kernels, and one of kernels for each arch.

    python tools/build_wheels.py --archs "80;90a" --preset default --out dist

The first is of this Python's version; those of kernels (`atomr-cutlass-sm90a`, ...) fit every version. Needs what
`pip install .` needs. Other knobs of the build come from CMAKE_ARGS. Compiled kernels are kept in build/, so that an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "packs" / "template"


def main() -> int:
    """Builds the wheels; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--archs", default="80;90a", help="a wheel of kernels for each, such as 80;90a")
    parser.add_argument("--preset", default="default", help="which kernels; default: default")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheels go; default: dist")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "wheels", help="folder for what is compiled")
    parser.add_argument("--no-base", action="store_true", help="the wheels of kernels alone")
    parser.add_argument(
        "--no-build-isolation", action="store_true", help="with the build's requirements of this Python"
    )
    arguments = parser.parse_args()
    options = ["--no-build-isolation"] if arguments.no_build_isolation else []
    out, build = arguments.out.resolve(), arguments.build.resolve()
    status = 0
    if not arguments.no_base:
        status = wheel(ROOT, "none", out, [*options, f"-Cbuild-dir={build}/{{wheel_tag}}"])
    for arch in filter(None, arguments.archs.split(";")):
        status = status or wheel(project(arch, build), arguments.preset, out, options)
    return status


def project(arch: str, build: Path) -> Path:
    """The folder of the distribution of kernels for an arch, filled in."""
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert found  # noqa: S101 - pyproject.toml has one
    name = f"sm{arch}"
    values = {"name": name, "arch": arch, "version": found[1], "root": ROOT.as_posix()}
    folder = build / name
    module = folder / f"atomr_cutlass_{name}"
    module.mkdir(parents=True, exist_ok=True)
    for source, target in (("pyproject.toml", folder), ("__init__.py", module)):
        text = (TEMPLATE / f"{source}.in").read_text(encoding="utf-8")
        (target / source).write_text(Template(text).substitute(values), encoding="utf-8")
    shutil.copy2(ROOT / "LICENSE", folder)
    return folder


def wheel(folder: Path, preset: str, out: Path, options: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Builds the wheel of a project with a preset; the exit status."""
    defines = [*shlex.split(environ.get("CMAKE_ARGS", "")), f"-DATOMR_CUTLASS_PRESET={preset}"]
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", *options, "--wheel-dir", str(out), str(folder)]
    return subprocess.run(words, env={**environ, "CMAKE_ARGS": shlex.join(defines)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
