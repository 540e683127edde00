"""Compiles the cells of a preset for archs and looks at their machine code: the expected instruction, and no spills.

    python tools/audit_table.py --archs '86;89;100a;120a' --out audit.jsonl
    python tools/audit_table.py --archs '100a' --out audit.jsonl --seconds 600 --jobs 12   # what gets done in it
    python tools/audit_table.py --archs '100a' --out more.jsonl --done audit.jsonl           # what is left

Needs no GPU: NVRTC compiles, cuobjdump and nvdisasm list. Each kernel adds a line to the file as it is done, so that a
run that is stopped has lost nothing and another goes on from there. `tools/verified.py` takes the files into the
package's records; what has faults is recorded in the file alone.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

LONGEST_SECONDS = 900.0
CHECKED = "instruction, spills, stack"


def main() -> int:
    """Audits; returns 1 if a kernel did not compile or has faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--archs", required=True, help="targets such as 86;100a")
    parser.add_argument("--out", type=Path, required=True, help="file that gets a line for each kernel")
    parser.add_argument("--preset", default="full")
    parser.add_argument("--kernels", default="", help="only names that match: * between substrings, comma-separated")
    parser.add_argument("--done", type=Path, action="append", default=[], help="an earlier run's; may be repeated")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="kernels at once")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no kernel after this time")
    parser.add_argument("--longest-first", action="store_true", help="begin with those that take longest to compile")
    parser.add_argument("--limit", type=int, default=0, help="at most so many kernels; 0: all")
    arguments = parser.parse_args()

    # In a process that only compiles, nothing of the package is imported.
    from atomr_cutlass.generator.matrix import family
    from atomr_cutlass.generator.selection import Selection

    keys = Selection(preset=arguments.preset, archs=arguments.archs, kernels=arguments.kernels).keys()
    audit = Audit(arguments.out)
    found = done([arguments.out, *arguments.done])
    left = [key for key in keys if audit.identity(key) not in found]
    left.sort(key=lambda key: family(key).compile_seconds, reverse=arguments.longest_first)
    left = left[: arguments.limit or None]
    print(f"{len(keys)} kernels, {len(keys) - len(left)} done before or left out", flush=True)
    began = time.monotonic()
    counts = {"right": 0, "wrong": 0, "left": 0}

    def audit_kernel(key: Any) -> None:
        if time.monotonic() - began > arguments.seconds:
            counts["left"] += 1
            return
        faults = audit.kernel(key)
        counts["wrong" if faults else "right"] += 1
        for fault in faults:
            print(f"{key.name}: {fault}", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for _ in pool.map(audit_kernel, left):
            pass
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"{said}; {time.monotonic() - began:.0f} s with {arguments.jobs} at once")
    return 1 if counts["wrong"] else 0


def done(files: Iterable[Path]) -> set[tuple[str, ...]]:
    """The identities in the lines of earlier runs; a line that was cut short is ignored."""
    found = set()
    for path in files:
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                    found.add(tuple(str(record[name]) for name in ("kernel", "source", "cutlass", "compiler")))
                except (ValueError, KeyError, TypeError):  # noqa: PERF203 - one bad line is not the others' end
                    continue
    return found


class Audit:
    """Compiles kernels, looks at them and writes down what it finds."""

    def __init__(self, out: Path) -> None:
        from atomr_cutlass.generator import audit
        from atomr_cutlass.jit.compiler import OPTIONS
        from atomr_cutlass.jit.toolchain import OURS, toolchain
        from atomr_cutlass.pipeline import verification

        self._tools = toolchain()
        self._options = [*OPTIONS, *(f"-I{folder}" for folder in self._tools.include)]
        self._ours = OURS
        self._cutlass = verification.cutlass_identity()
        self._compiler = self._tools.compiler
        try:
            self._environment = audit.disassemblers()
        except FileNotFoundError as error:
            raise SystemExit(str(error)) from error
        self._date = dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
        self._lock = threading.Lock()
        self._out = out
        out.parent.mkdir(parents=True, exist_ok=True)
        # A line that was cut short must not swallow the next.
        if out.is_file() and not out.read_bytes().endswith(b"\n") and out.stat().st_size:
            with out.open("ab") as target:
                target.write(b"\n")

    def identity(self, key: Any) -> tuple[str, ...]:
        """The identity by which the record of a key is found."""
        from atomr_cutlass.generator import content

        return key.name, content.source_digest(key, self._ours), self._cutlass, self._compiler

    def kernel(self, key: Any) -> list[str]:
        """Audits a kernel, and returns its faults."""
        from atomr_cutlass.pipeline import verification

        with tempfile.TemporaryDirectory(prefix="atomr-cutlass-audit-") as folder:
            image = Path(folder) / "kernel.cubin"
            start = time.monotonic()
            faults = self._compile(key, image)
            seconds = time.monotonic() - start
            if not faults:
                faults = self._faults(key, image)
            digest = hashlib.sha256(image.read_bytes()).hexdigest()[:16] if image.is_file() else ""
        name, source, cutlass, made_by = self.identity(key)
        record = verification.Record(
            kernel=name, how=verification.AUDITED, source=source, cutlass=cutlass, compiler=made_by,
            on=key.arch.value, driver="", date=self._date, checked=CHECKED, image=digest,
        )  # fmt: skip
        line = {**asdict(record), "seconds": round(seconds, 1), **({"faults": faults} if faults else {})}
        with self._lock, self._out.open("a", encoding="utf-8") as target:
            target.write(json.dumps(line) + "\n")
        return faults

    def _compile(self, key: Any, image: Path) -> list[str]:
        from atomr_cutlass.generator.render import render
        from atomr_cutlass.jit import worker

        request = {
            "worker": worker.__file__,
            "library": str(self._tools.nvrtc),
            "name": key.name,
            "source": render(key, flavour="nvrtc")[0],
            "options": [f"--gpu-architecture={key.arch.value}", *self._options],
        }
        request_file = image.with_name("request.json")
        request_file.write_text(json.dumps(request), encoding="utf-8")
        process = subprocess.run(
            [sys.executable, "-I", __file__, "--compile", str(request_file), str(image)],
            capture_output=True, text=True, check=False, timeout=LONGEST_SECONDS,
        )  # fmt: skip
        if process.returncode == 0 and image.is_file():
            return []
        said = [line for line in process.stderr.splitlines() if line.strip()]
        error = next((line for line in said if "error" in line), said[-1] if said else "no message")
        return [f"it does not compile (exit status {process.returncode}): {error[:500]}"]

    def _faults(self, key: Any, image: Path) -> list[str]:
        from atomr_cutlass.generator import audit

        functions = {function.name: function for function in audit.read_sass(self._listing("-sass", image))}
        # The listing of a file that holds one image does not name its arch.
        resources = {
            name: found for (name, _), found in audit.read_resources(self._listing("-res-usage", image)).items()
        }
        if key.name not in functions:
            return [f"no machine code of it among {', '.join(functions) or 'none'}"]
        return audit.faults(key, functions[key.name], resources.get(key.name, {}))

    def _listing(self, option: str, image: Path) -> list[str]:
        command = ["cuobjdump", option, str(image)]
        listed = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=True, timeout=300)
        return listed.stdout.splitlines()


def compile_one(request_file: str, image: str) -> int:
    """In a process of its own, since NVRTC keeps its memory: the image of a request."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    spec = importlib.util.spec_from_file_location("worker", request["worker"])
    if spec is None or spec.loader is None:
        raise ImportError(request["worker"])
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    made, log = worker.compile_source(
        request["library"], request["name"], request["source"], request["options"], "cubin"
    )
    print(log, file=sys.stderr)
    if made is None:
        return 1
    Path(image).write_bytes(made)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        raise SystemExit(compile_one(*sys.argv[2:]))
    raise SystemExit(main())
