"""Scales of a GEMM as a plan sees them: their forms, the problem that they make, and the launches of batches."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import fake_table
from atomr_cutlass import EvtBuilder
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.arrays.numerics import numpy_dtype
from atomr_cutlass.epilogue.results import MatrixResult
from atomr_cutlass.errors import InvalidOperandError, UnsupportedError
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.jit import kernels
from atomr_cutlass.ops.gemm import plans
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.plans import Scale, Scales, scale_forms
from atomr_cutlass.ops.gemm.problem import GemmProblem, collapse_batches
from atomr_cutlass.pipeline import select
from atomr_cutlass.pipeline.operation import operation_of
from atomr_cutlass.pipeline.probe import Check
from fake_table import H200


def _spec(shape: tuple[int, ...], dtype: D = D.F32, *, columns: bool = False) -> MatrixSpec:
    """Dense, the matrices row-major or, if `columns`, column-major."""
    order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2) if columns else tuple(range(len(shape)))
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return MatrixSpec(shape, tuple(strides), dtype)


def _problem(
    m: int = 65, n: int = 300, k: int = 520, *, batch_a: tuple[int, ...] = (), batch_b: tuple[int, ...] = ()
) -> GemmProblem:
    batch = tuple(np.broadcast_shapes(batch_a, batch_b))
    return GemmProblem(
        a=_spec((*batch_a, m, k), D.F8E4M3),
        b=_spec((*batch_b, k, n), D.F8E4M3, columns=True),
        c=None,
        d=_spec((*batch, m, n), D.BF16),
        math="default",
        device=0,
    )


def _scale(shape: tuple[int, ...], form: str) -> Scale:
    return Scale(shape, _spec(shape).strides, form)


# ----------------------------------------------------------------------------------------------------------------------
# Forms
# ----------------------------------------------------------------------------------------------------------------------

ONE_ELEMENT: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (1, 1, 1))


def _forms(problem: GemmProblem, a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[str, str]:
    return scale_forms(problem, None if a is None else _spec(a), None if b is None else _spec(b))


@pytest.mark.parametrize(("a", "b"), list(itertools.product((None, *ONE_ELEMENT), repeat=2)))
def test_one_element_is_of_the_tensor(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> None:
    assert _forms(_problem(), a, b) == ("tensor", "tensor")


@pytest.mark.parametrize(
    ("a", "b", "forms"),
    [
        ((65, 1), None, ("vector", "tensor")),
        (None, (1, 300), ("tensor", "vector")),
        ((65, 1), (1, 300), ("vector", "vector")),
        ((65, 1), (1,), ("vector", "tensor")),
        ((1, 1), (1, 300), ("tensor", "vector")),
        ((4, 65, 1), (2, 1, 1, 300), ("vector", "vector")),
        ((65, 5), (5, 3), ("block", "block")),
        ((4, 65, 5), (5, 3), ("block", "block")),
    ],
)
def test_forms(a: tuple[int, ...] | None, b: tuple[int, ...] | None, forms: tuple[str, str]) -> None:
    assert _forms(_problem(), a, b) == forms


@pytest.mark.parametrize(
    ("extents", "a", "b", "forms"),
    [
        # Up to 128 elements of K, a column of scales of A has the shape of either form: scale_b says which it is.
        ((65, 300, 128), (65, 1), (1, 3), ("block", "block")),
        ((65, 300, 128), (65, 1), (1, 300), ("vector", "vector")),
        ((65, 300, 128), (65, 1), None, ("vector", "tensor")),
        ((1, 300, 128), (1, 1), (1, 3), ("block", "block")),
        # One number for all of B is its only block as well: the products are the same.
        ((65, 128, 128), (65, 1), (1, 1), ("vector", "tensor")),
        ((65, 1, 300), (65, 3), (3, 1), ("block", "block")),
        ((1, 1, 300), (1, 3), (3, 1), ("block", "block")),
        ((1, 1, 1), (1, 1), (1, 1), ("tensor", "tensor")),
        ((65, 129, 129), (65, 2), (2, 2), ("block", "block")),
    ],
)
def test_forms_that_look_alike(
    extents: tuple[int, int, int], a: tuple[int, ...], b: tuple[int, ...] | None, forms: tuple[str, str]
) -> None:
    assert _forms(_problem(*extents), a, b) == forms


@pytest.mark.parametrize("shape", [(65,), (1, 65), (64, 1), (65, 4), (65, 6), (2,), (65, 5, 1), (5, 65), (300, 1)])
def test_scale_a_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidOperandError) as caught:
        _forms(_problem(), shape, None)
    assert str(caught.value) == (
        f"scale_a has shape {shape}; expected one element, (65, 1) or, for blocks of 128, (65, 5)"
    )


@pytest.mark.parametrize("shape", [(300,), (300, 1), (1, 301), (3, 5), (5, 2), (5, 300), (2,)])
def test_scale_b_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidOperandError) as caught:
        _forms(_problem(), None, shape)
    assert str(caught.value) == (
        f"scale_b has shape {shape}; expected one element, (1, 300) or, for blocks of 128, (5, 3)"
    )


@pytest.mark.parametrize(
    ("a", "b"),
    [((65, 5), None), (None, (5, 3)), ((65, 5), (1, 300)), ((65, 1), (5, 3)), ((65, 5), (1,)), ((), (5, 3))],
)
def test_block_scales_are_of_both_operands(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> None:
    with pytest.raises(InvalidOperandError, match=r"block scales are \(65, 5\) and \(5, 3\), both or neither"):
        _forms(_problem(), a, b)


# ----------------------------------------------------------------------------------------------------------------------
# Problems
# ----------------------------------------------------------------------------------------------------------------------


def test_the_problem_of_scales_has_the_scaled_epilogue() -> None:
    problem = _problem()
    found = plans.with_scales(problem, Scales(a=_scale((65, 1), "vector")))
    assert found == dataclasses.replace(problem, epilogue="scaled")
    assert plans.with_scales(problem, Scales(amax=_scale((1,), "tensor"))).epilogue == "scaled"


def test_the_problem_of_block_scales() -> None:
    found = plans.with_scales(_problem(), Scales(_scale((65, 5), "block"), _scale((5, 3), "block")))
    assert found.scale_granularity == (1, 128, 128)
    assert found.scale_type == "f32"


def test_what_are_block_scales() -> None:
    assert Scales(_scale((65, 5), "block"), _scale((5, 3), "block")).form == "block"
    assert Scales(_scale((65, 1), "vector")).form == "vector"
    assert not Scales().form


@pytest.mark.parametrize("extents", [(0, 300, 128), (65, 0, 128)])
def test_an_empty_result_has_no_plan(extents: tuple[int, int, int]) -> None:
    with pytest.raises(UnsupportedError, match="is empty: there is nothing to plan"):
        plans.make(_problem(*extents), Scales(_scale((), "tensor")))


def test_without_k_there_is_nothing_to_scale() -> None:
    with pytest.raises(UnsupportedError, match="K is 0"):
        plans.make(_problem(k=0), Scales(_scale((), "tensor")))


def test_problems_of_a_tree() -> None:
    """A matrix like D is loaded as the C operand first."""
    tree = EvtBuilder().add_bias("bias").add_matrix("residual", D.BF16).build()
    problem = _problem(64, 128, 96)
    fusion = MatrixResult(problem.d.shape).dense(tree, problem.d)
    scales = Scales(a=_scale((64, 1), "vector"))
    for given, base in ((plans.NO_SCALES, "lc"), (scales, "scaled")):
        source, plain = plans.rewritten(problem, given, fusion)
        assert plain.epilogue == f"{base}+{tree.program}"
        assert source.epilogue == plain.epilogue.replace("input:matrix:bf16", "input:source:bf16")
        residual = next(operand for operand in fusion.inputs if operand.name == "residual")
        assert (plain.c, source.c) == (None, residual.spec)
        assert source.operands == plain.operands == tuple(array.spec for array in fusion.arrays)
    with_c = dataclasses.replace(problem, c=problem.d)
    (only,) = plans.rewritten(with_c, scales, fusion)
    assert (only.c, only.epilogue) == (problem.d, f"scaled+{tree.program}")
    assert plans.rewritten(problem, scales) == [plans.with_scales(problem, scales)]


def test_a_problem_that_the_table_serves_goes_before_one_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = EvtBuilder().add_bias("bias").add_matrix("residual", D.BF16).build()
    problem = _problem(64, 128, 96)
    fusion = MatrixResult(problem.d.shape).dense(tree, problem.d)
    source, plain = rewritten = plans.rewritten(problem, plans.NO_SCALES, fusion)
    monkeypatch.setattr(kernels, "record_miss", lambda _key: None)

    def chosen(backend: str = "auto") -> tuple[GemmProblem, str]:
        found = select.choose(GemmSearch(rewritten, H200), backend=backend)
        return found.formulation.problem, found.origin

    keys = {}
    for problem in rewritten:
        best = select.best_cell(GemmSearch(problem, H200))
        assert best is not None
        keys[problem.epilogue] = best.key
    fake_table.install(monkeypatch, [])
    assert chosen() == (source, "jit")
    fake_table.install(monkeypatch, [fake_table.row(keys[plain.epilogue])])
    assert chosen() == (plain, "prebuilt")
    assert chosen("jit") == (source, "jit")
    fake_table.install(monkeypatch, map(fake_table.row, keys.values()))
    assert chosen() == (source, "prebuilt")


# ----------------------------------------------------------------------------------------------------------------------
# Batches
# ----------------------------------------------------------------------------------------------------------------------


def _launches(problem: GemmProblem, scales: Scales, most: int | None = None) -> list[Any]:
    formulation: Any = SimpleNamespace(problem=problem, batches=collapse_batches(problem))
    made = plans._launches(scales, formulation, most)
    return [SimpleNamespace(count=count, offsets=at, scale_a=a, scale_b=b) for count, at, a, b in made]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (65, 1), (1, 65, 1)])
def test_batches_that_share_their_scales_are_one_launch(shape: tuple[int, ...]) -> None:
    problem = _problem(batch_a=(7,), batch_b=(7,))
    scales = Scales(a=_scale(shape, "vector" if 65 in shape else "tensor"))
    (launch,) = _launches(problem, scales)
    assert (launch.count, launch.offsets, launch.scale_a, launch.scale_b) == (7, (0, 0, 0, 0), 0, 0)


def test_a_launch_takes_as_many_batches_as_a_grid() -> None:
    """Those of a tree's operands too begin where the launch before ended."""
    tree = EvtBuilder().add_matrix("residual", D.BF16).build()
    problem = _problem(65, 300, 128, batch_a=(7,))
    fusion = MatrixResult(problem.d.shape).dense(tree, problem.d)
    *_, problem = plans.rewritten(problem, plans.NO_SCALES, fusion)
    launches = _launches(problem, plans.NO_SCALES, 3)
    starts = [(0, 0, 0, 0, 0)] + [(n * 65 * 128, 0, *(n * 65 * 300,) * 3) for n in (3, 6)]
    assert [(launch.count, launch.offsets) for launch in launches] == list(zip((3, 3, 1), starts, strict=True))


@pytest.mark.parametrize(
    ("batch_a", "batch_b", "scales_a", "scales_b"),
    [
        ((3,), (3,), (3,), ()),
        ((3,), (3,), (), (3,)),
        ((3,), (1,), (3,), (3,)),
        ((), (3,), (3,), ()),
        ((2, 3), (2, 3), (2, 3), (2, 3)),
        ((2, 1), (1, 3), (2, 1), (3,)),
        ((2, 3), (3,), (2, 1), (1, 3)),
        ((2, 1, 4), (3, 1), (4,), (2, 3, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["vector", "block"])
def test_batches_with_scales_of_their_own(
    batch_a: tuple[int, ...],
    batch_b: tuple[int, ...],
    scales_a: tuple[int, ...],
    scales_b: tuple[int, ...],
    form: str,
) -> None:
    """Each is a launch; where its matrices and scales begin is where NumPy's broadcasting has them."""
    m, n, k = 5, 130, 257
    problem = _problem(m, n, k, batch_a=batch_a, batch_b=batch_b)
    shape_a, shape_b = ((m, 1), (1, n)) if form == "vector" else ((m, 3), (3, 2))
    scales = Scales(_scale((*scales_a, *shape_a), form), _scale((*scales_b, *shape_b), form))
    batch = problem.d.shape[:-2]

    def firsts(shape: tuple[int, ...]) -> list[int]:
        """The offset of the first element of each batch's matrix in a dense array."""
        places = np.arange(int(np.prod(shape))).reshape(shape)[..., 0, 0]
        found: list[int] = np.broadcast_to(places, batch).reshape(-1).tolist()
        return found

    launches = _launches(problem, scales)
    assert [launch.count for launch in launches] == [1] * int(np.prod(batch))
    assert [launch.offsets[0] for launch in launches] == firsts((*batch_a, m, k))
    assert [launch.offsets[1] for launch in launches] == firsts((*batch_b, n, k))
    assert [launch.offsets[3] for launch in launches] == firsts((*batch, m, n))
    assert [launch.scale_a for launch in launches] == firsts((*scales_a, *shape_a))
    assert [launch.scale_b for launch in launches] == firsts((*scales_b, *shape_b))


def test_scales_of_other_batches() -> None:
    problem = _problem(batch_a=(2,))
    with pytest.raises(InvalidOperandError, match=r"batch dimensions \(3,\) of scale_a do not broadcast to \(2,\)"):
        _launches(problem, Scales(a=_scale((3, 65, 1), "vector")))


def test_too_many_batches_with_scales_of_their_own() -> None:
    problem = _problem(1, 16, 16, batch_a=(5000,))
    with pytest.raises(UnsupportedError, match="5000 batches with scales of their own; at most 4096 are launched"):
        _launches(problem, Scales(a=_scale((5000, 1, 1), "vector")))


# ----------------------------------------------------------------------------------------------------------------------
# Calls without a GPU
# ----------------------------------------------------------------------------------------------------------------------


def _fp8(*shape: int) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(len(shape)).integers(-4, 5, shape).astype(np.float32)
    return values.astype(numpy_dtype(D.F8E4M3))


def test_the_reference_takes_every_form() -> None:
    a, b = _fp8(65, 520), _fp8(520, 300)
    rng = np.random.default_rng(0)
    wide = a.astype(np.float64), b.astype(np.float64)
    for shape_a, shape_b in (((), ()), ((1,), (1, 300)), ((65, 1), (1, 1)), ((65, 1), (1, 300)), ((65, 5), (5, 3))):
        scale_a, scale_b = (np.array(2.0 ** rng.integers(-3, 4, s), np.float32) for s in (shape_a, shape_b))
        got = ac.gemm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=D.F32, backend="reference")
        if shape_a == (65, 5):
            spread = np.repeat(scale_a, 128, 1)[:, :520], np.repeat(np.repeat(scale_b, 128, 0)[:520], 128, 1)[:, :300]
            want = (wide[0] * spread[0]) @ (wide[1] * spread[1])
        else:
            want = wide[0] @ wide[1] * scale_a * scale_b
        np.testing.assert_array_equal(got, want.astype(np.float32))


def test_amax_is_taken_before_scale_d() -> None:
    a, b = _fp8(16, 32), _fp8(32, 48)
    amax = np.full(1, np.nan, np.float32)
    got = ac.gemm(a, b, scale_d=np.float32(0.5), amax=amax, out_dtype=D.F32, backend="reference")
    assert float(amax[0]) == 2 * float(np.abs(got).max())


def test_operands_of_a_tree_may_have_the_names_of_scales() -> None:
    tree = (
        EvtBuilder().scale("scale_d").binary("multiply", "scale_a", "column").quantize("e4m3", "scale", "amax").build()
    )
    epilogue, group = ac.GemmEpilogue(tree=tree), ac.GemmShape(16, 32, 16)
    of_groups = ac.GemmEpilogue(tree=EvtBuilder().scale("scale_a").add_bias("c").build())
    for request in (
        ac.GemmRequest(group, dtype=D.BF16, epilogue=epilogue),
        ac.GroupedGemmRequest(ac.GroupedGemmShape([group]), dtype=D.BF16, epilogue=of_groups),
    ):
        operation = operation_of(request)
        probe = operation.probe(request, operation.random_arrays(request, np.random.default_rng(0)))
        check = Check(probe.limits(request.math))
        for part in probe.parts():
            probe.compute(part)
            probe.compare(part, check)
        probe.finish(check)
        assert (check.mismatches, check.differences) == (0, [])


def test_numbers_are_scales_too() -> None:
    a, b = _fp8(16, 32), _fp8(32, 48)
    c = np.ones((16, 48), np.float32)
    got = ac.gemm(a, b, c, beta=4.0, scale_a=0.5, scale_b=2, scale_d=0.25, out_dtype=D.F32, backend="reference")
    np.testing.assert_array_equal(got, (a.astype(np.float32) @ b.astype(np.float32) + 4) / 4)
