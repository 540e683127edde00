"""Matmuls that the GPU tests launch, and which kernels that takes.

The code above `Placed` runs without a GPU, so that the kernels can be compiled side by side before the tests run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import ml_dtypes
import numpy as np

from atomr_cutlass import MatmulEpilogue as E
from atomr_cutlass import MatmulRequest, ScaleSet, _core, matmul
from atomr_cutlass.arrays import numerics, operands
from atomr_cutlass.epilogue import EpilogueVisitorTree
from atomr_cutlass.epilogue.results import MatrixResult
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.ops.gemm import plans
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.matmul import function
from atomr_cutlass.pipeline import select
from atomr_cutlass.pipeline.devices import Device
from matmul_formulas import Array, Case

if TYPE_CHECKING:
    import torch

BF16, F16 = ml_dtypes.bfloat16, np.float16
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2

LARGE, SMALL = (264, 520, 96), (75, 46, 37)
"""Extents: of several tiles, aligned for every kernel, and of parts of them, aligned for none."""
PAD = 16
"""Elements between columns that keep any element type aligned."""


@dataclass(frozen=True)
class Kind:
    """Operands, as the tests take them.

    Attributes:
        dtype, out: of A and B, and of C and D.
        precision: of float32.
        trans: of A and B, in BLAS's letters.
        extents: m, n and k.
        pad: between columns.
    """

    dtype: Any
    out: Any
    precision: str | None = None
    trans: str = "tn"
    extents: tuple[int, int, int] = LARGE
    pad: int = PAD

    def __str__(self) -> str:
        words = [np.dtype(self.dtype).name, *([self.precision] if self.precision else []), self.trans]
        return "-".join([*words, "x".join(map(str, self.extents))])

    def case(self, epilogue: E, *, pad: int | None = None, beta: float = 0.0) -> Case:
        """A case of an epilogue."""
        transa, transb = (letter == "t" for letter in self.trans)
        pad = self.pad if pad is None else pad
        return Case(epilogue, self.dtype, self.out, transa, transb, pad, beta, self.extents)


KINDS = (
    Kind(BF16, BF16),
    Kind(E4M3, BF16),
    # Aligned to single elements: kernels of the sm80 generation, which compile in a few seconds.
    Kind(F16, F16, extents=SMALL, pad=1),
    Kind(np.float32, np.float32, "tf32", extents=SMALL, pad=1),
    Kind(np.float64, np.float64),
)
"""With every epilogue."""

ALIGNED = (Kind(F16, F16), Kind(np.float32, np.float32, "tf32"))
SOME = (E.RELU_AUX_BIAS, E.DGELU_BGRAD)

OTHERS = (
    *(Kind(BF16, BF16, trans=trans) for trans in ("nn", "nt", "tt")),
    *(Kind(np.float64, np.float64, trans=trans, extents=SMALL, pad=3) for trans in ("nn", "nt", "tt")),
    *(Kind(np.float32, np.float32, "ieee", trans=trans, extents=SMALL, pad=3) for trans in ("nn", "nt", "tn", "tt")),
)
"""Transposes."""
OF_OTHERS = (E.GELU_AUX_BIAS, E.DRELU_BGRAD)

SCALED = (E.DEFAULT, E.RELU_BIAS, E.DRELU_BGRAD)
"""Of fp8 with scales on the device."""


def cases() -> list[tuple[Kind, E]]:
    """The kinds and epilogues that are launched without scales on the device."""
    found = [(kind, epilogue) for kind in KINDS for epilogue in E]
    found += [(kind, epilogue) for kind in ALIGNED for epilogue in SOME]
    return found + [(kind, epilogue) for kind in OTHERS for epilogue in OF_OTHERS]


def keys(device: Device) -> list[KernelKey]:
    """The kernels that the tests launch, each once; no GPU is needed."""
    found: dict[KernelKey, None] = {}
    for kind, epilogue in cases():
        for beta in (0.0, 1.0):
            request = kind.case(epilogue, beta=beta).request(_held, precision=kind.precision)
            found |= dict.fromkeys(_keys_of(request, device))
    for epilogue in SCALED:
        case = KINDS[1].case(epilogue, beta=1.0)
        found |= dict.fromkeys(_keys_of(case.request(_held, scales=scales_of(case, _held)[0]), device))
    return list(found)


def _keys_of(request: MatmulRequest, device: Device) -> list[KernelKey]:
    call: Any = function.parsed(request)
    views = call.inputs | {name: result.view for name, result in call.results.items()}

    def key(views: dict[str, _core.Operand], tree: EpilogueVisitorTree | None) -> KernelKey:
        problem, scales = function.product_of(views, call.math, tree)
        fusion = None if tree is None else MatrixResult(problem.d.shape).fusion(tree, views)
        problems = plans.rewritten(problem, scales, fusion)
        return select.choose(GemmSearch(problems, device)).key

    keys = [key(views, call.tree)]
    if summed := request.matrices.form.summed:
        dtype = operands.dtype_of(views["a"], "a")
        ones = _held(np.ones(4096, numerics.numpy_dtype(dtype)))
        with mock.patch.dict(function._made_ones, {(dtype, 0): [ones]}):
            keys.append(key(function.sums_of(views, summed, request.k, 0), None))
    return keys


_places = itertools.count(1)


def _held(array: Array) -> _core.Operand:
    """An array on an imagined GPU, aligned as frameworks align them."""
    element = operands.BYTE
    if array.dtype != np.uint8:
        dtype = numerics.from_numpy_dtype(array.dtype)
        assert dtype is not None
        element = dtype.dlpack
    return _core.Operand(next(_places) << 30, array.shape, None, element, operands.CUDA, 0, False, array)


def scales_of(case: Case, place: Callable[[Array], Any]) -> tuple[ScaleSet, dict[str, Array]]:
    """Scales of rows and columns, of D, and the largest magnitude: arrays somewhere, and on the host."""
    m, n, _ = case.extents
    random = np.random.default_rng(9)
    host = {name: 2.0 ** random.integers(-2, 3, extent).astype(np.float32) for name, extent in (("a", m), ("b", n))}
    host |= {"d": np.full(1, 0.25, np.float32), "amax_d": np.full(1, 9e9, np.float32)}
    return ScaleSet(**{name: place(array) for name, array in host.items()}), host


# ----------------------------------------------------------------------------------------------------------------------
# With PyTorch

GUARD_BYTES = 512
POISON = 0xA5


class Placed:
    """Flat memory on the GPU between bytes of poison, with the elements of a host array.

    Attributes:
        view: the memory, as a tensor of the array's element type.
    """

    def __init__(self, array: Array, *, offset: int = 0) -> None:
        """Copies an array; `offset`: bytes by which its address misses an alignment of 256."""
        import torch

        self.host = array
        start = GUARD_BYTES + offset
        self._all = torch.full((start + array.nbytes + GUARD_BYTES,), POISON, dtype=torch.uint8, device="cuda")
        inside = self._all[start : start + array.nbytes]
        inside.copy_(torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        self._inside = inside
        if array.dtype == np.uint8:
            self.view = inside
        else:
            dtype = numerics.from_numpy_dtype(array.dtype)
            assert dtype is not None
            self.view = inside.view(getattr(torch, dtype.numpy_name))

    def fetch(self) -> None:
        """Copies the memory into the host array; asserts that the bytes around it are unchanged."""
        outside = self._all.clone()
        start = self._inside.storage_offset()
        outside[start : start + self.host.nbytes] = POISON
        assert bool((outside == POISON).all()), "memory around the array was written"
        self.host.reshape(-1).view(np.uint8)[...] = self._inside.cpu().numpy()


class OnGpu:
    """A case with its arrays on the GPU."""

    def __init__(self, case: Case, *, offset: int = 0, **changes: Any) -> None:
        """Places the arrays; `changes` are those of the request."""
        self.case = case
        self.held: list[Placed] = []
        self._offset = offset
        self.request = case.request(self.place, **changes)

    def place(self, array: Array) -> torch.Tensor:
        """An array on the GPU."""
        self.held.append(Placed(array, offset=self._offset))
        return self.held[-1].view

    def fetch(self) -> None:
        """Brings everything back into the case's arrays."""
        for placed in self.held:
            placed.fetch()

    def run(self) -> None:
        """Computes, and checks all that was written and that nothing else was."""
        assert matmul(self.request) is (self.request.c if self.request.d is None else self.request.d)
        self.fetch()
        self.case.check(cleared=True)
