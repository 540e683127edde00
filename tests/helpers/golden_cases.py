"""Calls of every operation, drawn with numbers that are the same everywhere; `golden` records their outcomes.

They go through public functions and requests alone. How often something is drawn follows from how much code decides
about it, not from how often users do it.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

import atomr_cutlass as ac
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch
from atomr_cutlass.epilogue import gelu, relu, silu
from golden_gpu import DTYPES, TABLES, Array

Value = TypeVar("Value")
Arguments = dict[str, Any]

COUNTS = {
    "gemm": 60, "gemm_epilogue": 45, "gemm_scaled": 30, "gemm_fp4": 40, "gated_gemm": 30, "gemv": 25,
    "grouped_gemm": 50,
    "conv2d": 45, "conv2d_dgrad": 25, "conv2d_wgrad": 25, "matmul": 30, "quantize": 15, "host": 10, "requests": 40,
}  # fmt: skip
"""Cases of each operation for each arch."""

FEW = {
    "gemm_scaled": (SmArch.SM80, SmArch.SM86),
    "gemm_fp4": (SmArch.SM80, SmArch.SM86, SmArch.SM89, SmArch.SM90A),
    "gated_gemm": (SmArch.SM80, SmArch.SM86, SmArch.SM89, SmArch.SM100, SmArch.SM120),
    "grouped_gemm": (SmArch.SM120,),
    **dict.fromkeys(("conv2d", "conv2d_dgrad", "conv2d_wgrad"), (SmArch.SM100, SmArch.SM120)),
}
"""Archs that have no kernels of an operation: one case in ten."""


def count_of(op: str, arch: SmArch) -> int:
    """How many cases there are of an operation; on sm_90a, whose kernels are of most kinds, twice as many."""
    if arch in FEW.get(op, ()):
        return COUNTS[op] // 10
    # sm_80 and sm_86 differ in the amount of shared memory.
    return COUNTS[op] * 2 if arch is SmArch.SM90A else COUNTS[op] // (3 if arch is SmArch.SM86 else 1)


class Draw:
    """Numbers that follow from a name, in every version of Python."""

    def __init__(self, name: str, most: int = 9000) -> None:
        """Numbers of a name.

        Args:
            name: the seed of the draws.
            most: the largest extent.
        """
        self._name = name
        self._count = 0
        self._most = most

    def below(self, limit: int) -> int:
        """A number from 0 to below a limit."""
        self._count += 1
        digest = hashlib.sha256(f"{self._name}/{self._count}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % limit

    def of(self, values: Sequence[Value]) -> Value:
        """One of these."""
        return values[self.below(len(values))]

    def chance(self, percent: int) -> bool:
        """Whether something that happens so often happens."""
        return self.below(100) < percent

    def extent(self, most: int = 9000) -> int:
        """An extent: a small one, a usual one or an odd one."""
        kind = self.below(10)
        if kind < 3:
            value = self.of((1, 2, 3, 7, 8, 16, 17, 31, 33, 48, 64))
        elif kind < 8:
            value = self.of((96, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 5120, 7168, 8192))
        else:
            value = 1 + self.below(most)
        return min(value, most, self._most)

    def aligned(self, most: int = 9000) -> int:
        """An extent, mostly a multiple of 16."""
        value = self.extent(most)
        return value if self.chance(20) else min(self._most, max(16, value // 16 * 16))


@dataclass
class Operands:
    """Arrays for a call, each with addresses of its own; `host` makes them NumPy's."""

    arrays: Arguments = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    host: bool = False

    def add(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        *,
        columns: bool = False,
        pad: int = 0,
        offset: int = 0,
        broadcast: bool = False,
        number: int | None = None,
    ) -> Any:
        """An array.

        Args:
            name: of the argument.
            dtype: a name of `golden_gpu.DTYPES`.
            shape: its extents.
            columns: whether its matrices lie column by column.
            pad: elements between rows (columns).
            offset: bytes by which its address is less aligned.
            broadcast: whether its first dimension has stride 0.
            number: its place in the argument, of a list.
        """
        inner = list(shape)
        if columns and len(shape) > 1:
            inner[-2:] = inner[-1], inner[-2]
        strides = [1] * len(inner)
        for axis in reversed(range(len(inner) - 1)):
            strides[axis] = strides[axis + 1] * max(1, inner[axis + 1]) + (pad if axis == len(inner) - 2 else 0)
        if columns and len(shape) > 1:
            strides[-2:] = strides[-1], strides[-2]
        if broadcast:
            strides[0] = 0
        return self.put(name, dtype, shape, strides, offset=offset, number=number)

    def put(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        offset: int = 0,
        number: int | None = None,
    ) -> Any:
        """The same with its strides."""
        array: Any = Array(len(self.names), dtype, shape, strides, offset)
        if self.host:
            array = np.zeros(shape, DTYPES[dtype][0])
        self.names.append(name if number is None else f"{name}{number}")
        if number is None:
            self.arrays[name] = array
        else:
            self.arrays.setdefault(name, []).append(array)
        return array


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        name: operation, arch and number.
        table: a name of `golden_gpu.TABLES`.
        text: the call, for people.
        call: makes it.
        operands: names of the arrays by their addresses.
    """

    name: str
    table: str
    text: str
    call: Callable[[], Any]
    operands: tuple[str, ...]


def cases(arch: SmArch) -> Iterator[Case]:
    """All cases for an arch."""
    for op in COUNTS:
        for number in range(count_of(op, arch)):
            name = f"{op}/{arch.value}/{number:03}"
            draw = Draw(name)
            table = draw.of(("full",) * 5 + ("default",) + TABLES)
            yield _MAKERS[op](draw, name, table, arch)


def _case(
    name: str, table: str, function: Callable[..., Any], made: Operands, how: Arguments, *positional: str
) -> Case:
    """A call of a function with arrays and other arguments."""
    given = [made.arrays[label] for label in positional]
    rest = {key: value for key, value in made.arrays.items() if key not in positional} | how
    text = ", ".join([*map(_text, given), *(f"{key}={_text(value)}" for key, value in rest.items())])
    return Case(
        name, table, f"{function.__name__}({text})", lambda: function(*given, **rest), tuple(made.names)
    )  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, Array):
        return value.text
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, np.ndarray):
        return f"host {value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, ac.ScaleSet):
        return "ScaleSet(" + ", ".join(f"{key}={_text(getattr(value, key))}" for key in ("a", "b", "d", "amax_d")) + ")"
    if isinstance(value, ac.EpilogueVisitorTree):
        return f"tree {value.program}"
    return getattr(value, "__name__", None) or repr(value)


def _backend(draw: Draw) -> Arguments:
    """Where the kernel may come from."""
    backend = draw.of(("auto",) * 6 + ("prebuilt", "jit"))
    jit = draw.of(("auto", "auto", "auto", "auto", "off", "background", "background"))
    how: Arguments = {} if backend == "auto" else {"backend": backend}
    return how if jit == "auto" else how | {"jit": jit}


def _out_dtype(draw: Draw, dtype: str) -> D | None:
    if draw.chance(75):
        return None
    return draw.of((D.F32, D.BF16, D.F16) if dtype != "i8" else (D.I32, D.F32))


_FLOATS = ("bf16", "bf16", "bf16", "f16", "f16", "f32", "f32", "f64", "i8", "e4m3", "e5m2")
_RESULTS = {"i8": "i32", "e4m3": "bf16", "e5m2": "bf16"}


def _matrices(
    draw: Draw, made: Operands, dtype: str, how: Arguments, *, batched: int = 35, odd: int = 20
) -> tuple[int, ...]:
    """A and B, and the arguments for their types; returns the result's shape."""
    m, n, k = draw.aligned(), draw.aligned(), draw.aligned()
    batch: tuple[int, ...] = draw.of(((1,), (3,), (8,), (2, 3))) if draw.chance(batched) else ()
    eight = dtype in ("i8", "e4m3", "e5m2")
    pads = [draw.of((8, 16, 1, 3)) if draw.chance(odd) else 0 for _ in "ab"]
    offsets = [draw.of((1, 2, 4)) * (1 if eight else 8) if draw.chance(odd // 2) else 0 for _ in "ab"]
    one_b = bool(batch) and draw.chance(30)
    made.add("a", dtype, (*batch, m, k), columns=draw.chance(4 if eight else 30), pad=pads[0], offset=offsets[0])
    other = {"e4m3": "e5m2", "e5m2": "e4m3"}.get(dtype, dtype) if draw.chance(15) else dtype
    made.add(
        "b", other, (k, n) if one_b else (*batch, k, n), columns=draw.chance(94 if eight else 50), pad=pads[1],
        offset=offsets[1], broadcast=len(batch) == 1 and not one_b and draw.chance(10),
    )  # fmt: skip
    if dtype == "f32" and draw.chance(70):
        how["precision"] = draw.of(("ieee", "tf32", "tf32", "3xtf32"))
    if eight and draw.chance(40):
        how["fast_accum"] = True
    return (*batch, m, n)


def _result(draw: Draw, made: Operands, dtype: str, shape: tuple[int, ...], how: Arguments) -> str:
    """C, the result's type and where it goes; returns the type."""
    wanted = _out_dtype(draw, dtype)
    result = wanted.value if wanted else _RESULTS.get(dtype, dtype)
    if wanted:
        how["out_dtype"] = wanted
    columns, pad = draw.chance(15), draw.of((8, 1)) if draw.chance(15) else 0
    if draw.chance(25):
        made.add("c", result, shape, columns=columns, pad=pad)
        how["beta"] = draw.of((1, 2)) if result == "i32" else draw.of((1.0, 0.5))
    if draw.chance(40):
        made.add("out", result, shape, columns=columns, pad=pad)
    if draw.chance(30):
        how["alpha"] = 2 if result == "i32" else draw.of((0.5, 2.0, 0.0))
    return result


def _gemm(draw: Draw, name: str, table: str, _arch: SmArch) -> Case:
    made, how, dtype = Operands(host=name.startswith("host")), {}, draw.of(_FLOATS)
    usual = table in ("smoke", "default", "ptx") and draw.chance(50)  # what small tables serve
    if usual:
        dtype = draw.of(("bf16", "bf16", "f16", "f32"))
    shape = _matrices(draw, made, dtype, how, batched=5 if usual else 35, odd=5 if usual else 20)
    if not usual:
        _result(draw, made, dtype, shape, how)
    elif draw.chance(60):
        return _case(name, table, ac.gemm, made, how | {"jit": "background"}, "a", "b")
    return _case(name, table, ac.gemm, made, how | _backend(draw), "a", "b")


def _bias_gelu(acc: Any, row: Any) -> Any:
    return gelu(acc + row)


def _residual(acc: Any, column: Any, other: Any) -> Any:
    return silu(acc * column) + other


def _scaled_relu(acc: Any, scalar: Any) -> Any:
    return relu(acc) * scalar


def _block() -> ac.EpilogueVisitorTree:
    builder = ac.EvtBuilder().add_bias("row").activation("relu").mask_store("bits")
    return builder.reduce("sums", "row").add_matrix("other").build()


def _stored() -> ac.EpilogueVisitorTree:
    return ac.EvtBuilder().aux_store("stored", dtype="bf16").activation("silu").build()


def _quantized() -> ac.EpilogueVisitorTree:
    return ac.EvtBuilder().activation("gelu").quantize("e4m3", "scale", "amax").build()


_TREES: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (_bias_gelu, ("row",)), (_residual, ("column", "other")), (_scaled_relu, ("scalar",)), (_block(), ("row", "other")),
    (_stored(), ()), (_quantized(), ("scale",)),
)  # fmt: skip
_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "leaky_relu")


def _followed(draw: Draw, made: Operands, shape: tuple[int, ...], result: str, how: Arguments) -> None:
    """Bias and activation, or a tree with its operands, over a result whose last dimension rows are of."""
    element = draw.of(("f32", result, "bf16")) if result != "i32" else "f32"
    if draw.chance(55):
        if draw.chance(75):
            made.add("bias", element if draw.chance(40) else result, shape[-1:])
        if draw.chance(70):
            how["activation"] = draw.of(_ACTIVATIONS)
        return
    tree, reads = draw.of(_TREES)
    if "scale" in reads and (how.keys() & {"out_dtype"} or made.arrays.keys() & {"c", "out"}):
        tree, reads = _TREES[0]  # a result of another type is not the tree's
    if isinstance(tree, ac.EpilogueVisitorTree):
        element = "f32"
    how["epilogue"] = tree
    extents = {"row": shape[-1:], "column": (*shape[:-1], 1), "other": shape, "scalar": (1,), "scale": (1,)}
    for name in reads:
        made.add(
            name, "f32" if name == "scale" else element, extents[name], columns=name == "other" and draw.chance(15)
        )


def _gemm_epilogue(draw: Draw, name: str, table: str, _arch: SmArch) -> Case:
    made, how, dtype = Operands(), {}, draw.of(_FLOATS)
    shape = _matrices(draw, made, dtype, how, batched=25, odd=12)
    result = _result(draw, made, dtype, shape, how)
    _followed(draw, made, shape, result, how)
    return _case(name, table, ac.gemm, made, how | _backend(draw), "a", "b")


def _gemm_scaled(draw: Draw, name: str, table: str, _arch: SmArch) -> Case:
    made, how, dtype = Operands(), {}, draw.of(("e4m3", "e4m3", "e5m2"))
    shape = _matrices(draw, made, dtype, how, batched=20, odd=10)
    *batch, m, n = shape
    k = made.arrays["a"].shape[-1]
    form = draw.of(("tensor", "vector", "block", "number"))
    if form == "number":
        how |= {"scale_a": 0.5, "scale_b": 2.0}
    else:
        extents = {
            "tensor": ((1,), (1,)),
            "vector": ((*batch, m, 1), (1, n)),
            "block": ((*batch, m, -(-k // 128)), (-(-k // 128), -(-n // 128))),
        }[form]
        made.add("scale_a", "f32", extents[0], columns=draw.chance(30))
        made.add("scale_b", "f32", extents[1], columns=draw.chance(30))
    result = _result(draw, made, dtype, shape, how)
    if draw.chance(25):
        made.add("scale_d", "f32", (1,))
    if draw.chance(20):
        made.add("amax", "f32", (1,))
    elif draw.chance(25):
        _followed(draw, made, shape, result, how)
    return _case(name, table, ac.gemm, made, how | _backend(draw), "a", "b")


def _gemm_fp4(draw: Draw, name: str, table: str, _arch: SmArch) -> Case:
    made, how = Operands(), {}
    m, n, k = draw.aligned(), draw.aligned(), draw.aligned() // 32 * 32 + (32 if draw.chance(90) else 2)
    batch: tuple[int, ...] = (3,) if draw.chance(20) else ()
    kind, vector = draw.of((("e4m3", 16), ("e8m0", 32), ("u8", 32)))
    made.add("a", "u8", (*batch, m, k // 2), pad=16 if draw.chance(10) else 0)
    made.add("b", "u8", (*batch, k // 2, n), columns=True)
    for operand, rows in (("scale_a", m), ("scale_b", n)):
        size = -(-rows // 128) * -(-k // (4 * vector)) * 512
        made.add(operand, kind, (*batch, size))
    result = _result(draw, made, "e4m3", (*batch, m, n), how)
    if draw.chance(25):
        _followed(draw, made, (*batch, m, n), result, how)
    return _case(name, table, ac.gemm, made, how | _backend(draw), "a", "b")


def _gated_gemm(draw: Draw, name: str, table: str, _arch: SmArch) -> Case:
    made, how = Operands(), {}
    dtype = draw.of(("bf16", "f16", "e4m3"))
    batch: tuple[int, ...] = (4,) if draw.chance(20) else ()
    m, f, k = draw.aligned(), draw.aligned(), draw.aligned()
    made.add("a", dtype, (*batch, m, k), pad=draw.of((0, 0, 0, 8)))
    made.add("b", dtype, (k, 2 * f), columns=draw.chance(80))
    if dtype == "e4m3" and draw.chance(60):
        vector = draw.chance(50)
        made.add("scale_a", "f32", (*batch, m, 1) if vector else (1,))
        made.add("scale_b", "f32", (1, 2 * f) if vector else (1,))
    if draw.chance(60):
        how["activation"] = draw.of(("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh"))
    if draw.chance(40):
        made.add("out", _RESULTS.get(dtype, dtype), (*batch, m, f))
    return _case(name, table, ac.gated_gemm, made, how | _backend(draw), "a", "b")


def _gemv(draw: Draw, name: str, table: str, _arch: SmArch) -> Case:
    made, how, dtype = Operands(), {}, draw.of(("bf16", "bf16", "f16", "f32", "f64"))
    m, k = draw.aligned(), draw.aligned(40000)
    batch: tuple[int, ...] = draw.of(((3,), (2, 3))) if draw.chance(30) else ()
    shared = bool(batch) and draw.chance(40)
    made.add(
        "a", dtype, (m, k) if shared else (*batch, m, k), columns=draw.chance(40), pad=draw.of((0, 0, 0, 8, 1)),
        offset=8 if draw.chance(10) else 0,
    )  # fmt: skip
    made.add("x", dtype, (*batch, k))
    result = _result(draw, made, dtype, (*batch, m), how)
    if draw.chance(40):
        _followed(draw, made, (*batch, m), result, how)
    return _case(name, table, ac.gemv, made, how | _backend(draw), "a", "x")


def _grouped_gemm(draw: Draw, name: str, table: str, arch: SmArch) -> Case:
    made, how = Operands(host=name.startswith("host")), {}
    eight = draw.chance(6 if arch in FEW["gemm_scaled"] else 45)
    dtype = draw.of(("e4m3", "e4m3", "e5m2") if eight else ("bf16", "bf16", "f16"))
    form = draw.of(("contiguous", "contiguous", "masked", "along_k", "list"))
    groups, n, k = draw.of((1, 2, 4, 8)), draw.aligned(), draw.aligned()
    if eight and draw.chance(85):
        n, k = max(16, n // 16 * 16), max(16, k // 16 * 16)
    rows = draw.aligned()
    if form == "list":
        groups = min(groups, 4)
    by_column = draw.chance(96 if eight else 50)
    odd, result = draw.chance(15), _RESULTS.get(dtype, dtype)
    if form == "list":
        extents = [(draw.extent(600), n, k) if draw.chance(70) else (draw.extent(600), 64, 128) for _ in range(groups)]
        for number, (m, _, k) in enumerate(extents):
            made.add("a", dtype, (m, k), number=number, offset=2 if odd else 0)
        for number, (_, n, k) in enumerate(extents):
            made.add("b", dtype, (k, n), columns=by_column, number=number)
        shape: tuple[int, ...] = ()
    else:
        a, b, shape = {
            "contiguous": ((rows, k), (groups, k, n), (rows, n)),
            "masked": ((groups, rows, k), (groups, k, n), (groups, rows, n)),
            "along_k": ((rows, k), (k, n), (groups, rows, n)),
        }[form]
        made.add("a", dtype, a, pad=draw.of((8, 1)) if odd else 0, columns=form == "along_k" and not eight)
        made.add("b", dtype, b, columns=by_column and (eight or form != "along_k"))
        counted = form == "masked" or draw.chance(30)
        made.add("counts" if counted else "offsets", "i32", (groups,))
    if eight and draw.chance(60):
        _grouped_scales(draw, made, form, groups, rows, n, k)
    if eight and draw.chance(50):
        how["fast_accum"] = True
    if form != "list":
        if draw.chance(20):
            made.add("c", result, shape)
            how["beta"] = 1.0
        if draw.chance(30):
            made.add("out", result, shape)
    if draw.chance(30):
        if form != "list" and draw.chance(70) and ("c" not in made.arrays or draw.chance(20)):
            made.add("bias", draw.of((result, result, result, "f32")), (n,) if draw.chance(50) else (groups, n))
        if draw.chance(70):
            how["activation"] = draw.of(_ACTIVATIONS)
    elif form != "list" and draw.chance(20 if arch in (SmArch.SM90A, SmArch.SM100) else 3):
        how["epilogue"] = _bias_gelu
        made.add("row", "f32", (groups, n))
    if "out" not in made.arrays and "c" not in made.arrays and draw.chance(15):
        how["out_dtype"] = draw.of((D.F32, D.BF16, D.F16))
    return _case(name, table, ac.grouped_gemm, made, how | _backend(draw), "a", "b")


def _grouped_scales(draw: Draw, made: Operands, form: str, groups: int, rows: int, n: int, k: int) -> None:
    lead: tuple[int, ...] = (groups,) if form == "masked" else ()
    kind = draw.of(("one", "groups", "vector", "block"))
    if form in ("list", "along_k") and kind in ("vector", "block"):
        kind = "one"
    blocks = -(-k // 128)
    first, second = {
        "one": ((1,), (1,)),
        "groups": ((groups,), (groups,)),
        "vector": ((*lead, rows, 1), (groups, 1, n)),
        "block": ((*lead, rows, blocks), (groups, blocks, -(-n // 128))),
    }[kind]
    if form == "list":
        first, second = (1,), (1,)
    made.add("scale_a", "f32", first)
    made.add("scale_b", "f32", second)


def _convolution(draw: Draw, made: Operands, how: Arguments, op: str, arch: SmArch) -> tuple[str, tuple[str, ...]]:
    """Operands of a convolution; returns its result's type, and which operands come first."""
    dtype = draw.of(("bf16", "bf16", "f16", "f16", "f32", "e4m3"))
    tap = draw.of((1, 1, 3, 3, 3, 5, 7))
    r, s = tap, draw.of((tap, tap, tap, 1))
    n, h, w = draw.of((1, 2, 8, 32)), draw.of((7, 14, 15, 28, 56)), draw.of((7, 14, 28, 56, 57))
    c, k = (draw.of((3, 4, 8, 16, 24, 64, 65, 128, 256, 512)) for _ in "ck")
    groups = 1
    if draw.chance(25):
        groups = draw.of((2, 4, 32))
        c, k = max(1, c // groups) * groups, max(1, k // groups) * groups
        if draw.chance(50):
            groups = k = c
    stride = draw.of((1, 1, 2, (2, 1), 3))
    dilation = draw.of((1, 1, 1, 1, 1, 1, 2, (1, 2)))
    if op == "conv2d_dgrad" and stride != 1 and draw.chance(80):
        dilation = 1
    padding = draw.of((0, tap // 2, tap // 2, (1, 0), ((1, 0), (0, 1))))
    strides, dilations = (extent if isinstance(extent, tuple) else (extent, extent) for extent in (stride, dilation))
    pads = padding if isinstance(padding, tuple) else (padding, padding)
    pads = tuple(pad if isinstance(pad, tuple) else (pad, pad) for pad in pads)
    p, q = (
        (extent + sum(pad) - gap * (taps - 1) - 1) // step + 1
        for extent, pad, gap, taps, step in zip((h, w), pads, dilations, (r, s), strides, strict=True)
    )
    p, q = max(1, p), max(1, q)
    nchw = draw.chance(25)
    shapes = {"x": (n, h, w, c), "w": (k, r, s, c // groups), "dy": (n, p, q, k)}

    def add(name: str, like: str, element: str, pad: int = 0) -> None:
        b, e, f, g = shapes[like]
        wide = g + pad
        strides = (e * f * wide, f * wide, wide, 1)
        if nchw:
            made.put(name, element, (b, g, e, f), (strides[0], 1, strides[1], strides[2]))
        else:
            made.put(name, element, (b, e, f, g), strides)

    first, second, last = {
        "conv2d": ("x", "w", "dy"),
        "conv2d_dgrad": ("dy", "w", "x"),
        "conv2d_wgrad": ("dy", "x", "w"),
    }[op]
    add(first, first, dtype, 0 if dtype == "e4m3" else draw.of((0, 0, 0, 0, 8, 1)))
    add(second, second, dtype)
    for key, value, usual in (
        ("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1), ("groups", groups, 1),
    ):  # fmt: skip
        if value != usual:
            how[key] = value
    if nchw:
        how["layout"] = "nchw"
    if op != "conv2d":
        b, e, f, g = shapes[last]
        how["x_shape" if last == "x" else "w_shape"] = (b, g, e, f) if nchw else (b, e, f, g)
    wanted = draw.of((D.F32, D.F32, D.BF16)) if draw.chance(15) else None
    result = wanted.value if wanted else _RESULTS.get(dtype, dtype)
    if wanted:
        how["out_dtype"] = wanted
    if draw.chance(20):
        add("c", last, result)
        how["beta"] = draw.of((1.0, 0.5))
    if draw.chance(30):
        add("out", last, result, 8 if draw.chance(10) and "c" not in made.arrays else 0)
    if dtype == "f32" and draw.chance(60):
        how["precision"] = draw.of(("ieee", "tf32", "3xtf32"))
    if dtype == "e4m3" and draw.chance(40):
        how |= {"scale_a": 0.5, "scale_b": 2.0}
    if draw.chance(20):
        how["alpha"] = 0.5
    if op != "conv2d_wgrad" and draw.chance(40):
        kind = draw.below(4 if arch is SmArch.SM90A or draw.chance(20) else 3)
        channels = shapes[last][-1:]
        if kind < 3:
            if kind < 2:
                made.add("bias", result if draw.chance(95) else "f32", channels)
            if kind > 0:
                how["activation"] = draw.of(_ACTIVATIONS)
        else:
            how["epilogue"] = _bias_gelu
            made.add("row", draw.of((result, "f32")), channels)
    return result, (first, second)


def _conv(draw: Draw, name: str, table: str, arch: SmArch) -> Case:
    made, how, op = Operands(), {}, name.partition("/")[0]
    _, first = _convolution(draw, made, how, op, arch)
    return _case(name, table, getattr(ac, op), made, how | _backend(draw), *first)


def _matmul(draw: Draw, name: str, table: str, _arch: SmArch) -> Case:
    made, how = Operands(), {}
    dtype = draw.of(("bf16", "bf16", "f16", "f32", "f64", "i8", "e4m3"))
    m, n, k = draw.aligned(), draw.aligned(), draw.aligned()
    eight = dtype in ("e4m3", "i8")
    transa, transb = draw.chance(95 if eight else 50), draw.chance(5 if eight else 50)
    epilogue = draw.of(tuple(ac.MatmulEpilogue)) if draw.chance(70) else ac.MatmulEpilogue.DEFAULT
    pad = draw.of((0, 0, 0, 16, 1))
    stored = {"a": (k, m) if transa else (m, k), "b": (n, k) if transb else (k, n)}
    for operand, (rows, columns) in stored.items():
        made.add(operand, dtype, (columns, rows), pad=pad)
        if pad:
            how[f"ld{operand}"] = rows + pad
    result = _RESULTS.get(dtype, dtype)
    if draw.chance(30):
        made.add("c", result, (n, m))
        how["beta"] = 1
    if draw.chance(50):
        made.add("d", result, (n, m))
    word = epilogue.value
    wide = "f64" if dtype == "f64" else "f32"
    if "bgrad" in word:
        summed = "i32" if dtype == "i8" and word in ("bgrada", "bgradb") else wide
        made.add("bias", summed, (n if word == "bgradb" else m,))
    elif "bias" in word:
        made.add("bias", draw.of((wide, "bf16")), (m,))
    if "aux" in word or (word.startswith("d") and word != "default"):
        if "relu" in word:
            made.add("gelu_aux", "u8", (n, -(-m // 8)))
        else:
            made.add("gelu_aux", draw.of(("bf16", wide)), (n, m))
    if dtype == "e4m3" and draw.chance(60):
        scales = Operands(names=made.names)
        scale_a = scales.add("scale_a", "f32", (1,) if draw.chance(60) else (m,))
        two = scales.add("scale_b", "f32", (1,))
        how["scales"] = ac.ScaleSet(scale_a, two)
    if dtype == "f32" and draw.chance(60):
        how["precision"] = draw.of(("ieee", "tf32", "3xtf32"))
    if draw.chance(15):
        how["workspace_size"] = draw.of((0, 1 << 20))
    how |= {"m": m, "n": n, "k": k, "transa": transa, "transb": transb, "epilogue": epilogue}

    def matmul(*arrays: Any, **given: Any) -> Any:
        return ac.matmul(ac.MatmulRequest(*arrays, **given))

    return _case(name, table, matmul, made, how | _backend(draw), "a", "b")


def _quantize(draw: Draw, name: str, table: str, _arch: SmArch) -> Case:
    made, how = Operands(), _backend(draw)
    m, k = draw.aligned(4000), draw.aligned(4000)
    scaling = draw.of(("tensor", "row", "block", "tile", "nvfp4", "mxfp4"))
    how["scaling"] = scaling
    if draw.chance(50):
        made.add("x", draw.of(("f16", "bf16", "f32")), (m, k), pad=draw.of((0, 0, 8, 1)))
        if scaling not in ("nvfp4", "mxfp4"):
            how["dtype"] = draw.of((D.F8E4M3, D.F8E5M2))
        return _case(name, table, ac.quantize, made, how, "x")
    if scaling in ("nvfp4", "mxfp4"):
        vector, kind = (16, "e4m3") if scaling == "nvfp4" else (32, "u8")
        made.add("values", "u8", (m, k // 2))
        made.add("scales", kind, (-(-m // 128) * -(-(k // vector) // 4) * 512,))
    else:
        extents = {"tensor": (1,), "row": (m, 1), "block": (m, -(-k // 128)), "tile": (-(-m // 128), -(-k // 128))}
        made.add("values", draw.of(("e4m3", "e5m2")), (m, k))
        made.add("scales", "f32", extents[scaling])
    how["out_dtype"] = draw.of((D.F32, D.F16, D.BF16))
    return _case(name, table, ac.dequantize, made, how, "values", "scales")


def _host(draw: Draw, name: str, table: str, arch: SmArch) -> Case:
    """Operands on the host, which are copied."""
    return draw.of((_gemm, _gemm, _grouped_gemm))(Draw(f"{name}/small", 64), name, table, arch)


def _requests(draw: Draw, name: str, table: str, arch: SmArch) -> Case:
    """The answer of `explain` to a request, and the attributes of its plan."""
    kind = draw.of(("gemm", "gemm", "grouped", "fprop", "dgrad", "wgrad"))
    dtype = draw.of(
        (D.BF16, D.BF16, D.F16, D.F32, D.TF32, D.F8E4M3) if kind != "grouped" else (D.BF16, D.F16, D.F8E4M3)
    )
    policy = draw.of(("auto", "auto", "off", "background"))
    layouts = {
        f"layout_{letter}": ac.GemmLayout.COL_MAJOR for letter in "abc" if draw.chance(60 if letter == "b" else 20)
    }
    how: Arguments = {"alpha": draw.of((1.0, 2.0)), "beta": draw.of((0.0, 0.0, 1.0))}
    if kind != "wgrad" and draw.chance(40):
        how |= {"bias": draw.chance(60), "activation": draw.of((None, *_ACTIVATIONS))}
    if kind not in ("gemm", "grouped") and arch in FEW["conv2d"] and draw.chance(80):
        kind = "gemm"
    settings: Arguments = {"dtype": dtype, "arch": arch if draw.chance(85) else draw.of(tuple(SmArch))}
    shape: Any
    if kind == "gemm":
        shape = ac.GemmShape(draw.aligned(), draw.aligned(), draw.aligned(), draw.of((1, 1, 1, 4)))
        if dtype is D.F8E4M3 and draw.chance(50):
            settings["scaling"] = draw.of(("tensor", "vector", "block"))
        make, settings = ac.GemmRequest, settings | layouts
    elif kind == "grouped":
        extents = [ac.GemmShape(draw.extent(500), 256, draw.aligned(2000)) for _ in range(draw.of((1, 3)))]
        make, shape, settings = ac.GroupedGemmRequest, ac.GroupedGemmShape(extents), settings | layouts
    else:
        tap, channels = draw.of((1, 3, 3, 5)), [draw.of((3, 8, 64, 128, 256)) for _ in "ck"]
        shape = ac.ConvShape.nhwc(
            draw.of((1, 8)), 28, 28, *channels, tap, tap, stride=draw.of((1, 1, 2)), padding=tap // 2,
            groups=channels[0] if draw.chance(10) and channels[0] == channels[1] else 1,
        )  # fmt: skip
        make = {"fprop": ac.ConvFwdRequest, "dgrad": ac.ConvDgradRequest, "wgrad": ac.ConvWgradRequest}[kind]
    text = f"{make.__name__}({shape}, {', '.join(f'{key}={_text(value)}' for key, value in settings.items())}, {how}), "

    def call() -> Any:
        request = make(shape, epilogue=ac.GemmEpilogue(**how), **settings)
        return {"explain": _explained(request, policy), "plan": _planned(request, policy, made)}

    made = Operands()
    if kind == "gemm" and not (how["beta"] or how.get("bias") or how.get("activation") or "scaling" in settings):
        batch = () if shape.batch == 1 else (shape.batch,)
        element = dtype.storage.value
        for operand, extents in (("a", (shape.m, shape.k)), ("b", (shape.k, shape.n)), ("out", (shape.m, shape.n))):
            columns = f"layout_{operand.replace('out', 'c')}" in layouts
            result = _RESULTS.get(element, element) if operand == "out" else element
            made.add(operand, result, (*batch, *extents), columns=columns)
    return Case(name, table, f"{text}jit={policy}", call, tuple(made.names))


def _explained(request: Any, policy: str) -> Any:
    try:
        made = ac.explain(request, jit=policy).to_dict()
    except ac.CutlassError as error:
        return f"{type(error).__name__}: {error}"
    # By its digest: names are long.
    made["candidates"] = ", ".join(
        f"{candidate['name'][-16:]} {candidate['estimate_us']:.4g}" for candidate in made["candidates"]
    )
    made["estimate_us"] = made["estimate_us"] and f"{made['estimate_us']:.4g}"
    made["refused"] = sorted(refusal["reason"] for refusal in made["refused"])  # how many is a matter of presets
    for key in ("shape", "dtype", "op", "verified"):  # the request's own, or what was seen on a GPU
        del made[key]
    return {key: value for key, value in made.items() if value}


def _planned(request: Any, policy: str, operands: Operands) -> Any:
    """The attributes of a plan; it is called where there are operands for it."""
    try:
        made = ac.plan(request, jit=policy)
        if operands.arrays:
            made(**operands.arrays)
    except ac.CutlassError as error:
        return f"{type(error).__name__}: {error}"
    shown = {"kernel": made.kernel_name, "origin": made.origin, "workspace": made.workspace_bytes}
    return shown | {"slots": ",".join(map(str, getattr(made, "slots", ())))}


_MAKERS: dict[str, Callable[[Draw, str, str, SmArch], Case]] = {
    "gemm": _gemm, "gemm_epilogue": _gemm_epilogue, "gemm_scaled": _gemm_scaled, "gemm_fp4": _gemm_fp4,
    "gated_gemm": _gated_gemm, "gemv": _gemv, "grouped_gemm": _grouped_gemm, "conv2d": _conv, "conv2d_dgrad": _conv,
    "conv2d_wgrad": _conv, "matmul": _matmul, "quantize": _quantize, "host": _host, "requests": _requests,
}  # fmt: skip
