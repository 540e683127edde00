"""Packs of cubins: what is read is what was written, every byte of it, and what does not fit is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fake_cases
import fake_kernels
import fake_pack
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import LibraryError, SmArch, _core
from atomr_cutlass.cli.app import app
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.generator.seal import append, seal, unseal
from atomr_cutlass.pipeline import pack
from atomr_cutlass.pipeline.pack import LAYOUT, Cubin, Pack
from damaged import damaged

# None that an installation for tests has linked in: those of a pack give way to them.
LINKED = set(expand("smoke", [SmArch.SM80]))
KEYS = [
    k for k in expand("full", [SmArch.SM80]) if k.math == "ieee" and k.d is D.F32 and k.op == "gemm" and k not in LINKED
][:3]
FACTS = {
    "package": "0.1.0", "abi_version": _core.ABI_VERSION, "layout": LAYOUT, "compiler": "nvrtc 13.0.88",
    "headers": {"cutlass": "c"}, "licenses": {"CUTLASS": "BSD-3-Clause"},
}  # fmt: skip
CASES_FILE = "cubin_pack_cases.py"


def _cubin(key: KernelKey, kernel: bytes = b"kernel", companion: bytes = b"companion") -> Cubin:
    return Cubin(key, kernel, companion, "0 4.2-0 nvrtc", 1024, 128, ({"how": "runs"},))


def _pack(*keys: KernelKey, name: str = "model", **built: Any) -> Pack:
    cubins = tuple(_cubin(key, f"kernel {i}".encode() * 5) for i, key in enumerate(keys or KEYS))
    return Pack(name, FACTS | built, cubins)


def _file(path: Path, made: Pack) -> Path:
    path.write_bytes(pack.encode(made))
    path.chmod(0o644)
    return path


def test_packs_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = _pack()
    assert pack.read(_file(tmp_path / "model.pack", made)) == made
    assert pack.encode(made) == pack.encode(_pack())


def test_no_damaged_pack_is_read() -> None:
    for bad in damaged(pack.encode(_pack()), 10_000, 15):
        with pytest.raises(LibraryError, match="bad"):
            pack.decode(bad, "bad")


def test_images_that_changed_places_are_not_read() -> None:
    """The bytes of two kernels of one length, of which each is right by itself."""
    good = pack.encode(_pack())
    first, second = b"kernel 0" * 5, b"kernel 1" * 5
    assert (good.count(first), good.count(second)) == (1, 1)
    swapped = good.replace(first, b"\0" * len(first)).replace(second, first).replace(b"\0" * len(first), second)
    with pytest.raises(LibraryError, match=r"x\.pack is damaged: it does not match its checksum"):
        pack.decode(swapped, "x.pack")


@pytest.mark.parametrize(
    ("built", "says"),
    [
        ({"abi_version": 4}, "x.pack was built for ABI 4; this package speaks ABI"),
        ({"layout": "0" * 16}, "another layout of the ABI's structs"),
    ],
)
def test_another_abi_is_refused_by_name(built: dict[str, Any], says: str) -> None:
    with pytest.raises(LibraryError, match=says):
        pack.decode(pack.encode(_pack(**built)), "x.pack")


def test_a_manifest_that_was_made_by_hand_is_refused() -> None:
    """Checksums alone do not make a pack: its keys and fields have to be those of kernels."""
    made = _pack()
    other_images = ({"images": []}, {"images": [{"bytes": 1}] * 2})
    for change in ({"name": "other"}, {"align_a": "8"}, {"op": "multiply"}, *other_images):
        good = pack.encode(made)
        manifest = unseal(good)
        manifest["kernels"][0].update(change)
        forged = append(good[: manifest["bytes"]], manifest)
        with pytest.raises(LibraryError, match=r"manifest that cannot be used|images of other lengths"):
            pack.decode(forged, "x.pack")


# ----------------------------------------------------------------------------------------------------------------------
# Loaded into the table
# ----------------------------------------------------------------------------------------------------------------------


def _python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, check=False, timeout=60
    )


LIST = "import atomr_cutlass as ac; print(*(k.name for k in ac.kernels() if k.pack == 'model'))"


def test_packs_are_listed_without_a_gpu_and_without_a_compiler(tmp_path: Path) -> None:
    path = _file(tmp_path / "model.pack", _pack())
    code = f"""{LIST}
import sys
assert not [name for name in sys.modules if name.startswith("cuda") or name == "atomr_cutlass.jit.compiler"]
assert "nvrtc" not in open("/proc/self/maps").read()
assert ac.load_pack({str(path)!r}) == 0
(info, *_) = [k for k in ac.kernels() if k.pack]
assert (info.origin, info.shared_bytes, info.threads, info.ptx) == ("pack model", 1024, 128, False)
"""
    done = _python(code, ATOMR_CUTLASS_PACKS=str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [key.name for key in KEYS]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "foreign", "open", "ABI"])
def test_a_pack_that_is_refused_leaves_the_rest_of_the_table(tmp_path: Path, damage: str) -> None:
    good = _file(tmp_path / "good.pack", _pack(*KEYS[:1]))
    bad = _file(tmp_path / "bad.pack", _pack(*KEYS[1:], **({"abi_version": 1} if damage == "ABI" else {})))
    content = bytearray(bad.read_bytes())
    if damage == "flipped":
        content[-1] ^= 1
    if damage in ("flipped", "truncated"):
        bad.write_bytes(content if damage == "flipped" else content[:-9])
    if damage == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(bad, 12345, -1)
    if damage == "open":
        bad.chmod(0o666)
    done = _python(LIST, ATOMR_CUTLASS_PACKS=f"{bad}{os.pathsep}{good}")
    assert (done.returncode, done.stdout.split()) == (0, [KEYS[0].name])
    assert "a pack is left out" in done.stderr
    assert str(bad) in done.stderr


def _library(path: Path, made: Pack) -> Path:
    """The same pack as a library, as far as loading looks before it is opened."""
    path.write_bytes(seal(b"a library", made.manifest()))
    path.chmod(0o644)
    return path


@pytest.mark.parametrize("form", [_file, _library])
def test_packs_of_other_gpus_and_of_a_newer_cuda_are_refused(tmp_path: Path, form: Callable[..., Path]) -> None:
    driver = fake_pack.make_driver(tmp_path / "driver")
    newer = form(tmp_path / "newer.pack", _pack(compiler="nvrtc 14.0.1"))
    other = form(tmp_path / "other.pack", _pack(*expand("smoke", [SmArch.SM90A])[:1]))
    libraries = os.pathsep.join(filter(None, [str(driver), os.environ.get("LD_LIBRARY_PATH", "")]))
    code = f"""
import atomr_cutlass as ac
for path in ({str(newer)!r}, {str(other)!r}):
    try:
        ac.load_pack(path)
    except ac.LibraryError as error:
        print(error)
assert not [k for k in ac.kernels() if k.pack]
"""
    done = _python(code, LD_LIBRARY_PATH=libraries)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert f"{newer} was built with CUDA 14; the driver knows CUDA up to 13" in first
    assert f"{other} has code for sm_90a; GPUs here have compute capability 8.0" in second


def test_a_frozen_process_computes_with_a_pack_of_cubins(tmp_path: Path) -> None:
    """On a GPU whose images are the paths of shared libraries."""
    images = {key: fake_kernels.compile_at_run_time(tmp_path / f"{key.name}.so", key) for key in KEYS}
    made = Pack("model", FACTS, tuple(_cubin(key, image, image) for key, image in images.items()))
    path = _file(tmp_path / "model.pack", made)
    outcome = fake_cases.outcome(CASES_FILE, fake_pack.make_driver(tmp_path / "driver"), [path])
    assert set(outcome) == set(fake_cases.names(CASES_FILE)) != set()
    assert "".join(outcome.values()) == ""


# ----------------------------------------------------------------------------------------------------------------------
# The commands
# ----------------------------------------------------------------------------------------------------------------------


def _run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["pack", *map(str, arguments)])
    return done.exit_code, done.output


def test_packs_are_listed_verified_compared_and_merged(tmp_path: Path) -> None:
    first = _file(tmp_path / "one.pack", _pack(*KEYS[:2], name="one"))
    two = _file(tmp_path / "two.pack", _pack(KEYS[0], KEYS[2], name="two"))
    status, said = _run("list", first, "--json")
    listed = json.loads(said)
    assert (status, listed["compiler"], [k["name"] for k in listed["kernels"]]) == (
        0, "nvrtc 13.0.88", [k.name for k in KEYS[:2]],
    )  # fmt: skip
    assert all(key.name in _run("list", first)[1] for key in KEYS[:2])
    assert _run("diff", first, first) == (0, "")
    status, said = _run("diff", first, two, "--json")
    assert (status, json.loads(said)) == (
        1, {"only_first": [KEYS[1].name], "only_second": [KEYS[2].name], "different": []},
    )  # fmt: skip
    # The same kernel with other code.
    other = _file(tmp_path / "other.pack", _pack(KEYS[1], KEYS[0]))
    assert json.loads(_run("diff", first, other, "--json")[1])["different"] == [k.name for k in KEYS[:2]]
    both = tmp_path / "both.pack"
    assert _run("merge", first, two, "-o", both)[0] == 0
    assert [cubin.key for cubin in pack.read_cubins(both).cubins] == KEYS
    assert _run("verify", first, two, both)[0] == 0
    content = bytearray(two.read_bytes())
    content[-100] ^= 4
    two.write_bytes(content)
    status, said = _run("verify", first, two, "--json")
    assert (status, [p["ok"] for p in json.loads(said)["packs"]]) == (1, [True, False])
    assert "does not match its checksum" in said
    assert _run("list", tmp_path / "nowhere.pack")[0] == 1


def test_packs_that_were_built_otherwise_are_not_merged(tmp_path: Path) -> None:
    first = _file(tmp_path / "one.pack", _pack(KEYS[0], name="one"))
    for second, says in (
        (_pack(KEYS[1], name="two", compiler="nvrtc 12.9.1"), "compiler is nvrtc 13.0.88 and nvrtc 12.9.1"),
        (_pack(KEYS[1], KEYS[0], name="two"), f"different code for {KEYS[0].name}"),
    ):
        with pytest.raises(LibraryError, match=says):
            pack.merge([pack.read_cubins(first), second], "both")
