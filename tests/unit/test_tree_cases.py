"""What tests of epilogue trees on a GPU are made of: random trees, their operands, and the kernels that they take."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest

from atomr_cutlass import reference
from atomr_cutlass.arrays.numerics import to_float64
from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.generator.epilogue.ops import OPS
from atomr_cutlass.generator.epilogue.tree import (
    INPUT_DTYPES,
    KINDS,
    MASK,
    MATRIX,
    REDUCED_KINDS,
    REDUCTIONS,
    EpilogueVisitorTree,
)
from atomr_cutlass.pipeline import devices
from random_trees import evaluate_torch, is_special, random_operands, random_tree, to_torch
from tree_cases import Case, cases, cells, common, needed

RESULTS = ((D.BF16, D.F32), (D.F16, D.F32), (D.F8E4M3, D.F32), (D.I8, D.I32), (D.F32, D.F32), (D.F64, D.F64))
"""(element type of D, of the accumulator)."""
SEEDS = range(120)
MOST_KERNELS = 125
"""Of the sm90 generation, which take longest to compile."""


def tree_of(seed: int) -> tuple[EpilogueVisitorTree, D]:
    d, acc = RESULTS[seed % len(RESULTS)]
    return random_tree(seed, d=d, acc=acc), d


def accumulators(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, 9, 21))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_trees(seed: int) -> None:
    """The same for a seed, small, with numbers that a kernel takes; finite unless they are meant not to be."""
    tree, d = tree_of(seed)
    assert tree == tree_of(seed)[0]
    assert 2 <= len(tree.nodes) <= 40
    assert EpilogueVisitorTree.parse(tree.program).program == tree.program
    acc = accumulators(seed)
    operands = random_operands(tree, acc.shape, seed)
    got = reference.evaluate(tree, acc, operands, out_dtype=d)
    assert reference.mismatches(tree, got, acc, 1e-5, operands, out_dtype=d) == []
    if not is_special(seed):
        assert all(np.isfinite(to_float64(array)).all() for array in got.values())


def test_trees_without_masks() -> None:
    for seed in SEEDS:
        d, acc = RESULTS[seed % len(RESULTS)]
        tree = random_tree(seed, d=d, acc=acc, masks=False)
        assert MASK not in {operand.kind for operand in (*tree.inputs, *tree.outputs)}


def test_special_trees_make_nan_and_infinity() -> None:
    seen = set()
    for seed in filter(is_special, range(10 * len(SEEDS))):
        tree, d = tree_of(seed)
        acc = accumulators(seed)
        got = reference.evaluate(tree, acc, random_operands(tree, acc.shape, seed), out_dtype=d)
        for array in got.values():
            values = to_float64(array)
            seen |= {"nan"} if np.isnan(values).any() else set()
            seen |= {"inf"} if np.isinf(values).any() else set()
    assert seen == {"nan", "inf"}


def test_cases_cover_everything() -> None:
    trees = [case.tree for case in cases()]
    assert len(trees) == 200
    assert len({tree.program for tree in trees}) > 190
    assert {node.op for tree in trees for node in tree.nodes} == {*OPS, "cast", "acc", "constant", "input"}
    assert {operand.kind for tree in trees for operand in tree.inputs} == set(KINDS)
    read = {operand.dtype for tree in trees for operand in tree.inputs}
    cast = {D(node.attributes[0]) for tree in trees for node in tree.nodes if node.op == "cast"}
    outputs = [output for tree in trees for output in tree.outputs]
    assert read == {*INPUT_DTYPES, None}
    assert cast == set(INPUT_DTYPES)
    assert {output.dtype for output in outputs if output.kind == MATRIX and not output.reduction} == set(INPUT_DTYPES)
    assert MASK in {output.kind for output in outputs}
    reduced = {(output.kind, output.reduction) for output in outputs if output.reduction}
    assert reduced == {(kind, reduction) for kind in REDUCED_KINDS for reduction in REDUCTIONS}
    older = [case for case in cases() if case.arch is not None]
    assert math.isclose(len(older), len(trees) / 3, abs_tol=1)


def test_cases_have_kernels() -> None:
    device = devices.imagined(SmArch.SM90A)
    keys = {case.candidate(device).key for case in needed()}
    assert len({key.name for key in keys}) == len(keys)
    assert len([key for key in keys if key.generation == "sm90"]) <= MOST_KERNELS
    assert len({case.candidate(device).key for case in cells().values()}) == len(cells())
    # The same program has its matrix as the C operand, and beside it.
    assert any(":source:" in key.epilogue for key in keys)


def test_names_are_unique() -> None:
    names = [case.name for case in needed()]
    assert len(set(names)) == len(names)


def small(case: Case) -> bool:
    return math.prod(case.shape) < 20_000


def test_tolerances_tell_right_from_wrong() -> None:
    """They are finite and far below the results that they are for; for bits there is mostly one right one."""
    vague, total = [], 0
    for case in filter(small, (*cases(), *common().values())):
        values = case.values()
        acc, error = case.accumulators(values)
        read = {operand.name: values[operand.name] for operand in case.tree.inputs}
        got = reference.evaluate(case.tree, acc, read, out_dtype=case.d)
        bounds = reference.tolerances(case.tree, acc, error, read, out_dtype=case.d)
        assert {name: array.shape for name, array in got.items()} == {
            name: layout.shape for name, layout in case.array_layouts.items() if name not in values
        }
        if is_special(case.seed):
            continue
        for name, bound in bounds.items():
            largest = np.abs(to_float64(got[name])).max() if bound.shape == got[name].shape else 1.0
            total += 1
            if not np.isfinite(bound).all() or np.median(bound) > 0.01 * largest:
                vague.append(f"{case} {name}")
    assert len(vague) <= 0.02 * total, vague


if importlib.util.find_spec("torch"):

    @pytest.mark.parametrize("seed", [seed for seed in SEEDS if not is_special(seed)])
    def test_unfused_in_torch(seed: int) -> None:
        check_unfused_in_torch(seed)


def check_unfused_in_torch(seed: int) -> None:
    tree, d = tree_of(seed)
    acc = accumulators(seed)
    operands = random_operands(tree, acc.shape, seed)
    tensors = {name: to_torch(array) for name, array in operands.items()}
    got = {name: array_of(value) for name, value in evaluate_torch(tree, to_torch(acc), tensors, out_dtype=d).items()}
    assert reference.mismatches(tree, got, acc, 0.0, operands, out_dtype=d) == []


def array_of(tensor: object) -> np.ndarray:
    """A NumPy array of a tensor of any dtype."""
    import torch

    assert isinstance(tensor, torch.Tensor)
    narrow = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
    if tensor.dtype not in narrow:
        return tensor.contiguous().numpy()
    import ml_dtypes

    bits = tensor.contiguous().view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.uint8)
    return bits.numpy().view(getattr(ml_dtypes, narrow[tensor.dtype]))
