"""The headers of a compilation: which folders are searched for a version of CUTLASS, and what an installation keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atomr_cutlass import DeviceUnavailableError, SmArch, UnsupportedError
from atomr_cutlass.generator import emit, headers, key_file
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.generator.selection import Selection
from atomr_cutlass.jit import compiler, kernels, toolchain

OURS = Path(__file__).resolve().parents[2] / "cpp" / "include" / "atomr_cutlass"
SHADOWS = OURS / "shadows"


def cutlass(folder: Path, major: int, minor: int) -> Path:
    """A folder of CUTLASS headers, as far as its version goes."""
    (folder / "cutlass").mkdir(parents=True, exist_ok=True)
    lines = (f"#define CUTLASS_MAJOR {major}", f"#define CUTLASS_MINOR {minor}", "#define CUTLASS_PATCH 0 ")
    (folder / "cutlass" / "version.h").write_text("\n".join(lines) + "\n")
    return folder


def test_includes_of_the_pinned_version_are_required_and_faster_shadows_first(tmp_path: Path) -> None:
    folder = cutlass(tmp_path, 4, 2)
    required, faster = SHADOWS / "cutlass_4" / "required", SHADOWS / "cutlass_4.2" / "faster"
    for_nvcc = headers.includes(folder, "nvcc", ours=OURS)
    assert for_nvcc == headers.Includes((required, faster, OURS.parent, folder), "")
    for_nvrtc = headers.includes(folder, "nvrtc", ours=OURS)
    alone = (OURS / "nvrtc", SHADOWS / "cutlass_4" / "required_nvrtc")
    assert for_nvrtc == headers.Includes((*alone, *for_nvcc.folders), "")
    assert all(path.is_dir() for path in for_nvrtc.folders)


@pytest.mark.parametrize("minor", [4, 5])
def test_includes_of_another_minor_version_leave_out_the_faster_shadows_and_say_so(tmp_path: Path, minor: int) -> None:
    folder = cutlass(tmp_path, 4, minor)
    shadows = SHADOWS / "cutlass_4"
    for named, alone in (
        ("nvcc", ()),
        ("nvrtc", (OURS / "nvrtc", shadows / "required_nvrtc", shadows / "newer_nvrtc")),
    ):
        found = headers.includes(folder, named, ours=OURS)
        assert found.folders == (*alone, shadows / "required", OURS.parent, folder)
        assert all(path.is_dir() for path in found.folders)
        assert f"CUTLASS 4.{minor}" in found.remark
        assert "compile more slowly than with 4.2" in found.remark


def test_includes_refuse_what_no_kernel_is_written_for(tmp_path: Path) -> None:
    for major, minor in ((3, 9), (4, 0), (4, 3), (4, 6), (5, 2)):
        with pytest.raises(headers.HeadersError, match=rf"CUTLASS {major}\.{minor}; valid: 4\.2, 4\.4, 4\.5$"):
            headers.includes(cutlass(tmp_path, major, minor), "nvcc", ours=OURS)
    (tmp_path / "cutlass" / "version.h").write_text("#define CUTLASS_MAJOR 4\n")
    with pytest.raises(headers.HeadersError, match="defines no CUTLASS_MAJOR and CUTLASS_MINOR"):
        headers.includes(tmp_path, "nvcc", ours=OURS)
    (tmp_path / "cutlass" / "version.h").unlink()
    with pytest.raises(headers.HeadersError, match=r"no cutlass/version\.h .*expected CUTLASS headers"):
        headers.includes(tmp_path, "nvrtc", ours=OURS)
    with pytest.raises(ValueError, match="valid: nvcc, nvrtc"):
        headers.includes(tmp_path, "clang", ours=OURS)


FEW_ROWS = next(
    key for key in expand("full", [SmArch.SM90A]) if (key.op, key.tile[0]) == ("gemm", 64) and key.scale_type
)


def test_a_kernel_that_another_version_cannot_compile_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = cutlass(tmp_path / "cutlass", 4, 5)
    said = rf"{FEW_ROWS.name} does not compile with CUTLASS 4\.5, .*; valid: 4\.2"
    assert headers.objection(FEW_ROWS, (4, 2)) == ""
    refused = {key for key in expand("full", list(SmArch)) if headers.objection(key, (4, 5))}
    assert {(key.op, key.generation) for key in refused - {FEW_ROWS}} == {("grouped_gemm", "sm100")}
    # The build stops before it has written anything. It has our headers beside its generator.
    monkeypatch.setattr(emit, "OURS", OURS)
    keys = tmp_path / "keys.jsonl"
    keys.write_text(key_file.line(FEW_ROWS) + "\n")
    chosen = Selection(archs="", keys_file=str(keys))
    with pytest.raises(ValueError, match=f"{said}.*ATOMR_CUTLASS_EXCLUDE_KERNELS"):
        emit.emit(chosen, tmp_path / "emitted", folder)
    assert not (tmp_path / "emitted").exists()
    assert emit.emit(chosen, tmp_path / "emitted", cutlass(folder, 4, 2)) == [FEW_ROWS]
    # At run time, no compiler is started.
    monkeypatch.setattr(toolchain, "_cutlass_version", lambda _: (4, 5))
    monkeypatch.setattr(compiler.Unit, "compile", lambda _unit: pytest.fail("compiled"))
    with pytest.raises(UnsupportedError, match=said):
        kernels.load(FEW_ROWS, "sm_90a")


def test_the_command_answers_cmake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cutlass(tmp_path / "cutlass", 4, 5)
    found = headers.includes(folder, "nvcc", ours=OURS)
    assert headers.main(["includes", "nvcc", str(folder), str(OURS)]) == 0
    said = capsys.readouterr()
    assert said.out.strip().split(";") == [str(path) for path in found.folders]
    assert said.err.strip() == f"Kernels: {found.remark}"
    assert headers.main(["includes", "nvcc", str(cutlass(tmp_path / "cutlass", 3, 8)), str(OURS)]) == 1
    assert "CUTLASS 3.8; valid: 4.2, 4.4, 4.5" in capsys.readouterr().err
    assert headers.main(["digest", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == headers.digest(folder)


def test_nvrtc_searches_the_same_folders_and_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "OURS", OURS)
    monkeypatch.setattr(toolchain, "CUTLASS", cutlass(tmp_path, 4, 2))
    assert toolchain.cutlass_includes() == headers.includes(tmp_path, "nvrtc", ours=OURS).folders
    cutlass(tmp_path, 4, 5)
    with pytest.warns(RuntimeWarning, match=r"CUTLASS 4\.5: kernels compile more slowly"):
        assert toolchain.cutlass_includes() == headers.includes(tmp_path, "nvrtc", ours=OURS).folders
    cutlass(tmp_path, 5, 0)
    with pytest.raises(DeviceUnavailableError, match=r"CUTLASS 5\.0; valid: 4\.2, .*reinstall"):
        toolchain.cutlass_includes()


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.relative_to(SHADOWS).as_posix()) for p in sorted(SHADOWS.rglob("*")) if p.is_file()]
)
def test_every_shadow_asks_for_the_version_of_its_folder(path: Path) -> None:
    folder, purpose, *_ = path.relative_to(SHADOWS).parts
    version = folder.removeprefix("cutlass_")
    major, _, minor = version.partition(".")
    condition = f"CUTLASS_MAJOR != {major}" + (f" || CUTLASS_MINOR != {minor}" if minor else "")
    assert purpose in (("faster",) if minor else ("required", "required_nvrtc", "newer_nvrtc"))
    guard = rf'#include <cutlass/version.h>\n#if {re.escape(condition)}\n#error "[^"]*CUTLASS {re.escape(version)},'
    found = re.search(guard, path.read_text())
    assert found
    # Before everything else, lest another version's contents be complained about first.
    assert "#include" not in path.read_text()[: found.start()]


def test_a_digest_counts_headers_without_a_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text("int x;")
    before = headers.digest(tmp_path)
    (tmp_path / "string").write_text("namespace std {}")
    assert headers.digest(tmp_path) != before
    (tmp_path / "string").unlink()
    headers.write_digest(tmp_path)
    assert (tmp_path / "DIGEST").read_text() == f"{before}\n"
    assert headers.digest(tmp_path) == before


def test_an_installation_keeps_no_header_that_is_gone(tmp_path: Path) -> None:
    source, ours, include = tmp_path / "source", tmp_path / "ours", tmp_path / "include"
    for path in ("cutlass/a.h", "cute/b.hpp", "notes/c.h"):
        (source / path).parent.mkdir(parents=True)
        (source / path).write_text(path)
    ours.mkdir()
    (ours / "abi.h").write_text("")
    kept = {"cutlass_headers/cutlass/a.h", "cutlass_headers/cute/b.hpp", "cutlass_headers/LICENSE.txt",
            "atomr_cutlass/abi.h"}  # fmt: skip
    gone = {"cutlass_headers/cutlass/arch/old.h", "cutlass_headers/cute/old.hpp", "atomr_cutlass/shadow/cute/old.hpp"}
    for path in kept | gone:
        (include / path).parent.mkdir(parents=True, exist_ok=True)
        (include / path).write_text(path)
    assert headers.main(["finish", str(include), str(source), str(ours)]) == 0
    left = {path.relative_to(include).as_posix() for path in include.rglob("*") if path.is_file()}
    assert left == kept | {"cutlass_headers/DIGEST"}
    assert not (include / "atomr_cutlass" / "shadow").exists()
    written = (include / "cutlass_headers" / "DIGEST").read_text().strip()
    assert written == headers.digest(include / "cutlass_headers")
