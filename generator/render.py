"""KernelKey -> C++ source text, for nvcc (ahead of time, with the C ABI row) or for NVRTC (the kernel alone)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from .dtypes import CutlassDtype
from .key import ROW, KernelKey, Triple, instruction_shape, opcode_class
from .matrix import epilogue_compute

_TEMPLATES = Path(__file__).parent / "templates"

_MAINLOOP_SCHEDULE = {
    "pingpong": "KernelTmaWarpSpecializedPingpong",
    "cooperative": "KernelTmaWarpSpecializedCooperative",
    "warpspecialized": "KernelTmaWarpSpecialized",
}


def render(key: KernelKey, *, flavour: str = "aot", ptx: bool = False) -> tuple[str, str]:
    """The source of one cell and the name of its kernel.

    Args:
        key: a key that `matrix.supports` accepts.
        flavour: `aot` for nvcc, with the C ABI row; `nvrtc` for the kernel alone.
        ptx: whether the image will carry PTX as well (recorded in the row).

    Returns:
        (source text, name of the `extern "C"` kernel).
    """
    if flavour not in ("aot", "nvrtc"):
        raise ValueError(f"unknown flavour {flavour!r}; valid: aot, nvrtc")
    ahead_of_time = flavour == "aot"
    values = _values_sm80(key) if key.generation == "sm80" else _values_sm90(key)
    values |= {
        "name": key.name,
        "key": key.to_json(),
        "ptx": "true" if ptx else "false",
        "a": key.a.cpp,
        "b": key.b.cpp,
        "d": key.d.cpp,
        "acc": key.acc.cpp,
        "compute": epilogue_compute(key.acc).cpp,
        "layout_a": _layout(key.layout_a),
        "layout_b": _layout(key.layout_b),
        "layout_d": _layout(key.layout_d),
        "align_a": str(key.align_a),
        "align_b": str(key.align_b),
        "align_d": str(key.align_d),
        "row_include": '#include "atomr_cutlass/row.h"\n' if ahead_of_time else "",
        "prelude": "" if ahead_of_time else '#include "atomr_cutlass/nvrtc/prelude.h"\n',
    }
    kernel = _template("kernel")
    kernel = kernel + _template("row") if ahead_of_time else _template("companion").replace("@kernel@", kernel)
    values["kernel"] = _substitute(kernel, values)
    return _substitute(_template(f"{key.op}_{key.generation}"), values), key.name


def _values_sm80(key: KernelKey) -> dict[str, str]:
    m, n, k = (t // w for t, w in zip(key.tile, key.warps, strict=True))
    return {
        "opcode_class": "OpClassSimt" if opcode_class(key) == "simt" else "OpClassTensorOp",
        "tile": _numbers(key.tile),
        "warp_tile": _numbers((m, n, k)),
        "instruction": _numbers(instruction_shape(key)),
        "stages": str(key.stages),
        "math_operator": _math_operator(key),
        "swizzle": str(key.swizzle),
    }


def _math_operator(key: KernelKey) -> str:
    if key.math == "3xtf32":
        return "OpMultiplyAddFastF32"
    # CUTLASS has the 16x8x32 integer instruction in its saturating form only.
    return "OpMultiplyAddSaturate" if key.acc is CutlassDtype.I32 else "OpMultiplyAdd"


def _values_sm90(key: KernelKey) -> dict[str, str]:
    if key.epilogue_schedule == "nosmem":
        epilogue = "NoSmemWarpSpecialized"
    else:
        epilogue = "TmaWarpSpecializedCooperative" if key.mainloop == "cooperative" else "TmaWarpSpecialized"
    return {
        "cute_tile": _static_ints(key.tile),
        "cute_cluster": _static_ints(key.cluster),
        "stage_count": f"cutlass::gemm::collective::StageCount<{key.stages}>" if key.stages else "void",
        "mainloop_schedule": _MAINLOOP_SCHEDULE[key.mainloop],
        "epilogue_schedule": epilogue,
        "scheduler": "StreamKScheduler" if key.scheduler == "streamk" else "PersistentScheduler",
    }


def _layout(letter: str) -> str:
    return "cutlass::layout::RowMajor" if letter == ROW else "cutlass::layout::ColumnMajor"


def _numbers(values: Triple) -> str:
    return ", ".join(map(str, values))


def _static_ints(values: Triple) -> str:
    return ", ".join(f"cute::Int<{v}>" for v in values)


@cache
def _template(name: str) -> str:
    return (_TEMPLATES / f"{name}.cu.in").read_text(encoding="utf-8")


def _substitute(text: str, values: dict[str, str]) -> str:
    # '@' appears in no C++ token, so a mark can't be mistaken for source.
    parts = text.split("@")
    parts[1::2] = [values[name] for name in parts[1::2]]
    return "".join(parts)
