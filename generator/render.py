"""KernelKey -> C++ source text, for nvcc (ahead of time, with the C ABI row) or for NVRTC (the kernel alone)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from .epilogue.lower import split
from .families.base import layout_cpp
from .key import KernelKey
from .matrix import family
from .rules import epilogue_compute

_TEMPLATES = Path(__file__).parent / "templates"


def render(key: KernelKey, *, flavour: str = "aot", ptx: bool = False, content: str = "") -> tuple[str, str]:
    """The source of one cell and the name of its kernel.

    Args:
        key: a key that `matrix.supports` accepts.
        flavour: `aot` for nvcc, with the C ABI row; `nvrtc` for the kernel alone.
        ptx: whether the image will carry PTX as well (recorded in the row).
        content: `content.source_digest` of the key (recorded in the row).

    Returns:
        (source text, name of the `extern "C"` kernel).
    """
    if flavour not in ("aot", "nvrtc"):
        raise ValueError(f"unknown flavour {flavour!r}; valid: aot, nvrtc")
    ahead_of_time = flavour == "aot"
    values = family(key).values(key)
    values |= {
        "name": key.name,
        "key": key.to_json(),
        "content": content,
        "ptx": "true" if ptx else "false",
        "a": key.a.cpp,
        "b": key.b.cpp,
        "d": key.d.cpp,
        "acc": key.acc.cpp,
        "compute": epilogue_compute(key.acc, tree=bool(split(key.epilogue)[1])).cpp,
        "layout_a": layout_cpp(key.layout_a),
        "layout_b": layout_cpp(key.layout_b),
        "layout_d": layout_cpp(key.layout_d),
        "align_a": str(key.align_a),
        "align_b": str(key.align_b),
        "align_d": str(key.align_d),
        "row_include": '#include "atomr_cutlass/row.h"\n' if ahead_of_time else "",
        "prelude": "" if ahead_of_time else '#include "atomr_cutlass/nvrtc/prelude.h"\n',
    }
    kernel = _template("kernel")
    kernel = kernel + _template("row") if ahead_of_time else _template("companion").replace("@kernel@", kernel)
    values["kernel"] = _substitute(kernel, values)
    return _substitute(_template(family(key).template), values), key.name


@cache
def _template(name: str) -> str:
    return (_TEMPLATES / f"{name}.cu.in").read_text(encoding="utf-8")


def _substitute(text: str, values: dict[str, str]) -> str:
    # '@' appears in no C++ token, so a mark can't be mistaken for source.
    parts = text.split("@")
    parts[1::2] = [values[name] for name in parts[1::2]]
    return "".join(parts)
