"""Builds a pack of kernels and writes how long it took and how large it is, as JSON.

    python tools/build_pack.py --arch 90a --out results            # every kernel for sm_90a, in results/full90a.so
    python tools/build_pack.py --arch 90a --out results --limit 550   # stops in time; the next run goes on from there
    python tools/build_pack.py --arch '80;90a' --preset default --out results --jobs 2 --costs generator/costs.json

The last takes what each cell cost into the data that `python -m generator --list` shows: the seconds that processors
worked and the bytes of GPU code as it is linked, each an even share of the unit that the cell is compiled in.

Needs CMake, Ninja, nvcc and a host compiler. Those of PyPI are found too, wherever this Python finds their packages.
Exit status: 0 the pack is there, 1 the build failed, 3 it was stopped at the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from generator import emit  # noqa: E402

FAILED, STOPPED = 1, 3


def main() -> int:
    """Builds and measures; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arch", required=True, help="compile targets, such as 90a or 80;90a")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pack, its report and the build folder")
    parser.add_argument("--preset", default="full", help="which kernels; default: full")
    parser.add_argument("--kernels", default="", help="patterns of names, as ATOMR_CUTLASS_KERNELS has them")
    parser.add_argument("--name", default="", help="of the pack; default: the preset and the archs, such as full90a")
    parser.add_argument("--jobs", type=int, default=0, help="compiles at once; default: what cores and memory allow")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds after which to stop")
    parser.add_argument("--cutlass-dir", type=Path, help="CUTLASS headers to use instead of the pinned ones")
    parser.add_argument("--cxx", default="", help="host compiler, such as /usr/bin/g++")
    parser.add_argument("--path", default="", help="folders to find CMake, Ninja and nvcc in first")
    parser.add_argument("--costs", type=Path, help="file of costs to take in what was compiled")
    parser.add_argument("--fresh", action="store_true", help="start again instead of going on")
    arguments = parser.parse_args()
    name = arguments.name or f"{arguments.preset}{arguments.arch.replace(';', '_')}"
    out: Path = arguments.out.resolve()
    folder = out / f"{name}.build"
    report_path = out / f"{name}.json"
    spent = folder / "spent.jsonl"
    if arguments.fresh:
        shutil.rmtree(folder, ignore_errors=True)
        report_path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)

    environment = dict(os.environ)
    if arguments.path:
        environment["PATH"] = os.pathsep.join(filter(None, (arguments.path, environment.get("PATH", ""))))
    try:
        cmake = program("cmake", arguments.path)
        ninja = program("ninja", arguments.path)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return FAILED
    defines = {
        "ATOMR_CUTLASS_PACK": name,
        "ATOMR_CUTLASS_PRESET": arguments.preset,
        "ATOMR_CUTLASS_ARCHS": arguments.arch,
        "ATOMR_CUTLASS_KERNELS": arguments.kernels,
        # A cache would answer instead of the compiler, whose time is measured.
        "ATOMR_CUTLASS_COMPILER_CACHE": "",
        "ATOMR_CUTLASS_OBJECTS": "",
        "CMAKE_CUDA_COMPILER_LAUNCHER": ";".join((sys.executable, str(ROOT / "tools" / "measured.py"), str(spent))),
        "CUTLASS_DIR": str(arguments.cutlass_dir.resolve()) if arguments.cutlass_dir else "",
        "CMAKE_MAKE_PROGRAM": ninja,
        "Python_EXECUTABLE": sys.executable,
    }
    if arguments.cxx:
        defines["CMAKE_CXX_COMPILER"] = arguments.cxx

    # Runs before this one, so that times of a build in pieces add up.
    runs: list[dict[str, Any]] = []
    if report_path.is_file():
        runs = json.loads(report_path.read_text(encoding="utf-8")).get("runs", [])
    log = out / f"{name}.log"
    start = time.monotonic()
    configure = [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(folder)]
    configure += [f"-D{knob}={value}" for knob, value in defines.items()]
    status = run(configure, log, environment, 0.0)
    configured = time.monotonic() - start
    if status == 0:
        words = [ninja, "-C", str(folder), *(["-j", str(arguments.jobs)] if arguments.jobs else [])]
        left = max(1.0, arguments.limit - configured) if arguments.limit else 0.0
        status = run(words, log, environment, left)
    runs.append(
        {
            "configure_seconds": round(configured, 1),
            "build_seconds": round(time.monotonic() - start - configured, 1),
            "processor_seconds": round(processor_seconds(), 1),
            "status": status,
        }
    )
    pack = folder / f"{name}.so"
    complete = status == 0 and pack.is_file()
    if complete:
        shutil.copy2(pack, out / pack.name)
    report = {
        "pack": name,
        "archs": arguments.arch,
        "preset": arguments.preset,
        "kernels": arguments.kernels,
        "complete": complete,
        **machine(folder),
        "jobs": arguments.jobs or pool_depth(folder),
        # Of all runs.
        "seconds": round(sum(run["configure_seconds"] + run["build_seconds"] for run in runs), 1),
        "processor_seconds": round(sum(run["processor_seconds"] for run in runs), 1),
        **units(folder, spent, environment),
        **({"bytes": pack.stat().st_size, "zipped_bytes": zipped(pack)} if complete else {}),
        "runs": runs,
    }
    report_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(
        f"{name}: {report['compiled']} of {report['cells']} cells in {report['seconds']} s"
        + (f", {report['bytes'] / 2**20:.1f} MiB, zipped {report['zipped_bytes'] / 2**20:.1f} MiB" if complete else "")
    )
    if arguments.costs:
        take_costs(arguments.costs, report)
    if complete:
        return 0
    return status if status == STOPPED else FAILED


def program(name: str, path: str = "") -> str:
    """A build tool that runs: on the path given, among this Python's packages, beside it, or on PATH.

    PyPI's wheels put their programs in other places when they are installed with --target, and a start-up script among
    them may name a Python that is not there: what counts is that it answers.

    Raises:
        FileNotFoundError: none does.
    """
    tried = []
    for candidate in candidates(name, path):
        tried.append(candidate)
        try:
            completed = subprocess.run([candidate, "--version"], capture_output=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if completed.returncode == 0:
            return candidate
    raise FileNotFoundError(
        f"no {name} that runs (tried: {', '.join(tried) or 'nothing'}); `pip install {name}` has it"
    )


def candidates(name: str, path: str) -> Iterator[str]:
    """Where a build tool may be."""
    if path:
        yield from filter(None, [shutil.which(name, path=path)])
    found = importlib.util.find_spec(name)
    for folder in (found.submodule_search_locations if found else None) or ():
        package = Path(folder)
        for place in (package / "data" / "bin" / name, package.parent / "bin" / name):
            if place.is_file():
                yield str(place)
    yield from filter(None, [shutil.which(name, path=str(Path(sys.executable).parent)), shutil.which(name)])


def run(words: Sequence[str], log: Path, environment: Mapping[str, str], seconds: float) -> int:
    """Runs a command, its output in a file and its end on the terminal; STOPPED when `seconds` (0: none) have passed.

    Ninja takes an interrupt as a request to remove what is half written and to keep the rest.
    """
    with log.open("ab") as target:
        target.write(f"== {' '.join(words)}\n".encode())
        target.flush()
        began = target.tell()
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=target, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds or None)
        except subprocess.TimeoutExpired:
            status = STOPPED
        finally:
            stop(process)
    with log.open("rb") as source:
        source.seek(began)
        text = source.read().decode(errors="replace").splitlines()
    print("\n".join(text[-4:] if status in (0, STOPPED) else text[-60:]), flush=True)
    return status


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its children, where it still runs."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(20)


def processor_seconds() -> float:
    """Time that the processors worked for the children of this process."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ----------------------------------------------------------------------------------------------------------------------
# The built kernels


def units(folder: Path, spent: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The compile times, of units of several cells: in all, by operation, generation and arch, and each."""
    wanted = {path.stem: path for path in (folder / "cells" / "units").glob("*/*.cu")}
    objects = {path.name.partition(".cu")[0]: path for path in folder.rglob("*.cu.o")}
    objects = {name: path for name, path in objects.items() if name in wanted}
    seconds = compile_seconds(folder)
    sizes = fatbin_bytes(list(objects.values()), environment)
    work = {}
    if spent.is_file():
        # The last line of a unit that was compiled twice counts.
        for line in spent.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            work[found["object"].partition(".cu")[0]] = found
    keys = listed(folder)
    groups: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"cells": 0, "compiled": 0, "bytes": 0, "compile_seconds": 0.0, "processor_seconds": 0.0}
    )
    each = []
    for name, source in sorted(wanted.items()):
        members = emit.members(source)
        key = keys.get(members[0], {})
        group = groups[" ".join((key.get("op", "?"), key.get("generation", "?"), source.parent.name))]
        group["cells"] += len(members)
        if name in objects:
            unit: dict[str, Any] = {
                "unit": name,
                "arch": source.parent.name,
                "bytes": sizes.get(objects[name], 0),
                "seconds": seconds.get(objects[name].name, 0.0),
                "processor_seconds": work.get(name, {}).get("processor_seconds", 0.0),
                "peak_mb": work.get(name, {}).get("peak_mb", 0),
                "cells": members,
            }
            each.append(unit)
            group["compiled"] += len(members)
            group["bytes"] += unit["bytes"]
            group["compile_seconds"] = round(group["compile_seconds"] + unit["seconds"], 1)
            group["processor_seconds"] = round(group["processor_seconds"] + unit["processor_seconds"], 1)
    return {
        "cells": sum(group["cells"] for group in groups.values()),
        "compiled": sum(group["compiled"] for group in groups.values()),
        "groups": dict(sorted(groups.items())),
        "units": sorted(each, key=lambda unit: -unit["seconds"]),
    }


def take_costs(path: Path, report: Mapping[str, Any]) -> None:
    """Takes what each cell of a report cost into a file of costs."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"cells": {}}
    for unit in report["units"]:
        share = len(unit["cells"])
        for name in unit["cells"]:
            known["cells"][name] = [round(unit["processor_seconds"] / share, 1), unit["bytes"] // share]
    how = {name: report[name] for name in ("date", "commit", "cores", "jobs", "compilers", "preset", "archs")}
    known["measured"] = [*known.get("measured", []), how]
    cells = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cost)}" for name, cost in sorted(known["cells"].items()))
    builds = ",\n".join(f"  {json.dumps(build)}" for build in known["measured"])
    path.write_text(f'{{\n "measured": [\n{builds}\n ],\n "cells": {{\n{cells}\n }}\n}}\n', encoding="utf-8")


def compile_seconds(folder: Path) -> dict[str, float]:
    """How long each object took, by its file's name, from Ninja's log; side by side with others."""
    log = folder / ".ninja_log"
    if not log.is_file():
        return {}
    found = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        fields = line.split("\t")
        if len(fields) >= 4 and fields[3].endswith(".cu.o"):
            found[Path(fields[3]).name] = round((int(fields[1]) - int(fields[0])) / 1000, 1)
    return found


def fatbin_bytes(objects: Sequence[Path], environment: Mapping[str, str]) -> dict[Path, int]:
    """Bytes of GPU code in each object, compressed as they will be in the pack; of the whole object without `size`."""
    found = {path: path.stat().st_size for path in objects}
    if not objects:
        return found
    try:
        words = ["size", "--format=sysv", *map(str, objects)]
        said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    except (OSError, subprocess.SubprocessError):
        return found
    current = None
    for line in said.splitlines():
        fields = line.split()
        if line.endswith(":") and len(fields) >= 2:
            current = Path(line.partition("  :")[0].strip())
        elif current in found and fields and fields[0] == ".nv_fatbin":
            found[current] = int(fields[1])
    return found


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    """The fields of the chosen keys, by name."""
    archs = sorted(path.name.removeprefix("sm_") for path in (folder / "cells" / "src").glob("*"))
    if not archs:
        return {}
    words = [sys.executable, "-B", "-m", "generator", "--list", "--json", "--preset=full", f"--archs={';'.join(archs)}"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    return {key["name"]: key for key in json.loads(said)["kernels"]}


def pool_depth(folder: Path) -> int:
    """How many compiles the build allows at once."""
    for path in (folder / "build.ninja", folder / "CMakeFiles" / "rules.ninja"):
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if "pool nvcc" in lines:
            return int(lines[lines.index("pool nvcc") + 1].rpartition("=")[2])
    return 0


def zipped(path: Path) -> int:
    """Bytes of a file as a wheel has it."""
    packer = zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION, zlib.DEFLATED, -zlib.MAX_WBITS)
    total = 0
    with path.open("rb") as source:
        while chunk := source.read(2**20):
            total += len(packer.compress(chunk))
    return total + len(packer.flush())


def machine(folder: Path) -> dict[str, Any]:
    """The machine and software that the figures depend on."""
    compilers = {}
    for path in (folder / "CMakeFiles").glob("*/CMake*Compiler.cmake"):
        for line in path.read_text(encoding="utf-8").splitlines():
            for language in ("CUDA", "CXX"):
                if line.startswith(f'set(CMAKE_{language}_COMPILER_VERSION "'):
                    compilers[language.lower()] = line.split('"')[1]
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": output("git", "rev-parse", "HEAD"),
        "cores": len(os.sched_getaffinity(0)),
        "compilers": compilers,
    }


def output(*words: str) -> str:
    """The output of a command; empty where it is missing or fails."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
