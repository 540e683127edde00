"""One pass on a machine with a GPU: the GPU tests, compute-sanitizer over a subset of them, and the benchmark.

    python tools/gpu_pass.py --out results

Goes on when a stage fails, and exits with 1 if any did. The folder receives gpu_pass.json and each stage's own files.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

TIMEOUTS = {
    "tests": 290,
    "sanitizer": 110,
    "bench": 170,
    "compile": 590,
    "jit": 400,
    "jit-sanitizer": 150,
    "jit-bench": 290,
}
"""Seconds that a stage may take."""
USUAL = ("tests", "sanitizer", "bench")
QUICK_TIMEOUT = 120
TEST_TIMEOUT = 60

FAILURES_SHOWN = 40
PROCESSES_A_FILE = 6
LOST = "context was lost"  # tests/gpu/conftest.py, of tests that it did not run after a fault
SANITIZER_ERRORS = 99  # its exit status when it has found errors


@dataclass
class Stage:
    """What a stage did."""

    name: str
    ok: bool = False
    seconds: float = 0.0
    summary: str = ""
    results: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    """Runs the stages asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument(
        "--only", default="", help=f"comma-separated stages of {', '.join(STAGES)}; default: {', '.join(USUAL)}"
    )
    arguments = parser.parse_args()
    wanted = [name.strip() for name in arguments.only.split(",") if name.strip()] or list(USUAL)
    for name in wanted:
        if name not in STAGES:
            parser.error(f"unknown stage {name!r}; valid: {', '.join(STAGES)}")
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    report: dict[str, Any] = {**machine(), "quick": arguments.quick, "stages": {}}
    stages = []
    for name in wanted:
        print(f"== {name}", flush=True)
        stage, start = Stage(name), time.monotonic()
        try:
            STAGES[name](stage, out, arguments.quick)
        except subprocess.TimeoutExpired as error:
            stage.ok, stage.summary = False, f"stopped after {error.timeout:.0f} s"
        except Exception as error:  # noqa: BLE001 - the other stages still have something to say
            stage.ok, stage.summary = False, f"{type(error).__name__}: {error}"
        stage.seconds = round(time.monotonic() - start, 1)
        stages.append(stage)
        report["stages"][name] = {
            "ok": stage.ok, "seconds": stage.seconds, "summary": stage.summary, **stage.results,
        }  # fmt: skip
        # Written after every stage, so that an interrupted pass leaves what it has.
        (out / "gpu_pass.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print()
    for stage in stages:
        print(f"{'ok  ' if stage.ok else 'FAIL'}  {stage.name:<10}{stage.seconds:>7.1f} s  {stage.summary}")
    return 0 if all(stage.ok for stage in stages) else 1


# ----------------------------------------------------------------------------------------------------------------------
# Stages


def gpu_tests(stage: Stage, out: Path, quick: bool, *, compiled: bool = False) -> None:
    """The tests with the marker `gpu`: a process for each file, and more for what a lost context left over.

    `compiled`: all of them over kernels that are compiled at run time, where neither nvcc nor a host compiler is to be
    found; the stage `compile` has them compiled side by side before. Otherwise without the tests of the run-time
    compiler.
    """
    log, xml = out / f"{stage.name}.log", out / f"{stage.name}.xml"
    log.unlink(missing_ok=True)
    suites = ET.Element("testsuites")
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + limit(stage.name, quick)
    words = [*_pytest(), "-m", "gpu", "-q", "-rf", "--tb=short", *(["-k", "not large"] if quick else [])]
    crashed = []
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    environment = without_compilers() if compiled else {}
    for file in files if compiled else [file for file in files if file.stem != "test_jit"]:
        path = file.relative_to(ROOT).as_posix()
        wanted = [path]
        for attempt in range(PROCESSES_A_FILE):
            last = attempt == PROCESSES_A_FILE - 1
            try:
                found = _pytest_process([*words, *wanted], log, deadline - time.monotonic(), suites, environment)
            except subprocess.TimeoutExpired:
                found = []
                crashed.append(f"{path}: out of time")
            else:
                if not found:
                    crashed.append(f"{path}: the process ended without a report")
            lost = [] if last else [one for one in found if LOST in one.message]
            outcomes += [one for one in found if one not in lost]
            if not lost:
                break
            wanted = [f"{path}::{one.name}" for one in lost]
    ET.ElementTree(suites).write(xml, encoding="utf-8")
    counts = dict(Counter(one.outcome for one in outcomes))
    failures = [{"test": f"{one.place}::{one.name}", "message": one.message[:600]} for one in outcomes if one.failed]
    slowest = sorted(outcomes, key=lambda one: -one.seconds)[:10]
    stage.results = {
        "counts": counts,
        "crashed": crashed,
        "failures": failures[:FAILURES_SHOWN],
        "skipped": dict(Counter(one.message[:200] for one in outcomes if one.outcome == "skipped").most_common(20)),
        "slowest": [{"test": one.name, "seconds": round(one.seconds, 2)} for one in slowest],
    }
    stage.ok = not crashed and not failures and counts.get("passed", 0) > 0
    summary = [f"{count} {what}" for what, count in sorted(counts.items())]
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


def without_compilers() -> dict[str, str]:
    """The environment of tests of the run-time compiler: a PATH on which there is nothing."""
    empty = tempfile.mkdtemp()
    return {"PATH": empty, "ATOMR_CUTLASS_TEST_JIT": "1"}


def _pytest_process(
    words: Sequence[str], log: Path, seconds: float, suites: ET.Element, environment: dict[str, str]
) -> list[Outcome]:
    """Runs pytest, adds its report to `suites`, and returns how each test went; nothing when it left no report."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "report.xml"
        run([*words, f"--junit-xml={xml}"], log, max(1.0, seconds), environment)
        if not xml.is_file():
            return []
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
    return outcomes


def compile_table(stage: Stage, out: Path, quick: bool) -> None:
    """Every kernel of the table, compiled at run time."""
    results, log = out / "compile.json", out / "compile.log"
    for path in (results, log):
        path.unlink(missing_ok=True)
    words = [sys.executable, "tools/compile_table.py", "--out", str(results)]
    environment = {name: value for name, value in without_compilers().items() if name == "PATH"}
    status = run(words, log, limit(stage.name, quick), environment)
    measured = json.loads(results.read_text(encoding="utf-8"))
    stage.results = {name: value for name, value in measured.items() if name != "each"}
    stage.ok = status == 0 and measured["kernels"] > 0
    stage.summary = "{kernels} kernels, {failed} failed, {jobs} at once".format(**measured)


def jit_bench(stage: Stage, out: Path, quick: bool) -> None:
    """What compiling, finding and launching a kernel at run time costs."""
    results, log = out / "jit.json", out / "jit.log"
    for path in (results, log):
        path.unlink(missing_ok=True)
    words = [sys.executable, "benchmarks/jit.py", "--out", str(results), *(["--quick"] if quick else [])]
    status = run(words, log, limit(stage.name, quick))
    stage.ok = status == 0 and results.is_file()
    stage.summary = f"exit status {status}"


def sanitizer(stage: Stage, out: Path, quick: bool, *, compiled: bool = False) -> None:
    """compute-sanitizer's memcheck over the tests with the marker `sanitizer`."""
    tool = find_tool("compute-sanitizer")
    if tool is None:
        raise RuntimeError("compute-sanitizer was not found: it comes with the CUDA toolkit")
    words = [
        tool,
        "--tool",
        "memcheck",
        f"--error-exitcode={SANITIZER_ERRORS}",
        *_pytest(limit(stage.name, quick)),
        "-m",
        "sanitizer",
        "-q",
        "-s",
    ]
    words += ["-p", "no:cacheprovider", "tests/gpu/test_sanitizer.py"]
    log = out / f"{stage.name}.log"
    log.unlink(missing_ok=True)
    # Its own start-up script needs a PATH.
    status = run(words, log, limit(stage.name, quick), {"ATOMR_CUTLASS_TEST_JIT": "1"} if compiled else {})
    text = log.read_text(encoding="utf-8", errors="replace")
    summaries = re.findall(r"ERROR SUMMARY: (\d+) error", text)
    outcome = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped).*?)(?: =+)?$", text, re.MULTILINE)
    errors = sum(map(int, summaries))
    stage.results = {"exit_status": status, "errors": errors, "tests": outcome[-1] if outcome else ""}
    stage.ok = status == 0 and bool(summaries) and errors == 0
    stage.summary = f"{errors if summaries else 'unknown'} errors; {stage.results['tests'] or f'exit status {status}'}"


def bench(stage: Stage, out: Path, quick: bool) -> None:
    """The comparison with `torch.matmul`."""
    results = out / "gemm.json"
    results.unlink(missing_ok=True)
    words = [sys.executable, "benchmarks/gemm.py", "--out", str(results), *(["--quick"] if quick else [])]
    log = out / "gemm.log"
    log.unlink(missing_ok=True)
    status = run(words, log, limit(stage.name, quick))
    if not results.is_file():
        stage.summary = f"exit status {status}; nothing was measured"
        return
    measured = json.loads(results.read_text(encoding="utf-8"))
    rows = measured["rows"]
    stage.results = {"exit_status": status, "rows": len(rows), "host": measured.get("host", {})}
    stage.ok = status == 0 and bool(rows)
    large = [row for row in rows if row["dtype"] in ("bf16", "f16") and min(row["shape"]) >= 4096]
    if large:
        slowest = min(large, key=lambda row: row["ratio"])
        shape = "x".join(map(str, slowest["shape"]))
        stage.summary = f"{len(rows)} rows; from 4096^3 up {slowest['ratio']:.3f} of torch or better ({shape})"
    else:
        stage.summary = f"{len(rows)} rows"


STAGES: dict[str, Callable[[Stage, Path, bool], None]] = {
    "tests": gpu_tests,
    "sanitizer": sanitizer,
    "bench": bench,
    "compile": compile_table,
    "jit": functools.partial(gpu_tests, compiled=True),
    "jit-sanitizer": functools.partial(sanitizer, compiled=True),
    "jit-bench": jit_bench,
}


def limit(name: str, quick: bool) -> int:
    """Seconds that a stage may take."""
    return min(TIMEOUTS[name], QUICK_TIMEOUT) if quick else TIMEOUTS[name]


def _pytest(seconds: int = TEST_TIMEOUT) -> list[str]:
    words = [sys.executable, "-m", "pytest"]
    if importlib.util.find_spec("pytest_timeout") is not None:
        # By a thread, which ends the process: a signal's handler would wait for a kernel that hangs.
        words += [f"--timeout={seconds}", "--timeout-method=thread"]
    return words


def run(words: Sequence[str], log: Path, seconds: float, changes: Mapping[str, str] = MappingProxyType({})) -> int:
    """Runs a command in the repository, its output in a file and on the terminal; returns its exit status.

    Raises:
        subprocess.TimeoutExpired: it took longer; it and its children have been stopped.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | changes
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
    """What the results depend on, asked in a process of its own so that this one never holds the GPU."""
    words = [sys.executable, "benchmarks/facts.py"]
    try:
        asked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    except subprocess.TimeoutExpired as error:
        return {"machine": {"problem": str(error)}}
    if asked.returncode:
        return {"machine": {"problem": asked.stderr.strip()[-2000:]}}
    facts: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return facts


if __name__ == "__main__":
    sys.exit(main())
