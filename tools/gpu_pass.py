"""One pass on a machine with a GPU: the GPU tests, compute-sanitizer over a subset of them, and the benchmarks.

    python tools/gpu_pass.py --out results
    python tools/gpu_pass.py --out results --only compile,compile-older          # may be repeated: goes on
    python tools/gpu_pass.py --out results --only jit --limit 590
    python tools/gpu_pass.py --out results --only compile-trees,trees            # epilogue trees, both stages
    python tools/gpu_pass.py --out results --only tests --packs results/full90a.so --files conv,grouped

Goes on when a stage fails, and exits with 1 if any did. The folder receives gpu_pass.json, which keeps what earlier
calls found in other stages (a stage of chosen files is one by itself), and each stage's own files.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "gpu"

TIMEOUTS = {
    "tests": 400,
    "sanitizer": 110,
    "sanitizer-ops": 290,
    "synccheck": 170,
    "bench": 170,
    "bench-fp8": 290,
    "bench-grouped": 290,
    "bench-conv": 570,
    "bench-epilogue": 570,
    "bench-layers": 290,
    "compile": 580,
    "compile-older": 290,
    "compile-trees": 580,
    "compile-cells": 580,
    "jit": 580,
    "cells": 580,
    "trees": 580,
    "jit-sanitizer": 150,
    "jit-bench": 290,
}
"""Seconds that a stage may take."""
USUAL = ("tests", "sanitizer", "bench")
QUICK_TIMEOUT = 120
TEST_TIMEOUT = 120
"""Seconds a test may take, where others and compilers run beside it."""
REFERENCE_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "2")
"""Threads of NumPy's matrix products, the references of tests: a pool as wide as the machine in each of the processes
that run at once has them wait for each other for minutes."""

COMPILED = {
    "compile": ("--matrix=90a",),
    # Tests run these as PTX; of sm_89 those that sm_80 does not have.
    "compile-older": (
        "--matrix=80:*gemm*,*fprop*,*dgrad*,*wgrad*",
        "--matrix=89:*gemm*e4m3*,*gemm*e5m2*,*fprop*,*dgrad*,*wgrad*",
    ),
    "compile-trees": ("--trees",),
    "compile-cells": ("--matrix=90a", "--matrix=80;89"),
}
"""The arguments of compile_table.py, by stage."""

FIRST = ("test_conv", "test_table", "test_gemm", "test_grouped", "test_jit", "test_fp8")
"""Files that take long: one of them started last would be waited for."""
WORKERS = {
    "test_grouped": 6,
    "test_epilogue": 6,
    "test_matmul": 3,
    "test_conv_epilogue": 3,
    "test_gated": 2,
    "test_quantize": 2,
}
"""Processes that share the tests of a file that compiles kernels one by one, with pytest-xdist."""
ALONE = ("test_streams",)
"""Files whose tests ask what runs beside what on the GPU."""
OWN = {"jit": ("test_jit",), "trees": ("test_conv_epilogue", "test_epilogue", "test_matmul")}
"""Files whose kernels are in no table, by the stages that run them, after those that compile them side by side."""

SELECTIONS = {
    "sanitizer-ops": {
        "test_conv": (
            40,
            "test_random_geometry or test_filters or test_groups or test_depthwise or test_odd or test_bias",
        ),
        "test_grouped": (30, "test_every_cell or test_contiguous or test_masked or test_along_k or test_lists"),
        "test_fp8": (20, "test_every_cell or test_odd_extents"),
        "test_fp8_scaled": (16, "test_forms or test_block"),
        "test_quantize": (16, ""),
        "test_tree_cells": (16, "sm90"),
        "test_epilogue": (4, "test_every_kind_of_kernel"),  # compiled at run time: compile-trees is to come before
    },
    "synccheck": {
        "test_conv": (12, "test_random_geometry or test_depthwise"),
        "test_grouped": (12, "test_every_cell"),
        "test_fp8": (8, "test_every_cell"),
        "test_quantize": (6, ""),
    },
}
"""Of each file, how many tests at most run under compute-sanitizer, and from among which."""
TOOLS = {"synccheck": "synccheck"}

EVERY_CELL = "(test_every_cell or test_every_cast) and not bias"
"""The tests that launch each cell by itself, as pytest's -k has it."""

FAILURES_SHOWN = 40
PROCESSES_A_FILE = 6
LOST = "context was lost"  # tests/gpu/conftest.py, of tests that it did not run after a fault
SANITIZER_ERRORS = 99  # its exit status when it has found errors


@dataclass
class Stage:
    """The outcome of a stage. Its files and its place in the report have its label."""

    name: str
    label: str
    ok: bool = False
    seconds: float = 0.0
    summary: str = ""
    results: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """How stages run.

    Attributes:
        quick: fewer shapes and rounds.
        files: of the tests, by name without test_ and .py; empty for all.
        at_once: how many files of tests run at once.
        limit: seconds that a stage may take, instead of TIMEOUTS.
    """

    quick: bool = False
    files: tuple[str, ...] = ()
    at_once: int = 1
    limit: int = 0

    def seconds(self, name: str) -> int:
        """Seconds that a stage may take."""
        if self.limit:
            return self.limit
        return min(TIMEOUTS[name], QUICK_TIMEOUT) if self.quick else TIMEOUTS[name]


def main() -> int:
    """Runs the chosen stages; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument(
        "--only", default="", help=f"comma-separated stages of {', '.join(STAGES)}; default: {', '.join(USUAL)}"
    )
    parser.add_argument("--files", default="", help="files of tests, such as conv,grouped; default: all")
    parser.add_argument("--at-once", type=int, default=4, help="files of tests that run at once; default: %(default)s")
    parser.add_argument("--limit", type=int, default=0, help="seconds that each stage may take")
    parser.add_argument("--packs", default="", help="packs to load, separated like PATH")
    parser.add_argument("--commit", default="", help="what is tested, where git cannot say it")
    arguments = parser.parse_args()
    wanted = [name.strip() for name in arguments.only.split(",") if name.strip()] or list(USUAL)
    for name in wanted:
        if name not in STAGES:
            parser.error(f"unknown stage {name!r}; valid: {', '.join(STAGES)}")
    files = tuple(name.strip() for name in arguments.files.split(",") if name.strip())
    for name in files:
        if not (TESTS / f"test_{name}.py").is_file():
            parser.error(f"no tests/gpu/test_{name}.py")
    packs = [str(Path(path).resolve()) for path in arguments.packs.split(os.pathsep) if path]
    for path in packs:
        if not Path(path).is_file():
            parser.error(f"no pack {path}")
    if packs:
        os.environ["ATOMR_CUTLASS_PACKS"] = os.pathsep.join(packs)
    options = Options(arguments.quick, files, max(1, arguments.at_once), arguments.limit)
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    report: dict[str, Any] = {**machine(), "quick": arguments.quick, "stages": {}}
    if arguments.commit:
        report["machine"]["commit"] = arguments.commit
    report["packages"] = packages()
    report["packs"] = [Path(path).name for path in packs]
    with contextlib.suppress(OSError, ValueError):
        # The outcomes of an earlier call, for stages that this one does not run.
        report["stages"] = json.loads((out / "gpu_pass.json").read_text(encoding="utf-8"))["stages"]
    stages = []
    for name in wanted:
        print(f"== {name}", flush=True)
        label = "-".join((name, *files)) if name in OF_FILES else name
        stage, start = Stage(name, label), time.monotonic()
        try:
            STAGES[name](stage, out, options)
        except subprocess.TimeoutExpired as error:
            stage.ok, stage.summary = False, f"stopped after {error.timeout:.0f} s"
        except Exception as error:  # noqa: BLE001 - the other stages still have something to say
            stage.ok, stage.summary = False, f"{type(error).__name__}: {error}"
        stage.seconds = round(time.monotonic() - start, 1)
        stages.append(stage)
        report["stages"][stage.label] = {
            "date": report.get("date"),
            "commit": report["machine"].get("commit"),
            "ok": stage.ok,
            "seconds": stage.seconds,
            "summary": stage.summary,
            **stage.results,
        }
        # Written after every stage, so that an interrupted pass leaves what it has.
        (out / "gpu_pass.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print()
    for stage in stages:
        print(f"{'ok  ' if stage.ok else 'FAIL'}  {stage.label:<14}{stage.seconds:>7.1f} s  {stage.summary}")
    return 0 if all(stage.ok for stage in stages) else 1


# ----------------------------------------------------------------------------------------------------------------------
# Stages


def gpu_tests(stage: Stage, out: Path, options: Options, *, compiled: bool = False) -> None:
    """The tests with the marker `gpu`: a process for each file, several at once, and more for what a lost context left.

    `compiled`: all of them over kernels that are compiled at run time, where neither nvcc nor a host compiler is to be
    found; the stage `compile` has them compiled side by side before. The stage `trees` has the tests of epilogue trees,
    whose kernels are in no table, and `compile-trees` compiles before it; no other stage has them. `cells`, after
    `compile-cells`, is every cell of the matrix that the GPU can run and that has been compiled, once each.

    Cells that were right by themselves add their records to verified.jsonl, for tools/verified.py.
    """
    folder = out / stage.label
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    deadline = time.monotonic() + options.seconds(stage.name)
    words = [*_pytest(), "-m", "gpu", "-q", "-rf", "--tb=short", *(["-k", "not large"] if options.quick else [])]
    words += ["-k", EVERY_CELL] if stage.name == "cells" else []
    environment = {
        "ATOMR_CUTLASS_TEST_RECORDS": str(out / "verified.jsonl"),
        **REFERENCE_THREADS,
        **(without_compilers() if compiled else {}),
        **({"ATOMR_CUTLASS_TEST_JIT": "ready"} if stage.name == "cells" else {}),
    }
    files = [file.stem for file in sorted(TESTS.glob("test_*.py"))]
    own = OWN.get(stage.name, ())
    others = {name for names in OWN.values() for name in names}.difference(own)
    if stage.name == "cells":
        files = [name for name in files if "import every_cell" in (TESTS / f"{name}.py").read_text(encoding="utf-8")]
    else:
        files = [name for name in files if name not in others and (name in own or stage.name != "trees")]
    if options.files:
        files = [name for name in files if name.removeprefix("test_") in options.files]
    files.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))

    def tested(name: str) -> FileRun:
        found = run_file(name, words, folder, deadline, environment)
        print(found.line, flush=True)
        return found

    # No framework allocates more memory than one file needs, and a fault ends one process's context only.
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = list(pool.map(tested, [name for name in files if name not in ALONE]))
    runs += [tested(name) for name in files if name in ALONE]

    suites = ET.Element("testsuites")
    for file in runs:
        suites.extend(file.suites)
    ET.ElementTree(suites).write(out / f"{stage.label}.xml", encoding="utf-8")
    outcomes = [outcome for file in runs for outcome in file.outcomes]
    crashed = [text for file in runs for text in file.crashed]
    counts = tally(outcomes)
    failures = [
        {"test": f"{outcome.place}::{outcome.name}", "message": outcome.message[:600]}
        for outcome in outcomes
        if outcome.failed
    ]
    slowest = sorted(outcomes, key=lambda outcome: -outcome.seconds)[:10]
    ops = defaultdict(list)
    for outcome in outcomes:
        ops[op_of(outcome)].append(outcome)
    stage.results = {
        "counts": counts,
        "ops": {name: tally(found) for name, found in sorted(ops.items())},
        "files": {file.name: {**tally(file.outcomes), "seconds": file.seconds} for file in runs},
        "crashed": crashed,
        "failures": failures[:FAILURES_SHOWN],
        "skipped": dict(
            Counter(outcome.message[:200] for outcome in outcomes if outcome.outcome == "skipped").most_common(20)
        ),
        "slowest": [{"test": outcome.name, "seconds": round(outcome.seconds, 2)} for outcome in slowest],
    }
    stage.ok = not crashed and not failures and counts.get("passed", 0) > 0
    summary = [f"{count} {outcome}" for outcome, count in counts.items()]
    stage.summary = ", ".join([*summary, *crashed]) or "nothing was run"


@dataclass(frozen=True)
class Outcome:
    """How a test went."""

    place: str
    name: str
    outcome: str
    message: str
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether it failed."""
        return self.outcome == "failed"


@dataclass
class FileRun:
    """The outcome of a file of tests."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    suites: list[ET.Element] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """For the terminal."""
        said = [f"{count} {outcome}" for outcome, count in tally(self.outcomes).items()]
        failed = [
            f"\n    {outcome.name}: {outcome.message.splitlines()[0][:200]}"
            for outcome in self.outcomes
            if outcome.failed
        ][:5]
        return f"{self.name:<18}{self.seconds:>7.1f} s  {', '.join([*said, *self.crashed])}{''.join(failed)}"


def tally(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """How many passed, failed and were skipped."""
    return dict(sorted(Counter(outcome.outcome for outcome in outcomes).items()))


def op_of(test: Outcome) -> str:
    """The operation that a test is about, by its file and its parameters."""
    from atomr_cutlass.pipeline.operation import operations  # which need not be installed for stages to be reported

    own = test.place.rpartition(".")[2].removeprefix("test_")
    names = [name for name in operations() if own and name.startswith(own)]
    if names:  # several of a convolution: its parameters tell which
        common = names[0] if len(names) == 1 else names[0].rpartition("_")[0]
        return next((name for name in names if name.rpartition("_")[2] in test.name), common)
    of_files = {"fp8": "gemm fp8", "fp8_scaled": "gemm fp8 scaled", "requests": "requests", "actor": "actor",
                "epilogue": "gemm epilogue trees"}  # fmt: skip
    return of_files.get(own, "gemm")


def without_compilers() -> dict[str, str]:
    """The environment of tests of the run-time compiler: a PATH on which there is nothing."""
    empty = tempfile.mkdtemp()
    return {"PATH": empty, "ATOMR_CUTLASS_TEST_JIT": "1"}


def run_file(name: str, words: Sequence[str], folder: Path, deadline: float, environment: Mapping[str, str]) -> FileRun:
    """Runs a file of tests; what a lost context left over, in further processes."""
    made, start = FileRun(name), time.monotonic()
    path = f"tests/gpu/{name}.py"
    wanted = [path]
    if name in WORKERS and importlib.util.find_spec("xdist"):
        words = [*words, "-n", str(WORKERS[name]), "--dist=worksteal", "-p", "no:benchmark"]
    for attempt in range(PROCESSES_A_FILE):
        last = attempt == PROCESSES_A_FILE - 1
        found, in_time = _pytest_process([*words, *wanted], folder / f"{name}.log", deadline, made.suites, environment)
        if not in_time:
            made.crashed.append(f"{path}: out of time")
        elif not found:
            made.crashed.append(f"{path}: the process ended without a report")
        lost = [] if last or not in_time else [outcome for outcome in found if LOST in outcome.message]
        made.outcomes += [outcome for outcome in found if outcome not in lost]
        if not lost:
            break
        wanted = [f"{path}::{outcome.name}" for outcome in lost]
    made.seconds = round(time.monotonic() - start, 1)
    return made


def _pytest_process(
    words: Sequence[str], log: Path, deadline: float, suites: list[ET.Element], environment: Mapping[str, str]
) -> tuple[list[Outcome], bool]:
    """Runs pytest, adds its report to `suites`, and returns how each test went and whether it ended in time.

    Without a report there are no tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "report.xml"
        in_time = True
        try:
            seconds = max(1.0, deadline - time.monotonic())
            run([*words, f"--junit-xml={xml}"], log, seconds, environment, shown=False)
        except subprocess.TimeoutExpired:
            # Interrupted, it has still reported what it did.
            in_time = False
        if not xml.is_file():
            return [], in_time
        suite = ET.parse(xml).getroot()  # noqa: S314 - written by our own pytest
    suites.extend(suite)
    outcomes = []
    for case in suite.iter("testcase"):
        kinds = {kind: case.find(kind) for kind in ("failure", "error", "skipped")}
        kind, detail = next(((k, d) for k, d in kinds.items() if d is not None), ("", None))
        outcome = {"": "passed", "skipped": "skipped"}.get(kind, "failed")
        message = "" if detail is None else detail.get("message") or ""
        seconds_taken = float(case.get("time", "0"))
        outcomes.append(Outcome(case.get("classname", ""), case.get("name", ""), outcome, message, seconds_taken))
    if outcomes and not in_time:
        # The report has the test that was interrupted as one that passed.
        outcomes[-1] = replace(outcomes[-1], outcome="failed", message="out of time: interrupted")
    return outcomes, in_time


def compile_table(stage: Stage, out: Path, options: Options) -> None:
    """The kernels that the tests need, compiled at run time; goes on where an earlier call stopped."""
    results, log = out / f"{stage.name}.json", out / f"{stage.name}.log"
    for path in (results, log):
        path.unlink(missing_ok=True)
    seconds = options.seconds(stage.name)
    # Kernels that are being compiled then are finished.
    words = [sys.executable, "tools/compile_table.py", "--out", str(results), f"--seconds={max(1, seconds - 60)}"]
    words += COMPILED[stage.name]
    environment = {name: value for name, value in without_compilers().items() if name == "PATH"}
    status = run(words, log, seconds, environment)
    if not results.is_file():
        stage.summary = f"exit status {status}; nothing was compiled"
        return
    measured = json.loads(results.read_text(encoding="utf-8"))
    stage.results = {name: value for name, value in measured.items() if name != "each"}
    stage.ok = status == 0 and measured["kernels"] > 0
    stage.summary = "{kernels} kernels, {failed} failed, {left} left for another call, {jobs} at once".format(
        **measured
    )


def jit_bench(stage: Stage, out: Path, options: Options) -> None:
    """The times of compiling, finding and launching a kernel at run time."""
    results, log = out / "jit.json", out / "jit.log"
    for path in (results, log):
        path.unlink(missing_ok=True)
    status = run(_benchmark("jit", results, options), log, options.seconds(stage.name), BENCHMARKS)
    stage.ok = status == 0 and results.is_file()
    stage.summary = f"exit status {status}"


def sanitizer(stage: Stage, out: Path, options: Options, *, compiled: bool = False) -> None:
    """compute-sanitizer's memcheck over the tests with the marker `sanitizer`."""
    seconds = options.seconds(stage.name)
    log = out / f"{stage.name}.log"
    log.unlink(missing_ok=True)
    words = [*_sanitizer("memcheck"), *_pytest(seconds), "-m", "sanitizer", "-q", "-s"]
    words += ["-p", "no:cacheprovider", "tests/gpu/test_sanitizer.py"]
    # Its own start-up script needs a PATH.
    status = run(words, log, seconds, {"ATOMR_CUTLASS_TEST_JIT": "1"} if compiled else {})
    found = _sanitized(log, status)
    stage.results = found
    stage.ok = status == 0 and found["errors"] == 0
    stage.summary = f"{found['errors']} errors; {found['tests'] or f'exit status {status}'}"


def sanitizer_ops(stage: Stage, out: Path, options: Options) -> None:
    """compute-sanitizer over a few tests of each operation, a process for each file.

    Their frameworks' kernels are watched too, and each array is an allocation of its own. Without packs to load, the
    kernels are those of the run-time compiler, so that every cell can be among them.
    """
    deadline = time.monotonic() + options.seconds(stage.name)
    tool = TOOLS.get(stage.name, "memcheck")
    chosen = SELECTIONS[stage.name]
    files = [name for name in chosen if not options.files or name.removeprefix("test_") in options.files]
    stage.results, stage.ok = {"tool": tool, "files": {}}, bool(files)

    def checked(name: str) -> dict[str, Any]:
        count, expression = chosen[name]
        log = out / f"{stage.label}-{name}.log"
        log.unlink(missing_ok=True)
        tests = sample(collected(name, expression), 4 if options.quick else count)
        words = [*_sanitizer(tool), "--report-api-errors=no", *_pytest(options.seconds(stage.name)), "-q", "-s"]
        words += ["-p", "no:cacheprovider", *tests]
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **REFERENCE_THREADS}
        if not os.environ.get("ATOMR_CUTLASS_PACKS"):
            environment["ATOMR_CUTLASS_TEST_JIT"] = "1"
        try:
            status = run(words, log, max(1.0, deadline - time.monotonic()), environment, shown=False)
        except subprocess.TimeoutExpired:
            return {"errors": None, "tests": f"of {len(tests)}: out of time"}
        found = _sanitized(log, status)
        print(f"{name}: {found['errors']} errors, {found['tests']}", flush=True)
        return found

    with ThreadPoolExecutor(options.at_once) as pool:
        for name, found in zip(files, pool.map(checked, files), strict=True):
            stage.results["files"][name] = found
            stage.ok = stage.ok and found["errors"] == 0 and found.get("exit_status") == 0
    each = [f"{name.removeprefix('test_')} {counts['errors']}" for name, counts in stage.results["files"].items()]
    stage.summary = f"errors of {tool}: {', '.join(each)}"


def collected(name: str, expression: str) -> list[str]:
    """The tests of a file that an expression of pytest's -k leaves."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    words += [*(["-k", expression] if expression else []), f"tests/gpu/{name}.py"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    return [line for line in said.splitlines() if line.startswith("tests/gpu/") and "::" in line]


def sample(tests: Sequence[str], count: int) -> list[str]:
    """At most so many of them, the same ones every time. Any stride would meet the period of some parameter."""
    chosen = set(sorted(tests, key=lambda test: hashlib.sha256(test.encode()).digest())[:count])
    return [test for test in tests if test in chosen]


def _sanitizer(tool: str) -> list[str]:
    program = find_tool("compute-sanitizer")
    if program is None:
        raise RuntimeError("compute-sanitizer was not found: it comes with the CUDA toolkit")
    return [program, "--tool", tool, f"--error-exitcode={SANITIZER_ERRORS}"]


def _sanitized(log: Path, status: int) -> dict[str, Any]:
    """The outcome of compute-sanitizer and the tests under it; no number of errors where it did not end."""
    text = log.read_text(encoding="utf-8", errors="replace")
    summaries = re.findall(r"ERROR SUMMARY: (\d+) error", text)
    outcome = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped).*?)(?: =+)?$", text, re.MULTILINE)
    errors = sum(map(int, summaries)) if summaries else None
    return {"exit_status": status, "errors": errors, "tests": outcome[-1] if outcome else ""}


def bench(stage: Stage, out: Path, options: Options) -> None:
    """The comparison with `torch.matmul`."""
    results, log = out / "gemm.json", out / "gemm.log"
    for path in (results, log):
        path.unlink(missing_ok=True)
    status = run(_benchmark("gemm", results, options), log, options.seconds(stage.name), BENCHMARKS)
    if not results.is_file():
        stage.summary = f"exit status {status}; nothing was measured"
        return
    measured = json.loads(results.read_text(encoding="utf-8"))
    rows = measured["rows"]
    stage.results = {"exit_status": status, "rows": len(rows)}
    stage.ok = status == 0 and bool(rows)
    large = [row for row in rows if row["dtype"] in ("bf16", "f16") and min(row["shape"]) >= 4096]
    if large:
        slowest = min(large, key=lambda row: row["torch_ratio"])
        shape = "x".join(map(str, slowest["shape"]))
        stage.summary = f"{len(rows)} rows; from 4096^3 up {slowest['torch_ratio']:.3f} of torch or better ({shape})"
    else:
        stage.summary = f"{len(rows)} rows"


def bench_op(stage: Stage, out: Path, options: Options, *, script: str) -> None:
    """A comparison of another operation with PyTorch's; what it has measured when its time is over counts."""
    results, log = out / f"{script}.json", out / f"{script}.log"
    for path in (results, log):
        path.unlink(missing_ok=True)
    seconds = options.seconds(stage.name)
    words = [*_benchmark(script, results, options), f"--seconds={max(1, seconds - 60)}"]
    status: int | None
    try:
        status = run(words, log, seconds, BENCHMARKS)
    except subprocess.TimeoutExpired:
        status = None
    if not results.is_file():
        stage.summary = f"exit status {status}; nothing was measured"
        return
    measured = json.loads(results.read_text(encoding="utf-8"))
    means = measured.get("means") or measured.get("averages") or {}
    stage.results = {
        "exit_status": status,
        "rows": len(measured["rows"]),
        "means": means,
        "failures": measured.get("failures", [])[:FAILURES_SHOWN],
    }
    stage.ok = status == 0 and bool(measured["rows"])
    said = [f"{name} {mean:.3f}" for name, mean in means.items()]
    stopped = ["stopped"] if status is None else []
    stage.summary = "; ".join([f"{len(measured['rows'])} rows", ", ".join(said), *stopped])


def _benchmark(script: str, results: Path, options: Options) -> list[str]:
    quick = ["--quick"] if options.quick else []
    return [sys.executable, f"benchmarks/{script}.py", "--out", str(results), *quick]


# They import each other by their plain names, which Python's safe path (-P) would not find.
BENCHMARKS = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH"))))}

STAGES: dict[str, Callable[[Stage, Path, Options], None]] = {
    "compile": compile_table,
    "compile-older": compile_table,
    "compile-trees": compile_table,
    "compile-cells": compile_table,
    "tests": gpu_tests,
    "sanitizer": sanitizer,
    "sanitizer-ops": sanitizer_ops,
    "synccheck": sanitizer_ops,
    "jit": functools.partial(gpu_tests, compiled=True),
    "trees": functools.partial(gpu_tests, compiled=True),
    "cells": functools.partial(gpu_tests, compiled=True),
    "jit-sanitizer": functools.partial(sanitizer, compiled=True),
    "bench": bench,
    "bench-fp8": functools.partial(bench_op, script="fp8"),
    "bench-grouped": functools.partial(bench_op, script="grouped"),
    "bench-conv": functools.partial(bench_op, script="conv"),
    "bench-epilogue": functools.partial(bench_op, script="epilogue"),
    "bench-layers": functools.partial(bench_op, script="layers"),
    "jit-bench": jit_bench,
}
OF_FILES = ("tests", "jit", "trees", "cells", "sanitizer-ops", "synccheck")
"""The stages that --files restricts."""


def _pytest(seconds: int = TEST_TIMEOUT) -> list[str]:
    words = [sys.executable, "-m", "pytest"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        # By a thread, which ends the process: a signal's handler would wait for a kernel that hangs.
        words += [f"--timeout={seconds}", "--timeout-method=thread"]
    return words


def run(
    words: Sequence[str],
    log: Path,
    seconds: float,
    changes: Mapping[str, str] = MappingProxyType({}),
    *,
    shown: bool = True,
) -> int:
    """Runs a command in the repository, its output in a file and its end on the terminal; returns its exit status.

    Raises:
        subprocess.TimeoutExpired: it took longer; it and its children have been stopped.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **changes}
    with log.open("ab") as target:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=target, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except BaseException:
            # Its children too: compute-sanitizer runs what it watches as one.
            stop(process)
            raise
        finally:
            target.flush()
            if shown:
                show_tail(log)
    return status


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stops a process and the others of its session: first so that it can still report, then for good."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(10)
        if process.poll() is not None:
            return


def show_tail(log: Path, lines: int = 15) -> None:
    """The end of a log, on the terminal."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print("\n".join(text[-lines:]), flush=True)


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: on the path, in CUDA_HOME, or where toolkits are usually installed."""
    found = shutil.which(name)
    if found:
        return found
    homes = [Path(os.environ[v]) for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)] + [Path("/usr/local/cuda")]
    for home in homes:
        for place in (
            home / "bin" / name,
            home / "compute-sanitizer" / name,
            home / "extras" / "compute-sanitizer" / name,
        ):
            if place.is_file():
                return str(place)
    return None


def machine() -> dict[str, Any]:
    """The facts that the results depend on, found in a process of its own so that this one never holds the GPU."""
    words = [sys.executable, "benchmarks/facts.py"]
    changed = {**os.environ, **BENCHMARKS}
    try:
        completed = subprocess.run(
            words, cwd=ROOT, env=changed, capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired as error:
        return {"machine": {"problem": str(error)}}
    if completed.returncode:
        return {"machine": {"problem": completed.stderr.strip()[-2000:]}}
    facts: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return facts


def packages() -> dict[str, str]:
    """Versions of what compiles and what is compared with."""
    found = {}
    for name in (
        "torch",
        "cuda-pathfinder",
        "nvidia-cuda-nvrtc",
        "nvidia-cublas",
        "nvidia-cudnn-cu13",
        "pytest",
    ):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


if __name__ == "__main__":
    sys.exit(main())
