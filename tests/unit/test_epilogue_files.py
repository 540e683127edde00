"""Trees as files: the command that makes them of functions, and the builds that take them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import atomr_cutlass as ac
import fake_table
from atomr_cutlass import epilogue as evt
from atomr_cutlass.cli.app import app
from atomr_cutlass.generator import key_file, trees
from atomr_cutlass.generator.selection import Selection

FUNCTION = """
from atomr_cutlass import epilogue as evt

def block(acc, bias, residual):
    return evt.hardswish(acc + bias) * residual
"""
OPERANDS = ("--operand", "bias=row:f32", "--operand", "residual=matrix:bf16", "--dtype", "bf16")


def _written(folder: Path, *options: str) -> Path:
    (folder / "model.py").write_text(FUNCTION)
    path = folder / "block.json"
    result = CliRunner().invoke(app, ["epilogue", f"{folder / 'model.py'}:block", *options, "-o", str(path)])
    assert result.exit_code == 0, result.output
    return path


def test_a_function_becomes_kernels_that_serve_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _written(tmp_path, *OPERANDS)
    values = json.loads(path.read_text())
    assert values["inputs"] == {"bias": "row:f32", "residual": "matrix:bf16"}
    keys = Selection(preset="none", archs="90a", ops="gemm", epilogues=str(path)).keys()
    assert {key.layout_b for key in keys} == {"r", "c"}
    assert {key.a.value for key in keys} == {"bf16"}
    fake_table.install(monkeypatch, [fake_table.row(key) for key in keys])
    operands = {"shift": evt.Operand("row", "f32"), "other": evt.Operand("matrix", "bf16")}
    tree = evt.trace(lambda acc, other, shift: evt.hardswish(acc + shift) * other, operands).tree
    request = ac.GemmRequest(
        ac.GemmShape(512, 384, 256), dtype=ac.CutlassDtype.BF16, arch=ac.SmArch.SM90A,
        epilogue=ac.GemmEpilogue(tree=tree),
    )  # fmt: skip
    explanation = ac.explain(request, jit="off")
    assert explanation.source == "prebuilt", explanation.reason


def test_a_file_of_keys_is_one_of_trees(tmp_path: Path) -> None:
    keys = Selection(preset="none", archs="90a", ops="gemm", epilogues="bias_gelu").keys()
    path = tmp_path / "keys.jsonl"
    plain = Selection(preset="smoke", archs="90a").keys()[0]
    path.write_text("".join(f"{key_file.line(key, count=1)}\n" for key in (plain, keys[0])))
    (asked,) = trees.read(path)
    assert asked.epilogue == keys[0].epilogue
    assert keys[0] in Selection(preset="none", archs="90a", epilogues=str(path)).keys()  # noqa: SIM118


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no epilogue tree"),
        ("[]", "is no JSON object"),
        ('{"program": "evt:what"}', "no epilogue tree"),
        ("{", ":1:"),
    ],
)  # fmt: skip
def test_other_files_are_refused_by_name(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        Selection(archs="90a", epilogues=str(path)).keys()


def test_unknown_names_are_refused_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="unknown epilogue 'bais'; valid: common, bias"):
        Selection(archs="90a", epilogues="bais").keys()
    with pytest.raises(ValueError, match="no kernel for 80 has the epilogue gated_silu"):
        Selection(archs="80", epilogues="gated_silu").keys()


@pytest.mark.parametrize("wrong", ["model.py", "model.py:none", "gone.py:block"])
def test_what_is_no_function_is_refused(wrong: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FUNCTION)
    out = tmp_path / "x.json"
    result = CliRunner().invoke(app, ["epilogue", str(tmp_path / wrong), "-o", str(out)])
    assert result.exit_code == 2
    assert not out.exists()


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FUNCTION)
    out = tmp_path / "gone" / "x.json"
    result = CliRunner().invoke(app, ["epilogue", f"{tmp_path / 'model.py'}:block", *OPERANDS, "-o", str(out)])
    assert result.exit_code == 2
    assert f"cannot write {out}: No such file" in result.output
