"""The facts that measured numbers depend on: the machine, the software and the date. Prints them as JSON when run."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import atomr_cutlass as ac
from atomr_cutlass import _core
from atomr_cutlass.pipeline import devices

ROOT = Path(__file__).resolve().parents[1]

DISTRIBUTIONS = ("torch", "numpy", "ml_dtypes", "cupy", "cupy-cuda13x", "cupy-cuda12x", "jax")


def now() -> str:
    """The date and time, in UTC."""
    return dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def deliver(results: dict[str, Any], path: Path | None) -> None:
    """Writes results as JSON into a file, or without one to standard output."""
    text = json.dumps(results, indent=1) + "\n"
    if path is None:
        print(text, end="")
    else:
        path.write_text(text, encoding="utf-8")


def machine() -> dict[str, Any]:
    """GPU, driver and software, as far as they can be found out."""
    table = ac.kernels()
    facts: dict[str, Any] = {
        "atomr_cutlass": ac.version(),
        "commit": _output("git", "rev-parse", "HEAD"),
        "changed": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
        "table": len(table),
        "table_archs": sorted({info.key.arch.value for info in table}),
        "table_cuda": sorted({info.cuda_version for info in table}),
        "python": platform.python_version(),
    }
    installed = {found.metadata["Name"]: found.version for found in importlib.metadata.distributions()}
    facts.update({name: installed[name] for name in DISTRIBUTIONS if name in installed})
    problem = devices.problem()
    if problem:
        return {"gpu": None, "problem": problem, **facts}
    device = devices.get(0)
    gpu = {
        "gpu": device.name,
        "gpus": _core.device_count(),
        "capability": ".".join(map(str, device.capability)),
        "multiprocessors": device.multiprocessors,
        "cuda_driver_api": _core.driver_version(),
    }
    query = ("driver_version", "power.limit", "clocks.max.sm", "memory.total")
    answer = _output("nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader", "--id=0")
    gpu.update(zip(("driver", "power_limit", "max_clock", "memory"), answer.split(", "), strict=False))
    return {**gpu, **facts}


def _output(*words: str) -> str:
    """The output of a command; empty where it is missing or fails."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    print(json.dumps({"date": now(), "machine": machine()}))
