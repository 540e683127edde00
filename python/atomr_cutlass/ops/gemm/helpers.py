"""GEMMs that take further kernels: one that adds up slices of K, or those that copy an operand or both.

K is divided into slices for a small D and a long K, where the tiles of D alone leave multiprocessors idle: one kernel
computes the slices in parallel, another adds them up. Slices are equally many steps of the kernel; steps beyond the end
of K are zeros. Slices are added in the order of K, so that results are reproducible. Batch-invariant calls have as many
whatever the rows of D (`fixed_slices`): of many rows one kernel adds them up one after the other, in the same order.

Operands are copied on sm_90. Transposed, for kernels that read only the other layout, or read it faster: WGMMA reads
8-bit types and tf32 contiguous along K only, FFMA kernels have most tiles for a row-major A and are faster without
vector loads if B is not contiguous along K, TMA needs rows of whole vectors, which f16 and bf16 may have along K even
if M or N is odd, and kernels for few rows read those along K. Or with padded rows, where those of f16 and bf16 are no
whole vectors otherwise, as where K is odd.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from ...arrays.layouts import is_dense, round_up
from ...generator.archs import SmArch
from ...generator.dtypes import CutlassDtype
from ...generator.epilogue.lower import LINEAR, SCALED
from ...generator.families import gemm_few_sm90, transpose
from ...generator.families.cast import PAIRS, cast
from ...generator.key import COLUMN, ROW
from ...generator.rules import FP8_TYPES, HALF_TYPES
from ...pipeline import devices, estimate, select
from ...pipeline.devices import Device
from ...pipeline.plan import NO_PRODUCT, PRODUCT, Address, Steps, bytes_of
from ...pipeline.search import Candidate, ExactSearch
from .problem import Copy, GemmFormulation, GemmProblem, formulations

ALIGNMENT = 16
"""Alignment in bytes of C and D where slices are added up: the size of a vector access."""
LEAST_K = 1024
"""The least K that is divided."""

FIXED_COLUMNS = 512
"""The most columns of D for which batch-invariant calls divide K."""
LEAST_SLICES, LEAST_SLICE = 4, 768
"""The fewest slices that are worth it, and the least K of one."""

GRID_BATCHES = 65535
"""The most batches of a launch that has them along z of its grid: the limit of that extent."""
MOST_ROWS = 65535 * 64
"""The most rows that one launch transposes: the limit of a grid's y extent, in the smaller of its tiles."""
MOST_PADDED = 1 << 33
"""The most elements of a matrix whose rows are padded: 2^30 vectors, which its kernel counts by 32 bits."""
LEAST_PRODUCTS = 1 << 24
"""The least multiply-adds of IEEE f32 that are worth a copy: fewer take no longer than its launch."""


@functools.lru_cache(64)
def sums(acc: CutlassDtype, dtype: CutlassDtype, device: Device, arch: SmArch | None = None) -> ExactSearch:
    """The kernel that adds up slices of one type into another type; with one slice, a cast."""
    return ExactSearch(lambda arch: cast(arch, acc, dtype), device, arch)


@functools.lru_cache(64)
def copier(dtype: CutlassDtype, transposed: bool, device: Device) -> ExactSearch:
    """The kernel that copies operands of a type: transposed, or with padded rows."""
    make = transpose.transpose if transposed else transpose.padded
    return ExactSearch(lambda arch: make(arch, dtype), device)


def alignments(candidate: Candidate[GemmFormulation], dtype_d: CutlassDtype) -> tuple[int, int, int]:
    """The alignments in elements of the caller's A, B, and C and D for all kernels of a candidate."""
    key, formulation = candidate.key, candidate.formulation
    a, b = (key.align_b, key.align_a) if formulation.swapped else (key.align_a, key.align_b)
    for copy in formulation.copies:
        of_copy = transpose.alignment(formulation.problem.a.dtype)
        a, b = (of_copy, b) if copy.operand == "a" else (a, of_copy)
    return a, b, ALIGNMENT * 8 // dtype_d.bits if formulation.divided else key.align_d


def fixed_slices(problem: GemmProblem, device: Device) -> int:
    """The slices that batch-invariant calls divide K into, 1 for none: by N, K, the types and the GPU alone.

    As many as give half of the multiprocessors a tile of 64 rows and columns.
    """
    halves = problem.a.dtype in HALF_TYPES and problem.d.dtype.bits == 16
    if not halves or problem.epilogue != LINEAR or problem.n > FIXED_COLUMNS:
        return 1
    slices = min(device.multiprocessors // 2 // -(-problem.n // 64), problem.k // LEAST_SLICE)
    return slices if slices >= LEAST_SLICES else 1


def divided(whole: GemmProblem, slices: int = 0) -> list[GemmFormulation]:
    """The formulations for kernels that divide K, into so many slices or, with 0, as many as the model chooses.

    Empty if K is short, or no kernel adds up such slices.
    """
    d = whole.d
    if (
        whole.epilogue not in (LINEAR, SCALED)
        or whole.scale_type
        or whole.quantized
        or whole.batch != 1
        or whole.k < LEAST_K
        or not (whole.a.dtype in (*HALF_TYPES, *FP8_TYPES, CutlassDtype.F64) or whole.math in ("tf32", "ieee"))
        or (whole.acc, d.dtype) not in PAIRS
        or max(2, slices) * bytes_of(d.shape, whole.acc) > estimate.DIVIDED_MOST_BYTES
        or d.alignment % ALIGNMENT
        or not any(is_dense(d.shape[-2:][::step], d.strides[-2:][::step]) for step in (1, -1))
        or (whole.c is not None and (whole.c.alignment % ALIGNMENT or whole.c.strides[-2:] != d.strides[-2:]))
    ):
        return []
    sums = dataclasses.replace(d, dtype=whole.acc, alignment=256)
    found = formulations(dataclasses.replace(whole, c=None, d=sums))
    return [formulation._replace(divided=True, slices=slices, problem=whole) for formulation in found]


def add_divided(
    steps: Steps,
    candidate: Candidate[GemmFormulation],
    args: dict[str, Any],
    *,
    unmultiplied: bool,
    backend: str,
    jit: str | None,
) -> None:
    """Adds the launches of a kernel that divides K, and of the kernel that adds up its slices, to a plan.

    `args` are those of a kernel that does not divide K; with `unmultiplied`, calls may have an alpha of 0.
    """
    whole = candidate.formulation.problem
    adder = select.choose(sums(whole.acc, whole.d.dtype, devices.get(whole.device)), backend=backend, jit=jit)
    count = math.prod(whole.d.shape)
    # The kernel that adds up reads vectors of each slice.
    stride = round_up(count, ALIGNMENT * 8 // whole.acc.bits)
    sliced = steps.temporary(candidate.split_k * stride * whole.acc.bits // 8)
    of_slices = {"batch": 1, "c": None, "d": sliced, "alpha": 1.0, "beta": 0.0, "batch_stride_d": stride}
    steps.launch(candidate, args | of_slices, main=True, when=PRODUCT)
    result = {"count": count, "slice_stride": stride} | {name: args[name] for name in ("c", "d", "alpha", "beta")}
    steps.launch(adder, result | {"slices": candidate.split_k, "a": sliced}, when=PRODUCT)
    if unmultiplied:
        zeros = steps.zeros(bytes_of(whole.d.shape, whole.acc))
        steps.launch(adder, result | {"slices": 1, "a": zeros}, when=NO_PRODUCT)


def with_copies(found: Iterable[GemmFormulation], device: Device, *, batch_invariant: bool) -> list[GemmFormulation]:
    """The formulations, followed by those in which an operand is copied first, or both are.

    Args:
        found: formulations.
        device: the GPU.
        batch_invariant: whether all numbers of rows must have the same formulations, which determine their reduction.
    """
    found = list(found)
    if device.capability == (9, 0):
        copied = (_copied(formulation, batch_invariant=batch_invariant) for formulation in found)
        found += [formulation for formulation in copied if formulation is not None]
    return found


def _copied(formulation: GemmFormulation, *, batch_invariant: bool) -> GemmFormulation | None:
    """The formulation with operands copied first, where that may be faster; None where it is not, or cannot be.

    With `batch_invariant` the answer is the same for every number of rows, up to the sizes that are copied.
    """
    problem = formulation.problem
    dtype, bits = problem.a.dtype, problem.a.dtype.bits
    if problem.b.dtype.bits != bits or formulation.batches.count > GRID_BATCHES:
        return None
    if (dtype, problem.math) == (CutlassDtype.F32, "ieee"):
        return _copied_f32(formulation, batch_invariant=batch_invariant)
    if bits == 16:
        return _copied_halves(formulation, batch_invariant=batch_invariant)
    if bits == 8 or (dtype, problem.math) == (CutlassDtype.F32, "tf32"):
        return _copied_along_k(formulation)
    return None


def _copied_f32(formulation: GemmFormulation, *, batch_invariant: bool) -> GemmFormulation | None:
    """Of IEEE f32: a column-major A, which FFMA kernels read by tiles of one size alone, and B where no vectors serve.

    Kernels that load single elements are slow where B is contiguous along K. A row-major A is never worth a copy.
    """
    small = formulation.m * formulation.n * formulation.k < LEAST_PRODUCTS
    if formulation.layout_d != ROW or (small and not batch_invariant):
        return None
    made: GemmFormulation | None = formulation
    if formulation.layout_a != ROW:
        made = _copy_of(formulation, first=True)
    if made is not None and made.layout_b == COLUMN and min(made.align_a, made.align_b) < formulation.vector:
        made = _copy_of(made, first=False)
        made = None if made is None else made._replace(align_b=1)  # for any N
    return None if made is formulation else made


def _copied_halves(formulation: GemmFormulation, *, batch_invariant: bool) -> GemmFormulation | None:
    """Of f16 and bf16: operands whose rows TMA does not read, such as those of odd length, or the few rows.

    Copies are contiguous along K, for all kernels; if both are copies, zeros follow up to a K of whole vectors.
    """
    along_k, line = (formulation.layout_a == ROW, formulation.layout_b == COLUMN), formulation.vector
    aligned, odd_k = (formulation.align_a == line, formulation.align_b == line), formulation.k % line != 0
    # Kernels of presets that add up slices one after the other have a row-major A and D.
    turned = formulation.slices > 0 and formulation.layout_d == ROW and not along_k[0]
    if not all(aligned) or turned:
        made: GemmFormulation | None = formulation
        for place in range(2):
            if made is not None and (odd_k or not aligned[place] or (turned and place == 0)):
                made = _copy_of(made, first=place == 0, transposed=not along_k[place])
        if made is None or not odd_k:
            return made
        return made._replace(k=round_up(made.k, line), extended=True, align_a=line, align_b=line)
    # For few rows alone: other numbers of rows would have other formulations.
    if batch_invariant or formulation.layout_d != ROW or all(along_k) or odd_k:
        return None
    # Kernels for few rows or columns of D read the few, and A, contiguous along K.
    first = not along_k[0]
    few = (formulation.m if first else formulation.n) <= gemm_few_sm90.MOST
    return _copy_of(formulation, first=first) if few else None


def _copied_along_k(formulation: GemmFormulation) -> GemmFormulation | None:
    """Of 8-bit types and tf32: the operand that is not contiguous along K.

    If neither is, tf32 copies the kernel's second operand, since the first may come through registers; 8-bit types copy
    none.
    """
    along_k = formulation.layout_a == ROW, formulation.layout_b == COLUMN
    if all(along_k) or (formulation.problem.a.dtype.bits == 8 and not any(along_k)):
        return None
    return _copy_of(formulation, first=along_k[1])


def _copy_of(formulation: GemmFormulation, *, first: bool, transposed: bool = True) -> GemmFormulation | None:
    """The formulation with the kernel's first or second operand copied, transposed or with padded rows.

    Rows of a copy begin at whole vectors, but it counts as aligned only as far as K is: kernels ask K itself to be a
    multiple of what they load. None where the kernel that copies does not take the operand.
    """
    dtype, line, strides = formulation.problem.a.dtype, formulation.vector, formulation.batch_strides
    if (formulation.align_a if first else formulation.align_b) < transpose.alignment(dtype):
        return None
    extent, source = (formulation.m, formulation.lda) if first else (formulation.n, formulation.ldb)
    along_k = formulation.layout_a == ROW if first else formulation.layout_b == COLUMN
    onto_k = along_k is not transposed
    rows, columns = (extent, formulation.k) if onto_k else (formulation.k, extent)
    batch_stride, leading = strides[0 if first else 1], round_up(columns, line)
    if columns > MOST_ROWS if transposed else rows * leading > MOST_PADDED:
        return None
    size = rows * columns * dtype.bits // 8 * (formulation.batches.count if batch_stride else 1)
    copied = Copy("a" if first != formulation.swapped else "b", transposed, source, batch_stride, size)
    stride = rows * leading if batch_stride else 0
    strides = (stride, *strides[1:]) if first else (strides[0], stride, *strides[2:])
    letter, layout = ("a", ROW if onto_k else COLUMN) if first else ("b", COLUMN if onto_k else ROW)
    align = math.gcd(line, formulation.k) if onto_k else line
    changes: dict[str, Any] = {f"layout_{letter}": layout, f"ld{letter}": leading, f"align_{letter}": align}
    return formulation._replace(copies=(*formulation.copies, copied), batch_strides=strides, **changes)


def read_copy(formulation: GemmFormulation, copy: Copy) -> tuple[int, int, bool]:
    """The copy's extent other than K, its leading dimension, and whether it is contiguous along K."""
    if (copy.operand == "a") != formulation.swapped:
        return formulation.m, formulation.lda, formulation.layout_a == ROW
    return formulation.n, formulation.ldb, formulation.layout_b == COLUMN


def copies(
    steps: Steps, formulation: GemmFormulation, *, when: str, backend: str, jit: str | None
) -> Callable[[Address, Address, int], tuple[Address, Address]]:
    """A function that adds a formulation's copies to a plan and returns the addresses of the kernel's A and B.

    Its arguments are the addresses of the caller's A and B, and the number of batches. `when` is that of the kernel's
    launch, which must not read copies that were not made.
    """
    dtype, count = formulation.problem.a.dtype, formulation.batches.count  # both operands have as many bits
    k_of_all = formulation.problem.k  # without zeros that follow
    made = []
    for copy in formulation.copies:
        extent, leading, along_k = read_copy(formulation, copy)
        rows, columns = (extent, k_of_all) if along_k else (k_of_all, extent)
        target = steps.temporary((count if copy.batch_stride else 1) * rows * leading * dtype.bits // 8)
        kernel = select.choose(copier(dtype, copy.transposed, devices.get(steps.device)), backend=backend, jit=jit)
        # Of the operand as it lies: rows, and elements of each.
        m, k = (columns, rows) if copy.transposed else (rows, columns)
        args = {
            "m": m, "n": 1, "k": k, "lda": copy.leading, "batch_stride_a": copy.batch_stride,
            "d": target, "ldd": leading, "batch_stride_d": rows * leading,
        }  # fmt: skip
        made.append((copy, kernel, args, target))

    def copies_of(a: Address, b: Address, batches: int) -> tuple[Address, Address]:
        addresses = {"a": a, "b": b}
        for copy, kernel, args, target in made:
            own = {"a": addresses[copy.operand], "batch": batches if copy.batch_stride else 1}
            steps.launch(kernel, args | own, when=when)
            addresses[copy.operand] = target
        return addresses["a"], addresses["b"]

    return copies_of
