"""`atomr-cutlass cache`."""

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atomr_cutlass.cli.app import app
from atomr_cutlass.jit.files import FOLDER_VARIABLE
from atomr_cutlass.jit.store import KernelStore
from store_process import digest, kernel


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KernelStore:
    """The cache that the command line is to find, with two kernels."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    store = KernelStore()
    store.obtain(digest("kernel_a"), lambda: kernel("kernel_a", 3 << 20), {"name": "kernel_a", "target": "sm_90a"})
    store.obtain(digest("kernel_b"), lambda: kernel("kernel_b", 5000), {"name": "kernel_b", "target": "sm_90a"})
    return store


def call(*arguments: str, status: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of a command that must end with this status."""
    result = CliRunner().invoke(app, ["cache", *arguments])
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result.stdout, result.stderr


def call_json(*arguments: str, status: int = 0) -> dict:
    return json.loads(call(*arguments, "--json", status=status)[0])


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_help(command: str) -> None:
    assert "--json" in call(command, "--help")[0]


@pytest.mark.usefixtures("store")
def test_list_has_a_line_for_each_kernel() -> None:
    said, _ = call("list")
    rows = [line.split("\t") for line in said.splitlines()]
    assert [row[:3] for row in rows] == [["kernel_a", "sm_90a", "3.0 MiB"], ["kernel_b", "sm_90a", "5.1 KiB"]]
    assert all(row[3].endswith(" s") and row[4] == "0.0 s" for row in rows)


def test_list_json_tells_everything(store: KernelStore) -> None:
    shown = call_json("list")
    assert (shown["folder"], shown["max_bytes"]) == (str(store.folder), store.max_bytes)
    first, second = shown["entries"]
    assert (first["name"], first["target"], first["digest"]) == ("kernel_a", "sm_90a", digest("kernel_a").hex())
    assert first["bytes"] == Path(first["path"]).stat().st_size > second["bytes"]
    assert 0 <= first["compile_seconds"] < 1
    assert 0 <= first["age_seconds"] < 60


def test_without_a_cache_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "none"))
    said, complaint = call("list")
    assert said == ""
    assert f"there is no kernel in {tmp_path / 'none'}" in complaint
    assert call_json("list")["entries"] == []
    assert call_json("verify")["checked"] == 0
    assert call_json("prune", "--all")["removed"] == 0
    assert not (tmp_path / "none").exists()


def test_verify_ends_with_1_when_something_is_damaged(store: KernelStore) -> None:
    assert call("verify")[0] == f"2 kernels in {store.folder}, 0 of them damaged\n"
    damaged = store.entries()[1].path
    damaged.write_bytes(damaged.read_bytes()[:-1])
    shown = call_json("verify", status=1)
    assert shown["checked"] == 2
    (row,) = shown["damaged"]
    assert (row["path"], row["reason"]) == (str(damaged), "does not match its checksum")
    assert Path(row["moved_to"]).exists()
    assert call_json("verify") == {"folder": str(store.folder), "checked": 1, "damaged": []}
    store.entries()[0].path.chmod(0o666)
    said, _ = call("verify", status=1)
    assert "is writable by other users (mode 666): moved to " in said


def test_prune(store: KernelStore) -> None:
    assert call_json("prune")["kept"] == 2
    old = store.entries()[0].path
    os.utime(old, (time.time(), time.time() - 7200))
    assert call_json("prune", "--older-than", "3h")["removed"] == 0
    shown = call_json("prune", "--older-than", "1.5h")
    assert (shown["removed"], shown["kept"]) == (1, 1)
    assert shown["removed_bytes"] > 3 << 20
    assert call_json("prune", "--max-size", "6K")["removed"] == 0
    assert call_json("prune", "--max-size", "5000")["removed"] == 1
    store.obtain(digest("kernel_a"), lambda: kernel("kernel_a"), {})
    assert call("prune", "--all")[0].startswith("1 kernels removed (97.")


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [
        (("--max-size", "much"), "500M"),
        (("--max-size", "-5"), "500M"),
        (("--max-size", "5X"), "units K, M, G, T"),
        (("--older-than", "3y"), "units s, m, h, d, w"),
        (("--older-than", "5"), "12h or 30d"),
    ],
)
def test_wrong_amounts_end_with_2_and_name_what_is_valid(
    store: KernelStore, arguments: tuple[str, ...], valid: str
) -> None:
    said, complaint = call("prune", *arguments, status=2)
    assert said == ""
    assert valid in complaint
    assert len(store.entries()) == 2


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_an_unsafe_cache_ends_with_1_in_one_line(store: KernelStore, command: str) -> None:
    store.folder.chmod(0o777)
    said, complaint = call(command, status=1)
    assert said == ""
    assert complaint.startswith(f"atomr-cutlass: {store.folder} is writable by other users (mode 777)")
    assert len(complaint.splitlines()) == 1
