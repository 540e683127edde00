"""Files of keys: what a build compiles exactly, written by runs and by listings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from generator import key_file
from generator.archs import SmArch
from generator.dtypes import CutlassDtype as D
from generator.emit import emit
from generator.key import KernelKey
from generator.matrix import expand, supports, with_epilogue
from generator.selection import Selection

GEMMS = [key for key in expand("default", [SmArch.SM80, SmArch.SM90A]) if key.op == "gemm" and key.a is D.F16]
PLAIN = [GEMMS[0], GEMMS[1], GEMMS[-1]]
TREE = next(key for key in expand("full", [SmArch.SM90A]) if "gelu" in key.epilogue)
# Of a function of the user's: in no preset.
OWN = with_epilogue(TREE, TREE.epilogue.replace("gelu", "silu"), TREE.d)


def _written(path: Path, *keys: KernelKey, **more: Any) -> Path:
    path.write_text("".join(f"{key_file.line(key, **more)}\n" for key in keys), encoding="utf-8")
    return path


def test_keys_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert supports(OWN)
    everything = [*PLAIN, TREE, OWN]
    assert key_file.read(_written(tmp_path / "keys.jsonl", *everything, *PLAIN)) == everything


def test_every_kernel_of_the_matrix_is_read_again(tmp_path: Path) -> None:
    keys = expand("full", list(SmArch))
    assert key_file.read(_written(tmp_path / "keys.jsonl", *keys)) == keys


def test_names_and_what_else_a_line_has_are_optional(tmp_path: Path) -> None:
    path = _written(tmp_path / "keys.jsonl", PLAIN[0], shapes=[{"m": 1}], count=7)
    assert key_file.read(path) == PLAIN[:1]
    values = PLAIN[0].to_dict()
    defaults = {field.name for field in dataclasses.fields(KernelKey) if field.default is not dataclasses.MISSING}
    assert key_file.parse({name: value for name, value in values.items() if name not in defaults}).tile == PLAIN[0].tile


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "cutlass_other"}, "the name is 'cutlass_other'"),
        ({"tile": None}, "tile is null; expected three integers"),
        ({"tile": [1, 2]}, "expected three integers"),
        ({"tile": [1, 2, "3"]}, "expected three integers"),
        ({"stages": "3"}, 'stages is "3"; expected an integer'),
        ({"stages": True}, "expected an integer"),
        ({"op": 1}, "op is 1; expected a string"),
        ({"op": "multiply"}, "unknown op 'multiply'"),
        ({"a": "f12"}, "f12"),
        ({"arch": "sm_75"}, "sm_75"),
        ({"align_a": 3}, "power of two"),
        ({"epilogue": "lc+evt:nonsense"}, "no kernel has this key"),
    ],
)
def test_a_line_that_is_no_kernels_key_is_refused_by_number(tmp_path: Path, change: Any, says: str) -> None:
    path = _written(tmp_path / "keys.jsonl", PLAIN[0])
    values = {"name": PLAIN[1].name, **PLAIN[1].to_dict(), **change}
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(values)}\n")
    with pytest.raises(ValueError, match=f"{path}:3: ") as caught:
        key_file.read(path)
    assert says in str(caught.value)


def test_a_line_that_lacks_a_field_or_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    values = PLAIN[0].to_dict()
    del values["layout_b"]
    for text, says in ((json.dumps(values), "layout_b"), ("[1]", "no JSON object"), ("{", ":1: ")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"keys\.jsonl:1: ") as caught:
            key_file.read(path)
        assert says in str(caught.value)


def test_files_that_hold_no_key_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n", encoding="utf-8")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path in (empty, binary, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="key"):
            key_file.read(path)


def test_a_selection_of_keys_has_exactly_those(tmp_path: Path) -> None:
    path = str(_written(tmp_path / "keys.jsonl", *PLAIN, OWN))
    for preset in ("none", "smoke", "full"):
        chosen = Selection(preset=preset, archs="", keys_file=path)
        assert (chosen.keys(), chosen.skipped()) == ([*PLAIN, OWN], [])
    hopper = Selection(archs="90a", keys_file=path)
    of_hopper = [key for key in (*PLAIN, OWN) if key.arch is SmArch.SM90A]
    assert hopper.keys() == of_hopper
    assert hopper.skipped() == [key for key in PLAIN if key not in of_hopper]


def test_keys_of_other_archs_alone_and_further_filters_are_refused(tmp_path: Path) -> None:
    path = str(_written(tmp_path / "keys.jsonl", OWN))
    with pytest.raises(ValueError, match="has keys of 90a, and none of 80;89"):
        Selection(archs="80;89", keys_file=path).keys()
    for knob in ("ops", "dtypes", "kernels", "filter_file", "exclude"):
        with pytest.raises(ValueError, match=r"ATOMR_CUTLASS_KEYS=.* exactly .*='gemm'"):
            Selection(archs="90a", keys_file=path, **{knob: "gemm"}).keys()


def test_the_sources_of_keys_are_emitted_for_their_archs(tmp_path: Path) -> None:
    path = str(_written(tmp_path / "keys.jsonl", PLAIN[0], OWN))
    assert emit(Selection(archs="", keys_file=path), tmp_path / "cells") == [PLAIN[0], OWN]
    written = {file.stem: file.read_text() for file in (tmp_path / "cells").glob("src/*/*.cu")}
    assert set(written) == {PLAIN[0].name, OWN.name}
    assert OWN.name in (tmp_path / "cells" / "table.cpp").read_text()
