"""The reference of GEMM, the magnitudes that its tolerance is relative to, and its probe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import reference
from ...arrays import fp4, numerics
from ...arrays.numerics import INTEGER_DTYPES, AnyArray, FloatArray, from_numpy_dtype, round_to_tf32, stored, to_float64
from ...arrays.scales import BLOCK, VECTOR
from ...errors import InvalidOperandError
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.tree import COLUMN, MASK, MATRIX, RESULT, ROW, SCALAR, EpilogueVisitorTree
from ...pipeline.operation import Array, Arrays
from ...pipeline.probe import Check, Probe, slices
from ...reference import parts
from ...reference.parts import OperandScale, Scale, read_scales, scaled_product
from ..quantize import reference as quantization

if TYPE_CHECKING:
    from .operation import GemmRequest

_SMALL = 2**25
"""The most multiply-adds of a GEMM with a tree that is compared as a whole, which gives exact places of differences."""


@dataclass(frozen=True)
class GemmTerms:
    """Parameters of a GEMM apart from operands and the result's type.

    Attributes:
        bias: (N,), added to every row.
        scale_a, scale_b: as the function `gemm` takes them, those of fp4 plain; arrays have any floating dtype.
        scale_d: a number, applied after the activation.
        amax: one element, which receives max |act(...)| over all batches before scale_d, from which the next scale is
            chosen: 0 for an empty result, and NaN if D has one, as in CUTLASS's reduction. Not for int32 results.
        math: `tf32` rounds float32 operands to TF32 first. `default`, `ieee` and `3xtf32` keep them as they are.
    """

    alpha: float = 1.0
    beta: float = 0.0
    bias: AnyArray | None = None
    activation: str | None = None
    scale_a: Scale | None = None
    scale_b: Scale | None = None
    scale_d: float | None = None
    amax: AnyArray | None = None
    math: str = "default"


def gemm(a: AnyArray, b: AnyArray, c: AnyArray | None = None, *, out_dtype: CutlassDtype, **terms: Any) -> AnyArray:
    """D = saturating_cast(scale_d * act(alpha * scale_a * scale_b * A B + beta * C + bias)).

    NaN and infinity propagate as in BLAS: through A, B, C, alpha and beta alike, except that C is not read when
    beta is 0, and A and B are not read when alpha is 0 (reference BLAS documents both; cuBLAS does the same). Without
    products (K is 0) there is nothing for alpha to multiply either: D is then act(beta * C + bias).

    Scales propagate like alpha. Where there is one for each block, it multiplies that block's sum of products: an
    infinite scale makes infinity of a block whose sum is not zero, and NaN of one whose sum is. The narrow scales of
    fp4 hold no infinity; their NaN makes NaN of every result that the block takes part in, zeros included. fp4 itself
    holds neither. An infinite or NaN result is stored as `saturating_cast` says: fp8 saturates and keeps NaN.

    int8 operands with an int32 result stay integers from end to end. alpha and beta are whole numbers there, and
    every step wraps modulo 2**32 like the int32 arithmetic of CUTLASS's epilogue: nothing saturates. (Kernels of the
    sm80 generation saturate the sum of products, CUTLASS having no other instruction; it takes K above 131,071 to
    see that.) int8 operands with any other result go through float64 as everything else does.

    A and B may have any dtype but int32, C any; TF32 is stored as float32. `terms` are those of `GemmTerms`.
    """
    given = GemmTerms(**terms)
    if out_dtype is CutlassDtype.I32 and given.amax is not None:
        raise InvalidOperandError("amax is of floating results; out_dtype is int32")
    if out_dtype is CutlassDtype.I32 and from_numpy_dtype(a.dtype) is CutlassDtype.I8:
        if not (given.scale_a is None and given.scale_b is None and given.scale_d is None):
            raise InvalidOperandError("scales are given; int8 to int32 takes none: ask for a floating out_dtype")
        return _integer_gemm(a, b, c, given)
    shape = _result_shape(a, b, c, given)
    first, second = read_scales(a, b, given.scale_a, given.scale_b)
    if given.math == "tf32":
        a, b = round_to_tf32(a), round_to_tf32(b)
    with np.errstate(all="ignore"):
        product = _product(to_float64(a), to_float64(b), shape, float(given.alpha), first, second)
        values = parts.add_terms(product, c, float(given.beta), given.bias, given.activation)
        if given.amax is not None:
            given.amax[0] = np.abs(values).max(initial=0.0)
        return stored(values, given.scale_d, out_dtype)


def absolute_product(a: AnyArray, b: AnyArray, c: AnyArray | None = None, **terms: Any) -> FloatArray:
    """|scale_d| * (|alpha| |scale_a| |scale_b| |A| |B| + |beta| |C| + |bias|), elementwise absolute values.

    Rounding errors of a product are measured against it, in float64: they are small next to the terms that were summed,
    not next to a sum that may have cancelled. An activation makes them larger, by its slope: at most 1.5.
    """
    given = GemmTerms(**terms)
    shape = _result_shape(a, b, c, given)
    first, second = (scale.absolute() for scale in read_scales(a, b, given.scale_a, given.scale_b))
    with np.errstate(all="ignore"):
        d = _product(np.abs(to_float64(a)), np.abs(to_float64(b)), shape, abs(float(given.alpha)), first, second)
        c, bias = (None if term is None else np.abs(to_float64(term)) for term in (c, given.bias))
        d = parts.add_terms(d, c, abs(float(given.beta)), bias)
        return d if given.scale_d is None else d * abs(float(given.scale_d))


def _product(
    a: FloatArray, b: FloatArray, shape: tuple[int, ...], alpha: float, scale_a: OperandScale, scale_b: OperandScale
) -> FloatArray:
    """The scaled product in a new array. If alpha or K is 0, operands and scales are not read."""
    if alpha == 0.0 or a.shape[-1] == 0:
        return np.zeros(shape)
    d = scaled_product(a, b, scale_a, scale_b)
    for factor in (alpha, scale_a.outer, scale_b.outer):
        if not (isinstance(factor, float) and factor == 1.0):
            d *= factor
    return d


def _integer_gemm(a: AnyArray, b: AnyArray, c: AnyArray | None, terms: GemmTerms) -> AnyArray:
    """int8 x int8 -> int32 modulo 2**32."""
    alpha, beta, bias, activation = terms.alpha, terms.beta, terms.bias, terms.activation
    if activation not in (None, "identity", "relu"):
        raise InvalidOperandError(f"activation is {activation!r}; int8 to int32 takes None, identity or relu")
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if not float(factor).is_integer():
            raise InvalidOperandError(f"{name} is {factor}; int8 to int32 takes whole numbers")
    for name, term in (("c", c if beta != 0 else None), ("bias", bias)):
        if term is not None and from_numpy_dtype(term.dtype) not in INTEGER_DTYPES:
            raise InvalidOperandError(f"{name} is {term.dtype}; int8 to int32 takes int8 or int32")
    # A product is at most 2**14, so sums of fewer than 2**39 of them are exact in float64, which has a fast matmul.
    d = np.matmul(to_float64(a), to_float64(b)).astype(np.int64)
    # int64 wraps modulo 2**64, which leaves the low 32 bits right whatever overflows.
    d *= np.int64(int(alpha) % 2**32)
    if c is not None and beta != 0:
        d += np.int64(int(beta) % 2**32) * c.astype(np.int64)
    if bias is not None:
        d += bias.astype(np.int64)
    wrapped: AnyArray = d.astype(np.int32)
    return np.maximum(wrapped, np.int32(0)) if activation == "relu" else wrapped


def _result_shape(a: AnyArray, b: AnyArray, c: AnyArray | None, terms: GemmTerms) -> tuple[int, ...]:
    """The result's shape; refuses arguments that `gemm` of the package does not refuse before."""
    for name, operand in (("a", a), ("b", b)):
        if parts.element_type(name, operand) is CutlassDtype.I32:
            raise InvalidOperandError(f"{name} is int32; integer operands are int8")
    if a.shape[-1] != b.shape[-2]:
        raise InvalidOperandError(f"a has K = {a.shape[-1]} (shape {a.shape}), b has K = {b.shape[-2]} ({b.shape})")
    if c is None and terms.beta != 0.0:
        raise InvalidOperandError(f"beta is {terms.beta}, but c is not given")
    parts.check_bias(terms.bias, b.shape[-1])
    parts.check_activation(terms.activation)
    return (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])


def random_fp4(generator: np.random.Generator, request: GemmRequest) -> Arrays:
    """A, B and their scales in plain forms, as the reference takes them: quantized normal values."""
    shape = request.shape
    batch = () if shape.batch == 1 else (shape.batch,)
    arrays: Arrays = {}
    for name, extents in (("a", (shape.m, shape.k)), ("b", (shape.k, shape.n))):
        wide = generator.standard_normal((*batch, *extents))
        if request.scaling is None:
            arrays[name] = numerics.saturating_cast(wide, fp4.FP4)
            continue
        quantize = quantization.quantize_nvfp4 if request.scaling == "nvfp4" else quantization.quantize_mxfp4
        made = quantize(wide, axis=fp4.ALONG[name])
        arrays |= {name: made.values, f"scale_{name}": made.scale}
    return arrays


class GemmProbe(Probe["GemmRequest"]):
    """The probe of a GEMM with its epilogue."""

    def __init__(self, request: GemmRequest, arrays: Arrays) -> None:
        super().__init__(request, arrays)
        self.amax = self.amax_error = 0.0

    @property
    def depth(self) -> int:
        return self.request.shape.k

    @property
    def scale_block(self) -> int:
        kind = fp4.SCALINGS.get(self.request.scaling or "")
        return VECTOR[kind] if kind is not None else BLOCK if self.request.scaling == "block" else 0

    @property
    def has_amax(self) -> bool:
        """Whether the request has an amax; a tree may have an output of that name."""
        return self.request.quantized and "amax" in self.arrays

    @property
    def batched(self) -> bool:
        """Whether parts are batches; else they are rows of D."""
        return self.arrays["a"].ndim == 3

    def follows(self) -> set[str]:
        """Names of the arrays that are divided into parts; all parts share the others."""
        found = {"a", "out"} | ({"b"} if self.batched else set())
        found |= {"c"} if self.request.epilogue.beta != 0 else set()
        if self.request.scaling in (fp4.SCALINGS if self.batched else ("vector", "block", *fp4.SCALINGS)):
            found |= {"scale_a", "scale_b"} if self.batched else {"scale_a"}
        if self.tree is not None:
            kinds = {MATRIX, MASK} if self.batched else {MATRIX, MASK, COLUMN}
            found |= {operand.name for operand in self.tree.inputs if operand.kind in kinds}
            found |= {output.name for output in self.tree.outputs}
        return found

    def parts(self) -> Iterator[Arrays]:
        shape = self.request.shape
        if self.tree is not None:
            across = {SCALAR} if self.batched else {SCALAR, ROW}
            reduced = any(output.reduction and output.kind in across for output in self.tree.outputs)
            if reduced or shape.batch * shape.m * shape.n * shape.k <= _SMALL:
                yield self.arrays
                return
        follows = self.follows()
        for part in slices(shape.batch if self.batched else shape.m):
            yield {name: array[part] if name in follows else array for name, array in self.arrays.items()}

    def compute(self, part: Arrays) -> None:
        super().compute(part)
        if self.has_amax:
            if self.tree is not None:
                self._see_amax(self.tree, part, self.product(part, CutlassDtype.F64))
            self.arrays["amax"][0] = self.amax

    def product(self, part: Arrays, dtype: CutlassDtype) -> Array:
        how = self._scaled(part) | {"out_dtype": dtype, "math": self.request.math}
        return gemm(*self._operands(part), **how)

    def expected(self, part: Arrays) -> Array:
        if not self.request.quantized:
            return super().expected(part)
        how = self._scaled(part) | self.rounding(part) | {"math": self.request.math}
        amax = np.zeros(1, np.float32)
        expected = gemm(*self._operands(part), **how, amax=amax)
        self.amax = max(self.amax, float(amax[0]))
        return expected

    def magnitudes(self, part: Arrays) -> Array:
        magnitudes = absolute_product(*self._operands(part), **self._scaled(part))
        if self.tree is not None:
            return magnitudes
        factor = self.limits(self.request.math).atol_factor
        self.amax_error = max(self.amax_error, factor * float(np.max(magnitudes, initial=0.0)))
        return magnitudes * self.scale_d(part)

    def compare(self, part: Arrays, check: Check) -> None:
        super().compare(part, check)
        if self.tree is not None and self.has_amax:
            self._see_amax(self.tree, part, *self.accumulator(part, check.limits))

    def finish(self, check: Check) -> None:
        if self.has_amax:
            error = abs(float(self.arrays["amax"][0]) - self.amax)
            # amax is rounded to float32; NaN is a mismatch.
            allowed = self.amax_error + 2.0**-23 * self.amax
            check.mismatches += int(not error <= allowed)

    def scale_d(self, part: Arrays) -> float:
        """The factor of D; 1 where there is none."""
        return float(part["scale_d"][0]) if "scale_d" in part else 1.0

    def rounding(self, part: Arrays) -> dict[str, Any]:
        scale_d = self.scale_d(part) if self.request.quantized else None
        return super().rounding(part) | {"scale_d": scale_d}

    def _operands(self, part: Arrays) -> tuple[Array, Array, Array | None]:
        return part["a"], part["b"], part["c"] if self.request.epilogue.beta != 0 else None

    def _scaled(self, part: Arrays) -> dict[str, Any]:
        return self.how | {name: part[name] for name in ("scale_a", "scale_b") if self.request.scaling is not None}

    def _see_amax(self, tree: EpilogueVisitorTree, part: Arrays, acc: Array, error: Array | None = None) -> None:
        """Updates amax with D before it is stored and, given the accumulator's error, the error of amax."""
        of_d = EpilogueVisitorTree(tree.result)
        read = {operand.name: part[operand.name] for operand in of_d.inputs}
        values = reference.evaluate(of_d, acc, read, out_dtype=self.computed)[RESULT]
        self.amax = max(self.amax, float(np.max(np.abs(values), initial=0.0)))
        if error is not None:
            bound = reference.tolerances(of_d, acc, error, read, out_dtype=self.computed)[RESULT]
            self.amax_error = max(self.amax_error, float(np.max(bound, initial=0.0)))
