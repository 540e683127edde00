"""The build knobs that choose cells: each one narrows the selection, and wrong values name the valid ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from generator.archs import SmArch
from generator.dtypes import CutlassDtype as D
from generator.matrix import expand
from generator.selection import Selection, filter_file_matcher, pattern_matcher


def _names(**knobs: str) -> list[str]:
    return [key.name for key in Selection(**knobs).keys()]  # noqa: SIM118 - not a dict


ALL = [key.name for key in expand("default", [SmArch.SM80, SmArch.SM90A])]


def test_without_knobs_the_default_preset_for_80_and_90a_is_chosen() -> None:
    assert _names() == ALL


def test_presets_and_archs() -> None:
    assert _names(preset="none") == []
    keys = Selection(preset="smoke", archs="89; 86;89").keys()
    assert [key.arch for key in keys] == [SmArch.SM89] * (len(keys) // 2) + [SmArch.SM86] * (len(keys) // 2)


def test_dtypes_keep_cells_by_the_type_of_a() -> None:
    keys = Selection(dtypes="bf16;f64").keys()
    assert {key.a for key in keys} == {D.BF16, D.F64}


def test_tf32_and_f32_are_told_apart_by_the_math() -> None:
    assert {key.math for key in Selection(dtypes="tf32").keys()} == {"tf32"}  # noqa: SIM118
    assert {key.math for key in Selection(dtypes="f32").keys()} == {"ieee", "3xtf32"}  # noqa: SIM118


def test_ops_keep_cells_of_the_operation() -> None:
    keys = expand("default", [SmArch.SM80, SmArch.SM90A])
    for op in ("gemm", "conv2d_fprop"):
        assert _names(ops=op) == [key.name for key in keys if key.op == op] != []


def test_patterns_are_ordered_substrings() -> None:
    assert _names(kernels="bf16*128x256*ttt") == [n for n in ALL if re.search(r"bf16.*128x256.*ttt", n)] != []
    assert _names(kernels="simt,f64") == [n for n in ALL if "simt" in n or "f64" in n] != []


def test_excluded_patterns_are_left_out() -> None:
    assert _names(exclude="simt , cutlass3x*pingpong") == [
        n for n in ALL if "simt" not in n and not re.search("cutlass3x.*pingpong", n)
    ]


def test_a_filter_file_keeps_what_any_of_its_expressions_finds(tmp_path: Path) -> None:
    file = tmp_path / "filter"
    file.write_text("# tensor cores of the newest kind\n\n  ^cutlass3x_sm90.*_f16_  \n   # and\nsgemm\n")
    assert _names(filter_file=str(file)) == [n for n in ALL if re.search(r"^cutlass3x_sm90.*_f16_|sgemm", n)] != []


def test_knobs_narrow_each_other(tmp_path: Path) -> None:
    file = tmp_path / "filter"
    file.write_text("128x128\n")
    got = _names(dtypes="bf16", kernels="tensorop", filter_file=str(file), exclude="cutlass3x")
    assert (
        got
        == [
            n
            for n in ALL
            if "gemm_bf16" in n.replace("fprop_optimized", "gemm") and "128x128" in n and "cutlass3x" not in n
        ]
        != []
    )


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("gemm", "a_gemm_b", True),
        ("gemm*f16", "gemm_f32_f16", True),
        ("f16*gemm", "gemm_f16", False),
        ("*gemm*", "xgemmx", True),
        ("*", "anything", True),
        ("a.b", "axb", False),  # a pattern is no regular expression
        ("a+(b", "za+(bz", True),
        ("nothing,gemm", "gemm", True),
        (" gemm ", "gemm", True),
        ("Gemm", "gemm", False),
    ],
)
def test_the_pattern_syntax_of_cutlass_library_kernels(pattern: str, name: str, found: bool) -> None:
    assert pattern_matcher(pattern)(name) is found


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"preset": "huge"}, r"unknown preset 'huge'; valid: none, smoke, default, full"),
        ({"archs": "80;75"}, r"unknown arch '75'; valid: 80, 86, 89, 90a"),
        ({"archs": "90"}, r"'90a'"),
        ({"archs": " ; "}, r"no arch given; valid: 80"),
        ({"ops": "conv"}, r"unknown op 'conv'; valid: gemm"),
        ({"dtypes": "f17"}, r"unknown dtype 'f17'; valid: f64, f32, tf32, f16, bf16"),
        ({"ptx": "90a"}, r"PTX of '90a' runs on no other arch; valid: 80, 86, 89"),
        ({"ptx": "89"}, r"PTX is requested for '89', which is not among the archs '80;90a'"),
        ({"ptx": "70"}, r"unknown arch '70'"),
        ({"dtypes": "e2m1"}, r"no kernel is left .* dtypes here: .*bf16.* names look like: cutlass"),
        (
            {"kernels": "nothing*here"},
            r"ATOMR_CUTLASS_KERNELS='nothing\*here' leaves no kernel .* names look like: cut",
        ),
        ({"exclude": "cutlass"}, r"ATOMR_CUTLASS_EXCLUDE_KERNELS='cutlass' leaves no kernel"),
        ({"filter_file": "/nowhere/at/all"}, r"cannot read the kernel filter file /nowhere/at/all: No such file"),
    ],
)
def test_wrong_values_name_the_valid_ones(knobs: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Selection(**knobs).keys()


def test_a_filter_that_finds_nothing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "filter"
    file.write_text("^never$\n")
    with pytest.raises(ValueError, match=r"ATOMR_CUTLASS_KERNEL_FILTER_FILE=.* leaves no kernel"):
        _names(filter_file=str(file))


def test_a_wrong_expression_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "filter"
    file.write_text("fine\n# (\nbad(\n")
    with pytest.raises(ValueError, match=rf"{file}:3: not a regular expression"):
        filter_file_matcher(file)


def test_an_empty_filter_file_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "filter"
    file.write_text("# all comment\n")
    with pytest.raises(ValueError, match="leaves no kernel"):
        _names(filter_file=str(file))


def test_the_none_preset_still_checks_its_knobs() -> None:
    with pytest.raises(ValueError, match="unknown arch"):
        _names(preset="none", archs="75")


def test_ptx_is_listed_for_portable_archs_only() -> None:
    assert Selection(archs="80;89;90a", ptx="89;80;89").ptx_list() == [SmArch.SM89, SmArch.SM80]
    assert Selection().ptx_list() == []


def test_an_op_that_the_preset_has_not_stops_and_names_the_preset_that_has_it() -> None:
    lacking = {key.op for key in expand("full", [SmArch.SM90A])} - {key.op for key in expand("smoke", [SmArch.SM90A])}
    assert lacking
    for op in lacking:
        having = next(p for p in ("default", "full") if any(k.op == op for k in expand(p, [SmArch.SM90A])))
        with pytest.raises(ValueError, match=f"preset smoke has no kernel of {op} for archs 90a: preset {having} has"):
            Selection(preset="smoke", archs="90a", ops=f"gemm;{op}").keys()
