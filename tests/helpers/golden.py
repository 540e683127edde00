"""Today's behaviour as files: which kernel serves a call, how, with which arguments, or why none does.

    python tests/helpers/golden.py            # what differs from tests/golden
    python tests/helpers/golden.py --update   # writes tests/golden anew

A change that only moves code leaves the files as they are, byte for byte; one that means to change behaviour updates
them in a commit of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HELPERS = Path(__file__).resolve().parent
FOLDER = HELPERS.parent / "golden"
COMMAND = "python tests/helpers/golden.py --update"
KERNELS = "kernels"
MANY_WORDS = 600  # characters of a text of which what differs is shown alone


def lines(archs: Sequence[str] = ()) -> dict[str, list[str]]:
    """The files' lines as they are now, by the file's name without its ending.

    Args:
        archs: of these archs alone; none is all, and the names of kernels.
    """
    import golden_gpu
    from atomr_cutlass import SmArch

    chosen = [arch for arch in SmArch if not archs or arch.value in archs]
    with tempfile.TemporaryDirectory() as folder:
        library = golden_gpu.make_library(Path(folder))

        def work(arch: SmArch) -> list[str]:
            process = subprocess.run(
                [sys.executable, str(Path(__file__).resolve()), "--worker", arch.value, str(library)],
                env=golden_gpu.environment(library, arch, Path(folder)),
                capture_output=True,
                text=True,
                check=False,
            )
            if process.returncode != 0:
                message = f"{arch.value}: exit status {process.returncode}\n{process.stderr}"
                raise RuntimeError(message)
            return process.stdout.splitlines()

        with ThreadPoolExecutor(2) as pool:
            # The longest first.
            made = [
                line
                for part in pool.map(work, sorted(chosen, key=lambda arch: arch.value != "sm_90a"))
                for line in part
            ]
    files: dict[str, list[str]] = {}
    for line in made:
        files.setdefault(json.loads(line)["case"].partition("/")[0], []).append(line)
    if not archs:
        files[KERNELS] = _kernels()
    return {name: sorted(found) for name, found in files.items()}


def _kernels() -> list[str]:
    """The kernels of each preset and arch: a digest of all names, and for each name the digest that it ends with."""
    from atomr_cutlass import SmArch
    from atomr_cutlass.generator.matrix import expand

    made = []
    for arch in SmArch:
        for preset in ("smoke", "default", "full"):
            names = sorted(key.name for key in expand(preset, [arch]))
            digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
            short = " ".join(name.rpartition("_")[2] for name in names)
            made.append(
                _line(
                    {"case": f"{KERNELS}/{arch.value}/{preset}", "count": len(names), "digest": digest, "names": short}
                )
            )
    return made


def _line(record: Mapping[str, object]) -> str:
    return json.dumps(record, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def _work(arch_name: str, library: str) -> None:
    """Prints the lines of an arch, in a process with `golden_gpu.environment`."""
    import golden_cases
    import golden_gpu
    from atomr_cutlass import SmArch

    arch = SmArch(arch_name)
    gpu = golden_gpu.Gpu(Path(library), arch)
    for case in golden_cases.cases(arch):
        made = gpu.record(case.table, case.call, case.operands)
        print(_line({"case": case.name, "table": case.table, "call": case.text, **made}))


def recorded() -> dict[str, list[str]]:
    """The lines of the files."""
    return {file.stem: file.read_text(encoding="utf-8").splitlines() for file in sorted(FOLDER.glob("*.jsonl"))}


def differences(before: Iterable[str], after: Iterable[str]) -> list[str]:
    """The differences, a text for each case."""
    old, new = ({(case := json.loads(line))["case"]: case for line in given} for given in (before, after))
    told = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            told.append(f"{name}: {'new' if name in new else 'gone'}")
            continue
        was, now = old[name], new[name]
        fields = [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]
        if fields:
            told.append("\n".join([f"{name}, table {now.get('table')}: {now.get('call')}"]))
            told[-1] += "".join(f"\n  {key} {_changed(was.get(key), now.get(key))}" for key in fields)
    return told


def _changed(was: object, now: object) -> str:
    if isinstance(was, str) and isinstance(now, str) and len(now) > MANY_WORDS:
        lost, gained = ([word for word in a.split() if word not in b.split()] for a, b in ((was, now), (now, was)))
        return f"lost {' '.join(lost) or 'nothing'}, gained {' '.join(gained) or 'nothing'}"
    return f"was {json.dumps(was)}\n  {'':4} is {json.dumps(now)}"


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the files")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(*options.worker)
        return 0
    now, before = lines(), recorded()
    told = [
        text
        for name in sorted(now.keys() | before.keys())
        for text in differences(before.get(name, []), now.get(name, []))
    ]
    if options.update:
        FOLDER.mkdir(exist_ok=True)
        for file in FOLDER.glob("*.jsonl"):
            file.unlink()
        for name, found in now.items():
            (FOLDER / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
        print(f"{sum(map(len, now.values()))} cases, {len(told)} of them different from before")
        return 0
    print("\n".join([*told, f"{len(told)} cases differ"]))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(_main())
