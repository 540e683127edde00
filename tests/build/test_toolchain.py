"""Which nvcc is found, what PyPI supplies when there is none, and how many compiles run at once."""

import sys
from pathlib import Path

import pytest

from cmake_build import ROOT, Build, output, path_without, run
from generator import toolchain

NVCC = "echo 'Cuda compilation tools, release {}, V{}.1'"


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No toolkit in the places that are searched besides the environment."""
    monkeypatch.setattr(toolchain, "DEFAULT_ROOTS", ())


@pytest.mark.usefixtures("nowhere")
class TestSystemNvcc:
    def test_none(self, tmp_path: Path) -> None:
        assert toolchain.system_nvcc({"PATH": str(tmp_path)}) is None

    def test_on_path(self, script) -> None:
        folder = script("nvcc", NVCC.format("13.0", "13.0"))
        assert toolchain.system_nvcc({"PATH": f"/nonexistent:{folder}"}) == folder / "nvcc"

    def test_a_toolkit_that_is_too_old_is_passed_over(self, script) -> None:
        folder = script("nvcc", NVCC.format("11.8", "11.8"))
        assert toolchain.system_nvcc({"PATH": str(folder)}) is None

    def test_a_broken_one_is_passed_over(self, script) -> None:
        folder = script("nvcc", "exit 1")
        assert toolchain.system_nvcc({"PATH": str(folder)}) is None

    @pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
    def test_in_a_named_toolkit(self, script, name: str) -> None:
        folder = script("nvcc", NVCC.format("12.8", "12.8"))
        assert toolchain.system_nvcc({"PATH": "", name: str(folder.parent)}) == folder / "nvcc"

    def test_in_the_usual_place(self, script, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = script("nvcc", NVCC.format("13.0", "13.0"))
        monkeypatch.setattr(toolchain, "DEFAULT_ROOTS", (folder.parent,))
        assert toolchain.system_nvcc({"PATH": ""}) == folder / "nvcc"

    def test_pypi_was_asked_for(self, script) -> None:
        folder = script("nvcc", NVCC.format("13.0", "13.0"))
        assert toolchain.system_nvcc({"PATH": str(folder), "ATOMR_CUTLASS_NVCC": "pypi"}) is None

    def test_wrong_choice(self) -> None:
        with pytest.raises(toolchain.ToolchainError, match="system, pypi"):
            toolchain.system_nvcc({"PATH": "", "ATOMR_CUTLASS_NVCC": "apt"})


@pytest.mark.usefixtures("nowhere")
class TestFindNvcc:
    def test_the_one_named_is_taken_as_it_is(self, script, tmp_path: Path) -> None:
        folder = script("mycc", NVCC.format("11.8", "11.8"))
        assert toolchain.find_nvcc(tmp_path, {"CUDACXX": f"{folder}/mycc -Xptxas -v"}) == folder / "mycc"

    def test_the_one_named_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(toolchain.ToolchainError, match="CUDACXX"):
            toolchain.find_nvcc(tmp_path, {"CUDACXX": "/nonexistent/nvcc", "PATH": ""})

    def test_none_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(toolchain, "pypi_toolkit", lambda: None)
        with pytest.raises(toolchain.ToolchainError, match="ATOMR_CUTLASS_PRESET=none"):
            toolchain.find_nvcc(tmp_path, {"PATH": ""})


@pytest.mark.usefixtures("nowhere")
class TestBuildRequirements:
    def test_a_toolkit_where_there_is_none(self) -> None:
        assert toolchain.build_requirements({"PATH": ""}) == [toolchain.PYPI_TOOLKIT]

    def test_nothing_where_there_is_one(self, script) -> None:
        folder = script("nvcc", NVCC.format("13.0", "13.0"))
        assert toolchain.build_requirements({"PATH": str(folder)}) == []

    @pytest.mark.parametrize(
        "arguments",
        [
            "-DATOMR_CUTLASS_PRESET=none",
            "-DOTHER=1 -D ATOMR_CUTLASS_PRESET=none",
            "-DATOMR_CUTLASS_PRESET:STRING=none",
            "-DCMAKE_CUDA_COMPILER=/opt/cuda/bin/nvcc",
        ],
    )
    def test_nothing_where_none_is_needed(self, arguments: str) -> None:
        assert toolchain.build_requirements({"PATH": "", "CMAKE_ARGS": arguments}) == []

    def test_another_preset_needs_one(self) -> None:
        environ = {"PATH": "", "CMAKE_ARGS": '-DATOMR_CUTLASS_PRESET=smoke "-DATOMR_CUTLASS_ARCHS=80;90a"'}
        assert toolchain.build_requirements(environ) == [toolchain.PYPI_TOOLKIT]


@pytest.mark.parametrize(
    ("env", "required"),
    [
        ({"ATOMR_CUTLASS_NVCC": "pypi", "CMAKE_ARGS": ""}, True),
        ({"ATOMR_CUTLASS_NVCC": "pypi", "CMAKE_ARGS": "-DATOMR_CUTLASS_PRESET=none"}, False),
        ({"CUDACXX": "/some/nvcc", "CMAKE_ARGS": ""}, False),
    ],
)
def test_the_build_backend_asks_for_it(env: dict[str, str], required: bool) -> None:
    ask = "import scikit_build_core.build as b; print(b.get_requires_for_build_wheel())"
    said = run(sys.executable, "-c", ask, env={"CUDACXX": ""} | env)
    assert said.returncode == 0, said.stderr
    assert (toolchain.PYPI_TOOLKIT in said.stdout) == required


def test_no_nvcc_anywhere_stops_and_names_the_knob(new_build: Build, tmp_path: Path) -> None:
    # A bare environment, in which no PyPI toolkit can be installed.
    assert run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare").returncode == 0
    env = {"ATOMR_CUTLASS_NVCC": "pypi", "CUDACXX": "", "PYTHONPATH": ""}
    said = new_build.try_configure(python=tmp_path / "bare" / "bin" / "python", env=env)
    assert said.returncode != 0
    assert "-DATOMR_CUTLASS_PRESET=none" in output(said)


def test_pypi_toolkit_is_laid_out_as_an_installed_one(tmp_path: Path) -> None:
    root = tmp_path / "cu13"
    for name in ("bin/nvcc", "nvvm/bin/cicc", "include/cuda.h", "lib/libcudart.so.13", "lib/libnvrtc.so.13"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    stage = tmp_path / "stage"
    assert toolchain.stage_toolkit(root, stage) == stage / "bin" / "nvcc"
    assert (stage / "lib64" / "libcudart.so").read_text() == "lib/libcudart.so.13"
    assert (stage / "nvvm" / "bin" / "cicc").is_file()
    assert not (stage / "lib" / "libnvrtc.so.13").exists()

    # An isolated build environment has been deleted by the next build, which gets an equal one elsewhere.
    before = (stage / "include" / "cuda.h").stat()
    again = root.rename(tmp_path / "again")
    (again / "include" / "cuda.h").touch()
    toolchain.stage_toolkit(again, stage)
    assert (stage / "include" / "cuda.h").stat().st_ino == before.st_ino

    (again / "include" / "cuda.h").write_text("another version")
    toolchain.stage_toolkit(again, stage)
    assert (stage / "include" / "cuda.h").read_text() == "another version"


def test_kernels_compile_with_pypis_nvcc(new_build: Build, pypi_python: dict[str, str], tmp_path: Path) -> None:
    # The PATH has no nvcc, and neither Python nor CMake is told where one is.
    env = pypi_python | {"PATH": path_without(tmp_path / "tools", "nvcc"), "CUDA_HOME": "", "CUDA_PATH": ""}
    new_build.env = env
    (tmp_path / "probe.cu").write_text(
        "#include <cuda_runtime.h>\n#include <cuda/std/array>\n__global__ void probe() {}\n"
        "int main() { probe<<<1, 1>>>(); return cudaGetLastError() == cudaSuccess; }\n"
    )
    said = new_build.try_configure()
    assert said.returncode == 0, output(said)
    nvcc = new_build.folder / "cuda" / "bin" / "nvcc"
    assert str(nvcc) in new_build.rules()
    compiled = run(nvcc, "-arch=sm_90a", "-o", tmp_path / "probe", tmp_path / "probe.cu", env=env)
    assert compiled.returncode == 0, compiled.stderr
    assert (tmp_path / "probe").is_file()


class TestArchs:
    @pytest.mark.parametrize(
        ("said", "archs"),
        [
            ("9.0", "90a"),
            ("8.0\n8.6\n8.0", "80;86"),
            ("10.0\n12.0", "100a;120a"),
            ("7.5", "80;90a"),
            ("[N/A]", "80;90a"),
        ],
    )
    def test_of_the_gpus_present(self, script, monkeypatch: pytest.MonkeyPatch, said: str, archs: str) -> None:
        monkeypatch.setenv("PATH", str(script("nvidia-smi", f"echo '{said}'")))
        assert toolchain.default_archs() == archs

    def test_without_a_driver(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert toolchain.default_archs() == "80;90a"


def test_command_line(tmp_path: Path) -> None:
    ask = (sys.executable, "-m", "generator.toolchain")
    assert run(*ask, "--jobs", "1").stdout.strip().isdigit()
    assert set(run(*ask, "--archs=").stdout.strip().split(";")) <= {"80", "86", "89", "90a", "100a", "120a"}
    assert run(*ask, "--requires", env={"CMAKE_ARGS": "-DATOMR_CUTLASS_PRESET=none"}).stdout.strip() == ""
    said = run(*ask, "--nvcc", tmp_path, env={"CUDACXX": "/nonexistent/nvcc"}, cwd=ROOT)
    assert (said.returncode, said.stdout) == (1, "")
    assert "CUDACXX" in said.stderr
