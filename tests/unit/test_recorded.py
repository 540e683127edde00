"""Requests of recorded calls: the problem of each is read back, and other files are refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import atomr_cutlass as ac
import fake_cases
import golden_gpu
import recorded_cases
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass.generator import key_file
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.jit.record import Recording
from atomr_cutlass.pipeline import devices, recorded, tuning
from atomr_cutlass.pipeline.operation import operation_of

KEY = expand("smoke", [ac.SmArch.SM90A])[0]
ROW, COLUMN = ac.GemmLayout
SHAPE = ac.GemmShape(96, 128, 64)
BIASED = ac.GemmEpilogue(beta=1.0, bias=True, activation="gelu")
CONV = ac.ConvShape.nhwc(2, 14, 14, 32, 64, 3, 3, stride=2, padding=((1, 0), (0, 1)))


def gemm(shape: ac.GemmShape = SHAPE, **values: Any) -> ac.GemmRequest:
    return ac.GemmRequest(shape, **{"dtype": D.BF16, **values})


def scaled_and_stored() -> ac.GemmEpilogue:
    """A tree with operands of each kind, which decides the type of D and writes a further output."""
    return ac.GemmEpilogue(tree=ac.epilogue.trace(_tree, {
        "row": ac.epilogue.Operand("row", D.F32), "column": ac.epilogue.Operand("column", D.F32),
        "other": ac.epilogue.Operand("matrix", D.BF16),
    }).tree)  # fmt: skip


def _tree(acc: Any, row: Any, column: Any, other: Any) -> Any:
    value = ac.epilogue.relu(acc * column + row) + other
    return {"out": ac.epilogue.cast(value, D.F32), "largest": ac.epilogue.row_amax(value)}


REQUESTS = [
    *(gemm(layout_a=a, layout_b=b, layout_c=c) for a, b, c in itertools.product((ROW, COLUMN), repeat=3)),
    *(gemm(ac.GemmShape(m, n, k, batch)) for m, n, k, batch in ((1, 8, 16, 1), (7, 1, 5, 3), (5, 9, 1, 2))),
    *(gemm(dtype=dtype) for dtype in (D.F16, D.F32, D.F64, D.I8)),
    *(gemm(dtype=D.F32, precision=precision) for precision in ("ieee", "tf32", "3xtf32")),
    gemm(out_dtype=D.F32, batch_invariant=True),
    gemm(epilogue=ac.GemmEpilogue(beta=0.5)),
    gemm(epilogue=BIASED, layout_c=COLUMN),
    *(
        gemm(dtype=D.F8E4M3, dtype_b=D.F8E5M2, layout_b=COLUMN, scaling=scaling, fast_accum=fast, quantized=quantized)
        for scaling, fast, quantized in itertools.product((None, "tensor", "block"), (False, True), (False, True))
    ),
    *(
        gemm(dtype=D.F4E2M1, layout_b=COLUMN, scaling=scaling, arch=None)
        for scaling in ("nvfp4", "mxfp4")
    ),
    *(
        ac.GatedGemmRequest(SHAPE, dtype=dtype, layout_b=COLUMN, epilogue=ac.GemmEpilogue(activation=gate), **values)
        for dtype, gate, values in (
            (D.BF16, None, {}), (D.F16, "gelu_tanh", {}),
            (D.F8E5M2, "gelu", {"scaling": "tensor", "quantized": True, "out_dtype": D.F8E4M3}),
        )
    ),
    *(
        ac.GemvRequest(ac.GemvShape(65, 33, batch), dtype=D.BF16, layout_a=layout, epilogue=BIASED)
        for layout, batch in ((ROW, 1), (COLUMN, 4))
    ),
    *(
        ac.GroupedGemmRequest(ac.GroupedGemmShape([ac.GemmShape(m, 128, 64) for m in (3, 0, 70)]), **values)
        for values in (
            {"dtype": D.BF16}, {"dtype": D.F16, "layout_b": COLUMN, "epilogue": BIASED},
            {"dtype": D.F8E4M3, "layout_b": COLUMN, "scaling": "vector", "fast_accum": True},
        )
    ),
    *(
        kind(CONV, dtype=dtype, layout=layout)
        for kind in (ac.ConvFwdRequest, ac.ConvDgradRequest, ac.ConvWgradRequest)
        for dtype, layout in ((D.BF16, ac.ConvLayout.NHWC), (D.F32, ac.ConvLayout.NCHW))
    ),
    ac.ConvFwdRequest(CONV, dtype=D.F16, epilogue=BIASED, batch_invariant=True),
    ac.ConvDgradRequest(CONV, dtype=D.BF16, epilogue=BIASED, precision=None),
]  # fmt: skip


def problem_of(request: Any) -> Any:
    search = operation_of(request).search(request, devices.imagined(ac.SmArch.SM90A))
    assert search is not None
    return search.op, search.tuned_problem


def line_of(*problems: str) -> str:
    return key_file.line(KEY, shapes=[], count=1, problems=list(map(json.loads, problems))) + "\n"


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "keys.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: str(request.plan_key()))
def test_every_request_is_read_back(request_: Any, tmp_path: Path) -> None:
    op, problem = problem_of(request_)
    (found,) = ac.recorded_requests(written(tmp_path, line_of(tuning.RecordedProblem(op, problem).text())))
    assert type(found) is type(request_)
    assert tuning.identity(problem_of(found)[1]) == tuning.identity(problem)
    assert found.shape == request_.shape


@pytest.mark.parametrize("kind", [ac.GemmRequest, ac.ConvFwdRequest])
def test_trees_are_read_back(kind: Any, tmp_path: Path) -> None:
    request = kind(SHAPE if kind is ac.GemmRequest else CONV, dtype=D.BF16, epilogue=scaled_and_stored())
    op, problem = problem_of(request)
    (found,) = ac.recorded_requests(written(tmp_path, line_of(tuning.RecordedProblem(op, problem).text())))
    assert found.tree.program == request.tree.program
    assert found.result_dtype is D.F32


def test_problems_of_several_lines_are_one_request_each(tmp_path: Path) -> None:
    texts = [tuning.RecordedProblem(*problem_of(gemm(ac.GemmShape(m, 64, 64)))).text() for m in (8, 16, 8)]
    path = written(tmp_path, line_of(*texts), line_of(), line_of(texts[0]))
    assert [request.shape.m for request in ac.recorded_requests(path)] == [8, 16]


def test_what_no_request_has_is_left_out(tmp_path: Path) -> None:
    problem = problem_of(gemm())[1]
    gaps = dataclasses.replace(problem, a=dataclasses.replace(problem.a, strides=(72, 1)))
    narrow = dataclasses.replace(problem, b=dataclasses.replace(problem.b, alignment=2))
    broadcast = problem_of(gemm(ac.GemmShape(96, 128, 64, 3)))[1]
    broadcast = dataclasses.replace(broadcast, b=problem.b)
    texts = [tuning.RecordedProblem("gemm", each).text() for each in (gaps, problem, narrow, broadcast)]
    texts.append(tuning.RecordedProblem("transmutation", problem).text())
    path = written(tmp_path, line_of(*texts))
    with pytest.warns(RuntimeWarning) as warned:
        assert ac.recorded_requests(path) == [gemm(out_dtype=D.BF16, batch_invariant=False)]
    told = [str(warning.message) for warning in warned]
    assert len(told) == 2
    assert f"{path}: 3 problems of gemm left out: no request has such arrays" in told[0]
    assert "1 problem of transmutation left out: no requests describe that operation" in told[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no key"),
        (key_file.line(KEY, shapes=[], count=1), r"keys.jsonl:1: .* has no list `problems`.*record again"),
        (key_file.line(KEY, problems=[{"version": 7}]), "version of a problem is 7; expected 1: record again"),
        (key_file.line(KEY, problems=[3]), "version of a problem is None; expected 1"),
        (key_file.line(KEY, problems=[{"version": 1, "op": "gemm", "problem": {}}]), "malformed .*record again"),
        (key_file.line(KEY, problems=[{"version": 1, "op": "gemm", "problem": 3}]), "malformed .*record again"),
        (key_file.line(KEY, problems=[{"version": 1, "op": []}]), "malformed .*record again"),
        ("buy milk", "keys.jsonl:1:"),
    ],
)
def test_other_files_are_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ac.InvalidOperandError, match=says):
        ac.recorded_requests(written(tmp_path, text))


def test_what_is_no_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ac.InvalidOperandError, match="path is 7"):
        ac.recorded_requests(7)  # type: ignore[arg-type]
    with pytest.raises(ac.InvalidOperandError, match="cannot read"):
        ac.recorded_requests(tmp_path / "nowhere.jsonl")


def test_older_recordings_are_extended_and_stay_readable_for_builds(tmp_path: Path) -> None:
    """A line without problems would seem to have those of all its shapes if new ones were added to it."""
    path = written(tmp_path, key_file.line(KEY, shapes=[{"m": 1}], count=2) + "\n")
    other = expand("smoke", [ac.SmArch.SM90A])[1]
    text = tuning.RecordedProblem(*problem_of(gemm())).text()
    recording = Recording(path)
    recording.note([(KEY, {"m": 3})], (KEY, lambda: text))
    recording.note([(other, {"m": 3}), (KEY, {"m": 4})], (other, lambda: text))
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert (first["shapes"], first["count"], "problems" in first) == ([{"m": 1}, {"m": 3}, {"m": 4}], 4, False)
    assert second["problems"] == [json.loads(text)]
    assert key_file.read(path) == [KEY, other]
    with pytest.raises(ac.InvalidOperandError, match="record again"):
        ac.recorded_requests(path)
    assert recorded.read(written(tmp_path, line_of(text))).left_out == []


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text."""
    return golden_gpu.outcome("recorded_cases.py", tmp_path_factory.mktemp("gpu"), recorded_cases.ARCH, 300)


@pytest.mark.parametrize("case", fake_cases.names("recorded_cases.py"))
def test_on_a_gpu_that_takes_notes(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""
