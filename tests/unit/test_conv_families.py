"""The convolution families: which keys exist, why the others do not, and what they render to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atomr_cutlass.generator.archs import SmArch
from atomr_cutlass.generator.dtypes import CutlassDtype
from atomr_cutlass.generator.families import FAMILIES
from atomr_cutlass.generator.families.base import SMOKE
from atomr_cutlass.generator.families.conv import ACTIVATIONS, EPILOGUES, LAYOUTS
from atomr_cutlass.generator.families.conv_sm80 import conv_sm80, depthwise
from atomr_cutlass.generator.families.conv_sm90 import conv_sm90
from atomr_cutlass.generator.key import KernelKey, check_unique, opcode_class
from atomr_cutlass.generator.matrix import cells, supports
from atomr_cutlass.generator.render import render
from atomr_cutlass.generator.rules import conv_types

D = CutlassDtype
OPS = ("conv2d_fprop", "conv2d_dgrad", "conv2d_wgrad")
ARCHS = (SmArch.SM80, SmArch.SM86, SmArch.SM89, SmArch.SM90A)
TILE = ((128, 128, 32), (2, 2, 1), 4)
ONE = ((64, 64, 32), (2, 2, 1), 2)


def conv_cells(arch: SmArch) -> list[tuple[int, KernelKey]]:
    return [(tier, key) for tier, key in cells([arch]) if key.op in OPS]


def sm80_key(op: str = "conv2d_fprop", **changes: object) -> KernelKey:
    stride_support = "unity" if op == "conv2d_dgrad" else ""
    key = conv_sm80(op, SmArch.SM80, D.BF16, D.BF16, "optimized", (8, 8, 8), TILE, stride_support=stride_support)
    return replace(key, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_cell_is_supported_and_has_its_own_name(arch: SmArch) -> None:
    found = [key for _, key in conv_cells(arch)]
    for key in found:
        assert supports(key), (key.name, supports(key).reason)
    assert len(check_unique(found)) == len(found) <= 84


@pytest.mark.parametrize("arch", ARCHS)
def test_smoke_has_a_cell_for_aligned_channels_and_one_that_takes_any(arch: SmArch) -> None:
    found = [key for tier, key in conv_cells(arch) if tier == SMOKE]
    assert {key.op for key in found} == {"conv2d_fprop"}
    assert sorted((key.align_a, key.align_b, key.align_d) for key in found) == [(1, 1, 1), (8, 8, 8)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [D.F16, D.BF16, D.F32])
def test_every_channel_count_and_group_is_served(arch: SmArch, op: str, dtype: D) -> None:
    found = [key for _, key in conv_cells(arch) if key.op == op and key.a is dtype]
    single = [key for key in found if max(key.align_a, key.align_b, key.align_d) == 1 and key.group_mode != "depthwise"]
    assert any(key.group_mode == "" for key in single)
    assert any(key.group_mode == "single" for key in single)
    assert any(key.group_mode == "depthwise" for key in found)
    if op == "conv2d_dgrad":
        assert {key.stride_support for key in single} == {"unity", "strided"}
    if op == "conv2d_wgrad":
        assert any(key.d is D.F32 and key.generation == "sm80" and not key.group_mode for key in found)


def test_fp8_goes_forward_where_there_is_an_instruction() -> None:
    fp8 = {(key.op, key.arch) for arch in ARCHS for _, key in conv_cells(arch) if key.a.bits == 8}
    assert fp8 == {("conv2d_fprop", SmArch.SM89), ("conv2d_fprop", SmArch.SM90A)}
    key = sm80_key(a=D.F8E4M3, b=D.F8E4M3, math="fast", align_a=16, align_b=16)
    assert "mma.sync multiplies fp8 on sm_89" in supports(key).reason


@pytest.mark.parametrize(
    ("op", "types", "reason"),
    [
        ("conv2d_dgrad", (D.F8E4M3, D.F8E4M3, D.BF16, "fast"), "forward only"),
        ("conv2d_fprop", (D.F8E4M3, D.F8E4M3, D.BF16, "default"), "their math is 'fast'"),
        ("conv2d_fprop", (D.F16, D.BF16, D.F16, "default"), "both operands have one dtype"),
        ("conv2d_fprop", (D.F16, D.F16, D.BF16, "default"), "give f16, f32, not bf16"),
        ("conv2d_fprop", (D.F32, D.F32, D.F32, "default"), "valid: 3xtf32, ieee, tf32"),
        ("conv2d_fprop", (D.I8, D.I8, D.I32, "default"), "no convolution takes i8 operands"),
    ],
)
def test_types_that_do_not_exist_are_refused(op: str, types: tuple[D, D, D, str], reason: str) -> None:
    assert reason in conv_types(op, *types).reason


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (sm80_key(epilogue="lc_swish"), "unknown epilogue"),
        (sm80_key("conv2d_wgrad", epilogue="lc_relu"), "no activation"),
        (sm80_key(layout_b="r"), "the layouts of conv2d_fprop"),
        (sm80_key(acc=D.F16), "accumulate in f32"),
        (sm80_key(iterator="few"), "iterators are"),
        (sm80_key("conv2d_wgrad", iterator="few_channels"), "only fprop"),
        (sm80_key(iterator="fixed_channels", align_a=4), "one length"),
        (sm80_key(stride_support="unity"), "stride support of conv2d_fprop"),
        (sm80_key("conv2d_dgrad", stride_support=""), "'unity' or 'strided'"),
        (sm80_key("conv2d_dgrad", stride_support="strided", swizzle=4), "swizzles are 1, 8"),
        (sm80_key("conv2d_dgrad", stride_support="strided", group_mode="single", swizzle=8), "swizzles are 4"),
        (sm80_key(group_mode="multiple"), "not 'multiple'"),
        (sm80_key(align_a=1), "twostage"),
        (sm80_key(align_d=16), "at most 16 bytes"),
        (sm80_key(stages=12), "bytes of shared memory"),
        (sm80_key(cluster=(2, 1, 1)), "no clusters"),
        (sm80_key(warps=(3, 2, 1)), "the warps must divide"),
        (replace(conv_sm90("conv2d_fprop", D.BF16, D.BF16, (128, 256))), "would spill"),
        (replace(conv_sm90("conv2d_fprop", D.BF16, D.BF16, (128, 128)), align_a=4), "16 bytes"),
        (replace(conv_sm90("conv2d_fprop", D.BF16, D.BF16, (128, 128)), group_mode="single"), "neither groups"),
        (replace(conv_sm90("conv2d_fprop", D.BF16, D.BF16, (128, 128)), mainloop="cooperative"), "warpspecialized"),
        (conv_sm90("conv2d_dgrad", D.F32, D.F32, (128, 128)), "contiguous along K"),
        (replace(depthwise("conv2d_fprop", SmArch.SM80, D.BF16, 8), d=D.F32), "give bf16"),
        (replace(depthwise("conv2d_fprop", SmArch.SM80, D.BF16, 8), align_b=8), "filters one by one"),
        (replace(depthwise("conv2d_fprop", SmArch.SM80, D.BF16, 8), stages=2), "direct"),
    ],
)
def test_keys_that_cannot_compile_are_refused_with_the_reason(key: KernelKey, reason: str) -> None:
    status = supports(key)
    assert not status
    assert reason in status.reason


@pytest.mark.parametrize("op", OPS)
def test_layouts_are_those_of_the_implicit_gemm(op: str) -> None:
    for _, key in conv_cells(SmArch.SM90A):
        if key.op == op:
            assert key.layout_a + key.layout_b == LAYOUTS[op]


def test_every_activation_renders() -> None:
    for name, function in ACTIVATIONS.items():
        key = sm80_key(epilogue=f"lc_{name}")
        assert supports(key)
        assert f"atomr_cutlass::{function}" in render(key)[0]
    assert len(EPILOGUES) == len(ACTIVATIONS) + 1


@pytest.mark.parametrize("flavour", ["aot", "nvrtc"])
def test_sources_name_what_the_key_says(flavour: str) -> None:
    key = sm80_key("conv2d_dgrad", stride_support="strided", swizzle=8)
    source, name = render(key, flavour=flavour)
    for piece in (
        "conv_sm80.h",
        "Operator::kDgrad",
        "kStrided",
        "GemmShape<128, 128, 32>",
        "GemmShape<64, 64, 32>",
        name,
    ):
        assert piece in source
    assert "@" not in source
    source, _ = render(depthwise("conv2d_wgrad", SmArch.SM80, D.F16, 8), flavour=flavour)
    assert "conv_depthwise.h" in source
    assert "ConvDepthwise<" in source
    source, _ = render(conv_sm90("conv2d_wgrad", D.F16, D.F16, (128, 64), (2, 1, 1)), flavour=flavour)
    assert "128, 64, 64" in source


def test_names_tell_the_direction_the_iterator_and_the_groups() -> None:
    assert "_s16816fprop_optimized_bf16_128x128_32x4_nhwc_align8_" in sm80_key().name
    grouped = conv_sm80("conv2d_fprop", SmArch.SM80, D.F16, D.F16, "analytic", (1, 1, 1), ONE, group_mode="single")
    assert "_singlegroup_" in grouped.name
    key = depthwise("conv2d_dgrad", SmArch.SM80, D.F16, 8)
    assert "_sdgrad_direct_" in key.name
    assert opcode_class(key) == "simt"
    assert conv_sm90("conv2d_wgrad", D.F16, D.F16, (128, 128)).name.startswith("cutlass3x_sm90_tensorop_wgrad_f16_")


def test_the_families_of_convolutions_are_registered() -> None:
    for op in OPS:
        assert FAMILIES[op, "sm80"][0].archs[:4] == ARCHS
        assert FAMILIES[op, "sm90"][0].archs == (SmArch.SM90A,)
