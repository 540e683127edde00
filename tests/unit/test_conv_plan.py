"""Which kernels convolutions are put to, and how: over cells of our own and over the matrix. No GPU is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import fake_table
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, _core, reference
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.arrays.numerics import math_mode
from atomr_cutlass.errors import InvalidOperandError, KernelNotFoundError, UnsupportedError
from atomr_cutlass.generator.epilogue.lower import has_tree
from atomr_cutlass.generator.families.cast import cast
from atomr_cutlass.generator.families.conv import LAYOUTS
from atomr_cutlass.generator.families.conv_sm80 import depthwise
from atomr_cutlass.generator.key import ROW, KernelKey, shared_memory
from atomr_cutlass.generator.matrix import cells, supports
from atomr_cutlass.ops.conv2d import kernels as conv_kernels
from atomr_cutlass.ops.conv2d.function import check_channels
from atomr_cutlass.ops.conv2d.kernels import ConvFormulation, ConvSearch, make
from atomr_cutlass.ops.conv2d.problem import (
    CAST_ALIGNMENT,
    DGRAD,
    FPROP,
    WGRAD,
    ConvProblem,
    channel_alignment,
    collapses,
    conv_geometry,
    packed,
    pixel_strides,
    reach,
)
from atomr_cutlass.pipeline import devices, estimate, search, select, table
from atomr_cutlass.pipeline.plan import Steps
from fake_table import A100, ADA, H200

OPS = (FPROP, DGRAD, WGRAD)


def _spec(shape: tuple[int, ...], dtype: D, *, alignment: int = 256, pitch: int = 0) -> MatrixSpec:
    """An array whose pixels are `pitch` elements further apart than they need to be."""
    strides, step = [1], shape[-1] + pitch
    for extent in reversed(shape[1:-1]):
        strides.insert(0, step)
        step *= extent
    return MatrixSpec(shape, (step, *strides) if len(shape) > 1 else (1,), dtype, alignment)


def _problem(
    op: str = FPROP,
    x: tuple[int, int, int, int] = (2, 14, 14, 64),
    w: tuple[int, int, int] = (64, 3, 3),
    *,
    dtype: D = D.BF16,
    out: D | None = None,
    precision: str | None = None,
    groups: int = 1,
    c: bool = False,
    bias: bool = False,
    activation: str | None = None,
    alignments: dict[str, int] | None = None,
    pitches: dict[str, int] | None = None,
    **how: Any,
) -> ConvProblem:
    """`w` is (K, R, S); alignments and pitches are those of a, b, c, d and bias."""
    g = conv_geometry(x, (*w, x[3] // groups), groups=groups, **how)
    shapes = {
        FPROP: (g.x_shape, g.w_shape, g.y_shape),
        DGRAD: (g.y_shape, g.w_shape, g.x_shape),
        WGRAD: (g.y_shape, g.x_shape, g.w_shape),
    }[op]
    result = out or (D.BF16 if dtype.bits == 8 else dtype)

    def spec(name: str, shape: tuple[int, ...], kind: D) -> MatrixSpec:
        alignment, pitch = (alignments or {}).get(name, 256), (pitches or {}).get(name, 0)
        return _spec(shape, kind, alignment=alignment, pitch=pitch)

    return ConvProblem(
        op=op,
        geometry=g,
        a=spec("a", shapes[0], dtype),
        b=spec("b", shapes[1], dtype),
        c=spec("c", shapes[2], result) if c else None,
        d=spec("d", shapes[2], result),
        bias=spec("bias", shapes[2][-1:], result) if bias else None,
        activation=activation,
        math=math_mode(dtype, precision),
        device=0,
    )


def _cell(
    op: str = FPROP,
    iterator: str = "analytic",
    aligns: tuple[int, int, int] = (1, 1, 1),
    *,
    dtype: D = D.BF16,
    d: D | None = None,
    arch: SmArch = SmArch.SM80,
    tile: tuple[int, int, int] = (64, 64, 32),
    stages: int = 2,
    stride_support: str | None = None,
    group_mode: str = "",
    math: str = "default",
    epilogue: str = "lc",
) -> KernelKey:
    """A cell of the sm80 generation, or with the iterator "" of sm90's."""
    tma = not iterator
    strides = ("" if op != DGRAD or tma else "strided") if stride_support is None else stride_support
    return KernelKey(
        op=op, generation="sm90" if tma else "sm80", arch=SmArch.SM90A if tma else arch, a=dtype, b=dtype,
        d=d or dtype, acc=D.F32, layout_a=LAYOUTS[op][0], layout_b=LAYOUTS[op][1], layout_d=ROW, align_a=aligns[0],
        align_b=aligns[1], align_d=aligns[2], tile=tile, cluster=(1, 1, 1), warps=(0, 0, 0) if tma else (2, 2, 1),
        stages=0 if tma else stages, mainloop="warpspecialized" if tma else "twostage" if stages == 2 else "multistage",
        epilogue_schedule="tma" if tma else "", scheduler="identity", swizzle=0 if tma else 4, math=math,
        epilogue=epilogue, group_mode=group_mode, iterator=iterator, stride_support=strides,
    )  # fmt: skip


def _tma(op: str = FPROP, **fields: Any) -> KernelKey:
    aligns = (8, 8, 4 if fields.get("d") is D.F32 else 8)
    return _cell(op, "", aligns, **({"tile": (128, 128, 64)} | fields))


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes cells of our own the matrix, and the table empty."""
    monkeypatch.setattr(select.kernels, "record_miss", lambda _key: None)
    fake_table.install(monkeypatch, [])
    gemms = search.matrix

    def install(*keys: KernelKey) -> None:
        def listed(op: str, arch: SmArch) -> Any:
            return gemms(op, arch) if op == "gemm" else [k for k in keys if (k.op, k.arch) == (op, arch)]

        monkeypatch.setattr(search, "matrix", listed)
        monkeypatch.setattr(select, "_rosters", {})

    return install


HOW: dict[str, Any] = {"arch": None, "backend": "auto", "jit": "auto"}


def choose(problem: ConvProblem, device: devices.Device = A100, *, arch: Any = None, **how: Any) -> Any:
    return select.choose(ConvSearch(problem, device, arch), **how)


def best_key(problem: ConvProblem, device: devices.Device, arch: Any) -> KernelKey:
    return select.best_key(ConvSearch(problem, device, arch))


def serves(key: KernelKey, problem: ConvProblem, device: devices.Device, split_k: int = 1) -> bool:
    put = ConvFormulation(problem, split_k)
    return bool(ConvSearch(problem, device, formulations=[[put]]).supports(key, put))


def _candidate_of(problem: ConvProblem, device: devices.Device, **how: Any) -> tuple[Any, int, ConvProblem | None]:
    """The candidate, its slices of K, and the problem with a float32 result where it is computed in one and cast."""
    found = choose(problem, device, **how)
    return found, found.split_k, found.formulation.problem if found.formulation.wide else None


def _served(problem: ConvProblem, device: devices.Device, arch: Any) -> tuple[ConvProblem, str, bool]:
    """The problem as it is put to kernels, what was done to it, and whether its operands are cast."""
    put = ConvSearch(problem, device, arch).formulations[-1][0]
    return put.problem, put.rewrite, put.casts


def _chosen(problem: ConvProblem, device: devices.Device = A100, **how: Any) -> KernelKey:
    return _candidate_of(problem, device, **(HOW | how))[0].key


# ----------------------------------------------------------------------------------------------------------------------
# Layouts of arrays
# ----------------------------------------------------------------------------------------------------------------------


def test_strides_of_pixels() -> None:
    assert pixel_strides(_spec((2, 5, 6, 8), D.BF16)) == (8, 48, 240)
    assert pixel_strides(_spec((2, 5, 6, 8), D.BF16, pitch=3)) == (11, 66, 330)
    # Frameworks put anything into the stride of a dimension of one element.
    for shape, strides, want in (
        ((1, 5, 6, 8), (7, 48, 8, 1), (8, 48, 240)),
        ((2, 1, 6, 8), (48, 7, 8, 1), (8, 48, 48)),
        ((2, 5, 1, 8), (40, 8, 7, 1), (8, 8, 40)),
        ((2, 1, 1, 8), (8, 7, 7, 1), (8, 8, 8)),
        ((1, 1, 1, 8), (7, 7, 7, 1), (8, 8, 8)),
    ):
        spec = MatrixSpec(shape, strides, D.BF16)
        assert pixel_strides(spec) == want
        assert (collapses(spec), packed(spec), spec.dense) == (True, True, True)


def test_gaps_between_pixels() -> None:
    wide = _spec((2, 5, 6, 8), D.BF16, pitch=8)
    assert (collapses(wide), packed(wide), wide.dense) == (True, False, False)
    rows = MatrixSpec((2, 5, 6, 8), (400, 80, 8, 1), D.BF16)  # of 10 pixels, of which 6 are looked at
    assert (collapses(rows), packed(rows), rows.dense) == (False, False, False)
    filters = MatrixSpec((4, 3, 3, 8), (100, 24, 8, 1), D.BF16)
    assert (collapses(filters), packed(filters), filters.dense) == (False, True, False)


def test_reach_is_what_lies_between_the_first_element_and_the_end() -> None:
    assert reach(_spec((2, 5, 6, 8), D.BF16)) == 2 * 5 * 6 * 8 * 2
    assert reach(_spec((2, 5, 6, 8), D.F32, pitch=2)) == (59 * 10 + 8) * 4


@pytest.mark.parametrize(
    ("shape", "how", "groups", "want"),
    [
        ((2, 5, 6, 64), {}, 1, 8),
        ((2, 5, 6, 64), {"alignment": 8}, 1, 4),
        ((2, 5, 6, 64), {"alignment": 2}, 1, 1),
        ((2, 5, 6, 64), {"pitch": 4}, 1, 4),
        ((2, 5, 6, 12), {}, 1, 4),
        ((2, 5, 6, 3), {}, 1, 1),
        ((2, 5, 6, 3), {"pitch": 5}, 1, 1),  # three channels, whatever follows them
        ((2, 5, 6, 64), {}, 16, 4),
        ((2, 5, 6, 64), {}, 64, 1),
        ((1, 1, 1, 8), {"pitch": 3}, 1, 8),
    ],
)
def test_alignment_of_channels(shape: tuple[int, ...], how: dict[str, int], groups: int, want: int) -> None:
    assert channel_alignment(_spec(shape, D.BF16, **how), groups) == want


def test_arrays_that_convolutions_cannot_read() -> None:
    def strided(*strides: int, shape: tuple[int, ...] = (2, 5, 6, 8)) -> MatrixSpec:
        return MatrixSpec(shape, strides, D.BF16)

    check_channels("a", strided(240, 48, 8, 1))
    check_channels("a", strided(240, 48, 8, 5, shape=(2, 5, 6, 1)))
    check_channels("a", strided(0, 48, 8, 1, shape=(1, 5, 6, 8)))
    with pytest.raises(UnsupportedError, match=r"a .* its channels must be contiguous; in PyTorch a = a\.contiguous\("):
        check_channels("a", strided(240, 6, 1, 30))
    with pytest.raises(InvalidOperandError, match="c has a negative stride"):
        check_channels("c", strided(240, -48, 8, 1))
    with pytest.raises(UnsupportedError, match="copy what is broadcast"):
        check_channels("b", strided(0, 48, 8, 1))


@pytest.mark.parametrize(
    ("op", "how", "want"),
    [
        (FPROP, {}, (392, 64, 576)),
        (DGRAD, {}, (392, 64, 576)),
        (WGRAD, {}, (64, 576, 392)),
        (FPROP, {"stride": 2}, (98, 64, 576)),
        (DGRAD, {"stride": 2}, (392, 64, 4 * 64)),
        (WGRAD, {"stride": 2}, (64, 576, 98)),
        (FPROP, {"groups": 64}, (392, 1, 9)),
        (DGRAD, {"groups": 4}, (392, 16, 144)),
        (WGRAD, {"groups": 4}, (16, 144, 392)),
    ],
)
def test_the_implicit_gemm(op: str, how: dict[str, Any], want: tuple[int, int, int]) -> None:
    assert _problem(op, padding=1, **how).implicit_gemm == want


# ----------------------------------------------------------------------------------------------------------------------
# Problems that a kernel can serve
# ----------------------------------------------------------------------------------------------------------------------


def _serves(key: KernelKey, problem: ConvProblem, split_k: int = 1) -> bool:
    return serves(key, problem, devices.imagined(key.arch), split_k)


@pytest.mark.parametrize("op", OPS)
def test_types_math_and_epilogue_have_to_agree(op: str) -> None:
    plain = _problem(op)
    assert _serves(_cell(op), plain)
    assert not _serves(_cell(op, dtype=D.F16), plain)
    assert not _serves(_cell(op, d=D.F32), plain)
    assert not _serves(_cell(op, math="tf32", dtype=D.F32), _problem(op, dtype=D.F32))
    assert not _serves(_cell(op, epilogue="lc_relu"), plain)
    assert _serves(_cell(op, epilogue="lc_relu"), replace(plain, activation="relu"))
    assert not _serves(_cell(op), replace(plain, activation="relu"))
    assert _serves(_cell(op), replace(plain, activation="identity"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_every_array_has_to_be_aligned(op: str, name: str) -> None:
    eight, four, single = (_cell(op, "optimized", (n, n, n)) for n in (8, 4, 1))
    assert _serves(eight, _problem(op, c=True))
    for change in ({"alignments": {name: 8}}, {"pitches": {"c": 4, "d": 4} if name in "cd" else {name: 4}}):
        problem = _problem(op, (2, 14, 14, 64), (64, 1, 1), c=True, **change)
        assert (_serves(eight, problem), _serves(four, problem), _serves(single, problem)) == (False, True, True)


def test_a_bias_has_to_be_aligned_as_the_result_is() -> None:
    eight, two = _cell(FPROP, "optimized", (8, 8, 8)), _cell(FPROP, "optimized", (2, 2, 2))
    assert _serves(eight, _problem(bias=True))
    odd = _problem(bias=True, alignments={"bias": 4})
    assert (_serves(eight, odd), _serves(two, odd)) == (False, True)


@pytest.mark.parametrize(("op", "groups"), [(op, groups) for op in OPS for groups in (2, 8, 64)])
def test_groups_need_a_kernel_of_groups_and_narrow_the_vectors(op: str, groups: int) -> None:
    problem = _problem(op, groups=groups)
    assert not _serves(_cell(op), problem)
    assert not _serves(_cell(op, group_mode="single"), _problem(op))
    assert _serves(_cell(op, group_mode="single"), problem)
    assert _serves(_cell(op, "optimized", (8, 8, 8), group_mode="single"), problem) == (groups <= 8)


@pytest.mark.parametrize(
    ("stride", "dilation", "unity", "strided"),
    [(1, 1, True, True), (2, 1, False, True), ((1, 2), 1, False, True), (1, 2, True, False), (2, 2, False, False)],
)
def test_stride_support_of_dgrad(stride: Any, dilation: int, unity: bool, strided: bool) -> None:
    problem = _problem(DGRAD, stride=stride, dilation=dilation)
    assert _serves(_cell(DGRAD, stride_support="unity"), problem) == unity
    assert _serves(_cell(DGRAD, stride_support="strided"), problem) == strided
    assert _serves(_tma(DGRAD), problem) == unity


def test_iterators_for_few_channels() -> None:
    fixed, few = _cell(FPROP, "fixed_channels", (4, 4, 8)), _cell(FPROP, "few_channels", (1, 1, 1))
    image = _problem(x=(2, 32, 32, 4))
    assert (_serves(fixed, image), _serves(few, image)) == (True, True)
    assert not _serves(fixed, _problem(x=(2, 32, 32, 8)))
    assert _serves(few, _problem(x=(2, 32, 32, 3)))
    dilated = _problem(x=(2, 32, 32, 4), dilation=2)
    assert (_serves(fixed, dilated), _serves(few, dilated)) == (False, False)


@pytest.mark.parametrize("op", OPS)
def test_optimized_iterators_hold_the_filter_in_a_mask(op: str) -> None:
    long = _problem(op, (1, 64, 64, 8), (8, 33, 1))
    assert not _serves(_cell(op, "optimized", (8, 8, 8)), long)
    assert _serves(_cell(op, "analytic", (8, 8, 8)), long)


def _cropped(spec: MatrixSpec) -> MatrixSpec:
    """The array as part of a wider image: its rows are further apart than their pixels are long."""
    column, row, outer = pixel_strides(spec)
    return replace(spec, strides=(2 * outer + 16 * column, row + 8 * column, column, 1))


def test_rows_that_are_not_evenly_spaced() -> None:
    """The inputs of fprop may be; what is walked as the rows of one matrix may not."""
    for op in OPS:
        optimized, analytic, tma = _cell(op, "optimized", (8, 8, 8)), _cell(op, "analytic", (8, 8, 8)), _tma(op)
        problem = _problem(op)
        read = {name: replace(problem, **{name: _cropped(getattr(problem, name))}) for name in "ab"}
        written = replace(problem, d=_cropped(problem.d))
        assert (_serves(optimized, written), _serves(analytic, written)) == (False, False)
        assert _serves(tma, written) == (op != WGRAD)
        assert _serves(optimized, read["a"]) == (op != WGRAD)
        assert _serves(optimized, read["b"]) == (op == WGRAD)
        assert _serves(tma, read["a"]) == (op != WGRAD)
        assert all(_serves(analytic, problem_read) for problem_read in read.values())


def test_filters_may_be_apart() -> None:
    """A slice along K of wider filters, as the result of wgrad."""
    problem = _problem(WGRAD)
    apart = replace(problem, d=replace(problem.d, strides=(3 * problem.d.strides[0], *problem.d.strides[1:])))
    assert _serves(_cell(WGRAD, "optimized", (8, 8, 8)), apart)
    assert not _serves(_tma(WGRAD), apart)


@pytest.mark.parametrize("op", OPS)
def test_offsets_of_the_sm80_generation_are_32_bit_numbers(op: str) -> None:
    huge = _problem(op, (64, 512, 512, 64), (64, 1, 1))  # 2 GiB of bf16
    assert not _serves(_cell(op, "optimized", (8, 8, 8)), huge)
    assert _serves(_tma(op), huge)
    assert _serves(_cell(op, "optimized", (8, 8, 8)), _problem(op, (63, 512, 512, 64), (64, 1, 1)))


def test_offsets_in_bits() -> None:
    assert not _serves(_cell(FPROP, "few_channels"), _problem(x=(43, 1024, 1024, 3), w=(8, 3, 3)))
    assert _serves(_cell(FPROP, "few_channels"), _problem(x=(42, 1024, 1024, 3), w=(8, 3, 3)))


@pytest.mark.parametrize(
    ("how", "serves"),
    [
        ({}, True),
        ({"stride": 8}, True),
        ({"stride": 9}, False),
        ({"padding": 127}, True),
        ({"padding": ((0, 0), (0, 128))}, False),
        ({"dilation": 63, "padding": 64}, True),
        ({"dilation": 64, "padding": 64}, False),
        ({"groups": 2}, False),
    ],
)
def test_what_im2col_maps_can_say(how: dict[str, Any], serves: bool) -> None:
    assert _serves(_tma(), _problem(**how)) == serves


@pytest.mark.parametrize(
    ("key", "split_k", "serves"),
    [
        (_cell(WGRAD, d=D.F32), 4, True),
        (_cell(WGRAD), 4, False),  # partial sums pass through D
        (_cell(WGRAD, d=D.F32, group_mode="single"), 4, False),
        (_tma(WGRAD, d=D.F32), 4, False),
        (_tma(WGRAD, d=D.F32), 1, True),
    ],
)
def test_slices_of_k(key: KernelKey, split_k: int, serves: bool) -> None:
    problem = _problem(WGRAD, out=key.d, groups=2 if key.group_mode else 1)
    assert _serves(key, problem, split_k) == serves


# ----------------------------------------------------------------------------------------------------------------------
# Selection
# ----------------------------------------------------------------------------------------------------------------------


def test_wide_vectors_and_optimized_iterators_go_first(only: Any) -> None:
    narrow, wide, slow = (
        _cell(FPROP, *how) for how in (("optimized", (2, 2, 2)), ("optimized", (8, 8, 8)), ("analytic", (8, 8, 8)))
    )
    only(narrow, slow, wide, _cell())
    assert _chosen(_problem()) == wide
    assert _chosen(_problem(x=(2, 14, 14, 66))) == narrow
    assert _chosen(_problem(w=(64, 33, 1), x=(2, 40, 40, 64))) == slow
    assert _chosen(_problem(x=(2, 14, 14, 63))) == _cell()


def test_few_channels(only: Any) -> None:
    few, fixed, plain = _cell(FPROP, "few_channels"), _cell(FPROP, "fixed_channels", (4, 4, 8), stages=4), _cell()
    only(few, fixed, plain)
    layer: dict[str, Any] = {"w": (64, 7, 7), "stride": 2, "padding": 3}
    assert _chosen(_problem(x=(2, 224, 224, 3), **layer)) == few
    assert _chosen(_problem(x=(2, 224, 224, 4), **layer)) == fixed
    assert _chosen(_problem(x=(2, 224, 224, 3), w=(64, 7, 7), dilation=2)) == plain


def test_tma_where_it_serves(only: Any) -> None:
    """WGMMA is faster, but reads whole tiles of channels."""
    tma, multistage = _tma(), _cell(FPROP, "optimized", (8, 8, 8), arch=SmArch.SM90A, tile=(128, 128, 32), stages=4)
    only(tma, multistage)
    layer = (32, 56, 56, 128)
    assert _chosen(_problem(x=layer, w=(128, 3, 3), padding=1), H200) == tma
    assert _chosen(_problem(x=layer, w=(128, 3, 3), padding=1, stride=9), H200) == multistage
    assert _chosen(_problem(x=(32, 56, 56, 8), w=(128, 3, 3), padding=1), H200) == multistage


def test_padded_tiles_of_channels_are_paid_for() -> None:
    device = devices.imagined(SmArch.SM90A)

    def seconds(op: str, c: int, k: int) -> float:
        problem = _problem(op, (32, 56, 56, c), (k, 3, 3), padding=1)
        put = ConvFormulation(problem)
        search = ConvSearch(problem, device, formulations=[[put]])
        assert search.supports(_tma(op), put)
        return estimate.launch(_tma(op), search.extents(put), device, shared_memory(_tma(op))).seconds

    assert seconds(FPROP, 8, 128) == pytest.approx(seconds(FPROP, 64, 128), rel=0.3)
    assert seconds(DGRAD, 128, 8) == pytest.approx(seconds(DGRAD, 128, 64), rel=0.3)
    assert seconds(FPROP, 128, 128) > 1.25 * seconds(FPROP, 64, 128)


def test_the_table_goes_before_the_matrix(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = _cell(), _cell(FPROP, "optimized", (8, 8, 8), stages=4)
    only(slow, fast)
    fake_table.install(monkeypatch, [fake_table.row(slow)])
    assert _chosen(_problem()) == slow
    assert _chosen(_problem(), backend="jit") == fast
    assert _candidate_of(_problem(), A100, **HOW)[0].origin == "prebuilt"
    assert _candidate_of(_problem(), A100, **(HOW | {"backend": "jit"}))[0].origin == "jit"


def test_what_the_table_lacks_is_compiled_or_refused(only: Any) -> None:
    only(_cell())
    assert _candidate_of(_problem(), A100, **HOW)[0].origin == "jit"
    for how in ({"backend": "prebuilt"}, {"jit": "off"}):
        with pytest.raises(
            KernelNotFoundError, match=f"no kernel in the table serves this {FPROP}; .* would: .*build with"
        ):
            _chosen(_problem(), **how)


def test_other_activations_are_compiled_from_the_plain_cell(only: Any) -> None:
    """The matrix lists few activations; each compiles with each cell."""
    plain, relu = _cell(FPROP, "optimized", (8, 8, 8), stages=4), _cell(epilogue="lc_relu")
    only(plain, relu)
    assert _chosen(_problem(activation="relu")) == relu
    for backend in ("auto", "jit"):
        key = _chosen(_problem(activation="gelu"), backend=backend)
        assert key == replace(plain, epilogue="lc_gelu")
        assert supports(key)
    for how in ({"backend": "prebuilt"}, {"jit": "off"}):
        with pytest.raises(KernelNotFoundError, match="would: it is in no preset"):
            _chosen(_problem(activation="gelu"), **how)
    with pytest.raises(UnsupportedError, match="epilogue lc_gelu"):
        _chosen(_problem(DGRAD, activation="gelu"))


def test_dilation_in_dgrad_is_compiled_from_the_strided_cell(only: Any) -> None:
    strided = _cell(DGRAD, "optimized", (8, 8, 8), stages=4)
    only(strided)
    assert _chosen(_problem(DGRAD)) == strided
    key = _chosen(_problem(DGRAD, dilation=2))
    assert key == replace(strided, stride_support="unity")
    assert supports(key)
    with pytest.raises(KernelNotFoundError, match="it is in no preset"):
        _chosen(_problem(DGRAD, dilation=2), jit="off")


# ----------------------------------------------------------------------------------------------------------------------
# Slices of K, and results in float32 that are cast
# ----------------------------------------------------------------------------------------------------------------------

FEW_RESULTS: dict[str, Any] = {"x": (32, 112, 112, 64), "w": (64, 1, 1)}
"""64 x 64 results of 401408 products each."""


def _wgrad_cells(*more: KernelKey) -> tuple[KernelKey, ...]:
    return (
        _cell(WGRAD, "optimized", (8, 8, 8), stages=4),
        _cell(WGRAD, "optimized", (8, 8, 4), stages=4, d=D.F32),
        cast(SmArch.SM80, D.F32, D.BF16),
        *more,
    )


def test_few_results_of_many_pixels_are_computed_in_slices(only: Any) -> None:
    only(*_wgrad_cells())
    candidate, slices, wide = _candidate_of(_problem(WGRAD, **FEW_RESULTS), A100, **HOW)
    assert slices > 8
    assert candidate.key.d is D.F32
    assert wide is not None
    assert (wide.d.dtype, wide.d.shape) == (D.F32, (64, 1, 1, 64))
    candidate, slices, wide = _candidate_of(_problem(WGRAD, out=D.F32, **FEW_RESULTS), A100, **HOW)
    assert slices > 8
    assert wide is None  # it is the result's own type


def test_many_results_are_not(only: Any) -> None:
    only(*_wgrad_cells())
    candidate, slices, wide = _candidate_of(_problem(WGRAD, (2, 14, 14, 1024), (1024, 3, 3), padding=1), A100, **HOW)
    assert (slices, wide, candidate.key.d) == (1, None, D.BF16)


def test_slices_are_not_shorter_than_they_pay_for(only: Any) -> None:
    only(*_wgrad_cells())
    for images in (1, 2, 4, 8):
        problem = _problem(WGRAD, (images, 16, 16, 64), (64, 1, 1))
        assert _candidate_of(problem, A100, **HOW)[1] <= max(1, images)


@pytest.mark.parametrize(
    "change",
    [{"pitches": {"d": 8}, "x": (32, 112, 112, 64), "w": (1, 1, 1)}, {"alignments": {"d": 8}}],
    ids=["gaps", "unaligned"],
)
def test_results_that_a_cast_cannot_write_are_computed_in_one_piece(only: Any, change: dict[str, Any]) -> None:
    only(*_wgrad_cells(_cell(WGRAD)))
    problem = _problem(WGRAD, **(FEW_RESULTS | {key: value for key, value in change.items() if key != "pitches"}))
    if "pitches" in change:
        problem = replace(problem, d=replace(problem.d, shape=(64, 1, 1, 64), strides=(80, 80, 80, 1)))
    _, slices, wide = _candidate_of(problem, A100, **HOW)
    assert (slices, wide) == (1, None)


def test_a_sum_with_c_is_sliced_in_float32(only: Any) -> None:
    only(*_wgrad_cells())
    _, slices, wide = _candidate_of(_problem(WGRAD, c=True, out=D.F32, **FEW_RESULTS), A100, **HOW)
    assert slices > 8
    assert wide is None


def test_a_result_that_no_kernel_has_is_cast(only: Any) -> None:
    """Odd channel counts have kernels with float32 results only."""
    only(_cell(WGRAD, d=D.F32), cast(SmArch.SM80, D.F32, D.BF16))
    odd = _problem(WGRAD, (1, 8, 8, 3), (5, 3, 3))
    candidate, slices, wide = _candidate_of(odd, A100, **HOW)
    assert slices == 1
    assert wide is not None
    assert candidate.key.d is D.F32
    assert best_key(odd, A100, SmArch.SM80) == _cell(WGRAD, d=D.F32)
    assert _chosen(_problem(WGRAD, (1, 8, 8, 3), (5, 3, 3), c=True)).d is D.F32
    with pytest.raises(UnsupportedError, match="a cast writes what is dense and aligned to 16 bytes"):
        _chosen(_problem(WGRAD, (1, 8, 8, 3), (5, 3, 3), alignments={"d": 2}))


def test_a_rewrite_that_the_table_lacks_is_no_refusal(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix serves it, but through two kernels: whichever is missing, it can be built."""
    product, helper = _cell(WGRAD, d=D.F32), cast(SmArch.SM80, D.F32, D.BF16)
    only(product, helper)
    odd = _problem(WGRAD, (1, 8, 8, 3), (5, 3, 3))
    no_product = f"no kernel in the table serves this {WGRAD}; .* would: .*build with"
    no_helper = f"the table lacks {helper.name}, and it must not be compiled: .*build with"
    for there, message in (((), no_product), ((product,), no_helper), ((helper,), no_product)):
        fake_table.install(monkeypatch, [fake_table.row(key) for key in there])
        for how in ({"backend": "prebuilt"}, {"jit": "off"}):
            with pytest.raises(KernelNotFoundError, match=message):
                _chosen(odd, **how)
    fake_table.install(monkeypatch, [fake_table.row(key) for key in (product, helper)])
    assert _chosen(odd, jit="off") == product
    only(helper)
    fake_table.install(monkeypatch, [])
    with pytest.raises(UnsupportedError, match="no kernel of the matrix serves this"):
        _chosen(odd, jit="off")


def test_a_cast_that_has_to_be_compiled_is_refused_while_a_graph_is_captured(
    only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    product, helper = _cell(WGRAD, d=D.F32), cast(SmArch.SM80, D.F32, D.BF16)
    only(product, helper)
    fake_table.install(monkeypatch, [fake_table.row(product)])
    monkeypatch.setattr(_core, "capturing", lambda _device, stream: stream == 7)
    monkeypatch.setattr(devices, "get", lambda _: A100)
    monkeypatch.setattr(table, "launchable", lambda _: None)
    odd = _problem(WGRAD, (1, 8, 8, 3), (5, 3, 3))
    how: dict[str, Any]
    for how in ({}, {"candidate": choose(odd)}):
        with pytest.raises(UnsupportedError, match=rf"{helper.name} is compiled at run time, and such plans cannot"):
            make(odd, stream=7, **how)


def test_a_gemm_that_the_table_lacks_is_no_refusal(only: Any) -> None:
    """A filter of one tap that only kernels of GEMM serve."""
    only()
    problem = _problem(FPROP, (2, 8, 8, 5), (7, 1, 1))
    assert choose(problem, A100).formulation.product is not None
    with pytest.raises(KernelNotFoundError, match=r"no kernel in the table serves bf16 .* would: it is in preset"):
        choose(problem, A100, jit="off")
    with pytest.raises(UnsupportedError, match="no kernel of the matrix serves this"):
        choose(_problem(FPROP, (2, 8, 8, 5), (7, 3, 3)), A100, jit="off")


def test_a_filter_of_one_tap_is_compiled_for_only_where_the_table_has_neither_kernel(
    only: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv = _cell(FPROP, "optimized", (8, 8, 8), stages=4)
    slow_conv = _cell()
    only(conv, slow_conv)
    problem = _problem(FPROP, (2, 8, 8, 64), (64, 1, 1))
    gemms = [key for _, key in cells([SmArch.SM80]) if (key.op, key.a, key.d) == ("gemm", D.BF16, D.BF16)]
    (slow_gemm,) = [k for k in gemms if k.layout_a + k.layout_b == "rc" and k.align_a == 1]
    for there, is_gemm in ((slow_gemm, True), (slow_conv, False)):
        fake_table.install(monkeypatch, [fake_table.row(there)])
        chosen = choose(problem, A100)
        assert (chosen.key, chosen.origin) == (there, "prebuilt")
        assert (chosen.formulation.product is not None) is is_gemm
        assert choose(problem, A100, backend="jit").seconds < chosen.seconds
    # Of two that are there, the faster one.
    fake_table.install(monkeypatch, [fake_table.row(slow_gemm), fake_table.row(conv)])
    assert choose(problem, A100).key == conv


@pytest.mark.filterwarnings("ignore:.* is used, which by the model takes")
def test_a_table_that_cannot_slice_computes_in_one_piece(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the slices nor the cast may keep a kernel that is there from serving."""
    plain, sliced, helper = _wgrad_cells()
    only(plain, sliced, helper)
    problem = _problem(WGRAD, **FEW_RESULTS)
    for there in ((plain,), (plain, sliced), (plain, helper)):
        fake_table.install(monkeypatch, [fake_table.row(key) for key in there])
        assert _candidate_of(problem, A100, **(HOW | {"jit": "off"}))[1:] == (1, None)
    fake_table.install(monkeypatch, [fake_table.row(key) for key in (plain, sliced, helper)])
    assert _candidate_of(problem, A100, **(HOW | {"jit": "off"}))[1] > 1


# ----------------------------------------------------------------------------------------------------------------------
# Depthwise convolutions
# ----------------------------------------------------------------------------------------------------------------------

DEPTHWISE: dict[str, Any] = {"x": (2, 14, 14, 64), "w": (64, 3, 3), "groups": 64, "padding": 1}


def _direct(op: str, *, dtype: D = D.BF16, arch: SmArch = SmArch.SM80) -> KernelKey:
    return depthwise(op, arch, dtype, 128 // dtype.bits)


def _depthwise(op: str, **changes: Any) -> ConvProblem:
    """The gradient of a filter is in float32, as the matrix has it."""
    return _problem(op, out=D.F32 if op == WGRAD else None, **(DEPTHWISE | changes))


@pytest.mark.parametrize("op", OPS)
def test_depthwise_kernels(op: str) -> None:
    direct = _direct(op)
    served: tuple[dict[str, Any], ...] = (
        {}, {"stride": 2}, {"dilation": 3, "padding": 3}, {"stride": 2, "dilation": 2},
        {"w": (64, 11, 11), "padding": 5},
    )  # fmt: skip
    for how in served:
        assert _serves(direct, _depthwise(op, **how))
    others: tuple[dict[str, Any], ...] = (
        {"groups": 32},
        {"w": (128, 3, 3)},
        {"w": (64, 12, 11), "padding": 5},
        {"x": (2, 14, 14, 60), "w": (60, 3, 3), "groups": 60},
    )
    for how in others:
        assert not _serves(direct, _depthwise(op, **how))
    for name in "ab" if op == WGRAD else "ad":
        assert not _serves(direct, _depthwise(op, alignments={name: 8}))
    # The filter's elements are read and written one by one.
    assert _serves(direct, _depthwise(op, alignments={"d" if op == WGRAD else "b": 4}))
    cropped = _depthwise(op)
    assert _serves(direct, replace(cropped, d=_cropped(cropped.d)))


@pytest.mark.parametrize("op", OPS)
def test_depthwise_kernels_go_before_those_of_groups(only: Any, op: str) -> None:
    direct, groups = _direct(op), _cell(op, group_mode="single", d=D.F32 if op == WGRAD else None)
    only(direct, groups)
    assert _chosen(_depthwise(op, x=(32, 56, 56, 64))) == direct
    assert _chosen(_depthwise(op, groups=32)) == groups


def test_depthwise_sums_over_many_pixels_are_sliced(only: Any) -> None:
    only(_direct(WGRAD), cast(SmArch.SM80, D.F32, D.BF16))
    many: dict[str, Any] = {"x": (32, 112, 112, 64)}
    candidate, slices, wide = _candidate_of(_depthwise(WGRAD, c=True, **many), A100, **HOW)
    assert candidate.key == _direct(WGRAD)
    assert slices > 4
    assert wide is None
    candidate, slices, wide = _candidate_of(_problem(WGRAD, **(DEPTHWISE | many)), A100, **HOW)
    assert candidate.key == _direct(WGRAD)
    assert slices > 4
    assert wide is not None
    assert not _serves(_direct(FPROP), _depthwise(FPROP), 2)


# ----------------------------------------------------------------------------------------------------------------------
# fp8
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [D.F8E4M3, D.F8E5M2])
@pytest.mark.parametrize(("out", "wide"), [(D.BF16, D.BF16), (D.F16, D.F16), (D.F32, D.BF16)])
def test_fp8_without_a_kernel_is_cast(only: Any, dtype: D, out: D, wide: D) -> None:
    only(_cell(dtype=wide, d=out))
    problem = _problem(dtype=dtype, out=out)
    computed, rewrite, casts = _served(problem, A100, None)
    assert casts
    assert (computed.a.dtype, computed.b.dtype, computed.d.dtype, computed.math) == (wide, wide, out, "default")
    assert rewrite == f"fp8 operands cast to {wide.value}, which holds them exactly"


def test_fp8_with_a_kernel_is_not(only: Any) -> None:
    native = _cell(FPROP, "optimized", (16, 16, 8), dtype=D.F8E4M3, d=D.BF16, math="fast", arch=SmArch.SM89, stages=3)
    only(native, _cell(arch=SmArch.SM89))
    computed, rewrite, casts = _served(_problem(dtype=D.F8E4M3), ADA, None)
    assert (computed.math, rewrite, casts) == ("fast", "", False)
    assert _chosen(computed, ADA) == native
    for other in (_problem(dtype=D.F8E4M3, x=(2, 14, 14, 24)), _problem(DGRAD, dtype=D.F8E4M3)):
        assert _served(other, ADA, None)[2]


@pytest.mark.parametrize("change", [{"pitches": {"a": 8}}, {"alignments": {"b": 8}}])
def test_what_is_cast_lies_densely(only: Any, change: dict[str, Any]) -> None:
    only(_cell())
    with pytest.raises(UnsupportedError, match="no kernel multiplies these e4m3 operands, and what is cast instead"):
        _served(_problem(dtype=D.F8E4M3, **change), A100, None)


# ----------------------------------------------------------------------------------------------------------------------
# Whole plans
# ----------------------------------------------------------------------------------------------------------------------


class Recorded(Steps):
    """Steps that are written down."""

    def __init__(self, device: int, stream: int | None = None) -> None:
        super().__init__(device, stream)
        self.slots: dict[str, tuple[list[int], int, str]] = {}
        self.launched: list[tuple[KernelKey, dict[str, Any]]] = []

    def slot(self, name: str, shape: Any, strides: Any, dtype: Any, *, alignment: int = 1, role: str = "input") -> Any:
        self.slots[name] = (list(shape), alignment, role)
        return super().slot(name, shape, strides, dtype, alignment=alignment, role=role)

    def launch(self, candidate: Any, args: Any, **_: Any) -> None:
        self.launched.append((candidate.key, dict(args)))

    def plan(self, *, rewrite: str = "", **_: Any) -> Any:
        return SimpleNamespace(rewrite=rewrite, slots=self.slots, launched=self.launched, sizes=self._temporaries)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_kernels, "Steps", Recorded)
    monkeypatch.setattr(devices, "get", lambda _index=0: A100)


@pytest.mark.usefixtures("recorded")
def test_a_plan_is_one_launch(only: Any) -> None:
    only(_cell(FPROP, "optimized", (8, 8, 8), stages=4))
    problem = _problem(c=True, padding=((0, 1), (2, 3)), stride=(1, 2), dilation=(2, 1), pitches={"a": 8})
    made: Any = make(problem, **HOW)
    assert made.rewrite == ""
    assert list(made.slots) == ["a", "b", "c", "out"]
    assert {name: role for name, (_, _, role) in made.slots.items()} == {
        "a": "input", "b": "input", "c": "source", "out": "output",
    }  # fmt: skip
    assert {alignment for _, alignment, _ in made.slots.values()} == {16}
    ((_, args),) = made.launched
    g = problem.geometry
    for name in "nhwckrspq":
        assert args[name] == getattr(g, name)
    assert (args["pad_h"], args["pad_h_end"], args["pad_w"], args["pad_w_end"]) == (0, 1, 2, 3)
    assert (args["stride_h"], args["stride_w"], args["dilation_h"], args["dilation_w"]) == (1, 2, 2, 1)
    assert (args["groups"], args["split_k"], args["alpha"], args["beta"]) == (1, 1, "alpha", "beta")
    assert (args["x_stride_w"], args["x_stride_h"], args["x_stride_n"]) == (72, 14 * 72, 14 * 14 * 72)
    assert (args["w_stride_s"], args["w_stride_r"], args["w_stride_k"]) == (64, 192, 576)
    assert (args["y_stride_q"], args["y_stride_p"], args["y_stride_n"]) == (64, g.q * 64, g.p * g.q * 64)
    places = {name: args[name] for name in ("a", "b", "c_source", "d", "bias")}
    assert places == {
        "a": ("operand", 0, 0), "b": ("operand", 1, 0), "c_source": ("operand", 2, 0), "d": ("operand", 3, 0),
        "bias": None,
    }  # fmt: skip


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("op", OPS)
def test_a_plan_names_dimensions_as_its_caller_does(only: Any, op: str) -> None:
    only(_cell(op))
    problem = _problem(op, (2, 5, 6, 3), (7, 2, 2), bias=op != WGRAD)
    shapes = {
        layout: {name: tuple(shape) for name, (shape, _, _) in make(problem, layout=layout, **HOW).slots.items()}  # type: ignore[attr-defined]
        for layout in ("nhwc", "nchw")
    }
    for name, shape in shapes["nhwc"].items():
        turned = shape if len(shape) == 1 else (shape[0], shape[3], shape[1], shape[2])
        assert shapes["nchw"][name] == turned


@pytest.mark.usefixtures("recorded")
def test_a_plan_of_fp8_casts_both_operands(only: Any) -> None:
    only(_cell(DGRAD), cast(SmArch.SM80, D.F8E5M2, D.BF16))
    made: Any = make(_problem(DGRAD, (2, 5, 6, 3), (7, 2, 2), dtype=D.F8E5M2), **HOW)
    assert made.rewrite == "fp8 operands cast to bf16, which holds them exactly"
    assert [key.op for key, _ in made.launched] == ["cast", "cast", DGRAD]
    counts = [args["count"] for key, args in made.launched if key.op == "cast"]
    assert counts == [2 * 4 * 5 * 7, 7 * 2 * 2 * 3]
    assert made.sizes == [2 * count for count in counts]
    assert [made.slots[name][1] for name in "ab"] == [CAST_ALIGNMENT] * 2
    main = made.launched[-1][1]
    assert [main["a"], main["b"], main["d"]] == [("temporary", 0, 0), ("temporary", 1, 0), ("operand", 2, 0)]


@pytest.mark.usefixtures("recorded")
def test_a_plan_in_slices_casts_the_sum(only: Any) -> None:
    only(*_wgrad_cells())
    made: Any = make(_problem(WGRAD, **FEW_RESULTS), **HOW)
    (product, args), (_, casting) = made.launched
    assert made.rewrite == f"{args['split_k']} slices of K added up in float32, then cast"
    assert product.d is D.F32
    assert args["d"] == casting["a"] == ("temporary", 0, 0)
    assert (args["alpha"], args["beta"], args["split_parallel"]) == (1.0, 0.0, 1)
    assert (casting["d"], casting["count"], casting["alpha"]) == (("operand", 2, 0), 4096, "alpha")
    assert (casting["slices"], casting["slice_stride"]) == (args["split_k"], 4096)
    assert made.sizes == [4 * 4096 * args["split_k"]]
    assert made.slots["out"][1] == CAST_ALIGNMENT


@pytest.mark.usefixtures("recorded")
def test_both_rewrites_at_once(only: Any) -> None:
    only(*_wgrad_cells(cast(SmArch.SM80, D.F8E4M3, D.BF16)))
    made: Any = make(_problem(WGRAD, dtype=D.F8E4M3, **FEW_RESULTS), **HOW)
    assert made.rewrite.startswith("fp8 operands cast to bf16, which holds them exactly; ")
    assert made.rewrite.endswith("slices of K added up in float32, then cast")
    assert [key.op for key, _ in made.launched] == ["cast", "cast", WGRAD, "cast"]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (_problem(x=(0, 14, 14, 64)), r"a convolution of 0 images to shape \(0, 12, 12, 64\) is empty"),
        (_problem(WGRAD, x=(0, 14, 14, 64)), "a convolution of 0 images .* is empty"),
        (_problem(dtype=D.F64), "no convolution takes f64 operands; valid: bf16, e4m3, e5m2, f16, f32"),
        (_problem(dtype=D.I8, out=D.I32), "no convolution takes i8 operands"),
        (_problem(out=D.F16), "convolutions of bf16 give bf16, f32, not f16"),
        (_problem(dtype=D.F32, out=D.BF16), "convolutions of f32 give f32, not bf16"),
        (_problem(DGRAD, dtype=D.F8E4M3, out=D.F8E4M3), "convolutions of e4m3 give bf16, f16, f32, not e4m3"),
        (_problem(c=True, pitches={"c": 8}), r"c has strides .* and the result .*: kernels read c as they write the"),
        (_problem(DGRAD, stride=2, dilation=2), "kernels of strided dgrad have no dilation"),
        (_problem(groups=2), r"2 groups of 32 to 32 channels, stride .*: the closest of .* cells"),
        (_problem(dtype=D.F32), r"no kernel of the matrix serves this conv2d_fprop: f32 \(ieee\) to f32, epilogue lc"),
        (_problem(dtype=D.F32, precision="3xtf32"), r"f32 \(3xtf32\) to f32.*: its element types or math mode differ"),
        (replace(_problem(), d=_cropped(_problem().d)), "the pixels of the result, of strides .*, are not evenly"),
    ],
)  # fmt: skip
def test_refusals(only: Any, problem: ConvProblem, says: str) -> None:
    only(*(_cell(op) for op in OPS))
    with pytest.raises(UnsupportedError, match=says):
        make(problem, **HOW)


# ----------------------------------------------------------------------------------------------------------------------
# The matrix
# ----------------------------------------------------------------------------------------------------------------------

ARCHS = (SmArch.SM80, SmArch.SM86, SmArch.SM89, SmArch.SM90A)
ALIGNED: tuple[dict[str, Any], ...] = (
    {},
    {"padding": 1, "stride": 2},
    {"padding": ((0, 1), (1, 0))},
    {"padding": 2, "dilation": 2},
    {"w": (128, 1, 1)},
    {"w": (64, 7, 7), "padding": 3},
)
ANY_CHANNELS: tuple[dict[str, Any], ...] = (
    {"x": (2, 14, 14, 3)},
    {"x": (2, 14, 14, 5), "w": (7, 3, 3), "stride": 3},
    {"groups": 64, "padding": 1},
    {"groups": 4, "padding": 1, "stride": 2},
    {"x": (2, 14, 14, 96), "w": (96, 7, 7), "groups": 96, "padding": 3},
    {"x": (2, 14, 14, 30), "w": (20, 3, 3), "groups": 10},
    {"alignments": {"a": 2, "b": 2}},
    {"pitches": {"a": 1}},
)


def _device(arch: SmArch) -> devices.Device:
    return devices.imagined(arch)


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.value)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("how", range(len(ALIGNED)))
def test_aligned_channels_are_served(op: str, arch: SmArch, how: int) -> None:
    kinds: Iterable[tuple[D, str | None]] = (
        (D.F16, None), (D.BF16, None), (D.F32, None), (D.F32, "tf32"), (D.F8E4M3, None), (D.F8E5M2, None),
    )  # fmt: skip
    for dtype, precision in kinds:
        problem = _problem(op, dtype=dtype, precision=precision, **ALIGNED[how])
        assert best_key(problem, _device(arch), arch).arch is arch


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.value)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("how", range(len(ANY_CHANNELS)))
def test_any_channels_are_served(op: str, arch: SmArch, how: int) -> None:
    for dtype in (D.F16, D.BF16, D.F32):
        problem = _problem(op, dtype=dtype, **ANY_CHANNELS[how])
        assert best_key(problem, _device(arch), arch).arch is arch
    if "alignments" not in ANY_CHANNELS[how] and "pitches" not in ANY_CHANNELS[how]:
        assert best_key(_problem(op, dtype=D.F8E4M3, **ANY_CHANNELS[how]), _device(arch), arch).arch is arch


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.value)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("op", [FPROP, DGRAD])
def test_every_activation_is_served(op: str, activation: str, arch: SmArch) -> None:
    for how in ({}, {"x": (2, 14, 14, 3)}, {"groups": 64}, {"dtype": D.F32}):
        key = best_key(_problem(op, activation=activation, bias=True, **how), _device(arch), arch)
        assert key.epilogue == ("lc" if activation == "identity" else f"lc_{activation}")


def test_fp8_is_multiplied_where_there_are_kernels() -> None:
    for arch, native in ((SmArch.SM80, False), (SmArch.SM86, False), (SmArch.SM89, True), (SmArch.SM90A, True)):
        key = best_key(_problem(dtype=D.F8E4M3), _device(arch), arch)
        assert (key.a is D.F8E4M3) == native
        for op in (DGRAD, WGRAD):
            assert best_key(_problem(op, dtype=D.F8E4M3), _device(arch), arch).a is D.BF16


def test_hopper_convolves_through_tma_where_it_can() -> None:
    layer: dict[str, Any] = {"x": (32, 28, 28, 128), "w": (128, 3, 3), "padding": 1}
    for op in (FPROP, DGRAD):
        assert best_key(_problem(op, **layer), _device(SmArch.SM90A), SmArch.SM90A).generation == "sm90"
    strided = best_key(_problem(DGRAD, **layer, stride=2), _device(SmArch.SM90A), SmArch.SM90A)
    assert (strided.generation, strided.stride_support) == ("sm80", "strided")


def test_every_cell_serves_something() -> None:
    """A cell that no geometry reaches would be compiled for nothing; those of trees are in test_conv_epilogue.py."""
    problems = [
        _problem(op, dtype=dtype, precision=precision, out=out, activation=activation, **how)
        for op in OPS
        for dtype, precision in ((D.F16, None), (D.BF16, None), (D.F32, None), (D.F32, "tf32"), (D.F32, "3xtf32"),
                                 (D.F8E4M3, None), (D.F8E5M2, None))
        for out in (None, D.F16, D.F32)
        for activation in (reference.ACTIVATIONS if op != WGRAD else (None,))
        for how in ({}, {"stride": 2}, {"groups": 4}, {"groups": 64}, {"x": (2, 14, 14, 4)}, {"x": (2, 14, 14, 3)},
                    {"x": (2, 14, 14, 8)}, {"x": (2, 14, 14, 2)})
    ]  # fmt: skip
    problems += [replace(problem, math="fast") for problem in problems if problem.a.dtype.bits == 8]
    idle = []
    for arch in ARCHS:
        device = _device(arch)
        for _, key in cells([arch]):
            if (
                key.op in OPS
                and not has_tree(key.epilogue)
                and not any(serves(key, problem, device) for problem in problems if problem.op == key.op)
            ):
                idle.append(key.name)
    assert not idle


@pytest.mark.parametrize("op", OPS)
def test_all_choices_begin_with_the_one_that_is_taken(op: str) -> None:
    for how in ({}, {"stride": 2}, {"x": (2, 14, 14, 3)}, {"groups": 64}, {"dtype": D.F8E4M3}):
        problem = _problem(op, **how)
        found = select.rank_cells(ConvSearch(problem, _device(SmArch.SM90A), SmArch.SM90A))
        assert found
        taken = choose(problem, H200, backend="jit", jit="auto", record=False)
        assert (taken.key, taken.formulation) == (found[0].key, found[0].formulation)
        assert [candidate.seconds for candidate in found] == sorted(candidate.seconds for candidate in found)
