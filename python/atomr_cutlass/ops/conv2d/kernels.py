"""Plans of convolutions: which kernel, how many slices of K, and the rewrites onto kernels that exist."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from ... import _core
from ...arrays.layouts import collapses, in_layout, pixel_strides, rows_collapse
from ...arrays.numerics import FAST
from ...epilogue import validate as first_use
from ...epilogue.bound import FusedOperands, Fusion, source_number
from ...errors import KernelNotFoundError, UnsupportedError
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.lower import LINEAR, split
from ...generator.key import KernelKey
from ...generator.matrix import cells, shared_memory, with_epilogue
from ...generator.rules import FP8_TYPES, accumulator, conv_types, supports_tree
from ...jit import kernels
from ...pipeline import devices, estimate, select
from ...pipeline.devices import Device
from ...pipeline.op_plan import Address, OpPlan, Steps, bytes_of, refuse_capture
from ...pipeline.pick import Cost, Derive, Picked, best_cell, pick
from ...pipeline.plan import product_args
from ...pipeline.problem import GemmProblem, MatrixSpec, Variant, round_up
from ...pipeline.select import Choice
from .problem import (
    DGRAD,
    FPROP,
    WGRAD,
    ConvProblem,
    channel_alignment,
    dense,
    formulations,
    packed,
    reach,
)

ITERATOR_PENALTY = {"": 1.0, "optimized": 1.0, "fixed_channels": 1.1, "few_channels": 1.2, "analytic": 1.6}
"""How much longer than the optimized one an iterator takes, by the model."""
STRIDE_PENALTY = {"": 1.0, "unity": 1.0, "strided": 1.1}
"""Likewise, for dgrad's support of strides."""

TILE_SECONDS = 4.5e-6
"""What a thread block of a TMA convolution takes beside its products: it starts, stores one tile and ends."""
TILES_AT_ONCE = {64: 2}
"""Thread blocks of it on a multiprocessor, by the width of its tile; 1 for any other."""

DIRECT_TAPS_PER_CLOCK = 48.0
"""Taps of single channels that one multiprocessor sums in a depthwise convolution; in wgrad it reads two arrays."""
DIRECT_WGRAD_TAPS_PER_CLOCK = 12.0
DIRECT_BLOCKS = 4
"""Thread blocks of a depthwise convolution that a multiprocessor is busy with."""
SLICE_SECONDS = 2e-8
"""Adding up one slice of a depthwise wgrad."""

SLICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REDUCED_BYTES_PER_SECOND = 2.5e12
"""At which slices that were computed side by side are added up."""
ONE_TAP = "a filter of one tap: a GEMM"
TREES = (
    "epilogue trees, and bias together with C, are those of sm_90a's TMA kernels, which convolve one group of channels "
    "aligned to 16 bytes, dgrad without a stride; other kernels have bias and activation"
)
"""Why a convolution with a tree has no kernel."""
CAST_SECONDS = 4e-6
"""One launch that casts a small result."""
SLICE_VECTOR = 4
"""Elements that slices are added up by at once."""
CAST_ALIGNMENT = 16
"""Bytes that the addresses of what is cast are multiples of."""


def cost(key: KernelKey, what: ConvProblem, device: Device, split_k: int = 1) -> float | None:
    """Estimated seconds of a kernel for a problem; None when it cannot serve it."""
    g = what.geometry
    if (
        key.a is not what.a.dtype
        or key.b is not what.b.dtype
        or key.d is not what.d.dtype
        or key.math != what.math
        or key.epilogue != what.epilogue
        or (g.groups > 1) != (key.group_mode != "")
        or not _aligned(key, what)
    ):
        return None
    if key.group_mode == "depthwise":
        return _direct_seconds(key, what, device, split_k) if _direct_serves(what) else None
    if not (_iterator_serves(key, what) if key.generation == "sm80" else _tma_serves(what)):
        return None
    if split_k > 1 and (what.op != WGRAD or key.d is not CutlassDtype.F32 or not _slices_apart(key, what)):
        return None
    m, n, k = _tiled_gemm(key, what)
    if key.generation == "sm90":
        moved = sum(bytes_of(spec.shape, spec.dtype) for spec in (what.a, what.b, what.d))
        return _tma_seconds(key, (m, n, k), moved, device)
    variant = Variant(
        exchanged=False, m=m, n=n, k=-(-k // split_k), batch=g.groups * split_k,
        layout_a=key.layout_a, layout_b=key.layout_b, lda=k, ldb=k, ldc=n, ldd=n, batch_strides=(0, 0, 0, 0),
        align_a=key.align_a, align_b=key.align_b, align_d=key.align_d,
    )  # fmt: skip
    seconds = estimate.seconds(key, variant, device, shared_memory(key))
    if split_k > 1:
        seconds += CAST_SECONDS + (split_k + 1) * m * n * key.d.bits / 8 / REDUCED_BYTES_PER_SECOND
    # Of kernels that are as fast, the one that loads more at once.
    return seconds * ITERATOR_PENALTY[key.iterator] * STRIDE_PENALTY[key.stride_support] * (1 + 1e-3 / key.align_a)


def _tma_seconds(key: KernelKey, implicit_gemm: tuple[int, int, int], moved: int, device: Device) -> float:
    """Estimated seconds of a convolution over TMA, a tile for each thread block; `moved` bytes are read and written."""
    m, n, k = implicit_gemm
    tile_m, tile_n, tile_k = key.tile
    steps = -(-k // tile_k)
    residents = TILES_AT_ONCE.get(tile_n, 1)
    rate = 16384.0 / key.a.bits * 2  # multiply-adds per clock and multiprocessor: WGMMA's
    multiply = residents * tile_m * tile_n * tile_k * steps / (rate * estimate.TILE_N_EFFICIENCY[128])
    clocks = max(multiply, steps * estimate.STEP_CLOCKS)
    waves = -(-(-(-m // tile_m) * -(-n // tile_n)) // (device.multiprocessors * residents))
    floor = moved / estimate.DRAM_BYTES_PER_SECOND.get(device.capability, 1e12)
    seconds = max(waves * (clocks / estimate.CLOCK_HZ + TILE_SECONDS), floor) + estimate.LAUNCH_SECONDS
    return seconds * (1 + 1e-3 / key.align_a)


def _slices_apart(key: KernelKey, what: ConvProblem) -> bool:
    """Whether slices of K can be computed side by side, each to memory of its own (ConvSm80, Cast)."""
    results = [what.d] if what.c is None else [what.d, what.c]
    lies = all(dense(spec) and spec.alignment % CAST_ALIGNMENT == 0 for spec in results)
    return lies and key.generation == "sm80" and not key.group_mode and math.prod(what.d.shape) % SLICE_VECTOR == 0


def _aligned(key: KernelKey, what: ConvProblem) -> bool:
    """Whether all arrays lie as the kernel's vectors need them to."""
    groups = 1 if key.group_mode == "depthwise" else what.geometry.groups
    of_b, of_d = (groups, 1) if what.op == WGRAD else (1, groups)
    arrays = ((what.a, groups, key.align_a), (what.b, of_b, key.align_b), (what.d, of_d, key.align_d))
    if any(channel_alignment(spec, parts) % align for spec, parts, align in arrays):
        return False
    if what.c is not None and channel_alignment(what.c, of_d) % key.align_d:
        return False
    return what.bias is None or what.bias.alignment % key_bytes(key.align_d, what.bias) == 0


def _tiled_gemm(key: KernelKey, what: ConvProblem) -> tuple[int, int, int]:
    """The implicit GEMM as the kernel computes it: TMA loads whole tiles of channels, for each tap of the filter."""
    m, n, k = what.implicit_gemm
    if key.generation == "sm80":
        return m, n, k
    g = what.geometry
    if what.op == WGRAD:
        return m, n // g.c * round_up(g.c, key.tile[1]), k
    channels = g.c if what.op == FPROP else g.k
    return m, n, k // channels * round_up(channels, key.tile[2])


def _direct_serves(what: ConvProblem) -> bool:
    """What the kernels of depthwise convolutions compute (ConvDepthwise::can_implement)."""
    g = what.geometry
    return g.groups == g.c == g.k and g.r * g.s <= 128


def _direct_seconds(key: KernelKey, what: ConvProblem, device: Device, split_k: int) -> float | None:
    """Estimated seconds of a depthwise convolution: of its taps, or of reading and writing every array once."""
    g = what.geometry
    if split_k > 1 and what.op != WGRAD:
        return None
    pixels = g.n * (g.h * g.w if what.op == DGRAD else g.p * g.q)
    tiles = -(-g.c // key.tile[1])
    blocks = g.r * g.s * tiles * split_k if what.op == WGRAD else -(-pixels // key.tile[0]) * tiles
    rate = DIRECT_WGRAD_TAPS_PER_CLOCK if what.op == WGRAD else DIRECT_TAPS_PER_CLOCK
    rate *= device.multiprocessors * min(1.0, blocks / (DIRECT_BLOCKS * device.multiprocessors))
    summing = pixels * g.c * g.r * g.s / (rate * estimate.CLOCK_HZ) + (split_k - 1) * SLICE_SECONDS
    moved = sum(bytes_of(spec.shape, spec.dtype) for spec in (what.a, what.b, what.d))
    return max(summing, moved / estimate.DRAM_BYTES_PER_SECOND.get(device.capability, 1e12)) + estimate.LAUNCH_SECONDS


def _iterator_serves(key: KernelKey, what: ConvProblem) -> bool:
    """What the kernels of the sm80 generation read and write (ConvSm80::can_implement)."""
    g = what.geometry
    if what.op == DGRAD:
        strided = g.stride != (1, 1)
        if strided and (key.stride_support != "strided" or g.dilation != (1, 1)):
            return False
        if key.stride_support == "strided" and g.dilation != (1, 1):
            return False
    if not (packed(what.d) if what.op == WGRAD else collapses(what.d)):
        return False
    bits = 8 if key.iterator in ("fixed_channels", "few_channels") else 1  # those count in bits
    if max(bits * reach(what.a), bits * reach(what.b), reach(what.d)) >= 2**31:
        return False
    channels = g.c // g.groups
    if key.iterator == "fixed_channels":
        return channels == key.align_a and g.dilation == (1, 1)
    if key.iterator == "few_channels":
        return g.dilation == (1, 1)
    if key.iterator == "optimized":
        # A bit mask holds which taps of the filter are inside.
        return g.r <= 32 and g.s <= 32 and (collapses(what.a) if what.op == WGRAD else rows_collapse(what.b))
    return True


def _tma_serves(what: ConvProblem) -> bool:
    """What TMA's im2col mode and CUTLASS's kernels over it can do."""
    g = what.geometry
    if g.groups != 1 or (what.op == DGRAD and g.stride != (1, 1)):
        return False
    if what.op == WGRAD and not (dense(what.a) and dense(what.d)):
        return False
    spans = ((g.r - 1) * g.dilation[0], (g.s - 1) * g.dilation[1])
    # The corners of the box that an im2col map reads are signed numbers of 8 bits.
    return max(g.stride) <= 8 and max(*g.padding[0], *g.padding[1], *spans) <= 127


def make(
    what: ConvProblem,
    *,
    arch: SmArch | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    like: Any = None,
    backend: str = "auto",
    jit: str | None = None,
    stream: int | None = None,
    layout: str = "nhwc",
    chosen: Chosen | None = None,
) -> OpPlan:
    """The plan for a convolution.

    Its slots are a, b and, where there are such, c, bias, the inputs and the outputs of an epilogue tree, then out.
    `layout` is the order in which calls name the dimensions of their arrays; the problem has NHWC's. `chosen`, one of
    `choices`, is how it is computed; without it, that is `choose`'s business.

    A convolution that no kernel computes as it stands is rewritten, and the plan's `rewrite` says how:

    * fp8 where no kernel multiplies it: both operands are cast to bf16 or fp16, exactly, in memory of the plan's own
      (kernels that do multiply it accumulate in the tensor cores alone, as fast accumulation does);
    * wgrad with few results and many pixels, or with no kernel for its result's type: slices of K, or all of it, are
      added up in float32, then cast.

    Arguments and errors are those of `plan.make`.
    """
    device = devices.get(what.device)
    how: dict[str, Any] = {"arch": arch, "backend": backend, "jit": jit}
    chosen = chosen or choose(what, device, **how)
    refuse_capture(chosen.picked, what.device, stream)
    checked = True
    if what.fusion is not None:
        launch = functools.partial(_launch_once, chosen.picked, device)
        checked = first_use.require(chosen.picked, device, launch, stream=stream)
    made = _plan(what, chosen, device, how, alpha=alpha, beta=beta, like=like, layout=layout)
    made.checked = checked
    return made


def _launch_once(
    picked: Picked, device: Device, what: ConvProblem, fusion: Fusion, views: Mapping[str, _core.Operand]
) -> None:
    """Launches a kernel for a convolution of `a` and `b` to `out`, on the default stream."""
    number = source_number(picked.key.epilogue)
    way = dataclasses.replace(what, fusion=fusion, source=number, c=None if number is None else what.d)
    chosen = Chosen(picked, way, 1, casts=False, wide=False, rewrite="")
    made = _plan(way, chosen, device, {}, alpha=1.0, beta=0.0, like=None, layout="nhwc")
    made(*(views[name] for name in ("a", "b", *(one.name for one in fusion.arrays), "out")), stream=0)


def _plan(
    what: ConvProblem,
    chosen: Chosen,
    device: Device,
    how: dict[str, Any],
    *,
    alpha: float,
    beta: float,
    like: Any,
    layout: str,
) -> OpPlan:
    picked, solved, casts, wide = chosen.picked, chosen.solved, chosen.casts, chosen.wide
    steps = Steps(what.device)

    def slot(name: str, spec: MatrixSpec, alignment: int, role: str = "input") -> Address:
        shape, strides = (in_layout(values, layout) for values in (spec.shape, spec.strides))
        return steps.slot(name, shape, strides, spec.dtype.dlpack, alignment=alignment, role=role)

    key = picked.key
    align_a, align_b = (key.align_a, key.align_b)
    if chosen.product is not None and chosen.product[1].variant.exchanged:
        align_a, align_b = align_b, align_a
    reduced = wide or chosen.apart
    a = slot("a", what.a, CAST_ALIGNMENT if casts else key_bytes(align_a, what.a))
    b = slot("b", what.b, CAST_ALIGNMENT if casts else key_bytes(align_b, what.b))
    of_d = CAST_ALIGNMENT if reduced else key_bytes(key.align_d, what.d)
    source = solved.source is not None
    c = None if what.c is None or source else slot("c", what.c, of_d, "source")
    bias = None if what.bias is None else slot("bias", what.bias, key_bytes(key.align_d, what.bias))
    others = FusedOperands(steps, what.fusion, solved.epilogue, align=key.align_d, clear_masks=False)
    if source:
        c = others.source
    out = slot("out", what.d, of_d, "output")
    if casts:
        a = _cast(steps, a, what.a, solved.a, how, device)
        b = _cast(steps, b, what.b, solved.b, how, device)
    if chosen.product is not None:
        product, choice = chosen.product
        first, second = (b, a) if choice.variant.exchanged else (a, b)
        args = {"batch": 1, "a": first, "b": second, "c": c, "d": out, "alpha": "alpha", "beta": "beta"}
        steps.launch(picked, product_args(choice, product.k) | args, main=True)
    elif not reduced:
        none = (0,) * (0 if what.fusion is None else len(what.fusion.arrays))
        args = _args(solved, a, b, c, bias, out, chosen.split_k) | others.args(none, none, exchanged=False)
        steps.launch(picked, args, main=True)
    else:
        # alpha, beta and C are for whoever adds up.
        slices = chosen.split_k if chosen.apart else 1
        count = math.prod(what.d.shape)
        target = steps.temporary(slices * bytes_of(what.d.shape, CutlassDtype.F32))
        args = _args(solved, a, b, None, bias, target, chosen.split_k)
        steps.launch(picked, args | {"alpha": 1.0, "beta": 0.0, "split_parallel": int(chosen.apart)}, main=True)
        cast = _pick_cast(CutlassDtype.F32, what.d.dtype, device, **how)
        steps.launch(
            cast,
            {
                "count": count, "slices": slices, "slice_stride": count, "a": target, "c": c, "d": out,
                "alpha": "alpha", "beta": "beta" if c is not None else 0.0,
            },
        )  # fmt: skip
    return steps.plan(like=like, alpha=alpha, beta=beta, rewrite=chosen.rewrite)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """How a convolution is computed.

    Attributes:
        picked: the kernel of the products.
        solved: the problem that it is given.
        split_k: slices of K.
        casts: whether the operands are cast before.
        wide: whether the result is computed in float32 and cast.
        rewrite: both, in words; empty for a problem that is computed as it stands.
        product: the GEMM that it comes to, and how that is put to the kernel; None for an implicit GEMM.
    """

    picked: Picked
    solved: ConvProblem
    split_k: int
    casts: bool
    wide: bool
    rewrite: str
    product: tuple[GemmProblem, Choice] | None = None

    @property
    def apart(self) -> bool:
        """Whether the slices are computed side by side and added up by another kernel."""
        return self.split_k > 1 and self.product is None and self.picked.key.group_mode != "depthwise"


def choose(
    what: ConvProblem,
    device: Device,
    *,
    arch: SmArch | None = None,
    backend: str = "auto",
    jit: str | None = None,
    record: bool = True,
) -> Chosen:
    """The kernel for a convolution, after rewrites. Needs no GPU; arguments and errors are those of `pick.pick`.

    With `backend` `auto`, nothing is compiled where the table serves the convolution in whatever way.
    """
    *better, last = ways = formulations(what)
    if backend == "auto":
        for way in ways:
            with contextlib.suppress(UnsupportedError, KernelNotFoundError):
                return _choose(way, device, arch=arch, backend="prebuilt", jit=jit, record=False)
    how: dict[str, Any] = {"arch": arch, "backend": backend, "jit": jit, "record": record}
    for way in better:
        with contextlib.suppress(UnsupportedError, KernelNotFoundError):
            return _choose(way, device, **how)
    return _choose(last, device, **how)


def _choose(
    what: ConvProblem, device: Device, *, arch: SmArch | None, backend: str, jit: str | None, record: bool
) -> Chosen:
    g = what.geometry
    if 0 in what.d.shape or g.n == 0:
        raise UnsupportedError(
            f"a convolution of {g.n} images to shape {what.d.shape} is empty: there is nothing to plan"
        )
    tree = what.fusion is not None
    types = conv_types(what.op, what.a.dtype, what.b.dtype, what.d.dtype, what.math, tree=tree)
    if what.a.dtype in FP8_TYPES:
        # Whatever the operation: those that have no kernels are rewritten.
        types = conv_types(FPROP, what.a.dtype, what.b.dtype, what.d.dtype, FAST, tree=tree)
    if not types:
        raise UnsupportedError(types.reason)
    _check_results(what)
    how: dict[str, Any] = {"arch": arch, "backend": backend, "jit": jit, "record": record}
    solved, rewrite, casts = _served(what, device, arch)
    if casts:  # before a kernel is compiled that waits for one that must not be
        _pick_cast(what.a.dtype, solved.a.dtype, device, **how)
        _pick_cast(what.b.dtype, solved.b.dtype, device, **how)
    product = None if casts else _as_gemm(solved)
    choice = None if product is None else _gemm_choice(product, device, arch, backend, jit)
    try:
        picked, split_k, wide = _picked(solved, device, **how)
        seconds = picked.seconds
    except (UnsupportedError, KernelNotFoundError) as error:
        if choice is None:
            refused = isinstance(error, UnsupportedError)
            if refused and product is not None and select.best_cell(product, device, arch) is not None:
                raise select.missing(product, device, arch) from error
            raise
        seconds = math.inf
    if product is not None and choice is not None and choice.seconds < seconds:
        if choice.info is None and record:
            kernels.record_miss(choice.key)
        made = Picked(choice.key, choice.info, choice.seconds)
        return Chosen(made, solved, choice.split_k, casts, False, ONE_TAP, (product, choice))
    if wide is not None or split_k > 1:
        in_float = "in float32, then cast"
        if split_k > 1:
            in_float = f"{split_k} slices of K added up in float32" + ("" if wide is None else ", then cast")
        rewrite = "; ".join(filter(None, (rewrite, in_float)))
    return Chosen(picked, solved if wide is None else wide, split_k, casts, wide is not None, rewrite)


def _as_gemm(what: ConvProblem) -> GemmProblem | None:
    """The GEMM that a convolution with a filter of one tap is; None for any other, and where pixels have gaps."""
    g = what.geometry
    one_tap = g.r == g.s == g.groups == 1 and g.stride == (1, 1) and g.padding == ((0, 0), (0, 0))
    if not one_tap or what.bias is not None or what.epilogue != "lc":
        return None
    images = [what.x, what.y] if what.c is None or what.op == WGRAD else [what.x, what.y, what.c]
    if not all(collapses(spec) for spec in images):
        return None

    def matrix(spec: MatrixSpec) -> MatrixSpec:
        """Pixels (or filters) by channels."""
        outer, rows, columns, channels = spec.shape
        column, _, outermost = pixel_strides(spec)
        leading = outermost if spec is what.w or (what.op == WGRAD and spec is what.c) else column
        return MatrixSpec((outer * rows * columns, channels), (leading, 1), spec.dtype, spec.alignment)

    def turned(spec: MatrixSpec) -> MatrixSpec:
        return MatrixSpec(spec.shape[::-1], spec.strides[::-1], spec.dtype, spec.alignment)

    a, b, d = matrix(what.a), matrix(what.b), matrix(what.d)
    if what.op == FPROP:
        b = turned(b)
    elif what.op == WGRAD:
        a = turned(a)
    c = None if what.c is None else matrix(what.c)
    return GemmProblem(a, b, c, d, what.math, what.device)


def _gemm_choice(
    what: GemmProblem, device: Device, arch: SmArch | None, backend: str, jit: str | None
) -> Choice | None:
    compiling = backend == "jit" or kernels.policy(jit) != "off"
    try:
        found = select.choose(what, device, arch, backend=backend, compiling=compiling)
    except (UnsupportedError, KernelNotFoundError):
        return None
    return None if found.info is None and not compiling else found


def choices(what: ConvProblem, device: Device, arch: SmArch) -> list[Chosen]:
    """Every way in which cells of the matrix for an arch compute a convolution, best first by the model."""
    solved, rewrite, casts = _served(what, device, arch)
    problems = [solved]
    if what.op == WGRAD and solved.d.dtype is not CutlassDtype.F32 and not _unwidened(solved):
        problems.append(_widened(solved))
    found = []
    product = None if casts else _as_gemm(solved)
    choice = None if product is None else select.best_cell(product, device, arch)
    if product is not None and choice is not None:
        made = Picked(choice.key, None, choice.seconds)
        found.append(
            Chosen(made, solved, choice.split_k, casts, False, "a filter of one tap: a GEMM", (product, choice))
        )
    for problem in problems:
        for _, key in cells([arch]):
            for split_k in SLICES if what.op == WGRAD and key.op == WGRAD else (1,):
                seconds = cost(key, problem, device, split_k) if key.op == what.op else None
                if seconds is not None and (split_k == 1 or what.implicit_gemm[2] >= split_k * 256):
                    extra = CAST_SECONDS if problem is not solved and split_k == 1 else 0.0
                    picked = Picked(key, None, seconds + extra)
                    found.append(Chosen(picked, problem, split_k, casts, problem is not solved, rewrite))
    return sorted(found, key=lambda one: (one.picked.seconds, one.picked.key.name))


def _check_results(what: ConvProblem) -> None:
    """Refuses a C that does not lie like D: kernels have one set of strides for both."""
    if what.c is not None and pixel_strides(what.c) != pixel_strides(what.d):
        raise UnsupportedError(
            f"c has strides {what.c.strides} and the result {what.d.strides} (NHWC order): kernels read c as they "
            "write the result; copy c"
        )


def best_key(what: ConvProblem, device: Device, arch: SmArch | None) -> KernelKey:
    """The key of the matrix's best cell for the products of a problem, after rewrites. Needs no GPU.

    Raises:
        UnsupportedError: no cell serves it.
    """
    for way in formulations(what):
        solved, _, _ = _served(way, device, arch)
        best = _best(solved, device, arch)
        if best is not None:
            return best.key
    if best is None and what.op == WGRAD and not _unwidened(solved):
        best = _best(_widened(solved), device, arch)
    if best is None:
        raise UnsupportedError(_refusal(solved))
    return best.key


def _served(what: ConvProblem, device: Device, arch: SmArch | None) -> tuple[ConvProblem, str, bool]:
    """The problem that a kernel computes, what was done to it, and whether its operands have to be cast."""
    if what.a.dtype not in FP8_TYPES:
        return what, "", False
    native = dataclasses.replace(what, math=FAST)
    if _best(native, device, arch) is not None:
        return native, "", False
    wide = what.d.dtype if what.d.dtype in (CutlassDtype.F16, CutlassDtype.BF16) else CutlassDtype.BF16

    def cast(spec: MatrixSpec) -> MatrixSpec:
        if not dense(spec) or spec.alignment % CAST_ALIGNMENT:
            raise UnsupportedError(
                f"no kernel multiplies these {what.a.dtype.value} operands, and what is cast instead must be dense in "
                f"NHWC order and aligned to {CAST_ALIGNMENT} bytes: copy it"
            )
        strides = [math.prod(spec.shape[i + 1 :]) for i in range(4)]
        return MatrixSpec(spec.shape, tuple(strides), wide)

    solved = dataclasses.replace(what, a=cast(what.a), b=cast(what.b), math="default")
    return solved, f"fp8 operands cast to {wide.value}, which holds them exactly", True


def _refusal(what: ConvProblem) -> str:
    """What to say when no cell of the matrix serves a problem."""
    g = what.geometry
    refusal = (
        f"no kernel of the matrix serves this {what.op}: {what.a.dtype.value} ({what.math}) to {what.d.dtype.value}, "
        f"epilogue {what.epilogue}, {g.groups} groups of {g.c // g.groups} to {g.k // g.groups} channels, stride "
        f"{g.stride}, dilation {g.dilation}"
    )
    if what.op == DGRAD and g.stride != (1, 1) and g.dilation != (1, 1):
        refusal += ": kernels of strided dgrad have no dilation"
    elif not (packed(what.d) if what.op == WGRAD else collapses(what.d)):
        refusal += f": the pixels of the result, of strides {what.d.strides} (NHWC order), are not evenly spaced"
    elif what.fusion is not None:
        lowered = supports_tree(split(what.epilogue)[1], accumulator(what.a.dtype), what.d.dtype)
        refusal += ": " + (lowered.reason or TREES)
    return refusal


def _best(what: ConvProblem, device: Device, arch: SmArch | None, split_k: int = 1) -> Picked | None:
    """The best cell of the matrix, or the best kernel that differs from one in what every cell compiles with."""
    price, varied = _priced(what, device, split_k)
    return best_cell(what.op, price, device, arch) or best_cell(what.op, price, device, arch, varied)


def _priced(what: ConvProblem, device: Device, split_k: int) -> tuple[Cost, Derive]:
    """What kernels cost, and what is made of the matrix's cells where none serves as it is.

    The matrix lists what is worth building ahead of time.
    """

    def price(key: KernelKey) -> float | None:
        return cost(key, what, device, split_k)

    def varied(key: KernelKey) -> KernelKey:
        if key.epilogue == LINEAR:
            key = with_epilogue(key, what.epilogue, what.d.dtype if what.fusion else key.d)
        unity = key.stride_support == "strided" and what.geometry.stride == (1, 1)
        return dataclasses.replace(key, stride_support="unity") if unity else key

    return price, varied


def _pick(
    what: ConvProblem,
    device: Device,
    split_k: int = 1,
    *,
    arch: SmArch | None,
    backend: str,
    jit: str | None,
    record: bool = True,
) -> Picked:
    """`pick.pick` with the kernels of `_best`."""
    price, varied = _priced(what, device, split_k)
    how: dict[str, Any] = {
        "refusal": _refusal(what), "arch": arch, "backend": backend, "jit": jit, "record": record
    }  # fmt: skip
    try:
        return pick(what.op, price, device, **how)
    except UnsupportedError:
        return pick(what.op, price, device, **how, derive=varied)


def _unwidened(what: ConvProblem) -> str:
    """Why a wgrad cannot be computed in float32 and cast; empty where it can, or is in float32 anyway."""
    if what.d.dtype is CutlassDtype.F32:
        return ""
    if what.c is not None and (not dense(what.c) or what.c.alignment % CAST_ALIGNMENT):
        return f"a cast adds a c that is dense and aligned to {CAST_ALIGNMENT} bytes"
    if not dense(what.d) or what.d.alignment % CAST_ALIGNMENT:
        return f"a cast writes what is dense and aligned to {CAST_ALIGNMENT} bytes"
    return ""


def _widened(what: ConvProblem) -> ConvProblem:
    """The wgrad with a float32 result, dense in memory of the plan's own; `what` itself where it has one already."""
    if what.d.dtype is CutlassDtype.F32:
        return what
    return dataclasses.replace(what, c=None, d=dataclasses.replace(what.d, dtype=CutlassDtype.F32))


def _picked(
    what: ConvProblem, device: Device, *, arch: SmArch | None, backend: str, jit: str | None, record: bool = True
) -> tuple[Picked, int, ConvProblem | None]:
    """(kernel, slices of K, the problem with a float32 result where it is computed in one and cast)."""
    how: dict[str, Any] = {"arch": arch, "backend": backend, "jit": jit, "record": record}
    if what.op != WGRAD:
        return _pick(what, device, **how), 1, None
    best: Picked | None = None
    failure: Exception = UnsupportedError(_refusal(what))
    missing: KernelNotFoundError | None = None  # why a way that the matrix has is not open
    try:
        best = _pick(what, device, **how)
    except (UnsupportedError, KernelNotFoundError) as error:
        failure = error
    reason = _unwidened(what)
    wide = what if reason else _widened(what)
    slices, through, seconds = 1, what, math.inf if best is None else best.seconds
    try:
        if wide is not what:
            _pick_cast(CutlassDtype.F32, what.d.dtype, device, **how)
    except (UnsupportedError, KernelNotFoundError) as error:
        if isinstance(error, KernelNotFoundError) and _best(wide, device, arch) is not None:
            missing = error
        wide = what
    for count in SLICES:
        if count > 1 and what.implicit_gemm[2] < count * 256:
            break
        # The cost of slices has that of adding them up.
        for problem, extra in ((what, 0.0), (wide, CAST_SECONDS if count == 1 else 0.0)):
            if problem is what and (count == 1 or wide is not what):
                continue
            try:
                sliced = _pick(problem, device, count, **how)
            except (UnsupportedError, KernelNotFoundError) as error:
                missing = error if isinstance(error, KernelNotFoundError) else missing
                continue
            if sliced.seconds + extra < seconds:
                best, slices, through, seconds = sliced, count, problem, sliced.seconds + extra
    if best is None:
        if missing is not None and isinstance(failure, UnsupportedError):
            raise missing
        if reason and isinstance(failure, UnsupportedError):
            raise UnsupportedError(f"{failure}; nor is it computed in float32: {reason}")
        raise failure
    return best, slices, (None if through is what else through)


def key_bytes(align: int, spec: MatrixSpec) -> int:
    """Bytes of an alignment in elements."""
    return max(1, align * spec.dtype.bits // 8)


def _cast(
    steps: Steps, source: Address, spec: MatrixSpec, wide: MatrixSpec, how: dict[str, Any], device: Device
) -> Address:
    target = steps.temporary(bytes_of(wide.shape, wide.dtype))
    _launch_cast(steps, source, spec.dtype, target, wide.dtype, math.prod(spec.shape), how, device)
    return target


def _launch_cast(
    steps: Steps,
    source: Address,
    dtype: CutlassDtype,
    target: Address,
    wanted: CutlassDtype,
    count: int,
    how: dict[str, Any],
    device: Device,
) -> None:
    picked = _pick_cast(dtype, wanted, device, **how)
    steps.launch(picked, {"count": count, "slices": 1, "a": source, "d": target, "alpha": 1.0})


def _pick_cast(
    dtype: CutlassDtype,
    wanted: CutlassDtype,
    device: Device,
    *,
    arch: SmArch | None,
    backend: str,
    jit: str | None,
    record: bool = True,
) -> Picked:
    def serves(key: KernelKey) -> float | None:
        return CAST_SECONDS if key.a is dtype and key.d is wanted else None

    refusal = f"no kernel casts {dtype.value} to {wanted.value}"
    return pick("cast", serves, device, refusal=refusal, arch=arch, backend=backend, jit=jit, record=record)


def _args(
    what: ConvProblem, a: Address, b: Address, c: Address | None, bias: Address | None, d: Address, split_k: int
) -> dict[str, Any]:
    g = what.geometry
    x, w, y = (pixel_strides(spec) for spec in (what.x, what.w, what.y))
    (top, bottom), (left, right) = g.padding
    return {
        "n": g.n, "h": g.h, "w": g.w, "c": g.c, "k": g.k, "r": g.r, "s": g.s, "p": g.p, "q": g.q,
        "pad_h": top, "pad_w": left, "pad_h_end": bottom, "pad_w_end": right,
        "stride_h": g.stride[0], "stride_w": g.stride[1], "dilation_h": g.dilation[0], "dilation_w": g.dilation[1],
        "groups": g.groups, "split_k": split_k, "swizzle": 1,
        "a": a, "b": b, "c_source": c, "d": d, "bias": bias,
        "x_stride_w": x[0], "x_stride_h": x[1], "x_stride_n": x[2],
        "w_stride_s": w[0], "w_stride_r": w[1], "w_stride_k": w[2],
        "y_stride_q": y[0], "y_stride_p": y[1], "y_stride_n": y[2],
        "alpha": "alpha", "beta": "beta",
    }  # fmt: skip


__all__ = ["DGRAD", "FPROP", "WGRAD", "Chosen", "choose", "cost", "make"]
