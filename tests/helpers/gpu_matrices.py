"""Matrices on the GPU for tests: views inside poisoned buffers, and results compared with a reference.

Import it after a test has its `torch` fixture: nothing here imports PyTorch before a function is called.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest

import every_cell
from atomr_cutlass import reference
from atomr_cutlass.arrays import numerics, operands
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.arrays.numerics import default_out_dtype, math_mode
from atomr_cutlass.generator import matrix
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.families import gemm_few_sm90
from atomr_cutlass.generator.rules import FEW
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.ops.gemm.plans import from_candidate
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import devices, select, table
from atomr_cutlass.pipeline.planning import PlanOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from atomr_cutlass.generator.key import KernelKey
    from atomr_cutlass.pipeline.plan import Plan
    from atomr_cutlass.pipeline.table import KernelInfo

D = CutlassDtype

GUARD = 256
"""Elements of poison on either side of a matrix: a multiple of every alignment, so that the view keeps its own."""

# Quiet NaNs with a payload that no arithmetic makes, and an unlikely integer.
_POISON = {
    D.F16: 0x7E5A,
    D.BF16: 0x7FDA,
    D.F32: 0x7FC05A5A,
    D.F64: 0x7FF85A5A5A5A5A5A,
    D.I8: 0x5A,
    D.I32: 0x5A5A5A5A,
}

NUMPY_LIMIT = 2**24
"""Multiply-adds up to which NumPy computes the reference; above, the GPU does in float64."""


@dataclass(frozen=True)
class Kind:
    """Operands of a dtype, multiplied in a way."""

    dtype: CutlassDtype
    precision: str | None = None

    def __str__(self) -> str:
        return self.dtype.value + (f"-{self.precision}" if self.precision else "")

    @property
    def math(self) -> str:
        return math_mode(self.dtype, self.precision)

    @property
    def layouts(self) -> tuple[str, ...]:
        """A and B layouts that every build of the default preset has."""
        return ("rc",) if self.dtype is D.I8 else ("rr", "rc")


KINDS = (
    Kind(D.F16),
    Kind(D.BF16),
    Kind(D.F32, "ieee"),
    Kind(D.F32, "tf32"),
    Kind(D.F32, "3xtf32"),
    Kind(D.F64),
    Kind(D.I8),
)


def torch_dtype(dtype: CutlassDtype) -> torch.dtype:
    import torch

    found = getattr(torch, dtype.numpy_name)
    assert isinstance(found, torch.dtype)
    return found


def bits_dtype(dtype: CutlassDtype) -> torch.dtype:
    """The integer type as wide as `dtype`, for comparing bit for bit."""
    import torch

    return {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[dtype.bits]


class Guarded:
    """A matrix, or a batch of them, inside a buffer of poison.

    Attributes:
        view: the matrices, as a tensor of shape (*batch, rows, columns); poison until written.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: CutlassDtype,
        *,
        layout: str = "r",
        pad: int = 0,
        offset: int = 0,
        device: str = "cuda",
    ) -> None:
        import torch

        *batch, rows, columns = shape
        across, along = (rows, columns) if layout == "r" else (columns, rows)
        leading = along + pad
        strides = [leading, 1] if layout == "r" else [1, leading]
        step = leading * across
        for extent in reversed(batch):
            strides.insert(0, step)
            step *= extent
        bits = torch.full((2 * GUARD + offset + step,), _POISON[dtype], dtype=bits_dtype(dtype), device=device)
        self.dtype = dtype
        self._bits = bits
        self.view = bits.view(torch_dtype(dtype)).as_strided(shape, strides, GUARD + offset)

    def assert_guards(self) -> None:
        """Everything outside the view is as it was."""
        import torch

        rest = self._bits.clone()
        shape, strides, offset = self.view.shape, self.view.stride(), self.view.storage_offset()
        if self.view.numel():
            rest.as_strided(shape, strides, offset).fill_(_POISON[self.dtype])
        written = torch.nonzero(rest != _POISON[self.dtype]).flatten() - GUARD
        assert written.numel() == 0, f"memory outside the matrix was written, at elements {written[:8].tolist()}"

    def assert_untouched(self) -> None:
        """The view itself is still poison, and so is everything around it."""
        assert bool((self._bits == _POISON[self.dtype]).all()), "memory was written"


def fill(
    shape: tuple[int, ...], dtype: CutlassDtype, seed: int, *, whole: bool = False, tf32: bool = False
) -> torch.Tensor:
    """Random operands: normal numbers (`tf32`: ones that TF32 represents), small whole ones, or any int8."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    arguments: dict[str, Any] = {"generator": generator, "device": "cuda"}
    if dtype in numerics.INTEGER_DTYPES:
        low, high = (-128, 128) if dtype is D.I8 else (-(2**20), 2**20)
        return torch.randint(low, high, shape, dtype=torch_dtype(dtype), **arguments)
    if whole:
        return torch.randint(-4, 5, shape, dtype=torch.int32, **arguments).to(torch_dtype(dtype))
    wide = torch.float64 if dtype is D.F64 else torch.float32
    values = torch.randn(shape, dtype=wide, **arguments)
    return (round_to_tf32(values) if tf32 and dtype is D.F32 else values).to(torch_dtype(dtype))


def round_to_tf32(values: torch.Tensor) -> torch.Tensor:
    """`numerics.round_to_tf32` on the GPU, for finite values."""
    import torch

    return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def placed(
    shape: tuple[int, ...], dtype: CutlassDtype, seed: int, *, whole: bool = False, tf32: bool = False, **placement: Any
) -> torch.Tensor:
    """Random operands inside poison, so that a read outside them shows in the result."""
    made = Guarded(shape, dtype, **placement)
    if made.view.numel():
        made.view.copy_(fill(shape, dtype, seed, whole=whole, tf32=tf32))
    return made.view


def host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A NumPy copy of a tensor, of any dtype that kernels know."""
    import torch

    dtype = operands.dtype_of(operands.as_operand(tensor), "a tensor")
    if dtype is D.BF16:
        bits: np.ndarray[Any, Any] = tensor.contiguous().view(torch.int16).cpu().numpy()
        return bits.view(numerics.numpy_dtype(dtype))
    return np.array(tensor.cpu().numpy())


def element_type(tensor: torch.Tensor) -> CutlassDtype:
    return operands.dtype_of(operands.as_operand(tensor), "a tensor")


def assert_product(
    d: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    math_mode: str = "default",
    tf32: bool = False,
) -> None:
    """`d` agrees with the reference.

    Args:
        d: the result.
        a: operand A.
        b: operand B.
        c: operand C as it was before the call.
        alpha: factor of the product.
        beta: factor of C.
        math_mode: of the kernel key.
        tf32: the operands are ones that TF32 represents.
    """
    dtype, result = element_type(a), element_type(d)
    k = a.shape[-1]
    limits = reference.tolerance(dtype, result, k, math_mode, exact_operands=tf32)
    work = math.prod(d.shape) * max(1, k)
    if work <= NUMPY_LIMIT:
        host_a, host_b, host_c = host(a), host(b), None if c is None else host(c)
        scalars = {"alpha": alpha, "beta": beta}
        want = gemm_reference.gemm(host_a, host_b, host_c, **scalars, out_dtype=result, math=math_mode)
        got = host(d)
        scale = gemm_reference.absolute_product(host_a, host_b, host_c, **scalars)
        right = reference.within_tolerance(got, want, scale, limits, result)
        assert right.all(), _mismatch(got, want, ~right)
        return
    _assert_on_gpu(d, a, b, c, alpha, beta, limits, result, rounded=math_mode == "tf32" and not tf32)


def _assert_on_gpu(
    d: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    alpha: float,
    beta: float,
    limits: reference.Tolerance,
    result: CutlassDtype,
    *,
    rounded: bool,
) -> None:
    import torch

    if rounded:
        a, b = round_to_tf32(a), round_to_tf32(b)
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    want = torch.matmul(wide_a, wide_b) * alpha
    scale = torch.matmul(wide_a.abs(), wide_b.abs()) * abs(alpha)
    del wide_a, wide_b
    if c is not None:
        want += c.to(torch.float64) * beta
        scale += c.to(torch.float64).abs() * abs(beta)
    if result is D.I32:  # modulo 2**32, as int32 arithmetic does
        want = (want.to(torch.int64) << 32 >> 32).to(torch.float64)
    step = 0.0 if limits == (0.0, 0.0) else numerics.smallest_step(result)
    bound = scale.mul_(limits.atol_factor).add_(want.abs() * limits.rtol).add_(step)
    wrong = (d.to(torch.float64) - want).abs_() > bound
    # A NaN compares as not greater.
    wrong |= torch.isnan(d)
    if bool(wrong.any()):
        where = wrong.nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{where.shape[0]} of {d.numel()} elements are wrong; the first at {first}: {d[first].item()} "
            f"instead of {want[first].item()}, off by more than {bound[first].item()}"
        )


def _mismatch(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], wrong: np.ndarray[Any, Any]) -> str:
    where = np.argwhere(wrong)
    samples = ", ".join(f"{tuple(map(int, i))}: {got[tuple(i)]} for {want[tuple(i)]}" for i in where[:6])
    return f"{len(where)} of {got.size} elements are wrong (got, for wanted): {samples}"


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Both hold the same bits, NaN payloads included."""
    import torch

    bits = bits_dtype(element_type(got))
    assert torch.equal(got.contiguous().view(bits), want.contiguous().view(bits))


def spec(tensor: torch.Tensor) -> MatrixSpec:
    """The tensor as kernels are chosen for it."""
    view = operands.as_operand(tensor)
    return MatrixSpec(view.shape, view.strides, operands.dtype_of(view, "a tensor"), view.alignment)


def problem_of(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None, math_mode: str = "default"
) -> GemmProblem:
    """The problem that tensors pose."""
    return GemmProblem(
        a=spec(a),
        b=spec(b),
        c=None if c is None else spec(c),
        d=spec(d),
        math=math_mode,
        device=a.device.index or 0,
    )


def candidate_of(key: KernelKey, problem: GemmProblem) -> Any:
    """The kernel of a key for a problem: the table's, or, where ATOMR_CUTLASS_TEST_JIT is set, one that is compiled."""
    info = kernel_info(key)
    return dataclasses.replace(select.candidate_of(every_cell.search(key, problem), key), info=info)


def kernel_info(key: KernelKey) -> KernelInfo | None:
    """The table's row of a key; None where it is to be compiled. Skips what there is no kernel for."""
    device = devices.get(0)
    if devices.rank_arch(key.arch, device, ptx=False) is None:
        pytest.skip(f"code for {key.arch.value} does not run on {device.name}")
    compiled = "ATOMR_CUTLASS_TEST_JIT" in os.environ
    info = next((row for row in table.kernels(op="gemm") if row.key == key), None)
    if info is None and not compiled:
        pytest.skip(f"{key.name} is not in the table; with ATOMR_CUTLASS_TEST_JIT set it is compiled")
    return None if compiled else info


Extents = tuple[tuple[int, ...], tuple[int, ...], int, int, int]
"""Batches of A and of B; M, N and K."""

NONE: tuple[int, ...] = ()


def made_for(
    key: KernelKey, extents: Extents, *, beta: float = 0.0, pad: int = 0
) -> tuple[Plan, tuple[Any, ...], Guarded]:
    """The plan of a kernel for a product, its operands, and where the result goes; C where there is a beta."""
    batch_a, batch_b, m, n, k = extents
    a = placed((*batch_a, m, k), key.a, 1, pad=8)
    b = placed((*batch_b, k, n), key.b, 2, layout=key.layout_b)
    c = placed((*(batch_a or batch_b), m, n), key.d, 3) if beta else None
    out = Guarded((*(batch_a or batch_b), m, n), key.d, pad=pad)
    problem = problem_of(a, b, out.view, c, math_mode=key.math)
    plan = from_candidate(problem, candidate_of(key, problem), PlanOptions(like=a))
    assert plan.kernel_name == key.name
    return plan, (a, b, c), out


def assert_launches(
    plan: Any, operands: tuple[Any, ...], out: Guarded, *, math_mode: str, alpha: float = 1.0, beta: float = 0.0
) -> None:
    """Several launches give the product of A, B and C, with the same bits each time."""
    first = None
    for _ in range(4):
        out.view.fill_(float("nan"))
        plan(*operands, out=out.view, alpha=alpha, beta=beta)
        out.assert_guards()
        bits = out.view.contiguous().view(bits_dtype(element_type(out.view))).clone()
        assert first is None or bool((bits == first).all()), "another launch gives other bits"
        first = bits
    assert_product(out.view, *operands, alpha=alpha, beta=beta, math_mode=math_mode)


def captured(launch: Callable[[], object]) -> Any:
    """A graph of launches, captured on a stream of its own."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        launch()
        graph.capture_end()
    return graph


def rows_for(key: KernelKey, m: int) -> int:
    """Rows of D, or as many as the kernel takes."""
    return min(m, gemm_few_sm90.MOST - 8) if key.mainloop == FEW else m


def result_of(kind: Kind, out: CutlassDtype | None = None) -> CutlassDtype:
    """The result's element type."""
    return out or default_out_dtype(kind.dtype)


def lacking(error: Exception, kind: Kind, layouts: str, result: CutlassDtype) -> NoReturn:
    """Skips because the table lacks a cell; fails where the default preset has it and is installed."""
    layout_a, layout_b, layout_d = layouts
    if layout_d == "c":  # D^T = B^T A^T
        layout_a, layout_b = ("rc"["cr".index(layout)] for layout in (layout_b, layout_a))
    usual = layout_a + layout_b in kind.layouts and result in (
        {result_of(kind), D.F32} if kind.dtype.bits == 16 else {result_of(kind)}
    )
    if usual and has_default_preset():
        raise error
    pytest.skip(str(error))


@functools.cache
def has_default_preset(arch: SmArch | None = None) -> bool:
    """Whether the installed table has all that the default preset has for an arch; without one, for this GPU's."""
    arch = arch or devices.get(0).arch
    installed = {info.key for info in table.kernels()}
    return arch is not None and installed.issuperset(matrix.expand("default", [arch]))


def broadcast(*batches: tuple[int, ...]) -> tuple[int, ...]:
    """The batch dimensions of a result."""
    return tuple(np.broadcast_shapes(*batches))


def pairs(*axes: Any) -> list[Any]:
    """Every combination, as `pytest.mark.parametrize` takes them."""
    return list(itertools.product(*axes))
