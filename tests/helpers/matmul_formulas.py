"""Matmuls column-major in flat memory, and what each epilogue makes of them, written out for NumPy.

Nothing here uses the package's reference: these are formulas of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from atomr_cutlass import MatmulEpilogue as E
from atomr_cutlass import MatmulRequest
from atomr_cutlass.ops.matmul.operation import FORMS

Array = np.ndarray[Any, Any]

GUARD = 77
"""The padding bytes between the columns, in any element type but bytes of bits."""
GUARD_BITS = 0xA5


def memory(matrix: Array, leading: int | None = None) -> Array:
    """A matrix column-major in flat memory; what lies between its columns is GUARD."""
    rows, columns = matrix.shape
    leading = rows if leading is None else leading
    held = np.full((columns, leading), GUARD).astype(matrix.dtype)
    held[:, :rows] = matrix.T
    return held.reshape(-1)


def read(flat: Array, rows: int, columns: int, leading: int | None = None) -> Array:
    """The matrix in such memory."""
    leading = rows if leading is None else leading
    return flat.reshape(columns, leading)[:, :rows].T


def guards(flat: Array, rows: int, columns: int, leading: int) -> Array:
    """The padding bytes between the columns."""
    return wide(flat.reshape(columns, leading)[:, rows:])


def numbers(rows: int, columns: int, dtype: Any, seed: int) -> Array:
    """Small whole numbers: products and their sums are exact."""
    random = np.random.default_rng((seed, rows, columns))
    return random.integers(-3, 4, (rows, columns)).astype(np.float32).astype(dtype)


def wide(x: Any) -> Array:
    return np.asarray(x).astype(np.float64)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_slope(x: Array, step: float = 1e-3) -> Array:
    """By differences."""
    return (8 * (gelu(x + step) - gelu(x - step)) - (gelu(x + 2 * step) - gelu(x - 2 * step))) / (12 * step)


def bits_of(mask: Array) -> Array:
    """Bits of an m x n matrix as a matmul lays them out: m along the bytes of a column, dense."""
    rows, columns = mask.shape
    held = np.zeros((columns, -(-rows // 8) * 8), np.int64)
    held[:, :rows] = mask.T
    return (held.reshape(columns, -1, 8) << np.arange(8)).sum(-1).astype(np.uint8)


@dataclasses.dataclass
class Want:
    """The results of an epilogue on x = alpha op(A) op(B) + beta C, in float64; None for those it does not have."""

    d: Array
    aux: Array | None = None
    bias: Array | None = None


def formula(epilogue: E, x: Array, a: Array, b: Array, bias: Array | None = None, aux: Array | None = None) -> Want:
    """Each epilogue, written out. `a` and `b` are op(A) and op(B); `aux` is what a gradient reads."""
    with_bias = x if bias is None else x + bias[:, None]
    relu = np.maximum(with_bias, 0)
    if epilogue in (E.DEFAULT, E.BGRADA, E.BGRADB):
        sums = {E.BGRADA: a.sum(1), E.BGRADB: b.sum(0)}.get(epilogue)
        return Want(x, bias=sums)
    if epilogue is E.BIAS:
        return Want(with_bias)
    if epilogue in (E.RELU, E.RELU_BIAS):
        return Want(relu)
    if epilogue in (E.RELU_AUX, E.RELU_AUX_BIAS):
        return Want(relu, aux=with_bias > 0)
    if epilogue in (E.GELU, E.GELU_BIAS):
        return Want(gelu(with_bias))
    if epilogue in (E.GELU_AUX, E.GELU_AUX_BIAS):
        return Want(gelu(with_bias), aux=with_bias)
    assert aux is not None
    d = x * (aux if epilogue in (E.DRELU, E.DRELU_BGRAD) else gelu_slope(aux))
    return Want(d, bias=d.sum(1) if epilogue in (E.DRELU_BGRAD, E.DGELU_BGRAD) else None)


@dataclasses.dataclass
class Case:
    """A request and its arrays. `pad`: elements, of bits bytes, between the columns of every matrix.

    Attributes:
        arrays: by the request's names; those that are written hold GUARD.
    """

    epilogue: E
    dtype: Any
    out: Any
    transa: bool = False
    transb: bool = False
    pad: int = 0
    beta: float = 0.0
    extents: tuple[int, int, int] = (11, 6, 5)
    arrays: dict[str, Array] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        m, n, k = self.extents
        form = FORMS[self.epilogue]
        self.a, self.b = numbers(m, k, self.dtype, 1), numbers(k, n, self.dtype, 2)
        self.c, self.before = numbers(m, n, self.out, 3), numbers(m, n, self.out, 6)
        self.positive = np.random.default_rng(5).integers(0, 2, (m, n)).astype(bool)
        # A power of 2, so that x is exact and neither large nor small.
        self.alpha = 2.0 ** -round(math.log2(2 * math.sqrt(k)))
        acc = np.float64 if self.dtype is np.float64 else np.float32
        length = n if self.epilogue is E.BGRADB else m
        self.bias = numbers(length, 1, self.out, 4)[:, 0]
        self.leading = {
            "lda": (k if self.transa else m) + self.pad,
            "ldb": (n if self.transb else k) + self.pad,
            "ldc": m + self.pad,
            "ldd": m + self.pad,
        }
        self.arrays = {
            "a": memory(self.a.T if self.transa else self.a, self.leading["lda"]),
            "b": memory(self.b.T if self.transb else self.b, self.leading["ldb"]),
            "d": np.full(n * (m + self.pad), GUARD).astype(self.out),
        }
        if self.beta:
            self.arrays["c"] = memory(self.c, m + self.pad)
        if form.takes_bias:
            self.arrays["bias"] = np.full(length, GUARD, acc) if form.writes_bias else self.bias
        if form.masked:
            self.leading["ldaux"] = 8 * (-(-m // 8) + self.pad)
            aux = np.full((n, self.leading["ldaux"] // 8), GUARD_BITS, np.uint8)
            if form.aux == "read":
                aux[:, : -(-m // 8)] = bits_of(self.positive)
            self.arrays["gelu_aux"] = aux.reshape(-1)
        elif form.aux:
            self.leading["ldaux"] = m + self.pad
            aux = memory(self.before, m + self.pad)
            self.arrays["gelu_aux"] = np.full_like(aux, GUARD) if form.aux == "written" else aux

    def request(self, place: Callable[[Array], Any] = lambda array: array, **changes: Any) -> MatmulRequest:
        """The request, its arrays put somewhere."""
        m, n, k = self.extents
        given = {
            **{name: place(array) for name, array in self.arrays.items()}, **self.leading, "m": m, "n": n, "k": k,
            "alpha": self.alpha, "beta": self.beta, "transa": self.transa, "transb": self.transb,
            "epilogue": self.epilogue,
        }  # fmt: skip
        return MatmulRequest(**given | changes)

    @property
    def want(self) -> Want:
        """The results by the formulas."""
        x = self.alpha * (wide(self.a) @ wide(self.b)) + self.beta * wide(self.c)
        form = FORMS[self.epilogue]
        bias = wide(self.bias) if form.bias == "added" else None
        aux = wide(self.positive if form.masked else self.before)
        return formula(self.epilogue, x, wide(self.a), wide(self.b), bias, aux)

    def check(self, *, cleared: bool = False) -> None:
        """Everything in `arrays` that was to be written, and what was not.

        Args:
            cleared: whether whole bytes between the columns of bits may have become 0.
        """
        m, n, _ = self.extents
        want, form = self.want, FORMS[self.epilogue]
        guard = wide(np.array(GUARD).astype(self.out))
        close(read(self.arrays["d"], m, n, m + self.pad), want.d)
        assert (guards(self.arrays["d"], m, n, m + self.pad) == guard).all()
        if form.aux == "written" and form.masked:
            assert want.aux is not None
            aux, whole = self.arrays["gelu_aux"].reshape(n, -1), -(-m // 8)
            np.testing.assert_array_equal(aux[:, :whole], bits_of(want.aux))
            assert np.isin(aux[:, whole:], (GUARD_BITS, 0) if cleared else (GUARD_BITS,)).all()
        elif form.aux == "written":
            close(read(self.arrays["gelu_aux"], m, n, m + self.pad), want.aux)
            assert (guards(self.arrays["gelu_aux"], m, n, m + self.pad) == guard).all()
        if form.writes_bias:
            assert want.bias is not None
            near = 1e-9 if self.arrays["bias"].dtype == np.float64 else 1e-5
            np.testing.assert_allclose(self.arrays["bias"], want.bias, rtol=near, atol=near * math.sqrt(n))


def close(got: Array, want: Array | None) -> None:
    """Equal but for one rounding to the element type, and what kernels' functions are off by."""
    assert want is not None
    steps = {np.dtype(ml_dtypes.bfloat16): 2**-8, np.dtype(np.float16): 2**-11, np.dtype(np.float32): 2**-20}
    step = 1e-9 if got.dtype == np.float64 else steps.get(got.dtype, 2**-4)
    np.testing.assert_allclose(wide(got), want, rtol=1.01 * step, atol=1e-9 if got.dtype == np.float64 else 2**-20)
