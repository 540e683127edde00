"""cuBLASLt with the best of all candidates that its heuristic names, for 16-bit products of row-major results.

PyTorch takes the first candidate; a user who tunes takes the best. The library is the one that PyTorch has loaded.
The numbers of enumerators are those of CUDA's headers `cublasLt.h`, `cublas_api.h` and `library_types.h`.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from harness import QUICK_SECONDS, Burst, Call, fastest_first

COMPUTE_32F = 68
R_32F, R_16F, R_16BF = 0, 2, 14
TYPES = {torch.float16: R_16F, torch.bfloat16: R_16BF}
DESC_TRANSA, DESC_TRANSB = 3, 4
LAYOUT_BATCH_COUNT, LAYOUT_BATCH_STRIDE = 5, 6
PREFERENCE_MAX_WORKSPACE = 1
PREFERENCE_ALIGNMENTS = (5, 6, 7, 8)
WORKSPACE_BYTES = 32 << 20
CANDIDATES = 64


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", ctypes.c_uint64 * 8),)


class _Result(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """A handle of the library and its workspace."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "13").partition(".")[0]
        self._library = ctypes.CDLL(f"libcublasLt.so.{major}")
        self._handle = ctypes.c_void_p()
        self._check("cublasLtCreate", ctypes.byref(self._handle))
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def _check(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} returned status {status}")

    def product(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Product:
        """The product of tensors with these shapes, strides and dtypes, with its candidates.

        Args:
            a: (M, K) or (batch, M, K), row-major, of float16 or bfloat16.
            b: (K, N) or (batch, K, N), row- or column-major.
            out: (M, N) or (batch, M, N), row-major.
        """
        return Product(self, a, b, out)


class Product:
    """One problem: its descriptors and the heuristic's candidates, best first by the heuristic, then by `tune`."""

    def __init__(self, library: CublasLt, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self._library = library
        m, k = a.shape[-2:]
        n = b.shape[-1]
        # Column-major throughout: D^T (N, M) = B^T (N, K) A^T (K, M). A B that is contiguous along K is transposed.
        transposed = b.stride(-2) == 1
        check, kind = library._check, TYPES[a.dtype]  # noqa: SLF001 - the two classes are one wrapper
        self._description = ctypes.c_void_p()
        check("cublasLtMatmulDescCreate", ctypes.byref(self._description), COMPUTE_32F, R_32F)
        for attribute, value in ((DESC_TRANSA, int(transposed)), (DESC_TRANSB, 0)):
            number = ctypes.c_int32(value)
            check(
                "cublasLtMatmulDescSetAttribute", self._description, attribute, ctypes.byref(number), ctypes.c_size_t(4)
            )
        rows, columns = (k, n) if transposed else (n, k)
        self._layouts = [
            self._layout(kind, rows, columns, b.stride(-1) if transposed else b.stride(-2), b),
            self._layout(kind, k, m, a.stride(-2), a),
            self._layout(kind, n, m, out.stride(-2), out),
        ]
        preference = ctypes.c_void_p()
        check("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_uint64(WORKSPACE_BYTES)
        set_preference = "cublasLtMatmulPreferenceSetAttribute"
        check(set_preference, preference, PREFERENCE_MAX_WORKSPACE, ctypes.byref(size), ctypes.c_size_t(8))
        for attribute in PREFERENCE_ALIGNMENTS:
            alignment = ctypes.c_uint32(min(256, *(tensor.data_ptr() & -tensor.data_ptr() for tensor in (a, b, out))))
            check(set_preference, preference, attribute, ctypes.byref(alignment), ctypes.c_size_t(4))
        results = (_Result * CANDIDATES)()
        found = ctypes.c_int()
        first, second, result = self._layouts
        check(
            "cublasLtMatmulAlgoGetHeuristic",
            library._handle,  # noqa: SLF001
            *(self._description, first, second, result, result, preference, CANDIDATES, results, ctypes.byref(found)),
        )
        check("cublasLtMatmulPreferenceDestroy", preference)
        self.candidates = [result for result in results[: found.value] if result.state == 0]
        if not self.candidates:
            raise RuntimeError("cublasLt has no candidate")

    def _layout(self, kind: int, rows: int, columns: int, stride: int, matrices: torch.Tensor) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        check = self._library._check  # noqa: SLF001
        check(
            "cublasLtMatrixLayoutCreate",
            *(ctypes.byref(layout), kind, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)),
        )
        if matrices.dim() == 3:
            for attribute, number in (
                (LAYOUT_BATCH_COUNT, ctypes.c_int32(matrices.shape[0])),
                (LAYOUT_BATCH_STRIDE, ctypes.c_int64(matrices.stride(0))),
            ):
                size = ctypes.c_size_t(ctypes.sizeof(number))
                check("cublasLtMatrixLayoutSetAttribute", layout, attribute, ctypes.byref(number), size)
        return layout

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, candidate: int = 0) -> None:
        """Launches a candidate on the current stream."""
        alpha, beta = ctypes.c_float(1.0), ctypes.c_float(0.0)
        first, second, result = self._layouts
        self._library._check(  # noqa: SLF001
            "cublasLtMatmul",
            self._library._handle,  # noqa: SLF001
            self._description,
            ctypes.byref(alpha),
            *(ctypes.c_void_p(b.data_ptr()), first, ctypes.c_void_p(a.data_ptr()), second),
            ctypes.byref(beta),
            *(ctypes.c_void_p(out.data_ptr()), result, ctypes.c_void_p(out.data_ptr()), result),
            ctypes.byref(self.candidates[candidate].algorithm),
            ctypes.c_void_p(self._library._workspace.data_ptr()),  # noqa: SLF001
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )

    def tune(self, sets: Sequence[Any]) -> None:
        """Puts the fastest candidate first, by graphs of launches over rotating operands; the best are timed twice.

        Args:
            sets: operands with `a`, `b` and `out`.
        """
        bursts: dict[int, Burst] = {}
        for index in range(len(self.candidates)):
            # The heuristic names some that refuse the problem after all.
            with contextlib.suppress(RuntimeError):
                bursts[index] = Burst(self.call(index), sets, QUICK_SECONDS)
        order = fastest_first(bursts)
        if not order:
            raise RuntimeError("no candidate of cublasLt runs")
        self.candidates = [self.candidates[index] for index in order]

    def call(self, index: int = 0) -> Call:
        """A candidate, as a side of a comparison."""
        return lambda arrays: self(arrays.a, arrays.b, arrays.out, index)

    def close(self) -> None:
        """Frees the descriptors."""
        for layout in self._layouts:
            self._library._check("cublasLtMatrixLayoutDestroy", layout)  # noqa: SLF001
        self._library._check("cublasLtMatmulDescDestroy", self._description)  # noqa: SLF001
