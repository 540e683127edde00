"""Plans of convolutions: which kernel, how many slices of K, and the rewrites onto kernels that exist."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from . import devices, estimate
from .conv_problem import DGRAD, FPROP, WGRAD, ConvProblem, channel_alignment, pixel_strides
from .devices import Device
from .errors import UnsupportedError
from .generator.archs import SmArch
from .generator.dtypes import CutlassDtype
from .generator.key import KernelKey
from .generator.matrix import shared_memory
from .generator.rules import FP8_TYPES, conv_types
from .op_plan import Address, OpPlan, Steps, bytes_of, refuse_capture
from .pick import Picked, best_cell, pick
from .problem import MatrixSpec, Variant

ITERATOR_PENALTY = {"": 1.0, "optimized": 1.0, "fixed_channels": 1.1, "few_channels": 1.2, "analytic": 1.6}
"""How much longer than the optimized one an iterator takes, by the model."""

SLICES = (1, 2, 4, 8, 16, 32, 64)
CAST_SECONDS = 4e-6
"""One launch that casts a small result."""


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
        or channel_alignment(what.a, g.groups) % key.align_a
        or channel_alignment(what.b, g.groups if what.op == WGRAD else 1) % key.align_b
        or channel_alignment(what.d, 1 if what.op == WGRAD else g.groups) % key.align_d
        or (what.c is not None and channel_alignment(what.c, 1 if what.op == WGRAD else g.groups) % key.align_d)
    ):
        return None
    if key.generation == "sm80" and not _iterator_serves(key, what):
        return None
    if key.generation != "sm80" and not _tma_serves(what):
        return None
    if split_k > 1 and (key.generation != "sm80" or key.d is not CutlassDtype.F32 or key.group_mode):
        return None
    m, n, k = what.implicit_gemm
    variant = Variant(
        exchanged=False, m=m, n=n, k=k, batch=g.groups, layout_a=key.layout_a, layout_b=key.layout_b, lda=k, ldb=k,
        ldc=n, ldd=n, batch_strides=(0, 0, 0, 0), align_a=key.align_a, align_b=key.align_b, align_d=key.align_d,
    )  # fmt: skip
    seconds = estimate.seconds(key, variant, device, shared_memory(key), split_k)
    return seconds * ITERATOR_PENALTY[key.iterator] * (1.1 if key.stride_support == "strided" else 1.0)


def _iterator_serves(key: KernelKey, what: ConvProblem) -> bool:
    g = what.geometry
    if what.op == DGRAD:
        strided = g.stride != (1, 1)
        if strided and (key.stride_support != "strided" or g.dilation != (1, 1)):
            return False
        if key.stride_support == "strided" and g.dilation != (1, 1):
            return False
    channels = g.c // g.groups
    if key.iterator == "fixed_channels":
        return channels == key.align_a and g.dilation == (1, 1)
    if key.iterator == "few_channels":
        return g.dilation == (1, 1)
    if key.iterator == "optimized":
        # A bit mask holds which taps of the filter are inside.
        return g.r <= 32 and g.s <= 32
    return True


def _tma_serves(what: ConvProblem) -> bool:
    """What TMA's im2col mode and CUTLASS's kernels over it can do (design: one group, dgrad without stride)."""
    g = what.geometry
    return g.groups == 1 and not (what.op == DGRAD and g.stride != (1, 1))


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
) -> OpPlan:
    """The plan for a convolution; its slots are a, b and, where there are such, c and bias, then out.

    A convolution that no kernel computes as it stands is rewritten, and the plan's `rewrite` says how:

    * fp8 where no kernel multiplies it: both operands are cast to bf16 or fp16, exactly, in memory of the plan's own;
    * wgrad with few results and many pixels: slices of K are added up in float32, then cast.

    Arguments and errors are those of `plan.make`.
    """
    g = what.geometry
    if 0 in what.d.shape or g.n == 0:
        raise UnsupportedError(
            f"a convolution of {g.n} images to shape {what.d.shape} is empty: there is nothing to plan"
        )
    types = conv_types(what.op, what.a.dtype, what.b.dtype, what.d.dtype, what.math)
    if not types and what.a.dtype not in FP8_TYPES:
        raise UnsupportedError(types.reason)
    device = devices.get(what.device)
    how: dict[str, Any] = {"arch": arch, "backend": backend, "jit": jit}
    steps = Steps(what.device)
    solved, rewrite, casts = _served(what, device, arch)
    picked, split_k, wide = _picked(solved, device, **how)
    refuse_capture(picked, what.device, stream)

    a = _slot(steps, "a", what.a, 16 if what.a.dtype in FP8_TYPES else key_bytes(picked.key.align_a, what.a))
    b = _slot(steps, "b", what.b, 16 if what.b.dtype in FP8_TYPES else key_bytes(picked.key.align_b, what.b))
    c = None if what.c is None else _slot(steps, "c", what.c, key_bytes(picked.key.align_d, what.c), "source")
    bias = None
    if what.bias is not None:
        bias = _slot(steps, "bias", what.bias, key_bytes(picked.key.align_d, what.bias))
    out = _slot(steps, "out", what.d, key_bytes(picked.key.align_d, what.d), "output")
    if casts:
        a = _cast(steps, a, what.a, solved.a, how, device)
        b = _cast(steps, b, what.b, solved.b, how, device)
    target = out
    if wide is not None:
        rewrite = "; ".join(filter(None, (rewrite, f"{split_k} slices of K added up in float32, then cast")))
        target = steps.temporary(bytes_of(what.d.shape, CutlassDtype.F32))
        solved = wide
    steps.launch(picked, _args(solved, a, b, None if wide is not None else c, bias, target, split_k), main=True)
    if wide is not None:
        _launch_cast(steps, target, CutlassDtype.F32, out, what.d.dtype, math.prod(what.d.shape), how, device)
    return steps.plan(like=like, alpha=alpha, beta=beta, rewrite=rewrite)


def _served(what: ConvProblem, device: Device, arch: SmArch | None) -> tuple[ConvProblem, str, bool]:
    """The problem that a kernel computes, what was done to it, and whether its operands have to be cast."""
    if what.a.dtype not in FP8_TYPES:
        return what, "", False
    native = best_cell(what.op, lambda key: cost(key, what, device), device, arch)
    if native is not None:
        return what, "", False
    wide = what.d.dtype if what.d.dtype in (CutlassDtype.F16, CutlassDtype.BF16) else CutlassDtype.BF16

    def cast(spec: MatrixSpec) -> MatrixSpec:
        strides = [math.prod(spec.shape[i + 1 :]) for i in range(4)]
        return MatrixSpec(spec.shape, tuple(strides), wide)

    solved = dataclasses.replace(what, a=cast(what.a), b=cast(what.b), math="default")
    return solved, f"fp8 operands cast to {wide.value}, which holds them exactly", True


def _picked(
    what: ConvProblem, device: Device, *, arch: SmArch | None, backend: str, jit: str | None
) -> tuple[Picked, int, ConvProblem | None]:
    """(kernel, slices of K, the problem with a float32 result where the slices need one)."""
    g = what.geometry
    refusal = (
        f"no kernel of the matrix serves this {what.op}: {what.a.dtype.value} ({what.math}) to {what.d.dtype.value}, "
        f"epilogue {what.epilogue}, {g.groups} groups of {g.c // g.groups} to {g.k // g.groups} channels, stride "
        f"{g.stride}, dilation {g.dilation}"
    )
    if what.op == DGRAD and g.stride != (1, 1) and g.dilation != (1, 1):
        refusal += ": kernels of strided dgrad have no dilation"
    plain = pick(
        what.op, lambda key: cost(key, what, device), device, refusal=refusal, arch=arch, backend=backend, jit=jit
    )
    if what.op != WGRAD:
        return plain, 1, None
    wide = what if what.d.dtype is CutlassDtype.F32 else dataclasses.replace(
        what, c=None, d=dataclasses.replace(what.d, dtype=CutlassDtype.F32)
    )  # fmt: skip
    if what.c is not None and wide is not what:
        return plain, 1, None
    extra = 0.0 if wide is what else CAST_SECONDS
    best, slices, seconds = plain, 1, plain.seconds
    for count in SLICES[1:]:
        if what.implicit_gemm[2] < count * 256:
            break
        try:
            sliced = pick(
                what.op, lambda key, n=count: cost(key, wide, device, n), device, refusal=refusal, arch=arch,  # type: ignore[misc]
                backend=backend, jit=jit,
            )  # fmt: skip
        except UnsupportedError:
            break
        if sliced.seconds + extra < seconds:
            best, slices, seconds = sliced, count, sliced.seconds + extra
    return best, slices, (wide if slices > 1 and wide is not what else None)


def _slot(steps: Steps, name: str, spec: MatrixSpec, alignment: int, role: str = "input") -> Address:
    return steps.slot(name, spec.shape, spec.strides, spec.dtype.dlpack, alignment=alignment, role=role)


def key_bytes(align: int, spec: MatrixSpec) -> int:
    """Bytes of an alignment in elements."""
    return max(1, align * spec.dtype.bits // 8)


def _cast(
    steps: Steps, source: Address, spec: MatrixSpec, wide: MatrixSpec, how: dict[str, Any], device: Device
) -> Address:
    target = steps.temporary(bytes_of(wide.shape, wide.dtype))
    if spec.strides != wide.strides:
        raise UnsupportedError("an fp8 operand that has to be cast must be dense in NHWC order: copy it")
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
    def serves(key: KernelKey) -> float | None:
        return CAST_SECONDS if key.a is dtype and key.d is wanted else None

    refusal = f"no kernel casts {dtype.value} to {wanted.value}"
    picked = pick("cast", serves, device, refusal=refusal, **how)
    steps.launch(picked, {"count": count, "a": source, "d": target, "alpha": 1.0})


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


__all__ = ["DGRAD", "FPROP", "WGRAD", "cost", "make"]
