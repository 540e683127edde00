"""Shapes that the benchmarks draw: repeatable, within their class, and of both alignments."""

import pytest

from atomr_cutlass.ops.gemm.suites import MODELS, ROWS
from benchmarks.shapes import (
    CLASSES,
    FLOPS_AT_MOST,
    OPERAND_BYTES_AT_MOST,
    SHARE_OF_8,
    SHARE_OF_16,
    SPENT,
    Shape,
    draw,
    purpose,
    suite,
)


@pytest.mark.parametrize("name", CLASSES)
def test_extents_stay_within_the_class(name):
    of = CLASSES[name]
    for shape in draw([name], 300, seed=1):
        assert of.m[0] <= shape.m <= of.m[1]
        assert of.n[0] <= shape.n <= of.n[1]
        assert of.k[0] <= shape.k <= of.k[1]
        assert shape.bytes(2) <= OPERAND_BYTES_AT_MOST
        assert shape.flops <= FLOPS_AT_MOST
        assert of.batch[0] <= shape.batch <= of.batch[1]
        assert not of.square or shape.m == shape.n == shape.k
        assert of.multiple is None or shape.n % of.multiple == shape.k % of.multiple == 0


def test_a_seed_draws_the_same_shapes_whatever_else_is_asked_for():
    alone = draw(["mid"], 20, seed=5)
    assert alone == [shape for shape in draw(["large", "mid"], 20, seed=5) if shape.group == "mid"]
    assert alone == draw(["mid"], 40, seed=5)[:20]
    assert alone != draw(["mid"], 20, seed=6)


def test_most_shapes_are_aligned_and_some_are_not():
    shapes = draw(["large"], 2000, seed=3)
    aligned = sum(shape.aligned for shape in shapes) / len(shapes)
    # One in 64 of those that are multiples of nothing are multiples of 8 all the same.
    assert aligned == pytest.approx(SHARE_OF_16 + SHARE_OF_8, abs=0.03)
    assert all(shape.aligned for shape in draw(["large"], 100, seed=3, aligned=True))
    assert not any(shape.aligned for shape in draw(["large"], 20, seed=3, aligned=False))


def test_few_shapes_are_powers_of_two():
    shapes = draw(["few rows", "mid", "large"], 200, seed=9)
    assert sum(shape.n & (shape.n - 1) == 0 and shape.k & (shape.k - 1) == 0 for shape in shapes) < 20


def test_suites_have_every_layer_with_every_number_of_rows():
    for model, layers in MODELS.items():
        shapes = suite(model)
        assert len(shapes) == len(layers) * len(ROWS)
        assert {(shape.n, shape.k) for shape in shapes} == set(layers.values())
    assert [shape.m for shape in suite("llama-3-8b", [3])] == [3] * 4


def test_unknown_names_are_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match="few rows"):
        draw(["tiny"], 1, seed=1)
    with pytest.raises(ValueError, match="llama-3-8b"):
        suite("llama-9")


def test_extents_are_log_uniform():
    shapes = draw(["few rows"], 2000, seed=3)
    # Half of the draws lie below the geometric mean of the range.
    assert sum(shape.k < 2**12.5 for shape in shapes) / len(shapes) == pytest.approx(0.5, abs=0.05)
    assert sum(shape.m <= 8 for shape in shapes) / len(shapes) == pytest.approx(0.5, abs=0.06)


def test_a_batch_counts_every_product():
    single, three = Shape("x", 2, 8, 16), Shape("x", 2, 8, 16, 3)
    assert (three.flops, three.bytes(2)) == (3 * single.flops, 3 * single.bytes(2))
    assert (str(single), str(three)) == ("2x8x16", "3 of 2x8x16")


def test_seeds_are_for_fitting_or_for_acceptance():
    assert purpose(4) == "fitting"
    assert purpose(99) == "acceptance"
    assert all(purpose(seed) == "none: spent" for seed in SPENT)


def test_a_class_without_misaligned_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="decode has aligned shapes alone"):
        draw(["few rows", "decode"], 2, 3, aligned=False)
