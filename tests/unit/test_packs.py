"""The kernel table and the packs that add to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, _core, kernels, load_pack
from atomr_cutlass.cli.app import app
from atomr_cutlass.errors import InvalidOperandError, LibraryError
from atomr_cutlass.generator import key_file
from atomr_cutlass.generator.manifest import kernel, manifest
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.generator.seal import MAGIC, glibc, seal, unseal
from atomr_cutlass.ops.grouped_gemm.kernels import ENTRY
from atomr_cutlass.pipeline.pack import LAYOUT
from damaged import damaged
from fake_kernels import make_pack
from fake_pack import CONTENT, ROOT, compile_library

# With a swizzle that no preset has, so that these are not in the table already.
KEYS = [replace(k, swizzle=4) for k in expand("full", [SmArch.SM80]) if k.math == "ieee" and k.d is D.F32][:3]


def _python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own: packs stay loaded as long as a process lives."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def _printed(code: str, **environ: str) -> list[str]:
    process = _python("import atomr_cutlass as ac\n" + textwrap.dedent(code), **environ)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


# ----------------------------------------------------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------------------------------------------------


def test_the_table_holds_what_was_built_under_its_name() -> None:
    for info in kernels():
        assert info.name == info.key.name
        assert info.threads > 0
        assert info.cuda_version >= 12000
    assert len({info.name for info in kernels()}) == len(kernels())


def test_the_table_can_be_asked_for_a_part(tmp_path: Path) -> None:
    pack = make_pack(tmp_path / "pack.so", expand("default", [SmArch.SM80, SmArch.SM89]))
    code = f"""
        ac.load_pack({str(pack)!r})
        D, S = ac.CutlassDtype, ac.SmArch
        everything = ac.kernels()
        for op in ("gemm", "conv2d_fprop", "conv"):
            assert ac.kernels(op=op) == [k for k in everything if k.key.op == op]
        for dtype in D:
            want = [k for k in everything if (k.key.math == "tf32" if dtype is D.TF32 else k.key.a is dtype)]
            assert ac.kernels(dtype=dtype) == want, dtype
        for arch in S:
            assert ac.kernels(arch=arch) == [k for k in everything if k.key.arch is arch]
        assert ac.kernels(filter="simt*align1,f64") == [
            k for k in everything if "f64" in k.name or "simt" in k.name and "align1" in k.name.partition("simt")[2]
        ]
        assert len(ac.kernels(dtype=D.F16, arch=S.SM89, filter="128x128")) < len(ac.kernels(dtype=D.F16))
        print(len(everything))
    """
    assert int(_printed(code)[0]) >= 60


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(InvalidOperandError, match="dtype is 'f16'; expected a CutlassDtype"):
        kernels(dtype="f16")  # type: ignore[arg-type]
    with pytest.raises(InvalidOperandError, match="arch is 'sm_80'; expected an SmArch"):
        kernels(arch="sm_80")  # type: ignore[arg-type]


def test_a_row_is_json(tmp_path: Path) -> None:
    pack = make_pack(tmp_path / "pack.so", KEYS[:1], name="mine")
    code = f"""
        import json
        ac.load_pack({str(pack)!r})
        print(json.dumps(next(k for k in ac.kernels() if k.pack == "mine").to_dict()))
    """
    values = json.loads(" ".join(_printed(code)))
    assert values == {
        "name": KEYS[0].name,
        **KEYS[0].to_dict(),
        "pack": "mine",
        "ptx": False,
        "shared_bytes": 1024,
        "threads": 128,
        "cuda_version": 13000,
        "content": json.loads(CONTENT),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Loading
# ----------------------------------------------------------------------------------------------------------------------


def test_a_pack_adds_its_kernels_once(tmp_path: Path) -> None:
    pack = make_pack(tmp_path / "pack.so", KEYS, name="mine")
    code = f"""
        before = len(ac.kernels())
        print(ac.load_pack({str(pack)!r}), len(ac.kernels()) - before, ac.load_pack({str(pack)!r}))
        print(len(ac.kernels()) - before, sum(k.pack == "mine" for k in ac.kernels()))
    """
    assert _printed(code) == ["3", "3", "0", "3", "3"]


def test_kernels_that_another_pack_has_are_not_new(tmp_path: Path) -> None:
    first = make_pack(tmp_path / "first.so", KEYS[:2], name="first")
    second = make_pack(tmp_path / "second.so", KEYS, name="second")
    code = f"""
        print(ac.load_pack({str(first)!r}), ac.load_pack({str(second)!r}))
        print(*[k.pack for k in ac.kernels() if k.pack])
    """
    assert _printed(code) == ["2", "1", "first", "first", "second"]


def test_an_empty_pack_adds_nothing(tmp_path: Path) -> None:
    pack = make_pack(tmp_path / "pack.so", [])
    assert _printed(f"print(ac.load_pack({str(pack)!r}), ac._core.registry_generation())") == ["0", "0"]


def test_a_pack_may_be_named_relatively_and_through_a_link(tmp_path: Path) -> None:
    pack = make_pack(tmp_path / "pack.so", KEYS)
    link = tmp_path / "link.so"
    link.symlink_to(pack.name)
    code = f"""
        import os
        os.chdir({str(tmp_path)!r})
        print(ac.load_pack("link.so"), ac.load_pack("pack.so"))
    """
    assert _printed(code) == ["3", "0"]


@pytest.mark.parametrize("count", [1, 2])
def test_packs_of_the_environment_are_loaded_with_the_table(tmp_path: Path, count: int) -> None:
    packs = [make_pack(tmp_path / f"pack{i}.so", [KEYS[i]], name=f"pack{i}") for i in range(count)]
    want = [f"pack{i}" for i in range(count)]
    path = os.pathsep.join(map(str, packs)) + os.pathsep
    assert _printed("print(*[k.pack for k in ac.kernels() if k.pack])", ATOMR_CUTLASS_PACKS=path) == want


def test_importing_loads_no_pack() -> None:
    assert _printed("print('imported')", ATOMR_CUTLASS_PACKS="/nowhere/pack.so") == ["imported"]


def _distribution(site: Path, name: str, body: str) -> None:
    """A distribution with an entry point, and its module, which has this text."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[atomr_cutlass.packs]\nkernels = {name}:path\n")
    (site / f"{name}.py").write_text(body)


BAD = {
    "raises": "def path():\n    raise KeyError('its own mistake')\n",
    "imports": "import a_module_that_is_not_there\n",
    "returns": "def path():\n    return None\n",
    "is_gone": "def path():\n    return '/nowhere/of_an_entry_point.so'\n",
}
WARNED = """
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            packs = [k.pack for k in ac.kernels() if k.pack]
    print(json.dumps([packs, [str(w.message) for w in caught], list(table.pack_problems())]))
"""


def test_packs_that_cannot_be_loaded_are_named_once_and_the_others_serve(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name, body in BAD.items():
        _distribution(site, name, body)
    announced = make_pack(site / "kernels.so", KEYS[:1], name="announced")
    _distribution(site, "zebra", f"def path():\n    return {str(announced)!r}\n")
    later = make_pack(tmp_path / "later.so", KEYS[1:2], abi="999")
    good = make_pack(tmp_path / "good.so", KEYS[2:3], name="good")
    packs, warned, problems = json.loads(
        _python(
            "import json; import atomr_cutlass as ac; from atomr_cutlass.pipeline import table\n"
            + textwrap.dedent(WARNED),
            ATOMR_CUTLASS_PACKS=os.pathsep.join(["/nowhere/pack.so", str(later), str(good)]),
            PYTHONPATH=os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")])),
        ).stdout
    )
    assert packs == ["good", "announced"]
    assert warned == [f"a pack is left out: {problem}" for problem in problems]
    told = [
        "ATOMR_CUTLASS_PACKS names /nowhere/pack.so: pack: cannot read",
        f"ATOMR_CUTLASS_PACKS names {later}: pack: {later} was built for ABI 999",
        "entry point kernels of raises, raises:path: KeyError: 'its own mistake'",
        "entry point kernels of imports, imports:path: ModuleNotFoundError: No module named 'a_module",
        "entry point kernels of returns, returns:path: path is None; expected the path of a pack",
        "entry point kernels of is_gone, is_gone:path: pack: cannot read",
    ]
    assert len(problems) == len(told)
    assert all(any(problem.startswith(start) for problem in problems) for start in told), problems


def test_where_warnings_are_errors_packs_are_loaded_all_the_same(tmp_path: Path) -> None:
    good = make_pack(tmp_path / "good.so", KEYS[:1], name="good")
    code = """
        import warnings
        warnings.simplefilter("error")
        try:
            ac.kernels()
        except RuntimeWarning:
            print(*[k.pack for k in ac.kernels() if k.pack])
    """
    assert _printed(code, ATOMR_CUTLASS_PACKS=f"/nowhere/pack.so{os.pathsep}{good}") == ["good"]


def test_installed_distributions_announce_packs(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    pack = make_pack(site / "kernels.so", KEYS[:1], name="some")
    _distribution(site, "some_pack", f"def path():\n    return {str(pack)!r}\n")
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    assert _printed("print(*[k.pack for k in ac.kernels() if k.pack])", PYTHONPATH=path) == ["some"]


def test_a_loaded_pack_keeps_the_rows_already_read(tmp_path: Path) -> None:
    pack = make_pack(tmp_path / "pack.so", KEYS)
    code = f"""
        before = ac.kernels()
        ac.load_pack({str(pack)!r})
        after = ac.kernels()
        print(after[: len(before)] == before, ac.kernels() == after)
    """
    assert _printed(code) == ["True", "True"]


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def _refusal(path: Path) -> str:
    rows, generation = len(_core.rows()), _core.registry_generation()
    with pytest.raises(LibraryError) as caught:
        load_pack(path)
    assert caught.value.lib == "pack"
    assert (len(_core.rows()), _core.registry_generation()) == (rows, generation)
    return caught.value.msg


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert _refusal(tmp_path / "none.so") == f"cannot read {tmp_path}/none.so: No such file or directory"


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not a library")
    path.chmod(0o644)
    assert f"{path} is damaged: it has no checksum at its end" in _refusal(path)
    path.write_bytes(seal(b"not a library", {"name": "text", "kernels": []}))
    assert f"cannot open {path}" in _refusal(path)


SPEAKS = """
#include <stdio.h>
__attribute__((constructor)) static void speak(void) {
  FILE* file = fopen("%s", "w");
  if (file != 0) fclose(file);
}
"""


def test_a_damaged_library_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """Of a library that is loaded, functions run: this one leaves a file."""
    loaded = tmp_path / "loaded"
    path = compile_library(SPEAKS % loaded, tmp_path / "pack.so")
    good = path.read_bytes()
    for bad in (*(good[:length] for length in (0, 1, len(MAGIC))), good + good, *damaged(good, 10_000, 3)):
        path.write_bytes(bad)
        with pytest.raises(LibraryError, match=r"pack\.so is damaged: it "):
            load_pack(path)
    assert not [row["name"] for row in _core.rows() if row["pack"] == "fake"]
    assert not loaded.exists()
    path.write_bytes(good)
    assert "does not export atomr_cutlass_pack_v1" in _refusal(path)
    assert loaded.exists()


def test_a_library_for_a_newer_c_library_is_refused_by_name(tmp_path: Path) -> None:
    path = make_pack(tmp_path / "pack.so", KEYS)
    library = path.read_bytes()[: unseal(path.read_bytes())["bytes"]]
    manifest = {"name": "newer", "kernels": [{"name": key.name} for key in KEYS]}
    # As a string of its symbols' versions would be; the loader does not read what follows the file's own bytes.
    path.write_bytes(seal(library + b"\0GLIBC_2.999\0", manifest))
    here = os.confstr("CS_GNU_LIBC_VERSION").split()[1]
    said = _refusal(path)
    assert (
        f"{path} (3 kernels) needs GLIBC_2.999, and this system has {here}: build it on a system that is as old" in said
    )
    path.write_bytes(seal(library, {**manifest, "layout": "0" * 16}))
    assert "was built for another layout of the ABI's structs" in _refusal(path)
    path.write_bytes(seal(library, {"name": "none"}))
    assert "has a manifest that cannot be used ('kernels'): rebuild the pack" in _refusal(path)


def test_versions_of_the_c_library_are_compared_as_numbers() -> None:
    assert glibc(b"x\0GLIBC_2.4\0GLIBC_2.34\0GLIBC_2.2.5\0GLIBCXX_3.4.99\0") == "2.34"
    assert glibc(b"nothing") == ""


def test_a_library_is_listed_and_verified_without_being_loaded(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    path = compile_library(SPEAKS % loaded, tmp_path / "pack.so")
    library = path.read_bytes()[: unseal(path.read_bytes())["bytes"]]
    members = [kernel(key, "1 4.2 nvcc", []) for key in KEYS]
    facts: dict[str, Any] = {"package": "0.1.0", "abi_version": _core.ABI_VERSION, "layout": LAYOUT}
    facts |= {"compiler": "nvcc 13.0.88", "headers": {}, "licenses": {}}
    path.write_bytes(seal(library, manifest("mine", members, **facts)))
    run = CliRunner().invoke
    listed = json.loads(run(app, ["pack", "list", str(path), "--json"]).stdout)
    assert (listed["form"], listed["name"], listed["compiler"]) == ("library", "mine", "nvcc 13.0.88")
    assert [key_file.parse(kernel) for kernel in listed["kernels"]] == KEYS
    assert all(key.name in run(app, ["pack", "list", str(path)]).stdout for key in KEYS)
    assert run(app, ["pack", "verify", str(path)]).exit_code == 0
    other = tmp_path / "other.so"
    changed = [{**members[0], "content": "0 4.2 nvcc"}, members[1]]
    other.write_bytes(seal(library, manifest("other", changed, **facts)))
    found = json.loads(run(app, ["pack", "diff", str(path), str(other), "--json"]).stdout)
    assert found == {"only_first": [KEYS[2].name], "only_second": [], "different": [KEYS[0].name]}
    refused = run(app, ["pack", "merge", str(path), str(other), "-o", str(tmp_path / "both.pack")])
    said = f"{path} is no pack of cubins: one that is a shared library is loaded as it is"
    assert (refused.exit_code, said in " ".join(refused.output.split())) == (1, True)
    assert not loaded.exists()


def test_a_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    assert f"cannot read {folder}" in _refusal(folder)


def test_a_library_that_is_no_pack_is_refused(tmp_path: Path) -> None:
    library = compile_library("int something(void);\nint something(void) { return 0; }\n", tmp_path / "other.so")
    assert "is not an atomr_cutlass pack: it does not export atomr_cutlass_pack_v1" in _refusal(library)


@pytest.mark.parametrize("abi", ["0", "999", "ATOMR_CUTLASS_ABI_VERSION + 1"])
def test_a_pack_of_another_abi_is_refused_by_name(tmp_path: Path, abi: str) -> None:
    pack = make_pack(tmp_path / "pack.so", KEYS, abi=abi)
    said = _refusal(pack)
    assert f"{pack} was built for ABI " in said
    assert f"this package speaks ABI {_core.ABI_VERSION}: rebuild the pack" in said


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """A copy of our headers, to be changed: `headers/atomr_cutlass/kernel_abi.h`."""
    shutil.copytree(ROOT / "cpp/include/atomr_cutlass", tmp_path / "headers/atomr_cutlass")
    return tmp_path / "headers"


def _insert(header: Path, before: str, text: str) -> None:
    source = header.read_text()
    assert source.count(before) == 1
    header.write_text(source.replace(before, text + before))


def _compile_empty_pack(headers: Path, library: Path) -> str:
    """Compiles a pack without rows, as a build of `ATOMR_CUTLASS_PACK` does; what the compiler complained of."""
    table = (
        "namespace atomr_cutlass { const atomr_cutlass_row* const kRows[] = {nullptr}; const unsigned kRowCount = 0; }"
    )
    source = library.with_suffix(".cpp")
    source.write_text(f'#include "atomr_cutlass/table.h"\n{table}\n')
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler to make a pack with")
    flags = [
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        f"-I{headers}",
        '-DATOMR_CUTLASS_PACK_NAME="empty"',
    ]
    process = subprocess.run(
        [compiler, *flags, "-o", str(library), str(source)], capture_output=True, text=True, check=False, timeout=60
    )
    assert library.exists() == (process.returncode == 0)
    if process.returncode == 0:
        library.write_bytes(seal(library.read_bytes(), {"name": "empty", "kernels": []}))
    return process.stderr


_NEXT_FIELD = "  FIELD(int32_t, split_k)"
"""Of a GEMM's arguments."""


def test_a_pack_of_another_layout_is_refused_and_the_field_is_named(tmp_path: Path, headers: Path) -> None:
    pack = tmp_path / "other.so"
    assert _compile_empty_pack(headers, tmp_path / "same.so") == ""
    assert load_pack(tmp_path / "same.so") == 0
    _insert(headers / "atomr_cutlass/kernel_abi.h", _NEXT_FIELD, "  FIELD(int64_t, novelty) \\\n")
    assert _compile_empty_pack(headers, pack) == ""
    said = _refusal(pack)
    assert said.startswith(f"{pack} was built for another layout of the ABI's structs (")
    assert said.endswith("): this package lacks atomr_cutlass_gemm_args.novelty: rebuild the pack")


@pytest.mark.parametrize(
    ("before", "text"), [(_NEXT_FIELD, "  FIELD(int16_t, novelty) \\\n"), ("} Name;", "int64_t novelty; ")]
)
def test_bytes_that_no_listed_field_has_do_not_compile(tmp_path: Path, headers: Path, before: str, text: str) -> None:
    """A gap that the compiler leaves, or a field that is declared beside the list's."""
    _insert(headers / "atomr_cutlass/kernel_abi.h", before, text)
    assert "fill gaps with fields named padding" in _compile_empty_pack(headers, tmp_path / "pack.so")


def test_every_struct_of_the_abi_has_its_list() -> None:
    named = set()
    for header in ("kernel_abi.h", "jit_abi.h"):
        text = (ROOT / "cpp/include/atomr_cutlass" / header).read_text()
        named |= set(re.findall(r"^ATOMR_CUTLASS_STRUCT\((\w+)\)$", text, re.MULTILINE))
        assert re.findall(r"\bstruct (\w+) {", text) == ["Name"] * (header == "kernel_abi.h")
    assert named == set(_core.layout())


def test_the_table_of_groups_is_packed_as_the_abi_lays_it_out() -> None:
    fields = _core.layout()["atomr_cutlass_group"]
    kinds = {("p", 8): "Q", ("i", 8): "q", ("i", 4): "i"}
    assert "".join(kinds[kind, size] for _, _, size, kind in fields) == "Q" * 6 + "q" * 4 + "i" * 4
    assert ENTRY.format == "<" + 6 * "Q" + 4 * "q" + 4 * "i"
    assert ENTRY.size == sum(size for _, _, size, _ in fields)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o666])
def test_a_pack_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    pack = make_pack(tmp_path / "pack.so", KEYS)
    pack.chmod(mode)
    assert f"{pack} is writable by other users: chmod go-w" in _refusal(pack)


@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_a_pack_in_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    pack = make_pack(folder / "pack.so", KEYS)
    folder.chmod(mode)
    assert f"{folder} is writable by other users" in _refusal(pack)


def test_a_link_does_not_hide_what_it_points_to(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    pack = make_pack(folder / "pack.so", KEYS)
    folder.chmod(0o777)
    link = tmp_path / "link.so"
    link.symlink_to(pack)
    assert f"{folder} is writable by other users" in _refusal(link)


def test_a_pack_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = make_pack(tmp_path / "pack.so", KEYS)
    if os.geteuid() == 0:
        os.chown(pack, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert "belongs to another user" in _refusal(pack)


GOOD = (KEYS[0].name, KEYS[0].to_json())


@pytest.mark.parametrize(
    ("name", "key", "reason"),
    [
        ("cutlass_of_tomorrow", json.dumps(KEYS[1].to_dict() | {"novelty": "some"}), r"unknown fields \['novelty'\]"),
        (KEYS[1].name, "{", "whose key cannot be read"),
        (KEYS[1].name, "[1, 2]", "whose key cannot be read"),
        (KEYS[1].name, "7", "whose key cannot be read"),
        (KEYS[1].name, json.dumps(KEYS[1].to_dict() | {"arch": "sm_1"}), "whose key cannot be read: .*'sm_1'"),
        (KEYS[1].name, json.dumps(KEYS[1].to_dict() | {"layout_a": 5, "math": []}), "whose key is"),
        (KEYS[1].name, KEYS[2].to_json(), f"whose key is that of {KEYS[2].name}"),
    ],
)
def test_a_pack_with_the_key_of_no_kernel_is_refused_whole(tmp_path: Path, name: str, key: str, reason: str) -> None:
    pack = make_pack(tmp_path / "pack.so", [GOOD, (name, key)], name="bad")
    said = _refusal(pack)
    assert re.match(f"{re.escape(str(pack))} has kernel {name}, .*{reason}", said), said
    assert GOOD[0] not in {row["name"] for row in _core.rows()}


def test_a_failed_pack_can_be_mended_and_loaded(tmp_path: Path) -> None:
    pack = make_pack(tmp_path / "pack.so", [GOOD, ("bad", "{}")])
    code = f"""
        import shutil
        try:
            ac.load_pack({str(pack)!r})
        except ac.LibraryError:
            shutil.copy({str(make_pack(tmp_path / "good.so", [GOOD]))!r}, {str(pack)!r})
            print(ac.load_pack({str(pack)!r}))
    """
    assert _printed(code) == ["1"]


@pytest.mark.parametrize("path", [None, 3, b"pack.so", ["pack.so"], "pack\0.so"])
def test_what_is_no_path_is_refused(path: object) -> None:
    with pytest.raises(InvalidOperandError, match=r"^path is .*(expected the path of a pack|which is none)"):
        load_pack(path)  # type: ignore[arg-type]
