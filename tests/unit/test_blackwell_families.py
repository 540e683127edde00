"""The families of sm_100a and sm_120a: their cells, what they refuse and why, and what their sources say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from generator.archs import SmArch
from generator.audit import expected_instruction
from generator.dtypes import CutlassDtype as D
from generator.families.gemm_sm100 import FP4_SCALES, gemm_sm100
from generator.families.gemm_sm120 import gemm_sm120
from generator.families.grouped_sm100 import grouped_sm100
from generator.key import KernelKey, check_unique
from generator.matrix import expand, preset_of, supports
from generator.render import render
from generator.rules import BLOCKWISE

FAMILIES = {("gemm", "sm100"), ("grouped_gemm", "sm100"), ("gemm", "sm120")}


def _cells(preset: str, arch: SmArch) -> list[KernelKey]:
    return [key for key in expand(preset, [arch]) if (key.op, key.generation) in FAMILIES]


FULL = [*_cells("full", SmArch.SM100), *_cells("full", SmArch.SM120)]

ONE, PAIR = ((128, 128), (1, 1), "1sm"), ((256, 128), (2, 1), "2sm")
BF16 = gemm_sm100(D.BF16, D.BF16, "rc", *ONE)
BF16_PAIR = gemm_sm100(D.BF16, D.BF16, "rc", *PAIR)
E4M3 = gemm_sm100(D.F8E4M3, D.BF16, "rc", *ONE, epilogue="scaled")
BLOCKS = gemm_sm100(D.F8E4M3, D.BF16, "rc", *ONE, scale_granularity=BLOCKWISE)
NVFP4 = gemm_sm100(D.F4E2M1, D.BF16, "rc", *ONE, scale_type="ue4m3", scale_granularity=FP4_SCALES["ue4m3"])
MXFP4 = gemm_sm100(D.F4E2M1, D.BF16, "rc", *PAIR, scale_type="ue8m0", scale_granularity=FP4_SCALES["ue8m0"])
NVFP4_120 = gemm_sm120(D.BF16, "ue4m3", (128, 128, 128))
GROUPED = grouped_sm100(D.BF16, D.BF16, "rc", *ONE)
GROUPED_BLOCKS = grouped_sm100(D.F8E4M3, D.BF16, "rc", *PAIR, scale_granularity=BLOCKWISE)


def test_cells_stay_few_enough_to_build() -> None:
    assert len(_cells("full", SmArch.SM100)) <= 144
    assert len(_cells("full", SmArch.SM120)) <= 20
    for arch in (SmArch.SM100, SmArch.SM120):
        assert _cells("smoke", arch) == []
    assert {(key.a, key.generation) for key in _cells("default", SmArch.SM100)} == {
        (D.F16, "sm100"),
        (D.BF16, "sm100"),
        (D.F4E2M1, "sm100"),
    }
    assert [key.scale_type for key in _cells("default", SmArch.SM120)] == ["ue4m3"]


def test_every_cell_is_supported_and_has_a_name_of_its_own() -> None:
    assert {key.name: supports(key).reason for key in FULL if not supports(key)} == {}
    check_unique(FULL)


@pytest.mark.parametrize("a", [D.F16, D.BF16, D.F8E4M3])
@pytest.mark.parametrize("layouts", ["rr", "rc", "cr", "cc"])
def test_umma_reads_operands_of_any_layout(a: D, layouts: str) -> None:
    assert any((key.op, key.a, key.layout_a + key.layout_b) == ("gemm", a, layouts) for key in FULL)


@pytest.mark.parametrize("scale_type", FP4_SCALES)
@pytest.mark.parametrize("d", [D.BF16, D.F16, D.F32])
@pytest.mark.parametrize("generation", ["sm100", "sm120"])
def test_fp4_has_both_kinds_of_scales_and_every_output(generation: str, d: D, scale_type: str) -> None:
    assert any((key.generation, key.d, key.scale_type) == (generation, d, scale_type) for key in FULL)


@pytest.mark.parametrize(
    ("key", "change", "reason"),
    [
        (BF16, {"math": "3xtf32"}, "math '3xtf32' does not apply"),
        (BF16, {"a": D.F64, "b": D.F64, "d": D.F64, "acc": D.F64}, "UMMA multiplies f16, bf16, tf32, i8, fp8 and fp4"),
        (BF16, {"arch": SmArch.SM120}, "sm100 kernels of gemm do not compile for sm_120a"),
        (BF16, {"mainloop": "pingpong"}, "sm100 mainloops are 1sm and 2sm"),
        (BF16, {"tile": (256, 128, 64)}, "1sm tiles are 64 or 128 along M"),
        (BF16, {"tile": (128, 96, 64)}, "64, 128, 192 or 256 along N"),
        (BF16, {"tile": (128, 128, 32)}, "the K tile is 128 bytes"),
        (BF16, {"align_a": 4}, "TMA needs A aligned to 16 bytes: 8 elements of bf16"),
        (BF16, {"align_d": 1}, "the TMA epilogue needs D aligned to 16 bytes"),
        (BF16, {"epilogue": "lc_relu"}, "unknown epilogue 'lc_relu'"),
        (BF16, {"scheduler": "grouped"}, "schedulers of gemm of the sm100 generation: persistent, streamk"),
        (BF16, {"scheduler": "streamk"}, "more than 64 columns would spill"),
        (E4M3, {"scheduler": "streamk"}, "stream-K of the sm100 generation is for f16 and bf16"),
        (BF16, {"cluster": (4, 4, 1)}, "at most 8 thread blocks"),
        (BF16, {"cluster": (3, 1, 1)}, "powers of two"),
        (BF16, {"stages": 1}, "at least 2 stages"),
        (BF16, {"scale_type": "f32", "scale_granularity": BLOCKWISE}, "block scales of sm100 kernels are f32 for fp8"),
        (BF16_PAIR, {"cluster": (1, 1, 1)}, "an even number of thread blocks along M"),
        (E4M3, {"math": "fast"}, "fast accumulation does not exist"),
        (gemm_sm100(D.I8, D.I32, "rc", *ONE), {"epilogue": "scaled"}, "the scaled epilogue is for accumulators of f32"),
        (E4M3, {"tile": (64, 64, 128)}, "128 rows in each thread block"),
        (BLOCKS, {"tile": (128, 256, 128)}, "128x128x128 .1sm. and 256x128x128 .2sm."),
        (BLOCKS, {"scale_granularity": (1, 1, 128)}, "one for 1x128 of A and one for 128x128 of B"),
        (BLOCKS, {"epilogue_schedule": "nosmem"}, "the TMA epilogue"),
        (NVFP4, {"scale_type": "", "scale_granularity": (0, 0, 0)}, "fp4 is multiplied with block scales"),
        (NVFP4, {"scale_type": "ue8m0"}, "ue8m0 for 32 .mxfp4."),
        (NVFP4, {"layout_b": "r"}, "both contiguous along K"),
        (NVFP4, {"epilogue": "scaled"}, "the epilogue is lc"),
        (NVFP4, {"tile": (128, 64, 256)}, "128 rows at a time"),
        (MXFP4, {"tile": (128, 128, 256)}, "128 .1sm. and 256 .2sm. along M"),
        (NVFP4_120, {"mainloop": "pingpong"}, "pingpong spills"),
        (NVFP4_120, {"tile": (256, 128, 128)}, "256 rows spill"),
        (NVFP4_120, {"cluster": (2, 1, 1)}, "sm_120 has no clusters"),
        (NVFP4_120, {"a": D.BF16, "b": D.BF16}, "the sm120 generation is for fp4"),
        (GROUPED, {"scheduler": "persistent"}, "schedulers of grouped_gemm of the sm100 generation: grouped"),
        (GROUPED, {"d": D.F16}, "grouped bf16 operands give bf16, f32, not f16"),
        (GROUPED, {"epilogue_schedule": "nosmem"}, "the TMA epilogue"),
        (GROUPED_BLOCKS, {"epilogue": "scaled"}, "fold a scale into alpha"),
    ],
)
def test_what_there_is_not_is_refused_with_the_reason(key: KernelKey, change: dict[str, Any], reason: str) -> None:
    assert supports(key)
    with pytest.raises(AssertionError, match=reason):
        _accept(replace(key, **change))


def _accept(key: KernelKey) -> None:
    status = supports(key)
    assert status, status.reason


@pytest.mark.parametrize(
    ("key", "header", "words"),
    [
        (BF16, "gemm_sm100", ["KernelTmaWarpSpecialized1SmSm100,", "epilogue::TmaWarpSpecialized1Sm,", "NoScales"]),
        (replace(BF16_PAIR, epilogue_schedule="nosmem"), "gemm_sm100", ["2SmSm100,", "::NoSmemWarpSpecialized2Sm,"]),
        (E4M3, "gemm_sm100", ["cutlass::float_e4m3_t", "ScaledEpilogue"]),
        (BLOCKS, "gemm_sm100_blockwise", ["KernelTmaWarpSpecializedBlockwise1SmSm100", "FloatScales<1, 128, 128>"]),
        (NVFP4, "gemm_sm100_fp4", ["1SmNvf4Sm100", "VectorScales<cutlass::float_ue4m3_t, 16>"]),
        (MXFP4, "gemm_sm100_fp4", ["2SmMxf4Sm100", "VectorScales<cutlass::float_ue8m0_t, 32>"]),
        (NVFP4_120, "gemm_sm120", ["arch::Sm120", "KernelTmaWarpSpecializedNvf4Sm120"]),
        (GROUPED, "grouped_sm100", ["KernelPtrArrayTmaWarpSpecialized1SmSm100", "ATOMR_CUTLASS_SETUP", "0, 0, 0"]),
        (GROUPED_BLOCKS, "grouped_sm100", ["KernelPtrArrayTmaWarpSpecializedBlockwise2SmSm100", "1, 128, 128"]),
    ],
)
def test_sources(key: KernelKey, header: str, words: list[str]) -> None:
    source, name = render(key, flavour="nvrtc")
    assert name in source
    for word in (f'"atomr_cutlass/{header}.h"', *words):
        assert word in source


@pytest.mark.parametrize(
    ("key", "instruction"),
    [
        (BF16, "UTCHMMA"),
        (BF16_PAIR, "UTCHMMA...2CTA"),
        (gemm_sm100(D.F32, D.F32, "rr", *PAIR, math="tf32"), "UTCHMMA...2CTA"),
        (gemm_sm100(D.I8, D.I32, "rc", *ONE), "UTCIMMA"),
        (BLOCKS, "UTCQMMA"),
        (NVFP4, "UTCOMMA"),
        (MXFP4, "UTCOMMA...2CTA"),
        (GROUPED_BLOCKS, "UTCQMMA...2CTA"),
        (NVFP4_120, "OMMA...SF"),
    ],
)
def test_the_instruction_that_the_machine_code_must_hold(key: KernelKey, instruction: str) -> None:
    assert str(expected_instruction(key)) == instruction


def test_presets_of_the_first_cells() -> None:
    assert preset_of(BF16) == "default"
    assert preset_of(NVFP4_120) == "default"
    assert preset_of(NVFP4) == "full"


def test_simt_tiles_that_spill_on_sm_120a_are_refused() -> None:
    large = [key for key in expand("full", [SmArch.SM80]) if key.math == "ieee" and key.tile == (256, 128, 8)]
    assert large
    for key in large:
        assert supports(key)
        status = supports(replace(key, arch=SmArch.SM120))
        assert not status
        assert "at most 64 results a thread" in status.reason
    cells = [key for key in expand("full", [SmArch.SM120]) if key.math == "ieee" and key.op == "gemm"]
    assert {key.tile[:2] for key in cells} == {(128, 128), (128, 64), (64, 128)}
