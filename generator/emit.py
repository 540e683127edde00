"""Writes sources, the row table and kernels.cmake into a folder: only the changed files, removing the stale ones.

Each cell has a source, `src/ARCH/NAME.cu`. Several cells of a family are compiled as one unit, `units/ARCH/*.cu`, which
includes their sources, since much of a compilation is reading CUTLASS's headers, for host and device.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import headers
from .archs import SmArch
from .content import source_digest
from .key import KernelKey
from .matrix import family
from .render import render
from .selection import Selection

OURS = Path(__file__).resolve().parents[1] / "cpp" / "include" / "atomr_cutlass"
"""The headers that a build compiles kernels with."""

UNIT_CELLS = 8
LONG_SECONDS = 4.0
"""Most cells of a unit; half as many if NVRTC takes longer than this for each, and one if it takes four times as long:
larger units save little, and would leave processors idle at the end of a build."""

_MEMBER = re.compile(r'^#include "\.\./\.\./src/\w+/(\w+)\.cu"$', re.MULTILINE)


def emit(selection: Selection, folder: Path, cutlass: Path | None = None) -> list[KernelKey]:
    """Writes the build inputs of a selection below `folder`.

    Args:
        selection: of kernels.
        folder: to write to.
        cutlass: the folder of CUTLASS's headers; None: the pinned ones.

    Returns:
        The keys written.

    Raises:
        ValueError: the selection is invalid or empty, or has kernels that this CUTLASS cannot compile; nothing is
            written then.
        headers.HeadersError: the folder has no headers of CUTLASS.
    """
    keys = selection.keys()
    version = headers.cutlass_version(cutlass) if cutlass else headers.TRIED[0]
    objections = [text for text in (headers.objection(key, version) for key in keys) if text]
    if objections:
        raise ValueError(f"{'; '.join(objections)}: leave them out by ATOMR_CUTLASS_EXCLUDE_KERNELS")
    ptx = set(selection.ptx_list())
    folder = folder.resolve()
    digests = {key: source_digest(key, OURS) for key in keys}
    by_arch: dict[SmArch, list[KernelKey]] = defaultdict(list)
    wanted: dict[Path, str] = {}
    units: dict[SmArch, list[Path]] = {}
    for key in keys:
        by_arch[key.arch].append(key)
        path = folder / "src" / key.arch.value / f"{key.name}.cu"
        wanted[path] = render(key, ptx=key.arch in ptx, content=digests[key])[0]
    for arch, cells in by_arch.items():
        present = folder / "units" / arch.value
        texts = [unit_source(unit) for unit in units_of(cells, sorted(present.glob("*.cu")))]
        units[arch] = [present / f"{name}.cu" for name, _ in texts]
        wanted |= zip(units[arch], (text for _, text in texts), strict=True)
    wanted[folder / "table.cpp"] = table(keys)
    wanted[folder / "pack.json"] = json.dumps([{**key.to_dict(), "source": digests[key]} for key in keys], indent=0)
    wanted[folder / "kernels.cmake"] = _cmake(by_arch, units, ptx)

    for stale in {*(folder / "src").glob("*/*.cu"), *(folder / "units").glob("*/*.cu")} - set(wanted):
        stale.unlink()
    for path, text in wanted.items():
        _write_if_changed(path, text)
    return keys


def members(unit: Path) -> list[str]:
    """The names of the cells that are compiled in a unit, a source that `emit` wrote."""
    return _MEMBER.findall(unit.read_text(encoding="utf-8"))


def _write_if_changed(path: Path, text: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def units_of(cells: Sequence[KernelKey], present: Iterable[Path] = ()) -> list[list[KernelKey]]:
    """The cells of one arch grouped into units, those first that take longest.

    Args:
        cells: of one arch.
        present: existing units, kept if all their cells are selected, so that a new cell recompiles no others.
    """
    left = {key.name: key for key in cells}
    units = []
    for path in present:
        names = members(path)
        if names and all(name in left for name in names):
            units.append([left.pop(name) for name in names])
    # Cells of a template whose first header differs need another unit: that header has to precede all others.
    by_headers: dict[tuple[str, ...], list[KernelKey]] = defaultdict(list)
    for key in left.values():
        begins_with = (family(key).template, *_include_lines(render(key)[0]))
        by_headers[begins_with].append(key)
    for alike in by_headers.values():
        seconds = _seconds(alike[0])
        most = UNIT_CELLS if seconds <= LONG_SECONDS else UNIT_CELLS // 2 if seconds <= 4 * LONG_SECONDS else 1
        count = -(-len(alike) // most)
        units += [alike[len(alike) * i // count : len(alike) * (i + 1) // count] for i in range(count)]
    return sorted(units, key=lambda unit: -sum(map(_seconds, unit)))


def _seconds(key: KernelKey) -> float:
    """The approximate compilation time of a cell; one with a body for each width takes as long as a few others."""
    return family(key).compile_seconds * (4 if key.scheduler == "fitted" else 1)


def unit_source(cells: Sequence[KernelKey]) -> tuple[str, str]:
    """A unit's name, made of its family and cells, and its text, for a folder `units/ARCH`."""
    import hashlib  # loads OpenSSL, which importing the package need not

    names = [key.name for key in cells]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:10]
    # All headers precede the redefinition of names that cells share.
    headers = dict.fromkeys(line for key in cells for line in _include_lines(render(key)[0]))
    parts = [f"{line}\n" for line in headers]
    for number, key in enumerate(cells):
        parts.append(
            f"\n#define Cell Cell{number}\n#define Tree Tree{number}\n"
            f'#include "../../src/{key.arch.value}/{key.name}.cu"\n'
            "#undef Cell\n#undef Tree\n#undef ATOMR_CUTLASS_SETUP\n#undef ATOMR_CUTLASS_KERNELS\n"
        )
    return f"{family(cells[0]).template}_{digest}", "".join(parts)


def _include_lines(text: str) -> Iterable[str]:
    return (line for line in text.splitlines() if line.startswith("#include "))


def table(keys: Sequence[KernelKey]) -> str:
    """The C++ source of the table of some keys' rows."""
    declarations = "".join(f"extern const atomr_cutlass_row atomr_cutlass_row_{key.name};\n" for key in keys)
    entries = "".join(f"    &atomr_cutlass_row_{key.name},\n" for key in keys)
    # A C++ array cannot be empty: a null entry closes the table and is not counted.
    return (
        '#include "atomr_cutlass/table.h"\n\n'
        'extern "C" {\n'
        f"{declarations}"
        "}\n\n"
        "namespace atomr_cutlass {\n"
        f"const atomr_cutlass_row* const kRows[] = {{\n{entries}    nullptr,\n}};\n"
        f"const unsigned kRowCount = {len(keys)};\n"
        "}  // namespace atomr_cutlass\n"
    )


def _cmake(by_arch: dict[SmArch, list[KernelKey]], units: dict[SmArch, list[Path]], ptx: set[SmArch]) -> str:
    lines = [
        f'set(ATOMR_CUTLASS_CELL_ARCHS "{";".join(arch.value for arch in by_arch)}")',
        f"set(ATOMR_CUTLASS_CELL_COUNT {sum(map(len, by_arch.values()))})",
    ]
    for arch, keys in by_arch.items():
        targets = f"{arch.target}-real" + (f";{arch.target}-virtual" if arch in ptx else "")
        lines.append(f'set(ATOMR_CUTLASS_CUDA_ARCHITECTURES_{arch.value} "{targets}")')
        lines.append(f"set(ATOMR_CUTLASS_JOB_MB_{arch.value} {max(family(key).compile_mb for key in keys)})")
        lines.append(f"set(ATOMR_CUTLASS_UNITS_{arch.value}")
        lines.extend(f'  "{path.as_posix()}"' for path in units[arch])
        lines.append(")")
    return "\n".join(lines) + "\n"
