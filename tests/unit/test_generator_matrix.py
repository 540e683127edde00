"""The matrix: which cells exist, in which preset, and why the others do not."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator import costs, matrix, rules, trees
from generator.archs import SmArch
from generator.dtypes import CutlassDtype as D
from generator.families import gemm_sm90
from generator.families.base import FULL as FULL_TIER
from generator.families.base import ON_DEMAND
from generator.families.gemm_sm80 import FP8_ARCHS
from generator.key import ANYWHERE, COLUMN, ROW, KernelKey, check_unique, instruction_shape
from generator.matrix import ARCHS, PRESETS, cells, expand, preset_of, supports
from generator.render import render
from generator.rules import BLOCKWISE, COMMON_LAYOUTS, FP8_TYPES, HALF_TYPES, LAYOUTS, gemm_types

GEMM_ARCHS = ARCHS["gemm"]
FULL = expand("full", GEMM_ARCHS)
HOPPER = [key for key in FULL if key.generation == "sm90"]


def assert_refused(key: KernelKey, reason: str) -> None:
    status = supports(key)
    assert not status
    assert reason in status.reason


@pytest.mark.parametrize("preset", PRESETS)
def test_every_cell_of_a_preset_is_supported(preset: str) -> None:
    refused = {key.name: supports(key).reason for key in expand(preset, GEMM_ARCHS) if not supports(key)}
    assert refused == {}


@pytest.mark.parametrize("arch", GEMM_ARCHS)
def test_presets_are_nested(arch: SmArch) -> None:
    none, smoke, default, full = (set(expand(preset, [arch])) for preset in PRESETS)
    assert none == set()
    assert none < smoke < default < full
    assert {key.arch for key in full} == {arch}


@pytest.mark.parametrize("arch", GEMM_ARCHS)
def test_presets_stay_small_enough_to_build(arch: SmArch) -> None:
    assert len(expand("smoke", [arch])) <= 8
    assert len(expand("default", [arch])) <= 60
    assert len(expand("full", [arch])) <= 420


@pytest.mark.parametrize("preset", PRESETS[1:])
@pytest.mark.parametrize("arch", SmArch)
def test_a_fallback_is_in_no_preset_without_the_cell_for_the_usual_case(arch: SmArch, preset: str) -> None:
    # A table with the one and not the other would serve everything slowly: bf16 convolutions at a ninth of the speed.
    keys = expand(preset, [arch])
    alone = [
        key.name
        for key in keys
        if rules.is_fallback(key) and not any(rules.serves_usual_case(other, key) for other in keys)
    ]
    assert alone == []


@pytest.mark.parametrize(
    ("change", "fallback"),
    [
        ({}, False),
        ({"align_a": 2, "align_b": 2}, False),
        ({"align_b": 1}, True),
        ({"mainloop": "twostage", "stages": 2}, True),
        ({"op": "conv2d_fprop", "iterator": "analytic"}, True),
        ({"align_a": 1, "align_b": 1, "a": D.F64, "b": D.F64}, False),
        ({"align_a": 1, "align_b": 1, "a": D.F32, "b": D.F32, "math": "ieee"}, False),
        ({"align_a": 1, "align_b": 1, "a": D.F32, "b": D.F32, "math": "tf32"}, True),
        ({"align_d": 1}, False),
    ],
)
def test_what_a_fallback_is(change: dict[str, Any], fallback: bool) -> None:
    base = next(k for k in FULL if (k.generation, k.a, k.d, k.align_a, k.stages) == ("sm80", D.BF16, D.BF16, 8, 4))
    assert rules.is_fallback(replace(base, **change)) is fallback


def test_cells_of_no_preset_are_compiled_at_run_time_with_the_cell_for_the_usual_case() -> None:
    # bf16 from f16 operands is rare: neither of the two is in `full`.
    rare = [(tier, k) for tier, k in cells([SmArch.SM90A]) if (k.op, k.a, k.d) == ("gemm", D.F16, D.BF16)]
    assert {tier for tier, _ in rare} == {ON_DEMAND}
    assert {(k.align_a, k.generation) for _, k in rare} == {(1, "sm80"), (8, "sm90")}
    assert {k.layout_a + k.layout_b for _, k in rare if k.align_a == 8} == set(LAYOUTS)
    assert all(preset_of(k) is None and supports(k) for _, k in rare)


def test_default_is_built_within_eight_minutes_on_two_cores() -> None:
    keys = expand("default", [SmArch.SM80, SmArch.SM90A])
    # Seconds of one core as nvcc was measured to take them; docs/install.md has the whole build.
    assert sum(costs.cost_of(key).seconds for key in keys) / 2 < 480


def test_archs_without_cells_are_refused_naming_those_that_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {
        place: tuple(replace(family, archs=(SmArch.SM80,)) for family in families)
        for place, families in matrix.FAMILIES.items()
    }
    monkeypatch.setattr(matrix, "FAMILIES", old)
    with pytest.raises(ValueError, match=r"no cells for arch '100a' yet; valid: 80$"):
        expand("default", [SmArch.SM100])
    with pytest.raises(ValueError, match=r"unknown preset 'big'; valid: none, smoke, default, full"):
        expand("big", [SmArch.SM80])


def test_a_cell_knows_the_smallest_preset_that_holds_it() -> None:
    for preset, smaller in zip(PRESETS[1:], PRESETS, strict=False):
        for key in set(expand(preset, GEMM_ARCHS)) - set(expand(smaller, GEMM_ARCHS)):
            assert preset_of(key) == preset
    assert preset_of(replace(FULL[0], swizzle=1)) is None


def _schedules(preset: str, dtype: D) -> set[tuple[Any, ...]]:
    keys = [k for k in expand(preset, [SmArch.SM90A]) if k.generation == "sm90" and k.a is k.d is dtype]
    return {(k.tile, k.cluster, k.mainloop, k.scheduler) for k in keys}


@pytest.mark.parametrize("dtype", [D.F16, D.BF16])
def test_hopper_has_tiles_from_small_to_large(dtype: D) -> None:
    full = _schedules("full", dtype)
    tiles = {tile[:2] for tile, *_ in full}
    assert len(full) >= 9
    assert {(64, 64), (128, 128), (128, 256)} <= tiles
    assert {mainloop for _, _, mainloop, _ in full} >= {"pingpong", "cooperative"}
    assert {"persistent", "fitted"} <= {scheduler for *_, scheduler in full}
    assert len(_schedules("default", dtype)) >= 3
    # Tiles of D^T, for few to some hundred rows of D: in steps of 16, and loaded once for several thread blocks.
    turned = {k for k in expand("full", [SmArch.SM90A]) if k.op == "gemm" and k.layout_d == "c" and k.a is dtype}
    for tile_m in (64, 128):
        told = {width for k in turned if k.tile[0] == tile_m for width in gemm_sm90.widths(k)}
        assert told >= {*range(64, 257, 16)}
    assert {k.layout_a + k.layout_b for k in turned} == {"rc", "cc", "cr", "rr"}
    # Rows of D are loaded once for several thread blocks, but for large products, of which 1x2 and 1x4 load the others
    # once.
    lone = {(k.tile[:2], k.cluster[:2]) for k in turned if k.d is dtype and k.cluster[0] == 1}
    of_bf16 = {((128, 256), (1, 2)), ((128, 256), (1, 4)), ((256, 192), (1, 2))}
    assert lone == {((192, 192), (1, 2))} | (of_bf16 if dtype is D.BF16 else set())


def test_tiles_of_other_widths_than_the_common_ones_have_instructions_as_wide() -> None:
    """Without the header CuTe multiplies a tile of 72 columns by nine instructions of 8; wgmma.h has some by itself."""
    header = '#include "atomr_cutlass/wgmma_widths.h"'
    own = Path(__file__).parents[2] / "cpp/include/atomr_cutlass/wgmma.h"
    widths = {int(width) for width in re.findall(r"^ATOMR_CUTLASS_WGMMA\((\d+),", own.read_text(), re.MULTILINE)}
    assert widths
    for key in expand("full", [SmArch.SM90A]):
        if key.generation == "sm90" and key.op == "gemm" and key.mainloop in ("pingpong", "cooperative"):
            # Of fp8 one operand may come through registers, unless both are contiguous along K.
            in_shared = key.a in HALF_TYPES or (key.a is key.b and key.a in FP8_TYPES and key.layout_b == "c")
            needed = key.tile[1] not in (8, 16, 32, 64, 96, 128, 192, 256, *(widths if in_shared else ()))
            assert render(key)[0].startswith(header) == needed, key.name
            wider = replace(key, tile=(key.tile[0], 72, key.tile[2]))
            assert render(wider)[0].startswith(header), wider.name


@pytest.mark.parametrize("arch", GEMM_ARCHS)
@pytest.mark.parametrize("dtype", [D.F16, D.BF16])
def test_half_types_have_every_layout_at_every_alignment(arch: SmArch, dtype: D) -> None:
    keys = [k for k in expand("full", [arch]) if k.a is k.d is dtype]
    trimmed = arch in (SmArch.SM90A, SmArch.SM100)  # where TMA kernels serve what is aligned
    for layouts in LAYOUTS:
        aligns = {(k.align_a, k.align_d) for k in keys if k.layout_a + k.layout_b == layouts}
        assert {(1, 1), (8, 8)} <= aligns
        assert (2, 2) in aligns or (trimmed and layouts not in COMMON_LAYOUTS)


@pytest.mark.parametrize("arch", GEMM_ARCHS)
def test_default_reaches_down_to_one_element_for_each_type_and_common_layout(arch: SmArch) -> None:
    default = expand("default", [arch])
    # Cells for aligned operands of sm_100a take a minute each: few are in `default`, and fallbacks follow them.
    few = arch is SmArch.SM100
    for a, d, math in [
        (D.F16, D.F16, "default"),
        (D.BF16, D.BF16, "default"),
        (D.F16, D.F32, "default"),
        (D.BF16, D.F32, "default"),
        (D.F32, D.F32, "ieee"),
        (D.F32, D.F32, "tf32"),
        (D.F32, D.F32, "3xtf32"),
        (D.F64, D.F64, "default"),
        (D.I8, D.I32, "default"),
    ]:
        layouts = ("rc",) if a is D.I8 else ("rr", "rc")
        for wanted in layouts:
            serving = [
                k
                for k in default
                if (k.a, k.d, k.math) == (a, d, math)
                and k.layout_a + k.layout_b == wanted
                and k.align_a == k.align_b == k.align_d == 1
            ]
            assert serving or (few and math in ("default", "tf32") and a is not D.F64), (arch, a, d, math, wanted)


def test_every_type_of_the_matrix_has_cells() -> None:
    everything = [key for _, key in cells(GEMM_ARCHS)]
    for (a, b, math), outputs in rules.GEMM_OUTPUTS.items():
        for d in outputs:
            assert gemm_types(a, b, d, math)
            for arch in GEMM_ARCHS:
                if a in FP8_TYPES or a is D.F4E2M1:
                    continue
                assert any((k.a, k.b, k.d, k.math, k.arch) == (a, b, d, math, arch) for k in everything), (a, d, arch)


@pytest.mark.parametrize("arch", [SmArch.SM89, SmArch.SM90A, SmArch.SM120])
def test_fp8_has_every_pair_of_operands_and_every_output(arch: SmArch) -> None:
    keys = [k for k in FULL if k.arch is arch and k.op == "gemm" and k.a in FP8_TYPES]
    of_matrix = [k for _, k in cells([arch]) if k.op == "gemm" and k.a in FP8_TYPES]
    have, every = (
        {(k.a, k.b, k.d) for k in some if k.math == "default" and k.epilogue == "scaled"} for some in (keys, of_matrix)
    )
    pairs = [(a, b) for a in FP8_TYPES for b in FP8_TYPES]
    assert every >= {(a, b, d) for a, b in pairs for d in rules.GEMM_OUTPUTS[a, b, "default"]}
    # What is rare is compiled at run time where presets are full.
    assert have >= {(a, b, D.BF16) for a, b in pairs}
    assert arch is SmArch.SM90A or have == every
    assert {k.math for k in keys} == {"default", "fast"}
    # Slices of K are accumulated in f32 with a scale for each row: what blockwise scales become on sm_89.
    assert (D.F8E4M3, D.F8E4M3, D.F32) in have
    for a, b in pairs:
        assert any((k.a, k.b, k.align_a, k.align_d) == (a, b, 1, 1) for k in keys)


def test_fp8_of_hopper_has_block_scales_and_fits_default() -> None:
    keys = [k for k in FULL if k.arch is SmArch.SM90A and k.op == "gemm" and k.a in FP8_TYPES]
    blocks = {k.d for k in keys if k.scale_granularity == BLOCKWISE}
    assert blocks >= {D.BF16, D.F16, D.F32}
    assert 1 <= sum(preset_of(k) == "default" for k in keys) <= 4


def test_wide_tiles_of_fp8_have_fast_accumulation_along_k_and_narrow_results() -> None:
    found = next(k for k in FULL if k.a is D.F8E4M3 and k.tile[:2] == (192, 192))
    wide = replace(found, scheduler="persistent")
    pingpong = replace(wide, tile=(128, 176, 128), mainloop="pingpong")
    assert supports(found)
    assert supports(wide)
    assert supports(pingpong)
    for refused in (
        replace(wide, tile=(192, 208, 128)),
        replace(wide, math="default"),
        replace(wide, d=D.F32, align_d=4),
        replace(wide, d=D.F8E4M3, align_d=16),
        replace(wide, scheduler="streamk"),
        replace(wide, layout_a="c", layout_b="c"),
        replace(pingpong, tile=(128, 192, 128)),
        replace(pingpong, layout_a="c"),
    ):
        assert not supports(refused), refused.name


def test_fp8_needs_sm_89() -> None:
    key = _one(generation="sm80", arch=SmArch.SM89, a=D.F8E4M3)
    assert set(FP8_ARCHS) == {arch for arch in SmArch if supports(replace(key, arch=arch))}
    assert "sm_89 or later" in supports(replace(key, arch=SmArch.SM86)).reason


def test_elements_narrower_than_an_async_copy_use_twostage() -> None:
    for key in FULL:
        if (
            key.op == "gemm"
            and key.generation == "sm80"
            and key.mainloop not in ANYWHERE  # they load the words, or vectors, in which elements lie
            and min(key.align_a * key.a.bits, key.align_b * key.b.bits) < 32
        ):
            assert key.mainloop == "twostage"


@pytest.mark.parametrize(
    ("types", "word"),
    [
        ((D.F16, D.BF16, D.F16, "default"), "one dtype"),
        ((D.F16, D.F16, D.F64, "default"), "f16 operands give"),
        ((D.F16, D.F16, D.F16, "tf32"), "does not apply"),
        ((D.F8E4M3, D.I8, D.BF16, "default"), "one dtype"),
        ((D.F8E4M3, D.F8E5M2, D.I32, "fast"), "e4m3 operands give"),
        ((D.I32, D.I32, D.I32, "default"), "no GEMM kernel takes i32"),
    ],
)
def test_types_without_kernels_are_refused_with_the_reason(types: tuple[D, D, D, str], word: str) -> None:
    status = gemm_types(*types)
    assert not status
    assert word in status.reason


def test_support_by_dtype_and_arch() -> None:
    assert matrix.is_supported_for(D.BF16, SmArch.SM90A)
    assert matrix.is_supported_for(D.TF32, SmArch.SM80)
    assert not matrix.is_supported_for(D.I32, SmArch.SM80)
    assert matrix.is_supported_for(D.F16, SmArch.SM120)
    assert not matrix.is_fp8_supported(SmArch.SM86)
    assert matrix.is_fp8_supported(SmArch.SM89)
    assert matrix.is_fp8_supported(SmArch.SM90A)
    assert not matrix.is_fp4_supported(SmArch.SM90A)


def _one(**wanted: Any) -> KernelKey:
    return next(k for k in FULL if all(getattr(k, name) == value for name, value in wanted.items()))


SM80 = _one(generation="sm80", arch=SmArch.SM80, a=D.F16, d=D.F16, mainloop="multistage", align_a=8)
SM90 = _one(generation="sm90", a=D.BF16, d=D.BF16, mainloop="pingpong", epilogue_schedule="tma")
INT8 = _one(generation="sm80", a=D.I8)
FP8 = _one(generation="sm90", a=D.F8E4M3, b=D.F8E4M3, d=D.BF16, math="default", mainloop="cooperative")
BLOCKS = _one(generation="sm90", scale_type="f32", mainloop="cooperative")
SIMT = _one(math="ieee")


@pytest.mark.parametrize(
    ("key", "change", "word"),
    [
        (SM80, {"op": "conv"}, "valid: gemm"),
        (SM80, {"generation": "sm70"}, "valid: sm80, sm90"),
        (SM90, {"arch": SmArch.SM80}, "do not compile for sm_80"),
        (SM80, {"epilogue": "gelu"}, "unknown epilogue"),
        (SM80, {"layout_a": "x"}, "unknown layout 'x' of A"),
        (SM80, {"tile": (0, 128, 32)}, "at least 1"),
        (SM80, {"warps": (-2, 2, 1)}, "not negative"),
        (SM80, {"align_b": 3}, "power of two"),
        (SM80, {"align_d": 0}, "power of two"),
        (SM80, {"swizzle": 3}, "swizzles are 1, 2, 4 and 8"),
        (SM90, {"stages": -1}, "not negative"),
        (SM90, {"cluster": (0, 1, 1)}, "at least 1"),
        (SM90, {"tile": (64, 0, 64)}, "at least 1"),
        (SM80, {"b": D.BF16}, "one dtype"),
        (SM80, {"acc": D.F16}, "accumulate in f32"),
        (SM80, {"layout_d": "c"}, "D^T = B^T A^T"),
        (SM80, {"mainloop": "pingpong"}, "multistage and twostage"),
        (SM80, {"mainloop": "twostage"}, "has 2 stages"),
        (SM80, {"stages": 2}, "at least 3 stages"),
        (SM80, {"cluster": (2, 1, 1)}, "no clusters"),
        (SM80, {"scheduler": "streamk"}, "identity scheduler"),
        (SM80, {"align_a": 1}, "cp.async"),
        (SM80, {"align_d": 16}, "at most 16 bytes"),
        (SM80, {"warps": (0, 2, 1)}, "warps must divide"),
        (SM80, {"tile": (128, 128, 24)}, "instruction must divide"),
        (SM80, {"stages": 40}, "bytes of shared memory"),
        (SIMT, {"align_a": 2}, "single elements"),
        (INT8, {"epilogue": "scaled"}, "products of tensor cores in f32"),
        (SM80, {"scale_type": "f32", "scale_granularity": BLOCKWISE}, "no block scales"),
        (FP8, {"layout_b": "r"}, "make B contiguous along K"),
        (FP8, {"layout_a": "c"}, "make A contiguous along K"),
        (FP8, {"layout_a": "c", "layout_b": "r", "math": "fast"}, "need A or B contiguous along K"),
        (FP8, {"tile": (128, 256, 128)}, "would spill"),
        (FP8, {"scale_type": "f32"}, "1x128 elements of A"),
        (BLOCKS, {"scale_granularity": (1, 1, 128)}, "1x128 elements of A"),
        (BLOCKS, {"math": "fast"}, "full accumulation"),
        (BLOCKS, {"scheduler": "streamk"}, "persistent scheduler"),
        (BLOCKS, {"tile": (128, 64, 128)}, "the N tile of a block-scaled sm90 kernel is 128"),
        (INT8, {"layout_b": "r"}, "make B contiguous along K"),
        (INT8, {"layout_a": "c"}, "a = a.T.contiguous().T"),
        (SM90, {"a": D.F64, "b": D.F64, "d": D.F64, "acc": D.F64}, "WGMMA multiplies"),
        (SM90, {"mainloop": "multistage"}, "pingpong and cooperative"),
        (SM90, {"mainloop": "warpspecialized"}, "pingpong and cooperative"),
        (SM90, {"scheduler": "identity"}, "fitted, persistent, sliced and streamk"),
        (SM90, {"mainloop": "cooperative", "scheduler": "sliced", "tile": (256, 128, 64)}, "64 rows or cooperative"),
        (SM90, {"mainloop": "pingpong", "scheduler": "sliced", "tile": (64, 208, 64)}, "at most 192 columns"),
        (SM90, {"scheduler": "sliced", "epilogue_schedule": "nosmem", "align_d": 1}, "store f16 and bf16 by TMA"),
        (SM90, {"scheduler": "streamk"}, "cooperative mainloop"),
        (SM90, {"mainloop": "cooperative", "tile": (320, 128, 64)}, "192 or multiples of 128"),
        (SM90, {"mainloop": "cooperative", "tile": (192, 256, 64)}, "at most 104 registers"),
        (SM90, {"mainloop": "cooperative", "tile": (192, 128, 64), "d": D.F32, "align_d": 4}, "by three warp groups"),
        (SM90, {"scheduler": "fitted", "tile": (128, 144, 64)}, "of 64 where B is row-major"),
        (SM90, {"scheduler": "fitted", "tile": (128, 136, 64), "layout_b": "c"}, "multiples of 16"),
        (SM90, {"scheduler": "fitted", "epilogue_schedule": "nosmem"}, "store f16 and bf16 by TMA"),
        (SM90, {"epilogue_schedule": ""}, "tma and nosmem"),
        (SM90, {"align_a": 4}, "TMA needs A aligned to 16 bytes"),
        (SM90, {"align_b": 4}, "TMA needs B aligned to 16 bytes"),
        (SM90, {"align_d": 1}, "TMA epilogue needs D aligned"),
        (SM90, {"tile": (96, 128, 64)}, "multiples of 64"),
        (SM90, {"tile": (128, 128, 32)}, "128 bytes"),
        (SM90, {"tile": (256, 256, 64), "mainloop": "cooperative"}, "would spill"),
        (SM90, {"cluster": (4, 4, 1)}, "at most 8"),
        (SM90, {"swizzle": 8}, "run time"),
    ],
)
def test_what_cutlass_lacks_is_refused_with_the_reason(key: KernelKey, change: dict[str, Any], word: str) -> None:
    assert supports(key)
    assert_refused(replace(key, **change), word)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        # One buffer of D, which waits until TMA has read it.
        (FP8, {"d": D.F8E4M3, "align_d": 16, "mainloop": "cooperative", "tile": (128, 32, 128)}),
        (SM90, {"scheduler": "fitted", "layout_b": "r"}),
        (SM90, {"mainloop": "cooperative", "tile": (192, 208, 64)}),
    ],
)
def test_what_our_kernels_have_beyond_cutlass_is_supported(key: KernelKey, change: dict[str, Any]) -> None:
    assert supports(replace(key, **change))


_numbers = st.sampled_from([-1, 0, 1, 2, 3, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 1024])
_triples = st.tuples(_numbers, _numbers, _numbers)
_dtypes = st.sampled_from(list(D))
_words = st.sampled_from(
    (
        "",
        "r",
        "c",
        "gemm",
        "sm80",
        "sm90",
        "multistage",
        "twostage",
        "pingpong",
        "cooperative",
        "warpspecialized",
        "tma",
        "nosmem",
        "identity",
        "persistent",
        "streamk",
        "default",
        "ieee",
        "tf32",
        "3xtf32",
        "fast",
        "lc",
        "scaled",
        "f32",
        "?",
    )
)
_fields: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("a", "b", "d", "acc"), _dtypes),
    **dict.fromkeys(("tile", "cluster", "warps", "scale_granularity"), _triples),
    **dict.fromkeys(("align_a", "align_b", "align_d", "stages", "swizzle"), _numbers),
    **dict.fromkeys(
        ("op", "generation", "mainloop", "epilogue_schedule", "scheduler", "math", "epilogue", "scale_type"), _words
    ),
    **dict.fromkeys(("layout_a", "layout_b", "layout_d"), _words),
    "arch": st.sampled_from(list(SmArch)),
}


@st.composite
def _mutated(draw: st.DrawFn) -> KernelKey:
    key = draw(st.sampled_from(FULL))
    names = draw(st.lists(st.sampled_from(sorted(_fields)), max_size=4, unique=True))
    return replace(key, **{name: draw(_fields[name]) for name in names})


@given(_mutated())
@settings(max_examples=500, deadline=None)
def test_any_key_is_either_renderable_or_refused_with_a_reason(key: KernelKey) -> None:
    status = supports(key)
    assert status.ok != bool(status.reason)
    if status:
        assert min(*key.tile, *key.cluster, key.align_a, key.align_b, key.align_d) >= 1
        for flavour in ("aot", "nvrtc"):
            source, name = render(key, flavour=flavour)
            assert name in source
            assert "@" not in source


def test_ten_thousand_keys_expand_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    base = list(cells(GEMM_ARCHS))
    many = [(FULL_TIER, replace(key, swizzle=i)) for i, (_, key) in enumerate(islice(cycle(base), 10_000))]
    monkeypatch.setattr(matrix, "cells", lambda _archs: iter(many))
    best = min(_seconds_to_expand() for _ in range(3))
    assert best < 1.0


def _seconds_to_expand() -> float:
    # Of this process alone: other processes' compilers must not fail the test.
    start = time.process_time()
    keys = expand("full", GEMM_ARCHS)
    check_unique(keys)
    assert len(keys) == 10_000
    return time.process_time() - start


def test_ffma_kernels_load_vectors_where_they_were_measured() -> None:
    full = expand("full", list(SmArch))
    vectors = [key for key in full if (key.op, key.math) == ("gemm", "ieee") and key.align_a > 1]
    assert {(key.arch, key.align_a, key.align_b, key.tile[2]) for key in vectors} == {(SmArch.SM90A, 4, 4, 16)}
    for changes, reason in (
        ({"arch": SmArch.SM80}, "for sm_90a"),
        ({"align_b": 1}, "vectors of four f32"),
        ({"tile": (64, 64, 8)}, "16 along K"),
        ({"tile": (64, 192, 16)}, "tiles of 32 to 256"),
        ({"warps": (1, 2, 1)}, "four or eight warps"),
        ({"tile": (64, 64, 16), "warps": (2, 2, 1)}, "64 to 128 results a thread"),
        ({"tile": (256, 256, 16), "warps": (4, 2, 1)}, "64 to 128 results a thread"),
    ):
        assert_refused(replace(vectors[0], **changes), reason)


def test_dmma_kernels_load_vectors_where_they_were_measured() -> None:
    vectors = [key for key in expand("full", list(SmArch)) if key.a is D.F64 and key.align_a > 1]
    assert {(key.arch, key.align_a, key.align_b) for key in vectors} == {(SmArch.SM90A, 2, 2)}
    assert {instruction_shape(key) for key in vectors} == {(16, 8, 8), (16, 8, 16)}
    for changes, reason in (
        ({"arch": SmArch.SM80}, "for sm_90a"),
        ({"align_b": 1}, "vectors of two"),
        ({"tile": (64, 64, 8)}, "without spills: 64x128x16"),
        ({"tile": (128, 128, 16)}, "without spills: 64x128x16"),
        ({"warps": (4, 2, 1)}, "two by two warps"),
        ({"tile": (64, 96, 16), "layout_b": ROW}, "32, 64 or 128 there"),
        ({"tile": (96, 64, 16), "layout_a": COLUMN}, "32, 64 or 128 there"),
    ):
        assert_refused(replace(vectors[0], **changes), reason)


def test_kernels_with_vector_loads_serve_epilogue_trees() -> None:
    full = [key for key in expand("full", [SmArch.SM90A]) if (key.op, key.generation) == ("gemm", "sm80")]
    vectors = [key for key in full if key.align_a > 1 and (key.math == "ieee" or key.a is D.F64)]
    assert len(vectors) == 13
    for key in vectors:
        assert supports(replace(key, epilogue=trees.NAMED["bias_relu"](key)[0]))
