"""Cases that `test_grouped.py` runs in a process whose driver and kernels are fakes: device memory is the host's.

Every function named `case_...` is a test; the process prints what each of them raised as JSON.
"""

import contextlib
import ctypes
import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
import fake_table
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, _core
from atomr_cutlass import epilogue as evt
from atomr_cutlass.arrays import operands
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.epilogue import validate
from atomr_cutlass.generator.epilogue.common import bias_and_activation
from atomr_cutlass.generator.epilogue.lower import COMMON, SCALED_COMMON, epilogue_id
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.ops.grouped_gemm import kernels as grouped_plan
from atomr_cutlass.ops.grouped_gemm import operation as grouped_request
from atomr_cutlass.ops.grouped_gemm.kernels import ENTRY
from atomr_cutlass.pipeline import probe, table
from atomr_cutlass.pipeline.call import kept_plans
from atomr_cutlass.pipeline.operation import operation_of

Values = np.ndarray[Any, Any]

POISON = np.float32(-77777)
random = np.random.default_rng(11)


def affine(acc: Any, row: Any, factor: Any) -> Any:
    """A tree of a row and of a scalar."""
    return acc * factor + row


AFFINE = evt.trace(affine, {"row": evt.Operand("row", D.F32), "factor": evt.Operand("scalar", D.F32)}).tree


def key(layouts: str, kind: str, align: int, tree: str = "-", activation: str = "-") -> KernelKey:
    """A cell in float32, which no real one multiplies.

    Those with trees are called sm90's, whose kernels have such, those that are told theirs sm100's, the others sm80's.

    Args:
        layouts: of A and B.
        kind: of scales: `-` none, `s` some, `b` those of blocks.
        align: of all matrices.
        tree: `-` none, `+` a bias, `t` none but the activation, `q` AFFINE, `m` what the arguments say.
        activation: `r` is relu.
    """
    epilogue = "scaled" if kind == "s" else "lc"
    named = "relu" if activation == "r" else None
    if tree == "m":
        epilogue = SCALED_COMMON if kind == "s" else COMMON
    elif tree == "q":
        epilogue = epilogue_id(epilogue, AFFINE.program)
    elif tree != "-":
        epilogue = epilogue_id(epilogue, bias_and_activation(D.F32 if tree == "+" else None, named).program)
    elif named:
        epilogue += f"_{named}"
    return KernelKey(
        op="grouped_gemm", generation={"-": "sm80", "m": "sm100"}.get(tree, "sm90"), arch=SmArch.SM80,
        a=D.F32, b=D.F32, d=D.F32, acc=D.F32,
        layout_a=layouts[0], layout_b=layouts[1], layout_d="r", align_a=align, align_b=align, align_d=align,
        tile=(64, 64, 32), cluster=(1, 1, 1), warps=(2, 2, 1), stages=2 if align == 1 else 4,
        mainloop="twostage" if align == 1 else "multistage", epilogue_schedule="", scheduler="grouped", swizzle=0,
        math="ieee", epilogue=epilogue,
        scale_granularity=(1, 128, 128) if kind == "b" else (0, 0, 0), scale_type="f32" if kind == "b" else "",
    )  # fmt: skip


_SCALED = [
    *((layouts, "s") for layouts in ("rr", "rc", "cr")),
    *((layouts, "b") for layouts in ("rr", "rc")),
]
KEYS = [
    key(*way)
    for way in [
        *((layouts, "-", align, "-", tree) for layouts in ("rr", "rc", "cr") for align in (1, 4) for tree in "-r"),
        *((layouts, kind, 1, "-", "-") for layouts, kind in _SCALED),
        *(
            (layouts, kind, 1, *fused)
            for layouts, kind in (*((layouts, "-") for layouts in ("rr", "rc", "cr")), *_SCALED)
            for fused in (("+", "-"), ("+", "r"), ("t", "r"), ("q", "-"), *([("m", "-")] if kind != "b" else []))
        ),
    ]
]


def operand(array: Values) -> _core.Operand:
    """GPU memory that is the array's."""
    strides = [s // array.itemsize for s in array.strides]
    dtype = {np.dtype(np.float32): (2, 32), np.dtype(np.int32): (0, 32)}[array.dtype]
    return _core.Operand(array.ctypes.data, array.shape, strides, dtype, operands.CUDA, 0, False, array)


def matrix(*shape: int, pad: int = 0, column: bool = False) -> Values:
    """Small whole numbers, whose sums are exact; rows (or columns) with `pad` elements of poison after each."""
    *batch, rows, columns = shape
    if column:
        return matrix(*batch, columns, rows, pad=pad).swapaxes(-1, -2)
    room = np.full((*batch, rows, columns + pad), POISON, np.float32)
    made = room[..., :columns]
    made[...] = random.integers(-4, 5, made.shape)
    return made


def blank(*shape: int, pad: int = 0) -> Values:
    made = matrix(*shape, pad=pad)
    made[...] = POISON
    return made


def i32(*values: int) -> Values:
    return np.array(values, np.int32)


def powers(*shape: int) -> Values:
    """Scales whose products are exact."""
    return (2.0 ** random.integers(-2, 3, shape)).astype(np.float32)


def refused(error: type[Exception], says: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=re.escape(says)):
        call()


def on_gpu(given: Any) -> Any:
    if isinstance(given, (list, tuple)):
        return type(given)(on_gpu(array) for array in given)
    return operand(given) if isinstance(given, np.ndarray) else given


def agree(a: Any, b: Any, c: Any = None, *, out: Any, **arguments: Any) -> None:
    """The kernel and the reference write the same into `out`, poison included; twice, the second time as kept."""
    copy = [np.array(array) for array in out] if isinstance(out, list) else np.array(out)
    plain = {name: value for name, value in arguments.items() if value is not None}
    want: Any = ac.grouped_gemm(a, b, c, out=copy, backend="reference", **plain)
    before = [np.array(array) for array in out] if isinstance(out, list) else np.array(out)
    for _ in range(2):
        target = on_gpu(out)
        given = {name: on_gpu(value) for name, value in plain.items()}
        got = ac.grouped_gemm(on_gpu(a), on_gpu(b), on_gpu(c), out=target, **given)
        assert got is target
        for result, right, old in zip(*(x if isinstance(x, list) else [x] for x in (out, want, before)), strict=True):
            np.testing.assert_array_equal(result, right)
            assert result.base is None or (result.base[..., result.shape[-1] :] == POISON).all()
            result[...] = old


# ----------------------------------------------------------------------------------------------------------------------


def case_contiguous() -> None:
    sizes = (([3, 0, 5, 1], 9), ([0, 0, 0, 0], 4), ([2, 2, 2, 2], 12), ([12, 0, 0, 0], 12))
    for (counts, rows), column, pad, (k, n), beta in itertools.product(
        sizes, (False, True), (0, 4, 3), ((8, 12), (7, 5)), (0, 2)
    ):
        a, b = matrix(rows, k, pad=pad), matrix(4, k, n, column=column)
        c = matrix(rows, n) if beta else None
        ends = np.cumsum(counts).astype(np.int32)
        agree(a, b, c, out=blank(rows, n, pad=pad), offsets=ends, beta=beta, alpha=0.5)
        agree(a, b, c, out=blank(rows, n, pad=pad), counts=i32(*counts), beta=beta)


def case_masked() -> None:
    for counts, column, pad, (k, n), beta in itertools.product(
        ([3, 0, 6], [6, 6, 6], [0, 0, 0]), (False, True), (0, 4, 1), ((8, 12), (7, 5)), (0, -1)
    ):
        a, b = matrix(3, 6, k, pad=pad), matrix(3, k, n, column=column)
        c = matrix(3, 6, n) if beta else None
        agree(a, b, c, out=blank(3, 6, n, pad=pad), counts=i32(*counts), beta=beta)


def case_along_k() -> None:
    for counts, layouts, pad, (m, n), beta in itertools.product(
        ([3, 0, 6], [9, 0, 0], [0, 0, 0], [2, 3, 1]), ("rr", "rc", "cr"), (0, 4, 1), ((8, 12), (7, 5)), (0, 3)
    ):
        a, b = matrix(m, 9, pad=pad, column=layouts[0] == "c"), matrix(9, n, column=layouts[1] == "c")
        c = matrix(3, m, n) if beta else None
        agree(a, b, c, out=blank(3, m, n), counts=i32(*counts), beta=beta)
        agree(a, b, c, out=blank(3, m, n), offsets=np.cumsum(counts).astype(np.int32), beta=beta)


SHAPES = ((4, 8, 12), (1, 1, 1), (9, 4, 16), (0, 4, 8), (5, 0, 8), (4, 12, 0), (7, 3, 5))


def case_lists() -> None:
    for shapes, column, beta in itertools.product((SHAPES, SHAPES[:3], SHAPES[:1], SHAPES * 9), (False, True), (0, 2)):
        a = [matrix(m, k) for m, n, k in shapes]
        b = [matrix(k, n, column=column) for m, n, k in shapes]
        c = [matrix(m, n) for m, n, k in shapes] if beta else None
        agree(a, b, c, out=[blank(m, n, pad=2) for m, n, k in shapes], beta=beta)
        targets = [blank(m, n) for m, n, k in shapes]
        agree(tuple(a), b, c, out=targets, beta=beta)


def case_a_list_takes_the_widest_cell_that_all_of_it_allows() -> None:
    a, b = [matrix(4, 8), matrix(8, 16)], [matrix(8, 12), matrix(16, 4)]
    out = [blank(4, 12), blank(8, 4)]
    kept_plans.clear()
    ac.grouped_gemm(on_gpu(a), on_gpu(b), out=on_gpu(out))
    assert [plan.main.key.align_a for plan in kept_plans.plans] == [4]
    out[0] = blank(4, 12, pad=1)
    ac.grouped_gemm(on_gpu(a), on_gpu(b), out=on_gpu(out))
    assert [plan.main.key.align_a for plan in kept_plans.plans] == [1, 4]


def case_scales_of_arrays() -> None:
    rows, k, n, groups = 10, 8, 12, 3
    ends = i32(4, 4, 9)
    for column in (False, True):
        a, b = matrix(rows, k), matrix(groups, k, n, column=column)
        for scale_a, scale_b in itertools.product(
            (None, 0.5, powers(1), powers(groups), powers(rows, 1)),
            (None, 2.0, powers(1, 1, 1), powers(groups), powers(groups, 1, 1), powers(groups, 1, n)),
        ):
            agree(a, b, out=blank(rows, n), offsets=ends, scale_a=scale_a, scale_b=scale_b, alpha=2.0)
    a, b = matrix(groups, 6, k), matrix(groups, k, n)
    for scale_a, scale_b in itertools.product(
        (None, powers(groups), powers(groups, 1, 1), powers(groups, 6, 1)), (None, powers(groups), powers(groups, 1, n))
    ):
        agree(a, b, out=blank(groups, 6, n), counts=i32(3, 6, 0), scale_a=scale_a, scale_b=scale_b)
    a, b = matrix(5, rows, column=True), matrix(rows, n)
    for scale_a, scale_b in itertools.product(
        (None, powers(groups), powers(groups, 1, 1), powers(5, 1), powers(groups, 5, 1)),
        (None, powers(groups), powers(1, n), powers(groups, 1, n)),
    ):
        agree(a, b, out=blank(groups, 5, n), offsets=ends, scale_a=scale_a, scale_b=scale_b)


def case_scales_of_blocks() -> None:
    rows, k, n, groups = 10, 300, 200, 3
    a, b, ends = matrix(rows, k), matrix(groups, k, n, column=True), i32(4, 4, 9)
    scale_b = powers(groups, 3, 2)
    wide = powers(rows, 5)
    for scale_a in (powers(rows, 3), powers(3, rows).T, wide[:, 1:4]):
        agree(a, b, out=blank(rows, n), offsets=ends, scale_a=scale_a, scale_b=scale_b)
    turned = np.ascontiguousarray(scale_b.swapaxes(1, 2)).swapaxes(1, 2)
    agree(a, b, out=blank(rows, n), offsets=ends, scale_a=powers(rows, 3), scale_b=turned)
    a = matrix(groups, 6, k)
    agree(a, b, out=blank(groups, 6, n), counts=i32(3, 6, 0), scale_a=powers(groups, 6, 3), scale_b=scale_b)
    # One block of K: scales of blocks of A look like those of rows.
    a, b = matrix(rows, 96), matrix(groups, 96, n)
    agree(a, b, out=blank(rows, n), offsets=ends, scale_a=powers(rows, 1), scale_b=powers(groups, 1, 2))


def case_scales_of_lists() -> None:
    shapes = ((4, 8, 12), (1, 1, 3), (9, 4, 16))
    a, b = [matrix(m, k) for m, n, k in shapes], [matrix(k, n) for m, n, k in shapes]
    for scale_a, scale_b in itertools.product(
        (None, powers(1), [powers(1) for _ in shapes], [powers(m, 1) for m, n, k in shapes], [0.5] * 3),
        (None, [powers(1, 1) for _ in shapes], [powers(1, n) for m, n, k in shapes]),
    ):
        agree(a, b, out=[blank(m, n) for m, n, k in shapes], scale_a=scale_a, scale_b=scale_b)
    same = ((4, 200, 300), (7, 130, 300), (0, 200, 300))
    a, b = [matrix(m, k) for m, n, k in same], [matrix(k, n) for m, n, k in same]
    blocks = {"scale_a": [powers(m, 3) for m, n, k in same], "scale_b": [powers(3, 2) for m, n, k in same]}
    agree(a, b, out=[blank(m, n) for m, n, k in same], **blocks)
    blocks["scale_a"][1] = powers(3, 7).T
    refused(
        ac.UnsupportedError,
        "the members of scale_a have different strides",
        lambda: ac.grouped_gemm(on_gpu(a), on_gpu(b), **{name: on_gpu(block) for name, block in blocks.items()}),
    )
    refused(ac.UnsupportedError, "must be the same", lambda: ac.grouped_gemm(a, b, scale_a=[1.0, 2.0, 3.0]))


@contextlib.contextmanager
def kernels_of(generation: str) -> Iterator[None]:
    """The table has no others."""
    kept_plans.clear()
    with pytest.MonkeyPatch.context() as patch:
        fake_table.install(patch, [info for info in table.rows() if info.key.generation == generation])
        yield
    kept_plans.clear()


def biases(groups: int, n: int) -> list[Values]:
    """One for all groups, and one for each, some with room around."""
    wide, padded = matrix(groups, 2 * n), matrix(groups, n, pad=4)
    return [matrix(1, n)[0], matrix(groups, n), padded, wide[:, ::2], wide[0, ::2], matrix(1, n)[0, ::-1]]


FUSED = ("sm80", "sm90", "sm100")
"""Bias in the place of C and activations; epilogue trees; kernels that are told which."""


def _readable(generation: str, bias: Values) -> bool:
    return generation != "sm80" or bias.strides[-1] == bias.itemsize


def case_bias_and_activation_of_contiguous_groups() -> None:
    ends, rows = i32(3, 3, 8, 9), 11
    for generation, (k, n), pad, activation in itertools.product(
        FUSED, ((8, 12), (7, 5)), (0, 4), (None, "relu", "identity")
    ):
        a, b = matrix(rows, k, pad=pad), matrix(4, k, n)
        with kernels_of(generation):
            for bias in biases(4, n):
                if _readable(generation, bias):
                    agree(a, b, out=blank(rows, n, pad=pad), offsets=ends, bias=bias, activation=activation, alpha=2.0)
            if activation == "relu":
                agree(a, b, out=blank(rows, n, pad=pad), counts=i32(3, 0, 5, 1), activation=activation)


def case_bias_and_activation_of_masked_groups() -> None:
    for generation, (k, n), activation in itertools.product(FUSED, ((8, 12), (7, 5)), (None, "relu")):
        a, b = matrix(3, 6, k), matrix(3, k, n, column=True)
        with kernels_of(generation):
            for bias in biases(3, n):
                if _readable(generation, bias):
                    agree(a, b, out=blank(3, 6, n, pad=3), counts=i32(3, 0, 6), bias=bias, activation=activation)


def case_bias_and_activation_along_k() -> None:
    """An empty group leaves act(bias)."""
    for generation, activation in itertools.product(FUSED, (None, "relu")):
        a, b = matrix(8, 9, column=True), matrix(9, 12)
        with kernels_of(generation):
            for bias in biases(3, 12):
                if _readable(generation, bias):
                    agree(a, b, out=blank(3, 8, 12), counts=i32(3, 0, 6), bias=bias, activation=activation)


def case_bias_and_activation_of_lists() -> None:
    for generation, activation, shapes in itertools.product(FUSED, (None, "relu"), (SHAPES, SHAPES[:1])):
        a, b = [matrix(m, k) for m, n, k in shapes], [matrix(k, n) for m, n, k in shapes]
        bias = [matrix(1, n)[0] for m, n, k in shapes]
        with kernels_of(generation):
            for given in (bias, tuple(bias), *([None] if activation else [])):
                out = [blank(m, n, pad=2) for m, n, k in shapes]
                agree(a, b, out=out, bias=given, activation=activation, alpha=0.5)
    strided = [np.repeat(row, 2)[::2] for row in bias]
    refused(
        ac.UnsupportedError,
        "the members of bias must be contiguous",
        lambda: ac.grouped_gemm(on_gpu(a), on_gpu(b), bias=on_gpu(strided)),
    )


def case_bias_beside_c_and_scales() -> None:
    rows, k, n, groups = 10, 8, 12, 3
    a, b, c, ends = matrix(rows, k), matrix(groups, k, n), matrix(rows, n), i32(4, 4, 9)
    for bias, activation in itertools.product((None, *biases(groups, n)), (None, "relu")):
        how = {"offsets": ends, "bias": bias, "activation": activation}
        agree(a, b, c, out=blank(rows, n), beta=-2.0, **how)
        agree(a, b, out=blank(rows, n), scale_a=powers(rows, 1), scale_b=powers(groups), **how)
    a, b = matrix(rows, 300), matrix(groups, 300, 200)
    blocks = {"scale_a": powers(rows, 3), "scale_b": powers(groups, 3, 2)}
    for bias in (matrix(1, 200)[0], matrix(groups, 200)):
        agree(a, b, out=blank(rows, 200), offsets=ends, bias=bias, activation="relu", **blocks)
    with kernels_of("sm80"):
        given = {"bias": operand(matrix(1, n)[0]), "offsets": operand(ends), "beta": 1.0}
        refused(
            ac.UnsupportedError,
            "no kernel of the matrix",
            lambda: ac.grouped_gemm(operand(matrix(rows, k)), operand(matrix(groups, k, n)), operand(c), **given),
        )


def factors(groups: int) -> list[Values]:
    """A scalar for all groups, and one for each, some with room around."""
    return [powers(1), powers(1, 1), powers(groups, 1, 1), powers(groups, 3, 1)[:, :1]]


def case_trees_of_arrays() -> None:
    ends, rows, groups = i32(3, 3, 8, 9), 11, 4
    for (k, n), pad, epilogue in itertools.product(((8, 12), (7, 5)), (0, 4), (AFFINE, affine)):
        a, b, c = matrix(rows, k, pad=pad), matrix(groups, k, n, column=True), matrix(rows, n)
        for row, factor in itertools.product((*biases(groups, n), matrix(groups, 1, n)), factors(groups)):
            how = {"epilogue": epilogue, "row": row, "factor": factor}
            agree(a, b, out=blank(rows, n, pad=pad), offsets=ends, alpha=2.0, **how)
        agree(a, b, c, out=blank(rows, n, pad=pad), counts=i32(3, 0, 5, 1), beta=-2.0, **how)
        agree(a, b, out=blank(rows, n), offsets=ends, scale_a=powers(rows, 1), scale_b=powers(groups), **how)
        masked = matrix(groups, 6, k)
        agree(masked, b, out=blank(groups, 6, n, pad=pad), counts=i32(3, 0, 6, 2), **how)
        agree(matrix(8, 9, column=True), matrix(9, n), out=blank(groups, 8, n), counts=i32(3, 0, 4, 2), **how)


def case_trees_of_lists() -> None:
    for shapes, epilogue in itertools.product((SHAPES, SHAPES[:1]), (AFFINE, affine)):
        a, b = [matrix(m, k) for m, n, k in shapes], [matrix(k, n) for m, n, k in shapes]
        row = [matrix(1, n)[0] for m, n, k in shapes]
        for factor in (powers(1), [powers(1) for _ in shapes]):
            out = [blank(m, n, pad=2) for m, n, k in shapes]
            agree(a, b, out=out, epilogue=epilogue, row=row, factor=factor, alpha=0.5)


def case_trees_that_are_bias_and_activation_need_no_kernels_of_their_own() -> None:
    a, b, ends, bias = matrix(6, 4), matrix(3, 4, 8), i32(1, 2, 6), matrix(1, 8)[0]
    for generation in FUSED:
        with kernels_of(generation):
            tree = ac.EvtBuilder().add_bias("x").activation("relu").build()
            for epilogue in (tree, lambda acc, x: evt.relu(acc + x)):
                agree(a, b, out=blank(6, 8), offsets=ends, epilogue=epilogue, x=bias)
    with kernels_of("sm80"):
        given = {"offsets": operand(ends), "row": operand(bias), "factor": operand(powers(1))}
        refused(
            ac.UnsupportedError,
            "no kernel of the matrix",
            lambda: ac.grouped_gemm(operand(a), operand(b), epilogue=AFFINE, **given),
        )


def case_trees_of_host_operands() -> None:
    a, b, row, factor = matrix(9, 7), matrix(2, 7, 5), matrix(2, 5), powers(2, 1, 1)
    out = blank(9, 5)
    assert ac.grouped_gemm(a, b, counts=i32(4, 2), epilogue=affine, row=row, factor=factor, out=out) is out
    np.testing.assert_array_equal(out[4:6], (a[4:6] @ b[1]) * factor[1] + row[1])
    assert (out[6:] == POISON).all()
    got = ac.grouped_gemm([a, a], [b[0], b[1]], epilogue=AFFINE, row=list(row), factor=factor[1])
    np.testing.assert_array_equal(got[1], (a @ b[1]) * factor[1] + row[1])


def case_plans_with_trees_are_kept() -> None:
    kept_plans.clear()
    a, b, out, ends = operand(matrix(6, 4)), operand(matrix(3, 4, 8)), operand(blank(6, 8)), operand(i32(1, 2, 3))

    def call(epilogue: Any, row: Values, factor: Values, **more: Any) -> None:
        how = {"offsets": ends, "out": out, "epilogue": epilogue, "row": operand(row), "factor": operand(factor)}
        ac.grouped_gemm(a, b, **how, **more)

    with fake_cases.parsed() as calls:
        for _ in range(3):
            for row, factor in itertools.product((matrix(1, 8)[0], matrix(3, 8)), (powers(1), powers(3, 1, 1))):
                call(AFFINE, row, factor)
        same = ac.EpilogueVisitorTree(AFFINE.result)
        call(same, matrix(1, 8)[0], powers(1), alpha=3.0)
        assert (len(kept_plans), len(calls)) == (4, 4)
        # Functions are traced at each call.
        call(affine, matrix(1, 8)[0], powers(1))
        call(affine, matrix(1, 8)[0], powers(1))
        assert (len(kept_plans), len(calls)) == (4, 6)
    # Problems that a kept plan does not serve are refused all the same.
    strays = (({"x": operand(powers(1))}, "has no operand x"), ({"activation": "relu"}, "apply the activation"))
    for more, says in strays:
        refused(
            ac.InvalidOperandError,
            says,
            lambda: call(AFFINE, matrix(1, 8)[0], powers(1), **more),  # noqa: B023 - called at once
        )
    listed = {
        "a": [operand(matrix(6, 4)), operand(matrix(2, 8))], "b": [operand(matrix(4, 4)), operand(matrix(8, 4))],
        "row": [operand(matrix(1, 4)[0]), operand(matrix(1, 4)[0])], "epilogue": AFFINE,
    }  # fmt: skip
    with fake_cases.parsed() as calls:
        for factor in (operand(powers(1)), [operand(powers(1)), operand(powers(1))]):
            for _ in range(2):
                ac.grouped_gemm(**listed, factor=factor, out=[operand(blank(6, 4)), operand(blank(2, 4))])
        assert (len(kept_plans), len(calls)) == (6, 2)


def case_plans_with_bias_and_activation_are_kept() -> None:
    kept_plans.clear()
    a, b, out, ends = operand(matrix(6, 4)), operand(matrix(3, 4, 8)), operand(blank(6, 8)), operand(i32(1, 2, 3))
    with fake_cases.parsed() as calls:
        for _ in range(3):
            for bias in (matrix(1, 8)[0], matrix(3, 8)):
                for activation in (None, "relu"):
                    ac.grouped_gemm(a, b, offsets=ends, bias=operand(bias), activation=activation, out=out)
        assert (len(kept_plans), len(calls)) == (4, 4)


def case_epilogues_are_validated() -> None:
    a, b, ends = operand(matrix(6, 4)), operand(matrix(3, 4, 8)), operand(i32(1, 2, 6))
    with kernels_of("sm90"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate, "_known", {})
        patch.setattr(validate.files, "recall_validation", lambda _identity: None)
        out = blank(6, 8)
        ac.grouped_gemm(a, b, offsets=ends, bias=operand(matrix(1, 8)[0]), activation="relu", out=operand(out))
        assert list(validate._known.values()) == [""]
        # A kernel that computes something else than its key says.
        validate._known.clear()
        patch.setattr(probe, "differing", lambda *_given: {"out differs": 1})
        kept_plans.clear()
        out[...] = POISON
        with pytest.warns(RuntimeWarning, match="wrong results"):
            refused(
                ac.UnsupportedError,
                "computes its epilogue wrongly",
                lambda: ac.grouped_gemm(a, b, offsets=ends, bias=operand(matrix(1, 8)[0]), out=operand(out)),
            )
        assert (out == POISON).all()


def case_results_are_made_where_none_is_given() -> None:
    a, b = matrix(9, 7), matrix(2, 7, 5)
    got = ac.grouped_gemm(operand(a), operand(b), offsets=operand(i32(4, 9)))
    host = operands.download(got)
    np.testing.assert_array_equal(host, np.concatenate([a[:4] @ b[0], a[4:] @ b[1]]))
    made = ac.grouped_gemm([operand(a), operand(a)], [operand(b[0]), operand(b[1])])
    assert isinstance(made, list)
    for result, other in zip(made, b, strict=True):
        np.testing.assert_array_equal(operands.download(result), a @ other)


def case_host_operands_are_uploaded() -> None:
    a, b = matrix(9, 7), matrix(2, 7, 5)
    got = ac.grouped_gemm(a, b, counts=i32(4, 2))
    np.testing.assert_array_equal(got, np.concatenate([a[:4] @ b[0], a[4:6] @ b[1], np.zeros((3, 5))]))
    out = blank(9, 5, pad=1)
    assert ac.grouped_gemm(a, b, offsets=i32(0, 3), out=out) is out
    np.testing.assert_array_equal(out, np.concatenate([a[:3] @ b[1], np.full((6, 5), POISON)]))
    assert (out.base[:, 5:] == POISON).all()
    got = ac.grouped_gemm(matrix(2, 9), matrix(9, 5), offsets=i32(4, 9))
    assert got.shape == (2, 2, 5)
    bias = matrix(2, 5)
    got = ac.grouped_gemm([a, a], [b[0], b[1]], bias=list(bias), activation="relu")
    np.testing.assert_array_equal(got[1], np.maximum(a @ b[1] + bias[1], 0))
    got = ac.grouped_gemm(a, b, counts=i32(4, 2), bias=bias)
    np.testing.assert_array_equal(got[4:6], a[4:6] @ b[1] + bias[1])
    refused(ac.InvalidOperandError, "offsets[1] is 10", lambda: ac.grouped_gemm(a, b, offsets=i32(4, 10)))


def case_the_reference_reads_gpu_arrays() -> None:
    a, b, out = matrix(9, 7), matrix(2, 7, 5), blank(9, 5)
    ac.grouped_gemm(operand(a), operand(b), offsets=operand(i32(0, 3)), out=operand(out), backend="reference")
    np.testing.assert_array_equal(out, np.concatenate([a[:3] @ b[1], np.full((6, 5), POISON)]))


def case_offsets_on_the_device_are_cut_off_and_not_refused() -> None:
    a, b = matrix(6, 4), matrix(3, 4, 8)
    for ends in (i32(2, 100, 200), i32(2, -5, 1), i32(-3, 4, 4)):
        out = blank(6, 8)
        ac.grouped_gemm(operand(a), operand(b), offsets=operand(ends), out=operand(out))
        inside = np.clip(ends, 0, 6)
        want, start = blank(6, 8), 0
        for g, end in enumerate(inside):
            if end > start:
                want[start:end] = a[start:end] @ b[g]
            start = end
        np.testing.assert_array_equal(out, want)


def case_the_debug_switch_names_the_first_wrong_one() -> None:
    a, b = operand(matrix(6, 4)), operand(matrix(3, 4, 8))
    masked = operand(matrix(3, 6, 4))
    cases = (
        ({"offsets": i32(2, 1, 6)}, "offsets[1] is 1, which goes back from 2"),
        ({"offsets": i32(2, 3, 7)}, "offsets[2] is 7: group 2 ends at 7 of 6"),
        ({"counts": i32(2, -1, 3)}, "counts[1] is -1, which is negative"),
        ({"counts": i32(2, 3, 3)}, "counts[2] is 3: group 2 ends at 8 of 6"),
    )
    for (given, says), env in itertools.product(cases, (False, True)):
        out = blank(6, 8)
        where = {name: operand(value) for name, value in given.items()}
        ac.grouped_gemm(a, b, out=operand(out), **where)  # kept, and not looked at
        out[...] = POISON
        with pytest.MonkeyPatch.context() as patch:
            if env:
                patch.setenv("ATOMR_CUTLASS_CHECK", "1")
            options = {} if env else {"check": True}
            refused(
                ac.InvalidOperandError,
                says,
                lambda: ac.grouped_gemm(a, b, out=operand(out), **where, **options),  # noqa: B023 - called at once
            )
        assert (out == POISON).all()
    refused(
        ac.InvalidOperandError,
        "counts[1] is 7; a group has 0 to 6 rows",
        lambda: ac.grouped_gemm(masked, b, counts=operand(i32(0, 7, 9)), check=True),
    )
    refused(
        ac.InvalidOperandError,
        "offsets[1] is 5: group 1 ends at 5 of 4",
        lambda: ac.grouped_gemm(a, operand(matrix(4, 8)), offsets=operand(i32(0, 5)), check=True),
    )
    out = operand(blank(6, 8))
    assert ac.grouped_gemm(a, b, offsets=operand(i32(1, 2, 6)), out=out, check=True) is out


def case_the_debug_switch_and_graphs() -> None:
    """The stream 777 is being captured."""
    a, b, out = operand(matrix(6, 4)), operand(matrix(3, 4, 8)), operand(blank(6, 8))
    given = {"offsets": operand(i32(1, 2, 60)), "out": out, "stream": 777}
    refused(ac.UnsupportedError, "captured", lambda: ac.grouped_gemm(a, b, check=True, **given))
    os.environ["ATOMR_CUTLASS_CHECK"] = "1"
    try:
        ac.grouped_gemm(a, b, **given)
    finally:
        del os.environ["ATOMR_CUTLASS_CHECK"]


def case_plans_are_kept_by_layouts_and_options() -> None:
    kept_plans.clear()
    a, b, out = operand(matrix(6, 4)), operand(matrix(3, 4, 8)), operand(blank(6, 8))
    with fake_cases.parsed() as calls:
        for ends in (i32(1, 2, 3), i32(0, 0, 6)):
            for scalar in (1.0, 2, np.float32(0.5)):
                ac.grouped_gemm(a, b, offsets=operand(ends), out=out, alpha=scalar, scale_a=3.0)
                ac.grouped_gemm(a, b, offsets=operand(ends), out=out, scale_a=scalar)
        assert (len(kept_plans), len(calls)) == (1, 1)
        counts = operand(i32(1, 2, 3))
        for number, more in enumerate(({}, {"fast_accum": True}, {"out_dtype": ac.CutlassDtype.F32}), 2):
            ac.grouped_gemm(a, b, counts=counts, out=out, **more)
            ac.grouped_gemm(a, b, counts=counts, out=out, **more)
            assert (len(kept_plans), len(calls)) == (number, number)
    refused(ac.InvalidOperandError, "give beta", lambda: ac.grouped_gemm(a, b, out, counts=counts, out=out))


def case_the_workspace_is_bounded() -> None:
    """Every kernel here asks for 64 bytes; lists have a table besides."""
    a, b, out, ends = operand(matrix(6, 4)), operand(matrix(3, 4, 8)), operand(blank(6, 8)), operand(i32(1, 2, 3))
    for workspace_size in (64, 1 << 20):
        ac.grouped_gemm(a, b, offsets=ends, out=out, workspace_size=workspace_size)
        assert kept_plans.plans[0].workspace_bytes <= workspace_size
    says = "bytes of workspace; workspace_size is 63: give as much, or None"
    refused(ac.UnsupportedError, says, lambda: ac.grouped_gemm(a, b, offsets=ends, out=out, workspace_size=63))
    lists = [operand(matrix(6, 4))], [operand(matrix(4, 8))]
    refused(
        ac.UnsupportedError, "workspace_size is 64", lambda: ac.grouped_gemm(*lists, workspace_size=64)
    )  # fmt: skip
    refused(
        ac.InvalidOperandError, "workspace_size is -1; expected bytes",
        lambda: ac.grouped_gemm(a, b, offsets=ends, workspace_size=-1),
    )  # fmt: skip


def case_plans_of_lists_are_kept() -> None:
    """Those whose members are asked for the same layouts, whether or not results are given."""
    kept_plans.clear()
    a, b = [matrix(6, 4), matrix(2, 8)], [matrix(4, 4), matrix(8, 4)]
    c = [matrix(6, 4), matrix(2, 4)]
    with fake_cases.parsed() as calls:
        for number, more in enumerate(({}, {"beta": 2.0, "c": c}), 1):
            want = [more.get("beta", 0) * z + x @ y for x, y, z in zip(a, b, c, strict=True)]
            for _ in range(3):
                targets = on_gpu([blank(6, 4), blank(2, 4)])
                given = {name: on_gpu(value) for name, value in more.items()}
                assert ac.grouped_gemm(on_gpu(a), on_gpu(b), out=targets, **given) is targets
                made = ac.grouped_gemm(on_gpu(a), on_gpu(b), **given)
                for got in (targets, made):
                    assert isinstance(got, list)
                    for d, right in zip(got, want, strict=True):
                        np.testing.assert_array_equal(operands.download(d), right)
            assert (len(kept_plans), len(calls)) == (2 * number, 2 * number)
        # One of them, and one more, are other lists.
        ac.grouped_gemm(on_gpu(a[:1]), on_gpu(b[:1]), out=on_gpu([blank(6, 4)]))
        ac.grouped_gemm(on_gpu([*a, a[0]]), on_gpu([*b, b[0]]), out=on_gpu([blank(6, 4), blank(2, 4), blank(6, 4)]))
        assert len(calls) == 6


def case_out_may_be_c() -> None:
    a, b, c = matrix(6, 4), matrix(3, 4, 8), matrix(6, 8)
    want = np.concatenate([a[:2] @ b[0], a[2:] @ b[2]]) + 2 * c
    out = operand(c)
    ac.grouped_gemm(operand(a), operand(b), out, offsets=operand(i32(2, 2, 6)), beta=2.0, out=out)
    np.testing.assert_array_equal(c, want)


def case_nothing_to_do() -> None:
    empty = operand(blank(0, 8))
    out = ac.grouped_gemm(operand(matrix(0, 4)), operand(matrix(3, 4, 8)), offsets=operand(i32(0, 0, 0)), out=empty)
    assert out is empty
    out = operand(blank(5, 8))
    none = _core.Operand(0, (0,), None, (0, 32), operands.CUDA, 0, False, None)
    weights = _core.Operand(0, (0, 4, 8), None, (2, 32), operands.CUDA, 0, False, None)
    assert ac.grouped_gemm(operand(matrix(5, 4)), weights, offsets=none, out=out) is out
    assert ac.grouped_gemm([], []) == []
    # K of 0 leaves beta * C.
    a, b, c = blank(6, 0), blank(3, 0, 8), matrix(6, 8)
    agree(a, b, c, out=blank(6, 8), offsets=i32(1, 2, 5), beta=2.0)
    agree(blank(5, 0), blank(0, 8), out=blank(2, 5, 8), offsets=i32(0, 0))


def case_what_no_kernel_reads() -> None:
    a, b, ends = operand(matrix(6, 4)), operand(matrix(3, 4, 8)), operand(i32(1, 2, 6))
    calls: tuple[tuple[str, Callable[[], Any]], ...] = (
        (
            "no kernel of the matrix",
            lambda: ac.grouped_gemm(
                operand(matrix(6, 4, column=True)), operand(matrix(3, 4, 8, column=True)), offsets=ends
            ),
        ),
        (
            "no kernel of the matrix",
            lambda: ac.grouped_gemm(a, b, offsets=ends, out=operand(matrix(6, 8, column=True))),
        ),
        (
            "no kernel of the matrix",
            lambda: ac.grouped_gemm(
                operand(matrix(6, 4, column=True)), operand(matrix(4, 8, column=True)), counts=ends
            ),
        ),
        (
            "read rows and scalars, not a column",
            lambda: ac.grouped_gemm(
                a, b, offsets=ends, epilogue=lambda acc, x: acc + x, x=operand(matrix(6, 1)), out=operand(blank(6, 8))
            ),
        ),
        ("no kernel of the matrix", lambda: ac.grouped_gemm(a, b, offsets=ends, activation="tanh")),
        (
            "make it contiguous",
            lambda: ac.grouped_gemm(a, b, offsets=operand(np.arange(6, dtype=np.int32)[::2])),
        ),
        (
            "must be contiguous",
            lambda: ac.grouped_gemm(a, b, offsets=ends, scale_a=operand(powers(6, 2)[:, :1])),
        ),
        (
            "must be contiguous",
            lambda: ac.grouped_gemm(a, b, offsets=ends, scale_b=operand(powers(6)[::2])),
        ),
    )
    for says, call in calls:
        refused(ac.UnsupportedError, says, call)


def case_operands_lie_in_one_place() -> None:
    a, b = operand(matrix(6, 4)), operand(matrix(3, 4, 8))
    refused(ac.InvalidOperandError, "offsets on the CPU", lambda: ac.grouped_gemm(a, b, offsets=i32(1, 2, 6)))


def case_results_must_not_overlap() -> None:
    room = matrix(12, 8)
    a, b, ends = operand(matrix(6, 4)), operand(matrix(3, 4, 8)), operand(i32(1, 2, 6))
    out = operand(room[:6])
    shared = ac.InvalidOperandError
    refused(
        shared, "out overlaps c", lambda: ac.grouped_gemm(a, b, operand(room[2:8]), offsets=ends, beta=1.0, out=out)
    )
    matrices = [operand(matrix(6, 4)) for _ in range(2)], [operand(matrix(4, 8)) for _ in range(2)]
    overlapping = [operand(room[:6]), operand(room[5:11])]
    refused(shared, "overlaps", lambda: ac.grouped_gemm(*matrices, out=overlapping))
    refused(shared, "overlaps", lambda: ac.grouped_gemm(*matrices, out=overlapping, backend="reference"))


def case_the_table_of_a_list_is_laid_out_as_kernels_read_it() -> None:
    pack = ctypes.CDLL(os.environ["ATOMR_CUTLASS_PACKS"])
    found = (ctypes.c_int32 * 14).in_dll(pack, "group_layout")
    assert list(found) == [ENTRY.size, *range(0, 80, 8), 80, 84, 88]


def case_a_request_becomes_a_plan() -> None:
    shapes = ((4, 8, 12), (1, 1, 1), (9, 4, 16))
    groups = ac.GroupedGemmShape([ac.GemmShape(*shape) for shape in shapes])
    request = ac.GroupedGemmRequest(groups, dtype=ac.CutlassDtype.BF16)
    problem = request.problem(0)
    assert problem.members == list(shapes)
    refused(ac.KernelNotFoundError, "no kernel in the table", lambda: grouped_plan.make(problem, backend="prebuilt"))
    a, b = [matrix(m, k) for m, n, k in shapes], [matrix(k, n) for m, n, k in shapes]
    out = [blank(m, n) for m, n, k in shapes]
    specs = {name: tuple(_spec(array) for array in given) for name, given in (("a", a), ("b", b), ("d", out))}
    plan = grouped_plan.make(type(problem)(**{**vars(problem), **specs, "math": "ieee"}))
    assert plan.slots == [f"{name}[{g}]" for name in ("a", "b", "out") for g in range(3)]
    assert plan.launches == 2
    plan(*on_gpu(a), *on_gpu(b), *on_gpu(out), alpha=2.0)
    for result, x, y in zip(out, a, b, strict=True):
        np.testing.assert_array_equal(result, 2 * (x @ y))


def case_a_request_with_scales_becomes_a_plan() -> None:
    shapes = ((4, 8, 300), (1, 130, 300), (0, 8, 260))
    groups = ac.GroupedGemmShape([ac.GemmShape(*shape) for shape in shapes])
    for scaling, shape in (("tensor", groups), ("vector", groups), ("block", ac.GroupedGemmShape(groups.groups[::2]))):
        request = ac.GroupedGemmRequest(shape, dtype=D.F8E4M3, scaling=scaling)
        problem, members = request.problem(0), [(group.m, group.n, group.k) for group in shape.groups]
        a, b = [matrix(m, k) for m, n, k in members], [matrix(k, n) for m, n, k in members]
        out = [blank(m, n) for m, n, k in members]
        slots = {slot.name: slot for slot in operation_of(request).operands(request)}
        scales = {
            name: [np.empty(spec.shape, np.float32) for spec in slots[name].specs] for name in ("scale_a", "scale_b")
        }
        for scale in itertools.chain(*scales.values()):
            scale[...] = powers(*scale.shape)
        specs = {name: tuple(_spec(array) for array in given) for name, given in (("a", a), ("b", b), ("d", out))}
        plan = grouped_plan.make(type(problem)(**{**vars(problem), **specs, "math": "ieee"}))
        assert plan.slots == [label for slot in slots.values() for label in slot.labels]
        given = [
            _core.Operand(array.ctypes.data, spec.shape, spec.strides, (2, 32), operands.CUDA, 0, False, array)
            for name, arrays in scales.items()
            for array, spec in zip(arrays, slots[name].specs, strict=True)
        ]
        plan(*on_gpu(a), *on_gpu(b), *given, *on_gpu(out), alpha=2.0)
        want = [blank(m, n) for m, n, k in members]
        ac.grouped_gemm(a, b, out=want, alpha=2.0, backend="reference", **scales)
        for scale, right in zip(out, want, strict=True):
            np.testing.assert_array_equal(scale, right)


def _spec(array: Values) -> Any:
    view = operand(array)
    return MatrixSpec(view.shape, view.strides, ac.CutlassDtype.F32, view.alignment)


if __name__ == "__main__":
    grouped_request._DTYPES = (*grouped_request._DTYPES, D.F32)  # of the cells here
    fake_cases.of_packs_alone()
    fake_cases.run(globals())
