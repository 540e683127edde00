"""The command line, as it behaves without a GPU."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fake_table
import numpy_gpu
from atomr_cutlass import ConvShape, CutlassDtype, SmArch, _core
from atomr_cutlass.cli import installed
from atomr_cutlass.cli.app import app
from atomr_cutlass.errors import DeviceUnavailableError, KernelNotFoundError
from atomr_cutlass.generator import key_file, records
from atomr_cutlass.generator.matrix import ARCHS, expand
from atomr_cutlass.generator.selection import Selection
from atomr_cutlass.jit import toolchain as jit_toolchain
from atomr_cutlass.jit.store import KernelStore
from atomr_cutlass.pipeline import devices, table, verification, verify
from atomr_cutlass.pipeline.operation import planned_operations
from store_process import digest, kernel

NO_GPU = "no GPU in this test"
SMALL = ("--m", "37", "--n", "29", "--k", "23")
COMMANDS = ("info", "list", "explain", "run", "demo")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "problem", lambda: NO_GPU)


@pytest.fixture
def empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "rows", list)
    table._rows.cache_clear()
    yield
    table._rows.cache_clear()


def call(*arguments: str, status: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of a command that must end with this status."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result.stdout, result.stderr


def call_json(*arguments: str, status: int = 0) -> dict:
    return json.loads(call(*arguments, "--json", status=status)[0])


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    assert "--json" in call(command, "--help")[0]


def test_import_of_the_package_leaves_the_command_line_out() -> None:
    code = "import atomr_cutlass, sys; print(sorted({'typer', 'rich', 'atomr_cutlass.cli.app'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_in_a_process_of_its_own() -> None:
    code = "from atomr_cutlass.cli.app import app; app()"
    said = subprocess.run(
        [sys.executable, "-c", code, "list", "--op", "conv"], capture_output=True, text=True, check=False
    )
    assert said.returncode == 2
    assert "unknown op 'conv'; valid: gemm" in said.stderr
    assert said.stdout == ""


# --- info ---


def test_info_names_what_is_missing_and_the_cure() -> None:
    said, _ = call("info")
    assert NO_GPU in said
    assert "cure: sudo ubuntu-drivers install" in said
    facts = call_json("info")
    assert facts["gpus"] == []
    assert facts["headers"]["version"] == "4.2.0"
    assert sum(row["kernels"] for row in facts["table"]) == len(table.kernels())
    assert all(set(row) == {"op", "generation", "arch", "kernels"} for row in facts["table"])
    assert all(missing["cure"] for missing in facts["missing"])


@pytest.mark.usefixtures("empty_table")
def test_info_of_an_empty_table_says_how_to_fill_it() -> None:
    said, _ = call("info")
    assert "0 kernels" in said
    assert "-DATOMR_CUTLASS_PRESET=default" in said


def test_info_survives_a_pack_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(table.PACKS_VARIABLE, str(tmp_path / "gone.so"))
    monkeypatch.setattr(table, "_packs_loaded", type(table._packs_loaded)())
    monkeypatch.setattr(table, "_pack_problems", [])
    with pytest.warns(RuntimeWarning, match=r"a pack is left out: .*gone\.so"):
        said, _ = call("info")
    assert "gone.so" in said
    assert f"correct {table.PACKS_VARIABLE}" in said
    call("list")


def test_info_counts_the_kernels_that_run_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = devices.Device(0, "a GPU", (9, 0), 132, 227 * 1024, 50 << 20, 80 << 30, 3352 * 10**9)
    monkeypatch.setattr(devices, "problem", lambda: "")
    monkeypatch.setattr(devices, "get", lambda _: gpu)
    monkeypatch.setattr(_core, "device_count", lambda: 1)
    monkeypatch.setattr(_core, "driver_version", lambda: 12080)
    (shown,) = call_json("info")["gpus"]
    native = [row for row in table.kernels() if row.key.arch is gpu.arch]
    assert shown["arch"] == "sm_90a"
    assert shown["kernels"] >= len(native)
    assert "CUDA 12.8" in call("info")[0]
    cures = [missing["cure"] for missing in installed.gather()["missing"]]
    assert all("cu13" not in cure for cure in cures)


def _needs_nvrtc() -> jit_toolchain.Toolchain:
    try:
        return jit_toolchain.toolchain()
    except DeviceUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def _tools_anew() -> Iterator[None]:
    jit_toolchain.toolchain.cache_clear()
    yield
    jit_toolchain.toolchain.cache_clear()


def test_info_tells_what_compiles_at_run_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _needs_nvrtc()
    for name, value in (("CACHE_DIR", "cache"), ("MISS_LOG", "misses")):
        monkeypatch.setenv(f"ATOMR_CUTLASS_{name}", str(tmp_path / value))
    monkeypatch.delenv("ATOMR_CUTLASS_JIT", raising=False)
    facts = call_json("info")
    jit, tools = facts["jit"], jit_toolchain.toolchain()
    assert (jit["policy"], jit["problem"]) == ("auto", "")
    assert facts["nvrtc"]["where"] == str(tools.nvrtc)
    assert facts["nvrtc"]["version"].startswith(".".join(map(str, tools.version)) + ".")
    assert jit["nvrtc_build"] == tools.build
    assert jit["headers"] == tools.headers
    assert re.fullmatch(r"\d+\.\d+", facts["cuda_headers"]["version"])
    assert jit["cache"]["folder"] == str(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    assert jit["miss_log"] == str(tmp_path / "misses")
    said, _ = call("info")
    for line in (
        rf"NVRTC      {re.escape(facts['nvrtc']['version'])} \(/.*\)",
        r"headers    CUTLASS 4\.2\.0 .*",
        r"headers    CCCL \d.*",
        "JIT        auto: kernels that the table lacks are compiled",
        rf"cache      0 kernels, 0\.0 KiB of at most 1024\.0 MiB, in {tmp_path}/cache",
        rf"misses     recorded in {tmp_path}/misses",
    ):
        assert re.search(f"^{line}$", said, re.MULTILINE), line


def test_info_counts_what_is_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATOMR_CUTLASS_CACHE_DIR", str(tmp_path / "cache"))
    store = KernelStore()
    for name in ("kernel_a", "kernel_b"):
        store.obtain(digest(name), lambda name=name: kernel(name, 5000), {"name": name})
    cache = installed.gather()["jit"]["cache"]
    assert (cache["kernels"], cache["size"]) == (2, sum(entry.size for entry in store.entries()))


def test_info_counts_kernels_by_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fake_table.rows_of("default", [SmArch.SM80, SmArch.SM90A])
    fake_table.install(monkeypatch, [*rows, *fake_table.rows_of("full", [SmArch.SM80])])
    facts = installed.gather()
    assert sum(row["kernels"] for row in facts["table"]) == len(table.kernels())
    for op, generation, arch, count in map(dict.values, facts["table"]):
        found = [row for row in table.kernels(op=op) if (row.key.generation, row.key.arch.value) == (generation, arch)]
        assert len(found) == count > 0
    said, _ = call("info")
    for op in {row["op"] for row in facts["table"] if row["generation"] == "sm80"}:
        assert re.search(rf"^ +{op}: \d+ sm80 for sm_80", said, re.MULTILINE), op


@pytest.mark.usefixtures("_tools_anew")
@pytest.mark.parametrize(("cuda", "extra"), [(12080, "cu12"), (13000, "cu13")])
@pytest.mark.parametrize("error", [jit_toolchain.missing("NVRTC"), RuntimeError("libnvrtc is half there")])
def test_info_names_the_extra_that_suits_the_driver(
    monkeypatch: pytest.MonkeyPatch, cuda: int, extra: str, error: Exception
) -> None:
    def finding() -> None:
        raise error

    monkeypatch.setattr(jit_toolchain, "_library", finding)
    monkeypatch.setattr(devices, "problem", lambda: "")
    monkeypatch.setattr(_core, "device_count", lambda: 0)
    monkeypatch.setattr(_core, "driver_version", lambda: cuda)
    facts = installed.gather()
    assert facts["nvrtc"] is None
    assert facts["cuda_headers"] is None
    assert facts["jit"]["problem"]
    (missing,) = [m for m in facts["missing"] if m["for"] == installed.RUN_TIME]
    assert facts["jit"]["problem"].startswith(missing["what"])
    assert "pip install" not in missing["what"]
    assert missing["cure"] == f"pip install 'atomr-cutlass[{extra}]'"
    said, _ = call("info")
    assert f"; but {facts['jit']['problem']}\n" in said
    assert f"    cure: pip install 'atomr-cutlass[{extra}]'\n" in said


def test_info_finds_an_nvrtc_that_is_newer_than_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    major = _needs_nvrtc().version[0]
    monkeypatch.setattr(devices, "problem", lambda: "")
    monkeypatch.setattr(_core, "device_count", lambda: 0)
    monkeypatch.setattr(_core, "driver_version", lambda: 1000 * (major - 1))
    facts = installed.gather()
    assert f"which this driver (CUDA {major - 1}) is too old for" in facts["jit"]["problem"]
    assert facts["jit"]["problem"] in {missing["what"] for missing in facts["missing"]}
    monkeypatch.setattr(_core, "driver_version", lambda: 1000 * major)
    assert installed.gather()["jit"]["problem"] == ""


def test_info_survives_a_wrong_policy_and_an_unsafe_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("ATOMR_CUTLASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "sometimes")
    facts = installed.gather()
    assert facts["jit"]["policy"] is None
    assert "writable by other users" in facts["jit"]["cache"]["problem"]
    cures = [missing["cure"] for missing in facts["missing"]]
    assert "correct ATOMR_CUTLASS_JIT" in cures
    assert "export ATOMR_CUTLASS_CACHE_DIR=ANOTHER_FOLDER" in cures
    said, _ = call("info")
    assert "ATOMR_CUTLASS_JIT names no policy" in said
    assert f"cache      not used: {tmp_path} is writable by other users" in said
    monkeypatch.setenv("ATOMR_CUTLASS_CACHE_DIR", "~nobody-of-this-name/cache")
    assert "home directory" in installed.gather()["jit"]["cache"]["problem"]
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "off")
    assert "JIT        off: nothing is compiled\n" in call("info")[0]


# --- list ---


def test_list_prints_one_name_a_line() -> None:
    assert call("list")[0].splitlines() == [row.name for row in table.kernels()]


def listed(*arguments: str) -> list[dict]:
    return [json.loads(line) for line in call(*arguments, "--json")[0].splitlines()]


def test_list_json_is_a_file_of_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`ATOMR_CUTLASS_KEYS=file` builds the same kernels."""
    keys = [*expand("full", [SmArch.SM90A]), *expand("default", [SmArch.SM80, SmArch.SM120])]
    fake_table.install(monkeypatch, [fake_table.row(key, shared_bytes=1024) for key in keys])
    printed = call("list", "--json")[0]
    assert [key_file.parse(json.loads(line)) for line in printed.splitlines()] == keys
    file = tmp_path / "keys.jsonl"
    file.write_text(printed)
    chosen = Selection(archs="", keys_file=str(file)).keys()
    assert (len(chosen), set(chosen)) == (len(keys), set(keys))


def test_list_json_has_every_field_of_the_keys() -> None:
    rows = listed("list")
    assert [row["name"] for row in rows] == [row.name for row in table.kernels()]
    for row, known in zip(rows, table.kernels(), strict=True):
        verified = verification.verification(known.key, known).to_dict()
        assert row == json.loads(json.dumps({**known.to_dict(), "verified": verified}))


def test_list_says_how_kernels_were_verified(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = fake_table.rows_of("smoke", [SmArch.SM90A])[:2]
    source, cutlass = verification.identity(rows[0].key)
    made = ("nvrtc 13.0.88", "NVIDIA H200", "580.1", "2026-11-22T07:50Z", "numbers")
    records.write(
        tmp_path / "verified.jsonl",
        [
            verification.Record(rows[0].name, verification.RUNS, source, cutlass, *made),
            verification.Record(rows[1].name, verification.RUNS, source, cutlass, *made),
        ],
    )
    monkeypatch.setattr(verification, "FILE", tmp_path / "verified.jsonl")
    verification.records.cache_clear()
    fake_table.install(monkeypatch, rows)
    first, second = (row["verified"] for row in listed("list"))
    assert [(record["how"], record["on"], record["changed"]) for record in first] == [("runs", "NVIDIA H200", False)]
    assert [record["changed"] for record in second] == [True]
    monkeypatch.setenv("COLUMNS", "400")
    installed.print_kernels(rows)
    verification.records.cache_clear()
    shown = capsys.readouterr().out.splitlines()
    for line, made_of in zip(shown[1:3], rows, strict=True):  # each fact stands under its heading
        cells = [line[shown[0].index(heading) :].split("  ")[0] for heading in ("op", "arch", "tile", "name")]
        assert cells == ["gemm", "sm_90a", "x".join(map(str, made_of.key.tile)), made_of.name]
    assert [next(words for words in (line.split("  ")) if "2026" in words).strip() for line in shown[1:3]] == [
        "runs 2026-11-22", "changed since 2026-11-22",
    ]  # fmt: skip


def test_list_filters() -> None:
    for arch in ARCHS["gemm"]:
        rows = listed("list", "--arch", arch.target, "--dtype", "bf16")
        assert all(row["arch"] == arch.value and row["a"] == "bf16" for row in rows)
    rows = listed("list", "--filter", "cutlass3x*bf16", "--op", "gemm")
    assert all(row["name"].startswith("cutlass3x") and "bf16" in row["name"] for row in rows)
    assert all(row["math"] == "tf32" for row in listed("list", "--dtype", "tf32"))


@pytest.mark.usefixtures("empty_table")
def test_list_of_an_empty_table() -> None:
    said, complaint = call("list")
    assert said == ""
    assert "the table is empty" in complaint
    assert listed("list") == []


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [
        (("list", "--op", "conv"), "valid: gemm"),
        (("list", "--dtype", "half"), "bf16"),
        (("list", "--arch", "90"), "say '90a'"),
        (("list", "--arch", "75"), "80, 86, 89, 90a"),
        (("run", "--backend", "cpu"), "auto, prebuilt, jit, reference"),
        (("run", "--jit", "on"), "auto, background, off"),
        (("explain", "--arch", "80", "--jit", "on"), "auto, background, off"),
        (("run", "--layout", "rx"), "three letters"),
        (("run", "--dtype", ""), "is empty"),
        (("run", "--m", "0"), "--m"),
        (("run", "--op", "conv"), "conv2d_fprop"),
        (("run", "--conv", "1,2,3,4,5,6,7"), "--conv is not for gemm; it is for conv2d_fprop"),
        (
            ("explain", "--op", "conv2d_wgrad", "--k", "4", "--arch", "80"),
            "--k is not for conv2d_wgrad; it is for gemm",
        ),
        (
            ("run", "--op", "gemv", "--scaling", "block"),
            "--scaling is not for gemv; it is for gemm, gated_gemm, grouped_gemm",
        ),
        (
            ("run", "--op", "grouped_gemm", "--dtype", "e4m3", "--scaling", "nvfp4"),
            "scaling is 'nvfp4'; expected None, 'tensor', 'vector', 'block'",
        ),
        (("run", "--op", "grouped_gemm", "--groups", "2"), "expected MxNxK of each group"),
        (("run", "--op", "conv2d_fprop", "--conv", "1,8,8,16"), "expected 7 whole numbers"),
        (("run", "--op", "conv2d_fprop", "--stride", "two"), "expected 1 or 2 whole numbers"),
        (("run", "--op", "conv2d_fprop", "--padding", "1,2,3"), "expected 1 or 2 or 4 whole numbers"),
        (("run", "--op", "conv2d_fprop", "--groups", "3"), "no multiple of the 3 groups"),
        (
            ("run", "--op", "conv2d_fprop", "--layout", "rrr"),
            "--layout: ConvLayout has no 'rrr'; valid: 'nhwc', 'nchw'",
        ),
        (("run", "--op", "conv2d_fprop", "--activation", "swish"), "relu"),
        (("run", "--activation", "swish"), "relu"),
        (("run", "--dtype", "e4m3", "--scaling", "row"), "'tensor', 'vector', 'block'"),
        (("run", "--dtype", "f32", "--precision", "double"), "ieee, tf32, 3xtf32"),
        (("run", "--dtype", "f16", "--precision", "tf32"), "float32"),
        (("explain",), "--arch"),
        (("nonsense",), "nonsense"),
    ],
)
def test_wrong_input_ends_with_2_and_names_what_is_valid(arguments: tuple[str, ...], valid: str) -> None:
    said, complaint = call(*arguments, status=2)
    assert said == ""
    assert valid in complaint


# --- explain ---


def test_explain_json_is_the_explanation() -> None:
    shown = call_json(
        "explain", "--arch", "80", "--dtype", "f32", "--m", "64", "--n", "48", "--k", "40", "--batch", "3"
    )
    assert shown["shape"] == {"m": 64, "n": 48, "k": 40, "batch": 3}
    assert (shown["dtype"], shown["arch"]) == ("f32", "sm_80")
    assert shown["kernel"] is not None
    assert (shown["source"] == "jit") == (shown["nearest"] is not None) == (shown["compile_seconds"] is not None)


@pytest.mark.usefixtures("empty_table")
def test_explain_names_the_knob_that_adds_the_kernel() -> None:
    said, _ = call("explain", "--arch", "90a", "--layout", "rcr")
    assert "to add it: CMAKE_ARGS=" in said


@pytest.mark.usefixtures("empty_table")
def test_explain_follows_the_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _needs_nvrtc()
    monkeypatch.setenv("ATOMR_CUTLASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ATOMR_CUTLASS_JIT", "off")
    asked = ("explain", "--arch", "90a", "--layout", "rcr")
    assert (call_json(*asked)["kernel"], call_json(*asked, "--jit", "off")["kernel"]) == (None, None)
    for policy in ("auto", "background"):
        shown = call_json(*asked, "--jit", policy)
        assert (shown["source"], shown["cached"]) == ("jit", None)
        assert shown["compile_seconds"] > 0
        assert "compiled first" in call(*asked, "--jit", policy)[0]


@pytest.mark.usefixtures("empty_table")
def test_explain_takes_bias_and_activation() -> None:
    shown = call_json("explain", "--arch", "90a", "--layout", "rcr", "--bias", "--activation", "tanh")
    assert "_evt_" in shown["kernel"]
    assert (shown["source"], shown["knob"]) == ("jit", None)
    assert "whose kernel is in no preset: it is compiled at run time" in shown["notes"][0]
    said, _ = call("explain", "--arch", "90a", "--bias", "--dtype", "i8", "--out-dtype", "i32", status=1)
    assert said == ""


def test_explain_of_a_layout_that_no_kernel_takes_names_the_transpose() -> None:
    assert "b.T.contiguous().T" in call("explain", "--arch", "80", "--dtype", "i8", "--layout", "rrr")[0]
    assert "b.T.contiguous().T" not in call("explain", "--arch", "80", "--dtype", "i8")[0]


def test_a_request_that_no_kernel_serves_ends_with_1_in_one_line() -> None:
    said, complaint = call("explain", "--arch", "80", "--dtype", "e2m1", status=1)
    assert said == ""
    assert complaint.startswith("atomr-cutlass: no kernel multiplies e2m1 on SM80")
    assert len(complaint.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        (
            ("--op", "conv2d_dgrad", "--conv", "2,9,8,16,24,3,2", "--padding", "1,0,2,1", "--stride", "2,1"),
            {
                "n": 2, "h": 9, "w": 8, "c": 16, "k": 24, "r": 3, "s": 2, "p": 4, "q": 10, "stride": [2, 1],
                "padding": [[1, 0], [2, 1]], "dilation": [1, 1], "groups": 1,
            },
        ),
        (("--op", "gated_gemm", "--n", "512"), {"m": 4096, "n": 512, "k": 4096, "batch": 1}),
        (("--op", "grouped_gemm", "--groups", "8x16x32,0x16x32"), {"groups": [[8, 16, 32], [0, 16, 32]]}),
        *(
            (
                ("--op", "grouped_gemm", "--groups", "8x16x32,0x16x32", "--dtype", "e4m3", "--scaling", scaling),
                {"groups": [[8, 16, 32], [0, 16, 32]]},
            )
            for scaling in ("tensor", "vector", "block")
        ),
        (("--dtype", "e4m3", "--scaling", "block", "--m", "7"), {"m": 7, "n": 4096, "k": 4096, "batch": 1}),
    ],
)  # fmt: skip
def test_explain_takes_every_operation(arguments: tuple[str, ...], shape: dict) -> None:
    shown = call_json("explain", "--arch", "90a", *arguments)
    assert shown["shape"] == shape
    assert shown["op"] == (arguments[1] if arguments[0] == "--op" else "gemm")
    assert shown["kernel"] is not None
    assert shown["kernel"] in call("explain", "--arch", "90a", *arguments)[0]


# --- run ---


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose kernels are right, for its results to be compared."""
    numpy_gpu.install(monkeypatch)


def test_run_compares_nothing_without_a_gpu() -> None:
    for more in ((), ("--bias",), ("--op", "grouped_gemm", "--groups", "8x16x32,5x3x7")):
        shown = call_json("run", *SMALL[: 0 if "--op" in more else None], *more)
        assert (shown["backend"], shown["reason"], shown["kernel"]) == ("reference", NO_GPU, None)
        assert (shown["seconds"], shown["launches"]) == (None, 0)
        assert [shown[name] for name in ("ok", "mismatches", "max_error", "tolerance")] == [None] * 4
    said, _ = call("run", *SMALL)
    assert f"computed by the NumPy reference ({NO_GPU})" in said
    assert "nothing was compared: 1073 elements of the reference" in said
    assert "right" not in said


@pytest.mark.parametrize("layout", ["rrr", "rcr", "crr", "ccr", "rrc", "rcc", "crc", "ccc"])
@pytest.mark.parametrize("batch", ["1", "3"])
@pytest.mark.usefixtures("gpu")
def test_run_takes_every_layout(layout: str, batch: str) -> None:
    shown = call_json("run", *SMALL, "--layout", layout, "--batch", batch, "--alpha", "-0.5", "--beta", "2")
    assert shown["ok"]
    assert shown["elements"] == 37 * 29 * int(batch)


@pytest.mark.parametrize("dtype", ["f64", "f32", "tf32", "f16", "bf16", "i8"])
@pytest.mark.usefixtures("gpu")
def test_run_takes_every_dtype(dtype: str) -> None:
    said, _ = call("run", *SMALL, "--dtype", dtype, "--layout", "rcr")
    assert "computed by a GPU" in said
    assert "right: 1073 elements agree with the reference" in said


def test_run_ends_with_1_when_the_result_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_gpu.install(monkeypatch, compute=lambda _, part: part["out"].fill(0))
    assert "WRONG" in call("run", *SMALL, status=1)[0]
    shown = call_json("run", *SMALL, status=1)
    assert not shown["ok"]
    assert shown["mismatches"] > 1000


def test_run_counts_elements_that_nobody_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_gpu.install(monkeypatch, compute=numpy_gpu.write_nothing)
    assert call_json("run", *SMALL, status=1)["mismatches"] == 37 * 29


@pytest.mark.parametrize("served_by", ["prebuilt", "jit"])
@pytest.mark.parametrize("backend", ["auto", "prebuilt", "jit"])
def test_run_on_a_gpu_says_where_the_kernel_comes_from(
    monkeypatch: pytest.MonkeyPatch, backend: str, served_by: str
) -> None:
    asked = numpy_gpu.install(monkeypatch, served_by=served_by)
    kernel = "a_kernel" if served_by == "prebuilt" else "a_better_kernel"
    shown = call_json("run", *SMALL, "--backend", backend, "--jit", "background")
    assert asked.pop() == {"backend": backend, "jit": "background"}
    assert (shown["backend"], shown["kernel"], shown["device"]) == (served_by, kernel, "a GPU")
    assert 0 <= shown["plan_seconds"] < 10
    said, _ = call("run", *SMALL, "--backend", backend)
    assert asked.pop()["jit"] is None
    assert f"kernel {kernel} ({served_by}, ready in 0.00 s)" in said


@pytest.mark.parametrize("backend", ["prebuilt", "jit"])
def test_run_with_a_gpu_asked_for_and_none_there(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    devices.get.cache_clear()
    _, complaint = call("run", *SMALL, "--backend", backend, status=1)
    assert complaint.startswith(f"atomr-cutlass: {NO_GPU}")
    assert call_json("run", *SMALL, "--backend", "reference")["reason"] == "as asked"

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(verify, "run", no_memory)
    assert "do not fit" in call("run", *SMALL, status=1)[1]


@pytest.mark.parametrize("op", planned_operations())
def test_run_takes_every_operation(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    extents = {"m": "37", "n": "30", "k": "23", "conv": "2,8,8,16,24,3,3"}
    if not (given := options_of(op, extents)):
        given = ["--groups", "8x16x32,5x3x7"]
    numpy_gpu.install(monkeypatch)
    for more in ((), ("--alpha", "-0.5", *(() if "beta" in planned_operations()[op].refuses else ("--beta", "2")))):
        shown = call_json("run", "--op", op, *given, *more)
        assert (shown["ok"], shown["op"], shown["mismatches"]) == (True, op, 0)
    numpy_gpu.install(monkeypatch, compute=numpy_gpu.write_nothing)
    shown = call_json("run", "--op", op, *given, status=1)
    assert shown["mismatches"] == shown["elements"] > 0


def options_of(op: str, extents: dict[str, str]) -> list[str]:
    """The options of an operation among these."""
    names = [option.name for option in planned_operations()[op].options if option.name in extents]
    return [word for name in names for word in (f"--{name}", extents[name])]


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("op", [op for op, operation in planned_operations().items() if operation.message == "Conv"])
@pytest.mark.usefixtures("gpu")
def test_run_takes_convolutions(op: str, layout: str) -> None:
    given = ("--op", op, "--conv", "3,9,8,16,24,3,2", "--padding", "1,0,2,1", "--stride", "2,1", "--layout", layout)
    for more in (("--beta", "2"), ("--groups", "8", "--dtype", "f32", "--precision", "tf32"), ("--dtype", "e5m2")):
        shown = call_json("run", *given, *more)
        assert (shown["ok"], shown["op"]) == (True, op)
    operation = planned_operations()[op]
    shape = ConvShape.nhwc(3, 9, 8, 16, 24, 3, 2, padding=((1, 0), (2, 1)), stride=(2, 1))
    *_, out = operation.operands(operation.request_type(shape, dtype=CutlassDtype.BF16))
    assert shown["elements"] == math.prod(out.specs[0].shape)
    assert f"{op} of 3x9x8x16 with 24 filters of 3x2 bf16 -> bf16: computed by" in call("run", *given)[0]


@pytest.mark.usefixtures("gpu")
def test_run_takes_bias_and_activation_of_convolutions() -> None:
    given = ("--op", "conv2d_fprop", "--conv", "2,8,8,16,24,3,3", "--dilation", "2", "--bias", "--activation", "relu")
    assert call_json("run", *given)["ok"]


@pytest.mark.parametrize("epilogue", [("--bias",), ("--activation", "gelu"), ("--bias", "--activation", "silu")])
@pytest.mark.usefixtures("gpu")
def test_run_takes_bias_and_activation_of_gemm(epilogue: tuple[str, ...]) -> None:
    for more in ((), ("--beta", "-1"), ("--batch", "3", "--layout", "crc"), ("--dtype", "i8"), ("--dtype", "f64")):
        shown = call_json("run", *SMALL, *epilogue, *more)
        assert (shown["ok"], shown["mismatches"]) == (True, 0)
    for more in ((), ("--scaling", "vector"), ("--quantized",), ("--scaling", "block", "--out-dtype", "e5m2")):
        assert call_json("run", *SMALL, *epilogue, "--dtype", "e4m3", *more)["ok"]
    assert "right: 1073 elements agree" in call("run", *SMALL, *epilogue)[0]


def test_run_counts_wrong_elements_of_epilogues(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_gpu.install(monkeypatch, compute=lambda work, part: np.copyto(part["out"], work.expected(part)))  # no bias
    assert call_json("run", *SMALL, "--bias", status=1)["mismatches"] > 1000
    numpy_gpu.install(monkeypatch, compute=numpy_gpu.write_nothing)
    assert call_json("run", *SMALL, "--bias", status=1)["mismatches"] == 37 * 29
    given = (*SMALL, "--activation", "relu", "--dtype", "e4m3", "--quantized")
    assert call_json("run", *given, status=1)["mismatches"] == 37 * 29 + 1


@pytest.mark.parametrize(
    "more",
    [
        (), ("--beta", "2"), ("--dtype", "e4m3", "--fast-accum"), ("--layout", "ccr"), ("--bias",),
        ("--bias", "--activation", "gelu"),
        *(("--dtype", "e4m3", "--scaling", scaling, *others)
          for scaling in ("tensor", "vector", "block") for others in ((), ("--bias", "--beta", "2"))),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("gpu")
def test_run_takes_groups(more: tuple[str, ...]) -> None:
    given = ("--op", "grouped_gemm", "--groups", "8x16x32,0x16x32,5x3x7,4x4x0", *more)
    shown = call_json("run", *given)
    assert (shown["ok"], shown["elements"]) == (True, 8 * 16 + 5 * 3 + 16)
    assert "4 groups (8x16x32, 0x16x32, 5x3x7, ...)" in call("run", *given)[0]


@pytest.mark.parametrize("batch", ["1", "3"])
@pytest.mark.parametrize(
    "more", [(), ("--activation", "gelu", "--alpha", "0.5"), ("--dtype", "e4m3", "--scaling", "vector", "--quantized")]
)
@pytest.mark.usefixtures("gpu")
def test_run_takes_gates(more: tuple[str, ...], batch: str) -> None:
    shown = call_json("run", "--op", "gated_gemm", "--m", "37", "--n", "58", "--k", "64", "--batch", batch, *more)
    assert (shown["ok"], shown["elements"]) == (True, 37 * 29 * int(batch))


@pytest.mark.parametrize("batch", ["1", "2"])
@pytest.mark.parametrize("scaling", ["tensor", "vector", "block"])
@pytest.mark.usefixtures("gpu")
def test_run_takes_scales(scaling: str, batch: str) -> None:
    for k in ("64", "300"):
        for more in ((), ("--quantized", "--out-dtype", "e4m3"), ("--dtype-b", "e5m2", "--beta", "2", "--fast-accum")):
            given = ("--m", "70", "--n", "48", "--k", k, "--batch", batch, "--dtype", "e4m3", "--scaling", scaling)
            assert call_json("run", *given, *more)["ok"]


@pytest.mark.parametrize(
    "more",
    [("--m", "32", "--n", "32", "--k", "128"), ("--op", "grouped_gemm", "--groups", "8x16x300,5x8x300")],
    ids=["gemm", "groups"],
)
def test_run_counts_wrong_elements_of_scaled_products(monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    numpy_gpu.install(monkeypatch, compute=numpy_gpu.write_nothing)
    shown = call_json("run", "--dtype", "e4m3", "--scaling", "block", *more, status=1)
    assert shown["mismatches"] == shown["elements"]


def test_run_checks_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy_gpu.install(monkeypatch, compute=lambda work, part: np.copyto(part["out"], work.expected(part)))
    given = ("--dtype", "e4m3", "--quantized", "--m", "32", "--n", "32", "--k", "128")
    assert call_json("run", *given, status=1)["mismatches"] == 1


# --- demo ---


def test_demo_without_a_gpu() -> None:
    said, _ = call("demo")
    for part in (
        "What is installed",
        f"Some of its {len(table.kernels())} kernels",
        "NumPy reference",
        "nothing was compared",
    ):
        assert part in said
    shown = call_json("demo")
    assert set(shown) == {"info", "explain", "run", "fp8", "conv"}
    assert [shown[name]["ok"] for name in ("run", "fp8", "conv")] == [None] * 3
    assert shown["conv"]["op"] == "conv2d_fprop"


@pytest.mark.parametrize("error", [KernelNotFoundError, DeviceUnavailableError])
def test_demo_computes_on_the_reference_when_the_kernel_is_not_to_be_had(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    real = verify.run

    def run(request: object, *, backend: str = "auto", jit: str | None = None) -> verify.RunResult:
        assert jit in (None, "off")
        if backend == "auto":
            raise error("it is in preset default")
        return real(request, backend=backend)

    monkeypatch.setattr(verify, "run", run)
    said, _ = call("demo")
    assert "it is in preset default" in said
    assert "computed by the NumPy reference (as asked)" in said


# --- docs ---


def test_the_coverage_page_is_what_the_matrix_says() -> None:
    script = Path(__file__).parents[2] / "docs" / "gen_coverage.py"
    said = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
@pytest.mark.filterwarnings("ignore:computing with NumPy:RuntimeWarning")
def test_examples_run_without_a_gpu(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if "ac.plan(" not in part:  # the one example that needs a GPU
            exec(part, names)
    assert "verified: " in capsys.readouterr().out


def test_the_readme_names_every_knob() -> None:
    root = Path(__file__).parents[2]
    knobs = re.findall(r"^(\w+) = ", (root / "pyproject.toml").read_text().split("cmake.define]\n")[1], re.MULTILINE)
    for page in ("README.md", "docs/install.md"):
        text = (root / page).read_text(encoding="utf-8")
        assert all(f"| `{knob}` |" in text for knob in knobs if knob.isupper()), page
