"""The families of grouped GEMM: which keys they take, why not the others, and what their sources promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from generator.archs import SmArch
from generator.dtypes import CutlassDtype as D
from generator.epilogue.lower import has_tree
from generator.families.conv import ACTIVATIONS
from generator.key import KernelKey
from generator.matrix import cells, preset_of, supports, with_epilogue
from generator.render import render

ARCHS = (SmArch.SM80, SmArch.SM86, SmArch.SM89, SmArch.SM90A)


def grouped(arch: SmArch) -> list[KernelKey]:
    return [key for _, key in cells([arch]) if key.op == "grouped_gemm"]


def grouped_key(arch: SmArch, **fields: Any) -> KernelKey:
    return next(key for key in grouped(arch) if all(getattr(key, name) == value for name, value in fields.items()))


@pytest.mark.parametrize("arch", ARCHS)
def test_cells_are_few_supported_and_in_full_only(arch: SmArch) -> None:
    keys = grouped(arch)
    assert 0 < len(keys) <= 48
    assert len(set(keys)) == len(keys)
    assert {key.name: supports(key).reason for key in keys if not supports(key)} == {}
    assert {preset_of(key) for key in keys if not has_tree(key.epilogue)} == {"full"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [D.F16, D.BF16])
def test_every_arch_has_weights_in_both_layouts_and_gradients_of_weights(arch: SmArch, dtype: D) -> None:
    layouts = {(key.layout_a, key.layout_b) for key in grouped(arch) if key.a is dtype}
    assert layouts >= {("r", "r"), ("r", "c"), ("c", "r")}


def test_hopper_serves_few_tokens_and_every_way_of_scaling_fp8() -> None:
    keys = [key for key in grouped(SmArch.SM90A) if key.generation == "sm90"]
    assert {key.tile[0] for key in keys if key.a is D.BF16} == {64, 128}
    fp8 = [key for key in keys if key.a.bits == 8]
    assert {(key.math, key.epilogue, key.scale_granularity) for key in fp8} == {
        ("fast", "scaled", (0, 0, 0)),
        ("default", "scaled", (0, 0, 0)),
        ("fast", "scaled_common", (0, 0, 0)),
        ("default", "scaled_common", (0, 0, 0)),
        ("default", "lc", (1, 128, 128)),
    }
    assert {key.tile[2] for key in fp8} == {128}


@pytest.mark.parametrize("flavour", ["aot", "nvrtc"])
def test_sources_have_a_setup_kernel(flavour: str) -> None:
    for arch in (SmArch.SM80, SmArch.SM90A):
        source, name = render(grouped(arch)[0], flavour=flavour)
        assert "#define ATOMR_CUTLASS_SETUP" in source
        assert f"{name}_setup" in source
    dense = next(key for _, key in cells([SmArch.SM80]) if key.op == "gemm")
    assert "#define ATOMR_CUTLASS_SETUP" not in render(dense, flavour=flavour)[0]


BIAS = "evt:acc;input:row:bf16;add:0:1;out:2"
BLACKWELL = next(key for key in grouped(SmArch.SM100) if key.a is D.BF16)
HOPPER = grouped_key(SmArch.SM90A, generation="sm90", a=D.BF16, d=D.BF16)
FP8 = grouped_key(SmArch.SM90A, a=D.F8E4M3, epilogue="scaled", math="default")
BLOCKWISE = grouped_key(SmArch.SM90A, scale_type="f32")
AMPERE = grouped_key(SmArch.SM80, a=D.BF16, mainloop="multistage")


@pytest.mark.parametrize(
    ("key", "fields", "reason"),
    [
        (HOPPER, {"a": D.F32, "b": D.F32, "d": D.F32, "math": "tf32"}, "multiply f16, bf16 and fp8, not f32"),
        (HOPPER, {"d": D.F16}, "grouped bf16 operands give bf16, f32, not f16"),
        (HOPPER, {"scheduler": "persistent"}, "have the grouped scheduler, not 'persistent'"),
        (HOPPER, {"mainloop": "warpspecialized"}, "mainloops are pingpong and cooperative"),
        (HOPPER, {"epilogue_schedule": "nosmem"}, "the sm80 generation stores any D"),
        (HOPPER, {"align_b": 4}, "TMA needs B aligned to 16 bytes: 8 elements of bf16"),
        (HOPPER, {"layout_d": "c"}, "D is row-major"),
        (HOPPER, {"tile": (256, 256, 64), "mainloop": "cooperative"}, "would spill"),
        (HOPPER, {"tile": (96, 128, 64)}, "multiples of 64 along M"),
        (HOPPER, {"tile": (128, 128, 32)}, "the K tile is 128 bytes"),
        (HOPPER, {"cluster": (1, 1, 2)}, "none along K"),
        (HOPPER, {"swizzle": 8}, "the swizzle at run time"),
        (HOPPER, {"scale_granularity": (1, 128, 128)}, "goes with a scale type"),
        (HOPPER, {"scale_granularity": (1, 128, 128), "scale_type": "f32"}, "block scales are for fp8"),
        (HOPPER, {"epilogue": "lc_relu"}, "unknown epilogue 'lc_relu'"),
        (FP8, {"layout_b": "r"}, "make B contiguous along K, for example b = b.T.contiguous().T"),
        (FP8, {"tile": (128, 256, 128)}, "would spill"),
        (FP8, {"d": D.F32}, "grouped e4m3 operands give bf16, f16, not f32"),
        (BLOCKWISE, {"scale_granularity": (128, 128, 128)}, "one for 1 x 128 of A and 128 x 128 of B"),
        (BLOCKWISE, {"math": "fast"}, "with math 'default'"),
        (BLOCKWISE, {"tile": (128, 64, 128)}, "a multiple of 128 along N"),
        (BLOCKWISE, {"epilogue": "scaled"}, "fold a scale into alpha"),
        (BLOCKWISE, {"epilogue": "scaled+evt:acc;relu:0;out:1"}, "fold a scale into alpha"),
        (HOPPER, {"epilogue": f"lc+{BIAS.replace('row', 'column')}"}, "read rows and scalars, not a column"),
        (HOPPER, {"epilogue": f"lc+{BIAS.replace('row', 'matrix')}"}, "read rows and scalars, not a matrix"),
        (HOPPER, {"epilogue": f"lc+{BIAS.replace('row', 'source')}"}, "read rows and scalars, not a source"),
        (BLACKWELL, {"epilogue": f"lc+{BIAS.replace('row', 'column')}"}, "read rows and scalars, not a column"),
        (HOPPER, {"epilogue": f"lc+{BIAS};store:2:bf16"}, "grouped kernels store D alone"),
        (BLACKWELL, {"epilogue": f"lc+{BIAS};reduce:2:row:sum:f32"}, "grouped kernels store D alone"),
        (HOPPER, {"epilogue": "lc+evt:nonsense"}, "is no epilogue program"),
        (HOPPER, {"epilogue": f"gated+{BIAS}"}, "gated results are those of sm_90a's dense kernels"),
        (HOPPER, {"d": D.F8E4M3}, "bf16 operands give bf16, f32, f16, not e4m3"),
        (HOPPER, {"epilogue": f"lc+{BIAS}", "d": D.F16}, "grouped bf16 operands give bf16, f32, e4m3, e5m2, i8, not"),
        (FP8, {"epilogue": f"scaled+{BIAS}", "d": D.I8}, "not i8"),
        (BLACKWELL, {"epilogue": f"lc+{BIAS}", "d": D.F8E4M3}, "grouped bf16 operands give bf16, f32, not e4m3"),
        (AMPERE, {"epilogue": f"lc+{BIAS}"}, "a bias may come in the place of C"),
        (AMPERE, {"epilogue": "lc_nonsense"}, "unknown epilogue 'lc_nonsense'"),
        (AMPERE, {"epilogue": "scaled"}, "fold a scale into alpha"),
        (AMPERE, {"scheduler": "identity"}, "have the grouped scheduler"),
        (AMPERE, {"mainloop": "tma"}, "mainloops are multistage and twostage"),
        (AMPERE, {"stages": 2}, "a multistage mainloop has at least 3 stages"),
        (AMPERE, {"stages": 1}, "a multistage mainloop has at least 3 stages"),
        (AMPERE, {"align_a": 1}, "cp.async moves at least 4 bytes"),
        (AMPERE, {"align_d": 16}, "at most 16 bytes"),
        (AMPERE, {"warps": (3, 2, 1)}, "the warps must divide the tile"),
        (AMPERE, {"warps": (2, 2, 4)}, "the instruction must divide the warp tile"),
        (AMPERE, {"stages": 12}, "stages need"),
        (AMPERE, {"d": D.F16}, "grouped bf16 operands give bf16, f32, not f16"),
        (AMPERE, {"a": D.F64, "b": D.F64, "d": D.F64, "acc": D.F64}, "multiply f16, bf16 and fp8, not f64"),
        (
            grouped_key(SmArch.SM89, a=D.F8E4M3),
            {"arch": SmArch.SM86},
            "mma.sync on fp8 exists from sm_89 on",
        ),
    ],
)
def test_what_is_not_there_is_refused_with_the_reason(key: KernelKey, fields: dict[str, Any], reason: str) -> None:
    status = supports(replace(key, **fields))
    assert not status
    assert reason in status.reason


@pytest.mark.parametrize(
    "epilogue", ["lc", f"lc+{BIAS}", "lc+evt:acc;input:scalar:f32;multiply:0:1;input:row:f16;add:2:3;silu:4;out:5"]
)
@pytest.mark.parametrize("key", [HOPPER, BLACKWELL, BLOCKWISE], ids=lambda key: key.name)
def test_kernels_of_cutlass_3_evaluate_trees(key: KernelKey, epilogue: str) -> None:
    changed = replace(key, epilogue=epilogue)
    assert supports(changed)
    source = render(changed, flavour="nvrtc")[0]
    assert ("TreeEpilogue<atomr_cutlass::Tree, false" in source) == (epilogue != "lc")


@pytest.mark.parametrize(("key", "d"), [(HOPPER, D.F8E4M3), (HOPPER, D.I8), (FP8, D.F8E5M2)], ids=str)
def test_trees_quantize(key: KernelKey, d: D) -> None:
    changed = with_epilogue(key, f"{key.epilogue}+{BIAS}", d)
    assert supports(changed)
    assert changed.align_d == 16
    assert not supports(replace(changed, align_d=8))
    assert not supports(replace(changed, epilogue=key.epilogue))


def test_trees_on_top_of_scales() -> None:
    changed = replace(FP8, epilogue=f"scaled+{BIAS}")
    assert supports(changed)
    assert "TreeEpilogue<atomr_cutlass::Tree, true, atomr_cutlass::QuadLanes>" in render(changed, flavour="nvrtc")[0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels_of_cutlass_2_have_activations(activation: str) -> None:
    changed = replace(AMPERE, epilogue=f"lc_{activation}")
    assert supports(changed)
    assert changed.name != AMPERE.name
    assert f"atomr_cutlass::{ACTIVATIONS[activation]}>;" in render(changed, flavour="nvrtc")[0]
    assert "void>;" in render(AMPERE, flavour="nvrtc")[0]
