"""fp8 matrices on the GPU for tests, and scaled products compared with the reference.

The counterpart of `gpu_matrices`, which has the other dtypes, with scales to choose besides.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest

import atomr_cutlass as ac
import gpu_matrices
from atomr_cutlass import reference
from atomr_cutlass.arrays import numerics, operands
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.rules import FP8_TYPES
from atomr_cutlass.ops.gemm import plans
from atomr_cutlass.ops.gemm import reference as gemm_reference
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.pipeline import devices
from atomr_cutlass.pipeline.plan import Plan
from atomr_cutlass.pipeline.planning import PlanOptions
from gpu_matrices import NUMPY_LIMIT, Guarded, element_type, fill, has_default_preset, problem_of, torch_dtype

if TYPE_CHECKING:
    import torch

COMPILED = "ATOMR_CUTLASS_TEST_JIT" in os.environ
BACKEND = "jit" if COMPILED else "auto"

BLOCK = 128
POISON = -1
"""0xff: NaN in either format, and none that a conversion writes (0x7f)."""


class GuardedFp8(Guarded):
    """`Guarded` for fp8."""

    def __init__(self, shape: tuple[int, ...], dtype: D, **placement: Any) -> None:
        super().__init__(shape, D.I8, **placement)
        self.dtype = dtype
        self._bits.fill_(POISON)
        self.view = self.view.view(torch_dtype(dtype))

    def assert_guards(self) -> None:
        import torch

        rest = self._bits.clone()
        shape, strides, offset = self.view.shape, self.view.stride(), self.view.storage_offset()
        if self.view.numel():
            rest.as_strided(shape, strides, offset).fill_(POISON)
        written = torch.nonzero(rest != POISON).flatten() - gpu_matrices.GUARD
        assert written.numel() == 0, f"memory outside the matrix was written, at elements {written[:8].tolist()}"

    def assert_untouched(self) -> None:
        assert bool((self._bits == POISON).all()), "memory was written"


def guarded(shape: tuple[int, ...], dtype: D, **placement: Any) -> Guarded:
    """A matrix inside poison, of any dtype."""
    return GuardedFp8(shape, dtype, **placement) if dtype in FP8_TYPES else Guarded(shape, dtype, **placement)


def placed(shape: tuple[int, ...], dtype: D, seed: int, *, whole: bool = False, **placement: Any) -> torch.Tensor:
    """Random operands inside poison, so that a read outside them shows in the result."""
    made = guarded(shape, dtype, **placement)
    if made.view.numel():
        made.view.copy_(fill(shape, D.F32, seed, whole=whole).to(made.view.dtype))
    return made.view


def operands_of(
    a: D, b: D, shape: tuple[int, int, int], *, whole: bool = False, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row-major and B column-major: both contiguous along K."""
    m, n, k = shape
    return placed((m, k), a, seed, whole=whole), placed((k, n), b, seed + 1, whole=whole, layout="c")


def host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A NumPy copy of a tensor, fp8 included."""
    import torch

    dtype = element_type(tensor)
    if dtype in FP8_TYPES:
        bits: np.ndarray[Any, Any] = tensor.contiguous().view(torch.uint8).cpu().numpy()
        return bits.view(numerics.numpy_dtype(dtype))
    return gpu_matrices.host(tensor)


def scales(shape: tuple[int, ...], seed: int, *, layout: str = "r") -> torch.Tensor:
    """Positive scales, spread over two powers of ten, of which some are no powers of two, inside poison."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.exp(torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32))
    if len(shape) < 2:
        return values
    made = Guarded(shape, D.F32, layout=layout)
    made.view.copy_(values)
    return made.view


@dataclass(frozen=True)
class Scaling:
    """The scales of a product. Arrays are tensors on the GPU."""

    alpha: float = 1.0
    beta: float = 0.0
    scale_a: Any = None
    scale_b: Any = None
    scale_d: Any = None

    @property
    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def on_host(self) -> dict[str, Any]:
        """The same for the reference."""
        found = {name: value if isinstance(value, float) else host(value) for name, value in self.arguments.items()}
        if "scale_d" in found:
            found["scale_d"] = float(np.asarray(found["scale_d"]).reshape(()))
        return found

    def block(self, b: torch.Tensor) -> int:
        """Elements of K that share a scale; 0 where no scale varies along K."""
        k, n = b.shape[-2:]
        shape = tuple(getattr(self.scale_b, "shape", ()))[-2:]
        return BLOCK if shape == (-(-k // BLOCK), -(-n // BLOCK)) and shape not in ((1, 1), (1, n)) else 0


def call(a: Any, b: Any, c: Any = None, **arguments: Any) -> Any:
    """`gemm`; skips where the table lacks a kernel that the default preset does not promise."""
    try:
        return ac.gemm(a, b, c, **({"backend": BACKEND} | arguments))
    except ac.KernelNotFoundError as error:
        lacking(error)


def lacking(error: Exception, arch: ac.SmArch | None = None) -> NoReturn:
    """Skips, unless the default preset has the kernel and is installed for the arch, or else for this GPU."""
    if "in preset default" in str(error) and has_default_preset(arch):
        raise error
    pytest.skip(str(error))


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float64."""
    return tensor.float().double()


def limits_of(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, how: Scaling, *, fast: bool = False
) -> reference.Tolerance:
    """How far a result may be from the reference's."""
    k, block = a.shape[-1], how.block(b)
    return reference.tolerance(element_type(a), element_type(d), k, fast_accum=fast, scale_block=block)


def assert_scaled(
    d: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    how: Scaling | None = None,
    *,
    fast: bool = False,
    amax: torch.Tensor | None = None,
) -> None:
    """`d`, and `amax` if it is given, agree with the reference.

    Args:
        d: the result.
        a: operand A.
        b: operand B.
        c: operand C as it was before the call.
        how: scalars and scales.
        fast: fast accumulation was allowed.
        amax: the largest magnitude that the call wrote.
    """
    how = how or Scaling()
    if math.prod(d.shape) * max(1, a.shape[-1]) > NUMPY_LIMIT:
        _assert_on_gpu(d, a, b, c, how, fast=fast, amax=amax)
        return
    limits, result = limits_of(a, b, d, how, fast=fast), element_type(d)
    arrays = host(a), host(b), None if c is None else host(c)
    largest = np.zeros(1, np.float32)
    want = gemm_reference.gemm(*arrays, **how.on_host, amax=largest, out_dtype=result)
    magnitude = gemm_reference.absolute_product(*arrays, **how.on_host)
    got = host(d)
    right = reference.within_tolerance(got, want, magnitude, limits, result)
    if not right.all():
        raise AssertionError(gpu_matrices._mismatch(got, want, ~right))
    if amax is not None:
        before = gemm_reference.absolute_product(*arrays, **{**how.on_host, "scale_d": None})
        _assert_amax(float(amax), float(largest[0]), limits.atol_factor * float(np.max(before, initial=0.0)))


def _assert_amax(got: float, want: float, error: float) -> None:
    if math.isnan(want):
        assert math.isnan(got)
        return
    assert abs(got - want) <= error + 2.0**-22 * want, f"amax is {got} instead of {want}, off by more than {error}"


def _assert_on_gpu(
    d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, how: Scaling, *, fast: bool, amax: Any
) -> None:
    """For products that NumPy would take too long for: float64 on the GPU. Nothing in them is NaN or infinite."""
    import torch

    limits, result = limits_of(a, b, d, how, fast=fast), element_type(d)
    wide_a, wide_b = wide(a), wide(b)
    outer: Any = how.alpha
    k, n = b.shape[-2:]
    if how.block(b):
        wide_a *= how.scale_a.double().repeat_interleave(BLOCK, -1)[..., :k]
        wide_b *= how.scale_b.double().repeat_interleave(BLOCK, -2)[..., :k, :].repeat_interleave(BLOCK, -1)[..., :n]
    else:
        for scale in (how.scale_a, how.scale_b):
            if scale is not None:
                outer = outer * (scale if isinstance(scale, float) else scale.double())
    want = torch.matmul(wide_a, wide_b) * outer
    bound = torch.matmul(wide_a.abs_(), wide_b.abs_()) * abs(outer)
    del wide_a, wide_b
    if c is not None:
        want += wide(c) * how.beta
        bound += wide(c).abs() * abs(how.beta)
    if amax is not None:
        _assert_amax(float(amax), float(want.abs().max()), limits.atol_factor * float(bound.max()))
    if how.scale_d is not None:
        scale_d = float(how.scale_d)
        want, bound = want * scale_d, bound * abs(scale_d)
    if result in FP8_TYPES:
        want.clamp_(-numerics.finite_max(result), numerics.finite_max(result))
    bound = bound.mul_(limits.atol_factor).add_(want.abs() * limits.rtol).add_(numerics.smallest_step(result))
    # A NaN compares as not close.
    wrong = ~((wide(d) - want).abs_() <= bound)
    if bool(wrong.any()):
        where = wrong.nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{where.shape[0]} of {d.numel()} elements are wrong; the first at {first}: {float(wide(d)[first])} "
            f"instead of {float(want[first])}, off by more than {float(bound[first])}"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Plans of scaled products


def scales_of(problem: Any, how: Scaling, amax: Any = None) -> plans.Scales:
    """The arrays among the scales, as a plan takes them."""

    def spec_of(array: Any) -> Any:
        if array is None or isinstance(array, float):
            return None
        view = operands.as_operand(array)
        return gpu_matrices.MatrixSpec(view.shape, view.strides, D.F32)

    found = {name: spec_of(value) for name, value in (("a", how.scale_a), ("b", how.scale_b), ("d", how.scale_d))}
    found["amax"] = spec_of(amax)
    forms = dict(zip("ab", plans.scale_forms(problem, found["a"], found["b"]), strict=True))
    return plans.Scales(
        **{
            name: None if spec is None else plans.Scale(spec.shape, spec.strides, forms.get(name, "tensor"))
            for name, spec in found.items()
        }
    )


def scaled_plan(
    d: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    how: Scaling | None = None,
    *,
    fast: bool = False,
    amax: torch.Tensor | None = None,
    arch: ac.SmArch | None = None,
) -> tuple[Plan, list[Any]]:
    """A plan of its own, and the arrays that it is called with."""
    how = how or Scaling()
    problem = problem_of(a, b, d, c, "fast" if fast else "default")
    options = {"arch": arch, "alpha": how.alpha, "beta": how.beta, "like": a, "backend": BACKEND}
    try:
        made = plans.make(problem, scales_of(problem, how, amax), **options)
    except ac.KernelNotFoundError as error:
        lacking(error, arch)
    slots = [a, b, c, how.scale_a, how.scale_b, how.scale_d, amax, d]
    return made, [array for array in slots if array is not None and not isinstance(array, float)]


def cell_plan(
    key: Any, info: Any, d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, how: Scaling, amax: Any
) -> tuple[Plan, list[Any]]:
    """`scaled_plan` of one cell, whichever is the best one."""
    from atomr_cutlass.pipeline import select

    problem = replace(
        problem_of(a, b, d, math_mode=key.math),
        epilogue=key.epilogue,
        scale_granularity=key.scale_granularity,
        scale_type=key.scale_type,
    )
    choice = replace(select.candidate_of(GemmSearch(problem, devices.get(0)), key), info=info)
    options = PlanOptions(alpha=how.alpha, beta=how.beta, like=a)
    made = plans.from_candidate(problem, choice, options, scales_of(problem, how, amax))
    slots = [a, b, how.scale_a, how.scale_b, how.scale_d, amax, d]
    return made, [array for array in slots if array is not None]
