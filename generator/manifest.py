"""The manifest of a pack of either form: its tools, ABI, headers and kernels.

`python -m generator.manifest LIBRARY KERNELS NAME=VALUE...` seals a library that CMake has linked.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import records
from .key import KernelKey
from .seal import image, seal

ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / "cpp" / "include" / "atomr_cutlass"
LICENSE = "BSD-3-Clause"
"""The license of this package and of CUTLASS, if their texts are missing."""


def manifest(
    name: str,
    kernels: Iterable[Mapping[str, Any]],
    *,
    package: str,
    abi_version: int,
    layout: str,
    compiler: str,
    headers: Mapping[str, str],
    licenses: Mapping[str, str],
) -> dict[str, Any]:
    """The manifest, as JSON-ready values.

    Args:
        name: of the pack.
        kernels: the result of `kernel` for each.
        package: version of this package.
        abi_version: of the C ABI.
        layout: digest of the ABI's layout, in hexadecimal digits.
        compiler: such as `nvrtc 13.0.88`.
        headers: digests of the headers, by their owner.
        licenses: the license texts of the kernels, by their owner.
    """
    return {
        "name": name, "package": package, "abi_version": abi_version, "layout": layout, "compiler": compiler,
        "cuda_version": cuda_version(compiler), "headers": dict(headers), "licenses": dict(licenses),
        "kernels": list(kernels),
    }  # fmt: skip


def cuda_version(compiler: str) -> int:
    """The CUDA version of a compiler such as `nvrtc 13.0.88`: 13000; ValueError without one."""
    major, minor = map(int, re.findall(r"\d+", compiler)[:2])
    return 1000 * major + 10 * minor


def kernel(
    key: KernelKey, content: str, verified: Iterable[Mapping[str, Any]], images: Iterable[bytes] = (), **more: Any
) -> dict[str, Any]:
    """A kernel's part of a manifest.

    Args:
        key: the kernel's.
        content: the identity of its sources and compiler, as in rows of the table.
        verified: its verification records, as `Record.to_dict` returns them.
        images: its code; none for kernels of a library.
        more: further members.
    """
    parts = [image(code) for code in images]
    return {
        "name": key.name, **key.to_dict(), "content": content, "verified": list(verified), **more, "images": parts,
    }  # fmt: skip


def main(library: str, kernels: str, *facts: str) -> None:
    """Seals a library.

    Args:
        library: the file.
        kernels: the file of kernels that `emit` wrote.
        facts: `name`, `package`, `compiler`, `cutlass` (the identity of its headers), `headers` (their folder) and
            `license` (that of CUTLASS, or nothing), each as NAME=VALUE.
    """
    from . import headers

    path, given = Path(library), dict(text.split("=", 1) for text in facts)
    found: dict[str, list[records.Record]] = {}
    for record in records.read(ROOT / "python" / "atomr_cutlass" / "verified.jsonl"):
        found.setdefault(record.kernel, []).append(record)
    members = []
    for values in json.loads(Path(kernels).read_text(encoding="utf-8")):
        source = values.pop("source")
        key = KernelKey.from_dict(values)
        now = (source, given["cutlass"])
        verified = [record.to_dict() for record in found.get(key.name, ()) if (record.source, record.cutlass) == now]
        members.append(kernel(key, f"{source} {given['cutlass']} {given['compiler']}", verified))
    version, layout = _abi(path)
    texts = {"atomr_cutlass": ROOT / "LICENSE", "CUTLASS": Path(given["license"] or "nowhere")}
    made = manifest(
        given["name"],
        members,
        package=given["package"],
        abi_version=version,
        layout=layout,
        compiler=given["compiler"],
        headers={"cutlass": headers.digest(Path(given["headers"])), "atomr_cutlass": headers.digest(OURS)},
        licenses={who: text.read_text("utf-8") if text.is_file() else LICENSE for who, text in texts.items()},
    )
    # Beside it, since it is loaded.
    partial = path.with_suffix(".partial")
    partial.write_bytes(seal(path.read_bytes(), made))
    partial.chmod(path.stat().st_mode)
    partial.replace(path)


def _abi(library: Path) -> tuple[int, str]:
    """Version and layout of the ABI that a library was compiled with, in the form common to all versions."""
    import ctypes

    own = ctypes.CDLL(str(library.resolve())).atomr_cutlass_pack_v1
    own.restype = ctypes.POINTER(ctypes.c_uint64)
    head = own()
    return int(head[0]) & 0xFFFFFFFF, f"{int(head[1]):016x}"


if __name__ == "__main__":
    main(*sys.argv[1:])
