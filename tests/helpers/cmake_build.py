"""Drives the build as a user does: configures one set of knobs after another, mostly without compiling."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from generator.toolchain import system_nvcc

ROOT = Path(__file__).resolve().parents[2]

KNOBS = {
    "ATOMR_CUTLASS_PRESET": "smoke",
    "ATOMR_CUTLASS_ARCHS": "80;90a",
    "ATOMR_CUTLASS_PTX": "",
    "ATOMR_CUTLASS_OPS": "",
    "ATOMR_CUTLASS_DTYPES": "",
    "ATOMR_CUTLASS_KERNELS": "",
    "ATOMR_CUTLASS_KERNEL_FILTER_FILE": "",
    "ATOMR_CUTLASS_EXCLUDE_KERNELS": "",
    "ATOMR_CUTLASS_EPILOGUES": "",
    "ATOMR_CUTLASS_KEYS": "",
    "ATOMR_CUTLASS_OBJECTS": "",
}


def tool(name: str) -> str:
    """CMake or Ninja, the ones beside this Python first."""
    beside = shutil.which(name, path=Path(sys.executable).parent)
    found = beside or shutil.which(name)
    assert found, f"{name} is among the test requirements"
    return found


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a command in the environment of this process changed by `env`; an empty value removes a variable."""
    environment = {name: value for name, value in (os.environ | (env or {})).items() if value}
    words = [str(word) for word in command]
    return subprocess.run(words, env=environment, cwd=cwd, text=True, capture_output=True, check=False, timeout=600)


def output(process: subprocess.CompletedProcess[str]) -> str:
    """Everything a process said, in one line: CMake breaks its messages anywhere."""
    return " ".join((process.stdout + process.stderr).split())


def compiled(text: str, made: Path, *options: str) -> Path:
    """Compiles a CUDA source with the system's nvcc into the file `made`, beside which it is written.

    C++17, without warnings, and with constexpr functions of the host on the device.
    """
    nvcc = system_nvcc()
    assert nvcc, "a test that needs nvcc skips without one"
    source = made.with_name(f"{made.stem}.cu")
    source.write_text(text)
    said = run(nvcc, "-std=c++17", "-w", "--expt-relaxed-constexpr", *options, source, "-o", made)
    assert said.returncode == 0, output(said)[:2000]
    return made


def said_by(program: Path, *arguments: str | Path) -> str:
    """The output of a program that succeeds."""
    said = run(program, *arguments)
    assert said.returncode == 0, output(said)[:2000]
    return said.stdout


def path_without(folder: Path, *names: str) -> str:
    """A PATH with all the tools of this one but those named, as links in a folder."""
    folder.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).glob("*"):
            link = folder / program.name
            link.unlink(missing_ok=True)
            if program.name not in names:
                link.symlink_to(program)
    return str(folder)


class Build:
    """A build folder."""

    def __init__(self, folder: Path, headers: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.headers = headers
        self.env = env

    def try_configure(
        self, *, env: dict[str, str] | None = None, python: Path | str = sys.executable, **knobs: str
    ) -> subprocess.CompletedProcess[str]:
        """Configures with the given knobs, all others as in KNOBS. It builds the C++ tests: no pybind11."""
        values = KNOBS | {
            "CUTLASS_DIR": str(self.headers),
            "ATOMR_CUTLASS_TESTS": "ON",
            "Python_EXECUTABLE": str(python),
            "CMAKE_MAKE_PROGRAM": tool("ninja"),
        }
        defines = [f"-D{name}={value}" for name, value in (values | knobs).items()]
        return run(tool("cmake"), "-G", "Ninja", "-S", ROOT, "-B", self.folder, *defines, env=self.env | (env or {}))

    def configure(self, **knobs: str) -> list[str]:
        """Configures and returns the cells written, as arch/name."""
        process = self.try_configure(**knobs)
        assert process.returncode == 0, process.stdout + process.stderr
        return self.cells()

    def refuse(self, **knobs: str) -> str:
        """Configures with wrong knobs and returns CMake's output."""
        process = self.try_configure(**knobs)
        assert process.returncode != 0, process.stdout
        return output(process)

    def cells(self) -> list[str]:
        """The cells written, as arch/name."""
        sources = sorted((self.folder / "cells" / "src").glob("*/*.cu"))
        return [f"{source.parent.name}/{source.stem}" for source in sources]

    def make(self, *targets: str) -> str:
        """Builds the targets and returns Ninja's output."""
        process = run(tool("cmake"), "--build", self.folder, "--target", *targets, env=self.env)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    def rules(self) -> str:
        """The commands that Ninja will run."""
        return (self.folder / "build.ninja").read_text() + (self.folder / "CMakeFiles" / "rules.ninja").read_text()
