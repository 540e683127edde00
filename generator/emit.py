"""Writes sources, the row table and kernels.cmake into a folder: only what changed, removing what is stale."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from .archs import SmArch
from .content import source_digest
from .key import KernelKey
from .matrix import family
from .render import render
from .selection import Selection

OURS = Path(__file__).resolve().parents[1] / "cpp" / "include" / "atomr_cutlass"
"""The headers that a build compiles kernels with."""


def emit(selection: Selection, folder: Path) -> list[KernelKey]:
    """Writes the build inputs of a selection below `folder`.

    Returns:
        The keys written.

    Raises:
        ValueError: the selection is invalid or empty; nothing is written then.
    """
    keys = selection.keys()
    ptx = set(selection.ptx_list())
    folder = folder.resolve()
    by_arch: dict[SmArch, list[KernelKey]] = defaultdict(list)
    wanted: dict[Path, str] = {}
    sources: dict[SmArch, list[Path]] = defaultdict(list)
    for key in keys:
        by_arch[key.arch].append(key)
        path = folder / "src" / key.arch.value / f"{key.name}.cu"
        wanted[path] = render(key, ptx=key.arch in ptx, content=source_digest(key, OURS))[0]
        sources[key.arch].append(path)
    wanted[folder / "table.cpp"] = _table(keys)
    wanted[folder / "kernels.cmake"] = _cmake(by_arch, sources, ptx)

    for stale in set((folder / "src").glob("*/*.cu")) - set(wanted):
        stale.unlink()
    for path, text in wanted.items():
        _write_if_changed(path, text)
    return keys


def _write_if_changed(path: Path, text: str) -> None:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _table(keys: list[KernelKey]) -> str:
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


def _cmake(by_arch: dict[SmArch, list[KernelKey]], sources: dict[SmArch, list[Path]], ptx: set[SmArch]) -> str:
    lines = [
        f'set(ATOMR_CUTLASS_CELL_ARCHS "{";".join(arch.value for arch in by_arch)}")',
        f"set(ATOMR_CUTLASS_CELL_COUNT {sum(map(len, by_arch.values()))})",
    ]
    for arch, keys in by_arch.items():
        targets = f"{arch.target}-real" + (f";{arch.target}-virtual" if arch in ptx else "")
        lines.append(f'set(ATOMR_CUTLASS_CUDA_ARCHITECTURES_{arch.value} "{targets}")')
        lines.append(f"set(ATOMR_CUTLASS_JOB_MB_{arch.value} {max(family(key).compile_mb for key in keys)})")
        lines.append(f"set(ATOMR_CUTLASS_CELLS_{arch.value}")
        lines.extend(f'  "{path.as_posix()}"' for path in sources[arch])
        lines.append(")")
    return "\n".join(lines) + "\n"
