"""Kernel keys: the identity of a compiled kernel, and its name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace

import pytest

from generator.archs import SmArch
from generator.dtypes import CutlassDtype as D
from generator.key import KernelKey, check_unique, layout_letters
from generator.matrix import ARCHS, cells, expand

FULL = expand("full", ARCHS["gemm"])

SM80_KEY = KernelKey(
    op="gemm",
    generation="sm80",
    arch=SmArch.SM80,
    a=D.F16,
    b=D.F16,
    d=D.F16,
    acc=D.F32,
    layout_a="r",
    layout_b="c",
    layout_d="r",
    align_a=8,
    align_b=8,
    align_d=8,
    tile=(128, 128, 32),
    cluster=(1, 1, 1),
    warps=(2, 2, 1),
    stages=4,
    mainloop="multistage",
    epilogue_schedule="",
    scheduler="identity",
    swizzle=8,
)

# What one change of each field gives: no two of these keys may share a name.
CHANGES = {
    "op": "other",
    "generation": "sm90",
    "arch": SmArch.SM86,
    "a": D.BF16,
    "b": D.BF16,
    "d": D.F32,
    "acc": D.F16,
    "layout_a": "c",
    "layout_b": "r",
    "layout_d": "c",
    "align_a": 4,
    "align_b": 4,
    "align_d": 4,
    "tile": (128, 64, 32),
    "cluster": (2, 1, 1),
    "warps": (4, 1, 1),
    "stages": 3,
    "mainloop": "twostage",
    "epilogue_schedule": "tma",
    "scheduler": "streamk",
    "swizzle": 1,
    "math": "tf32",
    "epilogue": "other",
    "scale_granularity": (1, 128, 128),
    "scale_type": "f32",
    "group_mode": "single",
    "iterator": "optimized",
    "stride_support": "unity",
}


def test_a_key_survives_a_dict_and_json() -> None:
    for key in FULL:
        assert KernelKey.from_dict(json.loads(json.dumps(key.to_dict()))) == key
        assert KernelKey.from_dict(json.loads(key.to_json())) == key


def test_a_dict_holds_every_field_as_plain_json_values() -> None:
    values = SM80_KEY.to_dict()
    assert set(values) == {field.name for field in fields(KernelKey)}
    assert values["arch"] == "sm_80"
    assert values["a"] == "f16"
    assert values["tile"] == [128, 128, 32]
    assert json.loads(json.dumps(values)) == values


def test_unknown_and_missing_fields_are_named() -> None:
    values = SM80_KEY.to_dict() | {"colour": "red"}
    del values["tile"]
    with pytest.raises(ValueError, match=r"unknown fields \['colour'\], missing fields \['tile'\]"):
        KernelKey.from_dict(values)


@pytest.mark.parametrize(
    ("field", "wrong"), [("a", "f17"), ("arch", "sm_81"), ("tile", [128, 128]), ("tile", ["x", 1, 1])]
)
def test_values_of_the_wrong_kind_are_refused(field: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        KernelKey.from_dict(SM80_KEY.to_dict() | {field: wrong})


def test_the_json_is_canonical() -> None:
    shuffled = KernelKey.from_dict(dict(reversed(SM80_KEY.to_dict().items())))
    assert shuffled.to_json() == SM80_KEY.to_json()
    assert " " not in SM80_KEY.to_json()


@dataclass(frozen=True)
class _LaterKey(KernelKey):
    """The key of a later version, with one more axis."""

    novelty: str = "none"


def test_a_field_added_later_renames_no_kernel_that_lacks_it() -> None:
    later = _LaterKey(**{field.name: getattr(SM80_KEY, field.name) for field in fields(SM80_KEY)})
    assert later.name == SM80_KEY.name
    assert replace(later, novelty="some").name != SM80_KEY.name
    assert _LaterKey.from_dict(json.loads(SM80_KEY.to_json())) == later


def test_the_digest_is_the_same_in_every_release() -> None:
    # Tuning records, packs and caches hold names: a change here orphans them all.
    assert SM80_KEY.name == "cutlass_tensorop_f16_s16816gemm_f16_128x128_32x4_tn_align8_01bbf945bd"


@pytest.mark.parametrize("field", [field.name for field in fields(KernelKey)])
def test_every_field_is_part_of_the_digest(field: str) -> None:
    changed = replace(SM80_KEY, **{field: CHANGES[field]})  # type: ignore[arg-type]
    assert changed.digest != SM80_KEY.digest
    assert re.fullmatch(r"[0-9a-f]{10}", changed.digest)


def test_names_are_unique_over_the_whole_matrix() -> None:
    assert len({key.name for key in FULL}) == len(set(FULL)) == len(FULL)
    assert list(check_unique(FULL).values()) == FULL


def test_names_are_c_identifiers_that_linkers_take() -> None:
    for key in FULL:
        assert re.fullmatch(r"cutlass[0-9A-Za-z_]+", key.name), key.name
        assert key.name.isascii()
        assert len(key.name) < 200


def test_names_state_what_cutlass_states() -> None:
    every = (key for _, key in cells([SmArch.SM90A]))
    hopper = next(k for k in every if k.generation == "sm90" and k.a is D.BF16 and k.scheduler == "streamk")
    tile = "x".join(map(str, hopper.tile))
    assert hopper.name.startswith(
        f"cutlass3x_sm90_tensorop_gemm_bf16_bf16_f32_{hopper.d.value}_{hopper.d.value}_{tile}_"
    )
    assert "_stream_k_" in hopper.name
    simt = next(k for k in FULL if k.math == "ieee" and k.d is D.F32)
    assert simt.name.startswith("cutlass_simt_f32_sgemm_f32_")
    tf32 = next(k for k in FULL if k.math == "tf32" and k.generation == "sm90")
    assert tf32.name.startswith("cutlass3x_sm90_tensorop_gemm_tf32_tf32_f32_")
    integer = next(k for k in FULL if k.a is D.I8 and k.generation == "sm80")
    assert integer.name.startswith("cutlass_tensorop_s32_i16832gemm_s8_")
    mixed = replace(SM80_KEY, arch=SmArch.SM89, a=D.F8E4M3, b=D.F8E5M2, d=D.BF16, align_a=16, align_b=16)
    assert mixed.name.startswith("cutlass_tensorop_bf16_s16832gemm_e4m3_e5m2_128x128_32x4_tn_align16_")
    fast = next(k for k in FULL if k.math == "fast" and k.generation == "sm90" and k.epilogue == "scaled")
    assert re.search("_cooperative_fp8_fastaccum_epi_tma_scaled_[0-9a-f]{10}$", fast.name)
    blocks = next(k for k in FULL if k.generation == "sm90" and k.scale_type)
    assert blocks.name.startswith("cutlass3x_sm90_tensorop_block_scaled_gemm_f32_1x128x128_e4m3_e4m3_f32_bf16_bf16_")
    assert layout_letters("rc") == "tn"


def test_two_keys_of_one_name_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelKey, "digest", "0123456789")
    key, other = replace(SM80_KEY), replace(SM80_KEY, swizzle=1)  # whose names nobody has asked for yet
    with pytest.raises(ValueError, match=r"two keys share the name cutlass_tensorop.*0123456789"):
        check_unique([key, other])
    assert check_unique([key, key]) == {key.name: key}


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("80", SmArch.SM80),
        ("sm_86", SmArch.SM86),
        (" SM89 ", SmArch.SM89),
        ("90a", SmArch.SM90A),
        ("100", SmArch.SM100),
        ("100a", SmArch.SM100),
        ("sm_120", SmArch.SM120),
    ],
)
def test_archs_are_read_as_the_knobs_spell_them(text: str, arch: SmArch) -> None:
    assert SmArch.parse(text) is arch


@pytest.mark.parametrize("text", ["", "75", "90", "80a", "100b", "103", "121", "hopper"])
def test_unknown_archs_are_refused_naming_the_valid_ones(text: str) -> None:
    with pytest.raises(ValueError, match="90a"):
        SmArch.parse(text)


def test_every_arch_has_a_capability_of_its_own() -> None:
    assert {SmArch.from_capability(*arch.capability) for arch in SmArch} == set(SmArch)
    assert SmArch.from_capability(7, 5) is None
    assert [arch for arch in SmArch if arch.portable] == [SmArch.SM80, SmArch.SM86, SmArch.SM89]


def test_dtypes_are_read_by_every_name_they_go_by() -> None:
    for dtype in D:
        for text in (dtype.value, dtype.name, dtype.cutlass_name):
            assert D.parse(f" {text.upper()} ") is dtype
        assert D.parse(dtype.numpy_name) is dtype.storage
    with pytest.raises(ValueError, match=r"unknown dtype 'f8'; valid: f64, .*e2m1"):
        D.parse("f8")


def test_dlpack_types_identify_what_is_stored() -> None:
    for dtype in D:
        assert D.from_dlpack(*dtype.dlpack) is dtype.storage
        assert dtype.dlpack[1] == dtype.bits
    assert D.from_dlpack(5, 64) is None
