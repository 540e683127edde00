"""Source text of the cells, for nvcc and for NVRTC, and the files that a build compiles."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from generator.archs import SmArch
from generator.content import source_digest
from generator.dtypes import CutlassDtype as D
from generator.emit import LONG_SECONDS, OURS, UNIT_CELLS, emit, members
from generator.key import KernelKey
from generator.matrix import ARCHS, cells, expand, family
from generator.render import render
from generator.selection import Selection

FULL = expand("full", ARCHS["gemm"])


def test_every_mark_of_a_template_is_filled_in_both_flavours() -> None:
    for key in FULL:
        for flavour in ("aot", "nvrtc"):
            source, name = render(key, flavour=flavour)
            assert name == key.name
            assert "@" not in source
            assert source.count("{") == source.count("}")
            assert f'extern "C" __global__ void __launch_bounds__(Cell::kThreads, Cell::kMinBlocks)\n{name}(' in source


def test_only_sources_for_nvcc_have_a_row() -> None:
    for key in FULL[::50]:
        ahead, _ = render(key)
        runtime, _ = render(key, flavour="nvrtc")
        assert f"atomr_cutlass_row_{key.name}" in ahead
        assert "atomr_cutlass/row.h" in ahead
        assert "atomr_cutlass_row" not in runtime
        assert "atomr_cutlass/row.h" not in runtime
        # But for that, and for what stands in for a host under NVRTC, they are one text.
        prelude = '#include "atomr_cutlass/nvrtc/prelude.h"\n'
        assert runtime.count(prelude) == 1
        assert runtime.replace(prelude, "").startswith(ahead.partition("\n")[0])


def test_the_row_carries_the_key() -> None:
    for key in FULL[::20]:
        source, _ = render(key)
        found = re.search(r'R"json\((.*)\)json"', source)
        assert found
        assert KernelKey.from_dict(json.loads(found[1])) == key


def test_the_row_carries_what_it_is_compiled_from() -> None:
    for key in FULL[::50]:
        digest = source_digest(key, OURS)
        assert f'ATOMR_CUTLASS_CONTENT("{digest}")' in render(key, content=digest)[0]
        assert digest not in render(key, flavour="nvrtc")[0]


def test_the_row_says_whether_there_is_ptx() -> None:
    key = FULL[0]
    assert ", true);" in render(key, ptx=True)[0]
    assert ", false);" in render(key, ptx=False)[0]
    assert render(key, flavour="nvrtc", ptx=True) == render(key, flavour="nvrtc", ptx=False)


def test_every_cell_has_a_source_of_its_own() -> None:
    # Two keys that differ only in the arch are the same text but for their names.
    texts = {render(key, flavour="nvrtc")[0] for key in FULL}
    assert len(texts) == len(FULL)


def test_the_source_states_the_key() -> None:
    key = next(k for k in FULL if k.generation == "sm80" and k.math == "3xtf32" and k.layout_b == "c")
    source, _ = render(key)
    for part in (
        "float, cutlass::layout::",
        "cutlass::arch::OpClassTensorOp",
        "cutlass::arch::OpMultiplyAddFastF32",
        f"cutlass::gemm::GemmShape<{key.tile[0]}, {key.tile[1]}, {key.tile[2]}>",
        "cutlass::gemm::GemmShape<16, 8, 8>",
    ):
        assert part in source
    stream = next(k for _, k in cells([SmArch.SM90A]) if k.scheduler == "streamk")
    source, _ = render(stream)
    for part in (
        f"cute::Shape<cute::Int<{stream.tile[0]}>, cute::Int<{stream.tile[1]}>, cute::Int<{stream.tile[2]}>>",
        "cutlass::gemm::KernelTmaWarpSpecializedCooperative",
        "cutlass::epilogue::TmaWarpSpecializedCooperative",
        "cutlass::gemm::StreamKScheduler",
    ):
        assert part in source
    integer = next(k for k in FULL if k.a is D.I8 and k.generation == "sm80")
    assert "OpMultiplyAddSaturate" in render(integer)[0]


@pytest.mark.parametrize(("layout_b", "narrowest", "step"), [("c", 48, 16), ("r", 64, 32)])
def test_a_kernel_that_is_told_the_width_of_its_tiles_has_a_cell_for_each(
    layout_b: str, narrowest: int, step: int
) -> None:
    found = (k for _, k in cells([SmArch.SM90A]) if k.scheduler == "streamk")
    stream = replace(next(found), layout_b=layout_b)
    source, _ = render(replace(stream, tile=(128, 192, 64), scheduler="fitted"))
    for part in (
        '#include "atomr_cutlass/fitted.h"',
        "using Cell = atomr_cutlass::FittedCell<atomr_cutlass::Cell3x<atomr_cutlass::GemmSm90<",
        "cute::Shape<cute::Int<128>, cute::Int<192>, cute::Int<64>>",
        "cutlass::gemm::PersistentScheduler",
        f", {narrowest}, 192, {step}>;",
    ):
        assert part in source
    assert "Fitted" not in render(stream)[0]


def test_an_unknown_flavour_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown flavour 'hip'; valid: aot, nvrtc"):
        render(FULL[0], flavour="hip")


# ----------------------------------------------------------------------------------------------------------------------
# Emission
# ----------------------------------------------------------------------------------------------------------------------

SMOKE = Selection(preset="smoke", archs="80;90a", ptx="80")


def _times(folder: Path) -> dict[str, int]:
    """Sets every file's time to the epoch and returns the files: what is written later has another time."""
    files = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file()}
    for path in files.values():
        os.utime(path, (0, 0))
    return dict.fromkeys(files, 0)


def _written(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.stat().st_mtime_ns != 0}


def test_emission_writes_sources_table_and_cmake(tmp_path: Path) -> None:
    keys = emit(SMOKE, tmp_path)
    sources = {f"src/{key.arch.value}/{key.name}.cu" for key in keys}
    units = {path for path in _written(tmp_path) if path.startswith("units/")}
    assert _written(tmp_path) == sources | units | {"table.cpp", "kernels.cmake", "pack.json"}
    for key in keys:
        text = (tmp_path / "src" / key.arch.value / f"{key.name}.cu").read_text()
        assert text == render(key, ptx=key.arch is SmArch.SM80, content=source_digest(key, OURS))[0]
    table = (tmp_path / "table.cpp").read_text()
    assert re.findall(r"&atomr_cutlass_row_(\w+),", table) == [key.name for key in keys]
    assert f"kRowCount = {len(keys)};" in table


def _units(folder: Path) -> dict[str, list[str]]:
    """The cells of each unit, by its path."""
    return {str(path.relative_to(folder)): members(path) for path in sorted(folder.glob("units/*/*.cu"))}


@pytest.mark.parametrize("preset", ["default", "full"])
def test_each_cell_is_compiled_in_one_unit_with_others_of_its_template(preset: str, tmp_path: Path) -> None:
    keys = {key.name: key for key in emit(Selection(preset=preset, archs="80;90a"), tmp_path)}
    units = _units(tmp_path)
    assert sorted(name for cells in units.values() for name in cells) == sorted(keys)
    assert len(units) < len(keys) / 3
    for path, named in units.items():
        unit = [keys[name] for name in named]
        assert {f"units/{key.arch.value}" for key in unit} == {path.rpartition("/")[0]}
        assert len({family(key).template for key in unit}) == 1
        assert len({render(key)[0].partition("\n")[0] for key in unit}) == 1  # the header that must come first
        long = max(family(key).compile_seconds for key in unit) > LONG_SECONDS
        assert len(unit) <= (UNIT_CELLS // 2 if long else UNIT_CELLS)


def test_a_unit_includes_headers_before_it_names_what_its_cells_share(tmp_path: Path) -> None:
    emit(Selection(archs="80"), tmp_path)
    for path in tmp_path.glob("units/*/*.cu"):
        lines = path.read_text().splitlines()
        shared = {name for line in lines for name in re.findall(r"^#define (\w+)", line)}
        assert shared == {"Cell", "Tree"}
        first = next(number for number, line in enumerate(lines) if line.startswith("#define"))
        headers = {line for line in lines[:first] if line}
        for name in members(path):
            source = (tmp_path / "src" / path.parent.name / f"{name}.cu").read_text()
            assert set(re.findall(r"^#include .*$", source, re.MULTILINE)) <= headers
            # What one cell defines besides is undefined before the next.
            defined = set(re.findall(r"^#define (\w+)", source, re.MULTILINE))
            assert defined <= set(re.findall(r"^#undef (\w+)", path.read_text(), re.MULTILINE))


def test_the_cmake_file_lists_the_units_of_each_arch(tmp_path: Path) -> None:
    keys = emit(SMOKE, tmp_path)
    text = (tmp_path / "kernels.cmake").read_text()
    assert 'set(ATOMR_CUTLASS_CELL_ARCHS "sm_80;sm_90a")' in text
    assert f"set(ATOMR_CUTLASS_CELL_COUNT {len(keys)})" in text
    assert 'set(ATOMR_CUTLASS_CUDA_ARCHITECTURES_sm_80 "80-real;80-virtual")' in text
    assert 'set(ATOMR_CUTLASS_CUDA_ARCHITECTURES_sm_90a "90a-real")' in text
    assert all(f'"{tmp_path.as_posix()}/{path}"' in text for path in _units(tmp_path))
    memory = {arch: int(mb) for arch, mb in re.findall(r"JOB_MB_(\w+) (\d+)", text)}
    assert memory["sm_90a"] > memory["sm_80"] > 0


def test_an_unchanged_selection_writes_nothing(tmp_path: Path) -> None:
    emit(SMOKE, tmp_path)
    before = _times(tmp_path)
    emit(SMOKE, tmp_path)
    assert _written(tmp_path) == set()
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()} == set(before)


def test_one_more_cell_compiles_one_unit_more_and_no_other(tmp_path: Path) -> None:
    keys = SMOKE.keys()
    emit(Selection(preset="smoke", archs="80;90a", ptx="80", exclude=keys[0].name), tmp_path)
    before = _units(tmp_path)
    _times(tmp_path)
    emit(SMOKE, tmp_path)
    (unit,) = _units(tmp_path).keys() - before.keys()
    assert _units(tmp_path) == before | {unit: [keys[0].name]}
    source = f"src/{keys[0].arch.value}/{keys[0].name}.cu"
    assert _written(tmp_path) == {source, unit, "table.cpp", "kernels.cmake", "pack.json"}


def test_one_cell_less_compiles_the_others_of_its_unit(tmp_path: Path) -> None:
    keys = emit(SMOKE, tmp_path)
    before = _units(tmp_path)
    (unit,) = (path for path, cells in before.items() if keys[0].name in cells)
    emit(Selection(preset="smoke", archs="80;90a", ptx="80", exclude=keys[0].name), tmp_path)
    after = _units(tmp_path)
    others = [name for path, cells in after.items() if path not in before for name in cells]
    assert unit not in after
    assert others == [name for name in before[unit] if name != keys[0].name]


def test_stale_sources_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    emit(SMOKE, tmp_path)
    (tmp_path / "src" / "notes.txt").write_text("mine")
    keys = emit(Selection(preset="smoke", archs="80", kernels="simt"), tmp_path)
    assert sorted(p.stem for p in tmp_path.glob("src/*/*.cu")) == sorted(key.name for key in keys)
    assert sorted(name for cells in _units(tmp_path).values() for name in cells) == sorted(key.name for key in keys)
    assert (tmp_path / "src" / "notes.txt").read_text() == "mine"


def test_a_source_that_was_edited_or_lost_is_written_again(tmp_path: Path) -> None:
    keys = emit(SMOKE, tmp_path)
    first, second = (tmp_path / "src" / k.arch.value / f"{k.name}.cu" for k in keys[:2])
    first.write_text("broken")
    second.unlink()
    unit = tmp_path / next(path for path, cells in _units(tmp_path).items() if keys[0].name in cells)
    text = unit.read_text()
    unit.write_text(text.replace("#undef Tree", "", 1))
    emit(SMOKE, tmp_path)
    assert unit.read_text() == text
    assert first.read_text() == render(keys[0], ptx=True, content=source_digest(keys[0], OURS))[0]
    assert second.is_file()


def test_a_wrong_selection_writes_and_removes_nothing(tmp_path: Path) -> None:
    emit(SMOKE, tmp_path)
    before = _times(tmp_path)
    with pytest.raises(ValueError, match="leaves no kernel"):
        emit(Selection(kernels="nothing"), tmp_path)
    assert _written(tmp_path) == set()
    assert all((tmp_path / name).is_file() for name in before)


def test_the_empty_preset_gives_an_empty_table(tmp_path: Path) -> None:
    emit(SMOKE, tmp_path)
    assert emit(Selection(preset="none"), tmp_path) == []
    assert list(tmp_path.glob("*/*/*.cu")) == []
    assert "kRowCount = 0;" in (tmp_path / "table.cpp").read_text()
    assert 'set(ATOMR_CUTLASS_CELL_ARCHS "")' in (tmp_path / "kernels.cmake").read_text()
