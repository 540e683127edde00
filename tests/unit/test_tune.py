"""Tuned choices: records, their files, and which kernels they lead to."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

import atomr_cutlass as ac
import fake_cases
import golden_gpu
import tune_cases
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.cli import tune as tune_module
from atomr_cutlass.cli.app import app
from atomr_cutlass.generator import key_file
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.ops.gemm import suites
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import profiler_csv, tuning

KEYS = expand("smoke", [ac.SmArch.SM90A])
SPEC = MatrixSpec((64, 64), (64, 1), ac.CutlassDtype.BF16)
PROBLEM = GemmProblem(SPEC, SPEC, None, SPEC, "default", 0)


def record(number: int = 0, microseconds: float = 5.0, gpu: str = "a GPU") -> tuning.TuneRecord:
    return tuning.TuneRecord(
        gpu, tuning.identity(PROBLEM), KEYS[number], 0, 1, 2, 1, microseconds, KEYS[0].name, 6.5, 12
    )


@pytest.fixture(autouse=True)
def _forgotten() -> object:
    tuning.clear()
    yield
    tuning.clear()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error that each case raised, as text."""
    return golden_gpu.outcome("tune_cases.py", tmp_path_factory.mktemp("gpu"), tune_cases.ARCH, 300)


@pytest.mark.parametrize("case", fake_cases.names("tune_cases.py"))
def test_on_a_gpu_that_takes_notes(case: str, outcome: dict[str, str]) -> None:
    assert outcome[case] == ""


def test_a_line_says_what_the_record_says() -> None:
    line = record().line()
    assert tuning.parse(json.loads(line)) == record()
    timed = dataclasses.replace(record(), timings=((KEYS[0].digest, 5.0), (KEYS[1].digest, 6.25)))
    assert tuning.parse(json.loads(timed.line())) == timed
    assert key_file.parse(json.loads(line)) == KEYS[0]  # a build takes the file as one of keys


def test_problems_differ_but_for_the_gpu_they_are_on() -> None:
    assert tuning.identity(dataclasses.replace(PROBLEM, device=1)) == tuning.identity(PROBLEM)
    for change in ({"math": "fast"}, {"c": SPEC}, {"epilogue": "relu"}, {"b": dataclasses.replace(SPEC, alignment=8)}):
        assert tuning.identity(dataclasses.replace(PROBLEM, **change)) != tuning.identity(PROBLEM)


def test_requests_and_arrays_of_one_row_are_the_same_problem() -> None:
    """Arrays have no stride along a dimension of one element; records that were written before had that of requests."""
    rows = [MatrixSpec((1, 64), strides, ac.CutlassDtype.BF16) for strides in ((64, 1), (0, 1))]
    first, other = (dataclasses.replace(PROBLEM, a=row, d=row) for row in rows)
    assert tuning.identity(first) == tuning.identity(other)
    fields = dataclasses.asdict(first)
    assert tuning.identity(fields | {"a": {"shape": [1, 64], "strides": [64, 1]}}) == tuning.identity(
        fields | {"a": {"shape": [1, 64], "strides": [0, 1]}}
    )


def test_the_fastest_counts_in_any_order(tmp_path: Path) -> None:
    records = [record(0, 5.0), record(1, 4.0), record(2, 4.0), record(3, 9.0)]
    found = set()
    for order in itertools.permutations(records):
        tuning.clear()
        for choice in order:
            tuning.add([choice])
        found.add(tuning.find("a GPU", PROBLEM))
    (kept,) = found
    assert kept in records[1:3]
    assert tuning.find("another GPU", PROBLEM) is None
    path = tmp_path / "tuned.jsonl"
    path.write_text("\n\n".join(choice.line() for choice in records))
    tuning.clear()
    assert ac.load_tuning(path) == len(records)
    assert tuning.find("a GPU", PROBLEM) == kept


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, "version is 2; expected 1"),
        ({"gpu": 3}, "gpu is 3; expected a string"),
        ({"swizzle": "1"}, 'swizzle is "1"; expected an integer'),
        ({"swizzle": True}, "swizzle is true; expected an integer"),
        ({"microseconds": None}, "microseconds is null; expected a number"),
        ({"timings": {"0123456789": "5"}}, "timings is .*; expected an object of numbers"),
    ],
)
def test_lines_that_are_no_records(change: dict[str, object], says: str, tmp_path: Path) -> None:
    values = json.loads(record().line())
    path = tmp_path / "tuned.jsonl"
    path.write_text(record().line() + "\n" + json.dumps(values | {"tuned": values["tuned"] | change}) + "\n")
    with pytest.raises(ac.InvalidOperandError, match=f"tuned.jsonl:2: {says}"):
        ac.load_tuning(path)
    assert tuning.find("a GPU", PROBLEM) is None


def test_records_of_before_kernels_were_told_a_width() -> None:
    values = json.loads(record().line())
    del values["tuned"]["width"]
    assert tuning.parse(values) == record()


def test_files_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_text(key_file.line(KEYS[0]))
    with pytest.raises(ac.InvalidOperandError, match="a file of keys, and none of tuned choices"):
        ac.load_tuning(path)
    with pytest.raises(ac.InvalidOperandError, match="cannot read"):
        ac.load_tuning(tmp_path / "absent")
    with pytest.raises(ac.InvalidOperandError, match="path is 3"):
        ac.load_tuning(3)  # type: ignore[arg-type]


def test_files_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuned.jsonl"
    path.write_text(record().line())
    monkeypatch.setenv(tuning.VARIABLE, f"{tmp_path / 'absent'}:{path}")
    tuning._start_from_environment.cache_clear()
    with pytest.warns(RuntimeWarning, match="ATOMR_CUTLASS_TUNED: cannot read"):
        assert tuning.find("a GPU", PROBLEM) == record()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.find("a GPU", PROBLEM) == record()


@pytest.mark.parametrize(
    ("requests", "options", "says"),
    [
        (3, {}, "requests is a int"),
        (["a"], {}, "request is a str"),
        ([], {"device": "0"}, "device is"),
        ([], {"seconds": "1"}, "seconds is"),
        ([], {"compiled": 1.5}, "compiled is"),
        ([], {"path": 3}, "path is 3"),
        ([], {"path": "\ud800"}, "path is "),
    ],
)
def test_tune_refuses(requests: object, options: dict[str, object], says: str) -> None:
    with pytest.raises(ac.InvalidOperandError, match=says):
        ac.tune(requests, **options)  # type: ignore[arg-type]


def test_the_command_reads_and_writes_the_profilers_csv(tmp_path: Path) -> None:
    tuned, profile, again = (tmp_path / name for name in ("tuned.jsonl", "profile.csv", "again.csv"))
    request = ac.GemmRequest(ac.GemmShape(64, 64, 64), dtype=ac.CutlassDtype.BF16, arch=ac.SmArch.SM90A)
    key = next(key for key in KEYS if (key.op, key.generation, key.layout_b) == ("gemm", "sm90", "c"))
    request = dataclasses.replace(request, layout_b=ac.GemmLayout.COL_MAJOR)
    choice = dataclasses.replace(record(), key=key, problem=tuning.identity(request.problem(0)), chosen=key.name)
    assert profiler_csv.write([choice], profile) == 1
    words = ["tune", "--from-csv", str(profile), "--gpu", "a GPU", "--out", str(tuned), "--csv", str(again)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert again.read_text() == profile.read_text()
    (found,) = tuning.read(tuned)
    assert (found.gpu, found.key, found.microseconds) == ("a GPU", key, choice.microseconds)
    assert ac.load_tuning(profile, gpu="a GPU") == 1
    assert tuning.find("a GPU", request.problem(0)) == found


@pytest.mark.parametrize("text", ["", "0,", "first", "-1"])
def test_the_command_refuses_what_is_no_gpu(text: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tune", "--device", text, "--out", str(tmp_path / "tuned.jsonl")])
    assert result.exit_code == 2
    assert "expected indexes, comma-separated, or all" in result.output


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The requests that the command has tuned."""
    found: list[object] = []
    monkeypatch.setattr(tune_module, "tune", lambda requests, *_, **__: found.extend(requests) or [])
    return found


def command(tmp_path: Path, *words: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["tune", "--out", str(tmp_path / "tuned.jsonl"), *words])
    assert result.exit_code == status, result.output
    return " ".join(re.sub("[│╭─╮╰╯]", "", result.output).split())


def test_the_command_tunes_suites(tmp_path: Path, tuned: list[ac.GemmRequest]) -> None:
    words = ["--suite", "llama-3-8b, qwen-3-8b", "--rows", "1,16", "--dtype", "f16", "--layouts", "rcr,rrr"]
    command(tmp_path, *words, "--activation", "relu")
    shapes = [(request.shape.m, request.shape.n, request.shape.k) for request in tuned]
    layers = {extents for model in ("llama-3-8b", "qwen-3-8b") for extents in suites.MODELS[model].values()}
    assert len(layers) == 6  # two of the models are the same
    expected = {(m, n, k) for m in (1, 16) for n, k in layers}
    assert sorted(shapes) == sorted([*expected, *expected])
    like = [(request.dtype, request.epilogue.activation, request.layout_a, request.layout_c) for request in tuned]
    assert set(like) == {(ac.CutlassDtype.F16, "relu", ac.GemmLayout.ROW_MAJOR, ac.GemmLayout.ROW_MAJOR)}
    assert [request.layout_b for request in tuned[:12]] == [ac.GemmLayout.COL_MAJOR] * 12
    assert [request.layout_b for request in tuned[12:]] == [ac.GemmLayout.ROW_MAJOR] * 12


def test_the_command_tunes_suites_with_the_default_rows_and_layout(tmp_path: Path, tuned: list[ac.GemmRequest]) -> None:
    command(tmp_path, "--suite", "deepseek-v3", "--dtype", "e4m3", "--scaling", "block")
    assert len(tuned) == len(suites.ROWS) * len(suites.MODELS["deepseek-v3"])
    assert {request.layout_b for request in tuned} == {ac.GemmLayout.COL_MAJOR}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--suite", "llama-9"],
            "no model 'llama-9'; valid: llama-3-8b, llama-3-70b, qwen-2.5-7b, qwen-3-8b, deepseek",
        ),
        (["--suite", "llama-3-8b,"], "no model ''; valid: llama-3-8b"),
        (["--suite", ""], "--suite: it is empty; valid: llama-3-8b"),
        (["--suite", "llama-3-8b", "--rows", "1,x"], "'1,x'; expected whole numbers, comma-separated"),
        (["--suite", "llama-3-8b", "--rows", "0"], "'0'; expected whole numbers, comma-separated"),
        (["--suite", "llama-3-8b", "--layouts", "rc"], "--layout is 'rc'; expected three letters r or c"),
        (["--suite", "llama-3-8b", "--layouts", "rcr,"], "--layouts: expected values of --layout, comma-separated"),
        (["--suite", "llama-3-8b", "--op", "gemv"], "the suites are of GEMMs: leave --op out"),
        (["--suite", "llama-3-8b", "--n", "8"], "--n: not used with --suite; leave it out"),
        (["--suite", "llama-3-8b", "--file", "requests.jsonl"], "--suite: given beside --file; give one of them"),
        (["--rows", "8"], "--rows: only used with --suite; leave it out"),
        (["--keys", "keys.jsonl", "--dtype", "f16"], "--dtype: not used with --keys; leave it out"),
        (["--keys", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
    ],
)
def test_the_command_refuses_sources_that_are_not_there(
    words: list[str], says: str, tmp_path: Path, tuned: list[object]
) -> None:
    assert says in command(tmp_path, *words, status=2)
    assert tuned == []


def test_the_command_tunes_recorded_calls(tmp_path: Path, tuned: list[object]) -> None:
    request = ac.GemmRequest(ac.GemmShape(64, 64, 64), dtype=ac.CutlassDtype.BF16)
    gaps = dataclasses.replace(request.problem(0), a=dataclasses.replace(SPEC, strides=(72, 1)))
    texts = [tuning.RecordedProblem("gemm", problem).text() for problem in (request.problem(0), gaps)]
    keys = tmp_path / "keys.jsonl"
    keys.write_text(key_file.line(KEYS[0], problems=list(map(json.loads, texts))), encoding="utf-8")
    assert "1 problem of gemm left out" in command(tmp_path, "--keys", str(keys))
    assert [each.problem(0) for each in tuned] == [request.problem(0)]
    keys.write_text(key_file.line(KEYS[0], problems=[json.loads(texts[1])]), encoding="utf-8")
    assert "has no call that can be tuned" in command(tmp_path, "--keys", str(keys), status=2)
    keys.write_text(key_file.line(KEYS[0], shapes=[]), encoding="utf-8")
    assert "record again" in command(tmp_path, "--keys", str(keys), status=2)


def test_suites_of_requests() -> None:
    like = ac.GemmRequest(ac.GemmShape(1, 1, 1, 3), dtype=ac.CutlassDtype.BF16)
    requests = ac.suite_requests("llama-3-8b", like, [5])
    assert [request.shape for request in requests] == [
        ac.GemmShape(5, n, k, 3) for n, k in suites.MODELS["llama-3-8b"].values()
    ]
    assert {dataclasses.replace(request, shape=like.shape) for request in requests} == {like}
    with pytest.raises(ac.InvalidOperandError, match="no model 'llama'; valid: llama-3-8b"):
        ac.suite_requests(["llama-3-8b", "llama"], like)
