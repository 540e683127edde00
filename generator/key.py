"""KernelKey: the one identity of a compiled kernel, and its name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

from .archs import SmArch
from .dtypes import CutlassDtype

Triple = tuple[int, int, int]

ROW = "r"
COLUMN = "c"


def flipped(layout: str) -> str:
    """The layout of the transposed matrix."""
    return COLUMN if layout == ROW else ROW


def turned_layouts(layouts: str) -> str:
    """The layouts of B^T, A^T and D^T = B^T A^T, given those of A, B and D; of D they may be left out."""
    return "".join(map(flipped, layouts[1::-1] + layouts[2:]))


DIRECT = "direct"
"""The mainloop of kernels that multiply in FMA instructions, without a pipeline of stages."""

RAGGED = "ragged"
"""The mainloop of kernels for few rows or columns of D whose operands begin anywhere."""

UNALIGNED = "unaligned"
"""The mainloop of kernels for small D whose operands begin anywhere."""

REALIGNED = "realigned"
"""The mainloop of kernels for any D that shift operands which begin anywhere, in shared memory."""

ANYWHERE = (RAGGED, UNALIGNED, REALIGNED)
"""The mainloops of our own kernels whose operands begin anywhere."""


@dataclass(frozen=True)
class KernelKey:
    """The compile-time parameters of a kernel, without those of a call (shapes, strides, scalars, pointers).

    TF32 math is a property of the multiplication: operands of tf32 kernels have element type F32 and `math` says tf32.

    Attributes:
        op: an operation's name, such as `gemm`, or a helper's, such as `cast`.
        generation: template family: `sm80` (CUTLASS 2.x), `sm90`, `sm100` or `sm120` (CUTLASS 3.x).
        arch: compile target.
        a, b, d, acc: element types of A, B, of C and D, and of the accumulator.
        layout_a, layout_b, layout_d: `r` (row-major) or `c` (column-major); C has D's.
        align_a, align_b, align_d: guaranteed alignment of pointers, leading dimensions and batch strides, in elements.
        tile: thread block tile M, N, K (for sm90: of one CTA; for `2sm` of sm100: of the two that share an MMA).
        cluster: thread block cluster.
        warps: warps along M, N, K (sm80 generation; (0, 0, 0) elsewhere).
        stages: mainloop stages; 0: as many as shared memory holds (sm90 on).
        mainloop: `multistage`, `twostage`, `direct`, `ragged` or `unaligned` (sm80); `pingpong`, `cooperative`,
            `warpspecialized`, `few`, `split` or `realigned` (sm90); `1sm` or `2sm` (sm100).
        epilogue_schedule: `tma` or `nosmem` (CUTLASS 3.x), `dsmem` or `smem` (our own of sm90); empty for sm80.
        scheduler: `identity` (sm80, realigned); `persistent` or `streamk` (CUTLASS 3.x); `fitted` (sm90): persistent,
            and the launch chooses how many columns a tile has, at most those of `tile`; `sliced` (sm90): persistent,
            and adds up K in slices, one after the other; `grouped`.
        swizzle: thread block swizzle compiled in (sm80); 0 where the scheduler takes it at run time.
        math: `default`; for fp32 operands `ieee`, `tf32` or `3xtf32`; for fp8 also `fast` (fast accumulation).
        epilogue: id of the epilogue: `lc` is the linear combination alpha * AB + beta * C, `lc_relu` and so on an
            activation of it, `scaled` has scales on the device. `lc+evt:...` and `scaled+evt:...` have an epilogue
            tree on top, whose program follows.
        scale_granularity: rows of A, columns of B and elements of K that share a block scale; zeros without any.
        scale_type: of block scales: `f32`, `ue4m3` or `ue8m0`; empty where there is none.
        group_mode: groups of a convolution's channels: empty for one, `single`, `multiple` (CUTLASS's GroupMode) or
            `depthwise`.
        iterator: how a convolution of the sm80 generation finds its operands: `analytic`, `optimized`,
            `fixed_channels`, `few_channels`; empty elsewhere.
        stride_support: of a dgrad of the sm80 generation, `unity` or `strided`; empty elsewhere.
    """

    op: str
    generation: str
    arch: SmArch
    a: CutlassDtype
    b: CutlassDtype
    d: CutlassDtype
    acc: CutlassDtype
    layout_a: str
    layout_b: str
    layout_d: str
    align_a: int
    align_b: int
    align_d: int
    tile: Triple
    cluster: Triple
    warps: Triple
    stages: int
    mainloop: str
    epilogue_schedule: str
    scheduler: str
    swizzle: int
    math: str = "default"
    epilogue: str = "lc"
    scale_granularity: Triple = (0, 0, 0)
    scale_type: str = ""
    group_mode: str = ""
    iterator: str = ""
    stride_support: str = ""

    @property
    def is_elementwise(self) -> bool:
        """Whether the kernel is elementwise instead of a matrix multiplication: it has no tile."""
        return self.tile == (1, 1, 1)

    @property
    def convolves(self) -> bool:
        """Whether the operation is a convolution, in one of its directions."""
        return self.op.startswith("conv2d_")

    @cached_property
    def digest(self) -> str:
        """Ten hexadecimal digits over every field: CUTLASS's procedural names are not injective."""
        import hashlib  # loads OpenSSL, which importing the package need not

        return hashlib.sha256(self.to_json().encode()).hexdigest()[:10]

    @cached_property
    def name(self) -> str:
        """CUTLASS's procedural name with the digest appended; a valid C identifier."""
        body = _name_sm80(self) if self.generation == "sm80" else _name_3x(self)
        return f"{body}_{self.digest}"

    def to_dict(self) -> dict[str, Any]:
        """Every field as a JSON-ready value."""
        return {name: _plain(getattr(self, name)) for name in _defaults(type(self))}

    def to_json(self) -> str:
        """Canonical JSON: one text per key.

        Fields at their default are omitted, so that a field added later does not rename existing kernels.
        """
        given = ((name, getattr(self, name), default) for name, default in _defaults(type(self)).items())
        return _ENCODER.encode({name: _plain(value) for name, value, default in given if value != default})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KernelKey:
        """The inverse of `to_dict`; ValueError names fields that are unknown or missing."""
        required = {name for name, default in _defaults(cls).items() if default is MISSING}
        unknown = sorted(set(values) - set(_defaults(cls)))
        missing = sorted(required - set(values))
        if unknown or missing:
            raise ValueError(f"not a KernelKey: unknown fields {unknown}, missing fields {missing}")
        converted = dict(values)
        for name in ("a", "b", "d", "acc"):
            converted[name] = CutlassDtype(converted[name])
        converted["arch"] = SmArch(converted["arch"])
        for name in ("tile", "cluster", "warps", "scale_granularity"):
            if name in converted:
                x, y, z = (int(v) for v in converted[name])
                converted[name] = (x, y, z)
        return cls(**converted)


def _defaults(cls: type[KernelKey]) -> dict[str, Any]:
    """Fields and their defaults, cached: every key of a matrix of thousands is written out."""
    if cls not in _DEFAULTS:
        _DEFAULTS[cls] = {field.name: field.default for field in fields(cls)}
    return _DEFAULTS[cls]


_DEFAULTS: dict[type[KernelKey], dict[str, Any]] = {}


def _plain(value: Any) -> Any:
    """A field as a JSON-ready value."""
    if isinstance(value, (CutlassDtype, SmArch)):
        return value.value
    return list(value) if isinstance(value, tuple) else value


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def check_unique(keys: Iterable[KernelKey]) -> dict[str, KernelKey]:
    """Maps names to keys; ValueError when two different keys share a name."""
    named: dict[str, KernelKey] = {}
    for key in keys:
        other = named.setdefault(key.name, key)
        if other != key:
            raise ValueError(f"two keys share the name {key.name}: {other.to_json()} and {key.to_json()}")
    return named


def layout_letters(layouts: str) -> str:
    """CUTLASS's letters: BLAS's `n` is column-major and `t` row-major."""
    return "".join("t" if layout == ROW else "n" for layout in layouts)


def opcode_class(key: KernelKey) -> str:
    """The unit that multiplies: `simt` for fp32 ieee and direct kernels, `tensorop` for everything else."""
    return "simt" if key.math == "ieee" or key.mainloop == DIRECT else "tensorop"


def shared_memory(key: KernelKey) -> int:
    """Bytes of shared memory of an sm80-generation mainloop; elsewhere the most an sm_90a kernel takes."""
    m, n, k = key.tile
    return key.stages * k * (m * key.a.bits + n * key.b.bits) // 8


def instruction_shape(key: KernelKey) -> Triple:
    """The MMA instruction of an sm80-generation key."""
    if opcode_class(key) == "simt":
        return (1, 1, 1)
    if key.a is CutlassDtype.F64 and key.arch is SmArch.SM90A:
        # sm_90's own DMMA shapes: 1.6 times the rate of the 8x8x4 that every arch has. Our mainloop (mainloop_dmma.h)
        # has the larger ones; 16x8x16 only where a thread has registers left for its operands.
        return (16, 8, 4 if key.align_a == 1 else 16 if key.tile == (32, 32, 32) else 8)
    return {64: (8, 8, 4), 32: (16, 8, 8), 16: (16, 8, 16), 8: (16, 8, 32)}[key.a.bits]


def _cutlass_op(key: KernelKey) -> str:
    """CUTLASS's word for the operation: `gemm`, `gemm_grouped` for `grouped_gemm`, `fprop` for `conv2d_fprop`."""
    form, _, kind = key.op.rpartition("_")
    return kind if key.convolves or not form else f"{kind}_{form}"


def _name_sm80(key: KernelKey) -> str:
    if key.is_elementwise:
        words = ("cutlass", key.op, key.a.cutlass_name, "to", key.d.cutlass_name, key.mainloop, key.scale_type)
        return "_".join(filter(None, words))
    m, n, k = key.tile
    letter = {CutlassDtype.F64: "d", CutlassDtype.F32: "s", CutlassDtype.I32: "i", CutlassDtype.F16: "h"}[key.acc]
    kind = _cutlass_op(key) + (f"_{key.iterator or key.mainloop}" if key.convolves else "")
    if opcode_class(key) == "simt":
        core = f"{letter}{kind}"
    else:
        instruction = "".join(str(x) for x in instruction_shape(key))
        math = {"tf32": "tf32", "3xtf32": "3xtf32"}.get(key.math, "")
        core = f"{letter}{instruction}{math}{kind}"
    if key.mainloop in (RAGGED, UNALIGNED):
        core += f"_{key.mainloop}"
    operands = key.a.cutlass_name if key.a is key.b else f"{key.a.cutlass_name}_{key.b.cutlass_name}"
    layouts = "nhwc" if key.convolves else layout_letters(key.layout_a + key.layout_b)
    extra = [key.stride_support, {"": "", "depthwise": "depthwise"}.get(key.group_mode, f"{key.group_mode}group")]
    tail = "".join(f"_{word}" for word in [*extra, _epilogue_name(key)] if word)
    return (
        f"cutlass_{opcode_class(key)}_{key.d.cutlass_name}_{core}_{operands}_"
        f"{m}x{n}_{k}x{key.stages}_{layouts}_align{key.align_a}{tail}"
    )


def _name_3x(key: KernelKey) -> str:
    element_a, element_b = (CutlassDtype.TF32, CutlassDtype.TF32) if key.math == "tf32" else (key.a, key.b)
    types = "_".join(t.cutlass_name for t in (element_a, element_b, key.acc, key.d, key.d))
    tile = "x".join(map(str, key.tile))
    cluster = "x".join(map(str, key.cluster))
    letters = "nhwc" if key.convolves else layout_letters(key.layout_a + key.layout_b + key.layout_d)
    kind = _cutlass_op(key)
    if key.scale_type:
        block = "x".join(map(str, key.scale_granularity))
        kind = f"block_scaled_{kind}_{key.scale_type}_{block}"
    schedule = "warpspecialized" + ("" if key.mainloop == "warpspecialized" else f"_{key.mainloop}")
    fast = "_fp8_fastaccum" if key.math == "fast" else ""
    stream = {"streamk": "_stream_k", "fitted": "_fitted", "sliced": "_sliced"}.get(key.scheduler, "")
    epilogue = _epilogue_name(key)
    return (
        f"cutlass3x_{key.generation}_tensorop_{kind}_{types}_{tile}_{cluster}_{key.stages}_{letters}_align{key.align_a}_"
        f"{schedule}{fast}{stream}_epi_{key.epilogue_schedule}{f'_{epilogue}' if epilogue else ''}"
    )


def _epilogue_name(key: KernelKey) -> str:
    # Of a tree the digest tells which.
    base, _, tree = key.epilogue.partition("+")
    words = ["" if base == "lc" else base.removeprefix("lc_"), "evt" if tree else ""]
    return "_".join(filter(None, words))
