"""Which kernel serves a call, how and with which arguments, compared with what tests/golden has recorded."""

import os
import shutil

import pytest

import golden
from atomr_cutlass import SmArch

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler to make the fake GPU with"
)
SHOWN = 10


def check(now: dict[str, list[str]]) -> None:
    """Compares lines with the recorded ones of the same archs."""
    archs = {line.split("/")[1] for lines in now.values() for line in lines}
    before = {
        name: [line for line in lines if line.split("/")[1] in archs]
        for name, lines in golden.recorded().items()
        if name in now or name != golden.KERNELS
    }
    told = [
        text
        for name in sorted(now.keys() | before.keys())
        for text in golden.differences(before.get(name, []), now.get(name, []))
    ]
    if told:
        more = f"\n... and {len(told) - SHOWN} more: python tests/helpers/golden.py" if len(told) > SHOWN else ""
        pytest.fail(
            "\n".join(told[:SHOWN]) + f"{more}\n{len(told)} cases differ from tests/golden. If that is intended, "
            f"update the files in a commit of their own: {golden.COMMAND}",
            pytrace=False,
        )


def test_differences_are_told_by_case_and_field() -> None:
    before = ['{"call":"gemm(a, b)","case":"gemm/1","launches":["x m=1"],"table":"full"}', '{"case":"gemm/2"}']
    after = ['{"call":"gemm(a, b)","case":"gemm/1","launches":["y m=1"],"table":"full"}', '{"case":"gemm/3"}']
    changed, gone, new = golden.differences(before, after)
    assert changed.startswith("gemm/1, table full: gemm(a, b)\n  launches was")
    assert '"x m=1"' in changed
    assert '"y m=1"' in changed
    assert (gone, new) == ("gemm/2: gone", "gemm/3: new")
    assert golden.differences(before, before) == []


def test_calls_and_requests_are_served_as_recorded() -> None:
    check(golden.lines())


def test_what_is_recorded_depends_on_nothing_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one arch: with other hashes, another locale and time zone, one CPU, and settings that are not to count."""
    process = {"PYTHONHASHSEED": "77", "LC_ALL": "C", "TZ": "Pacific/Auckland", "ATOMR_CUTLASS_JIT": "off"}
    for name, value in process.items():
        monkeypatch.setenv(name, value)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        now = golden.lines([SmArch.SM86.value])
    finally:
        os.sched_setaffinity(0, allowed)
    assert "gemm" in now
    check(now)
