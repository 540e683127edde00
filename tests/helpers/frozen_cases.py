"""Cases that `test_frozen.py` runs in a process whose driver and kernels are fakes: recording, and freezing.

Every function named `case_...` is a test; the process prints what each of them raised as JSON.
"""

import contextlib
import gc
import json
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import atomr_cutlass as ac
import fake_cases
from atomr_cutlass.generator import key_file
from atomr_cutlass.jit import kernels
from atomr_cutlass.jit import record as recording
from atomr_cutlass.pipeline.call import kept_plans
from pipeline_cases import Tensor, compiler, matrix, operand, refused

COMMAND = (
    r"record a run that compiles it \(ATOMR_CUTLASS_RECORD=keys\.jsonl\), `atomr-cutlass build keys\.jsonl "
    r"--arch 80 -o model\.pack`, and ATOMR_CUTLASS_PACKS=model\.pack"
)
"""What adds a kernel, as every error for want of one says, for this GPU."""


@contextlib.contextmanager
def thawed() -> Iterator[None]:
    """Within, the process may be frozen; after, it is not any more."""
    try:
        yield
    finally:
        kernels._frozen = ""


def frozen_after(*shapes: tuple[int, int, int]) -> None:
    """Freezes once the kernels for these problems are loaded."""
    for m, n, k in shapes:
        ac.gemm(matrix(m, k), matrix(k, n))
    ac.freeze()


def case_what_would_be_compiled_is_an_error_once_frozen() -> None:
    with compiler() as compiled, thawed(), tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        frozen_after((5, 3, 7))
        log = Path(name) / "misses.jsonl"
        patch.setenv(kernels.MISS_LOG_VARIABLE, str(log))
        kernels._missed.clear()
        a, b, out = matrix(5, 7), matrix(3, 7).T, matrix(5, 3)
        before = out.copy()
        with pytest.raises(ac.KernelNotFoundError) as caught:
            ac.gemm(Tensor(a), Tensor(b), out=Tensor(out))
        line = sys._getframe().f_lineno - 1
        (missing,) = key_file.read(log)
        said = str(caught.value)
        for part in (missing.name, re.escape(f"{__file__}:{line}"), COMMAND):
            assert re.search(part, said), (part, said)
        np.testing.assert_array_equal(out, before)
        # Loaded kernels serve, other problems of theirs too, whichever function is called.
        kept_plans.clear()
        for given in ({}, {"backend": "jit"}, {"jit": "background"}):
            np.testing.assert_array_equal(ac.gemm(*(pair := (matrix(6, 7), matrix(7, 3))), **given), pair[0] @ pair[1])
        refused(ac.KernelNotFoundError, "frozen", lambda: ac.gemm(Tensor(a), Tensor(b), backend="jit"))
        assert len(compiled) == 1


def case_a_frozen_process_looks_at_no_compiler_and_no_disk() -> None:
    with compiler(), thawed(), pytest.MonkeyPatch.context() as patch:
        ac.freeze()

        def never(*_: object) -> None:
            raise AssertionError

        for name in ("toolchain", "store", "load"):
            patch.setattr(kernels, name, never)
        refused(ac.KernelNotFoundError, "frozen", lambda: ac.gemm(matrix(5, 7), matrix(7, 3)))


def case_a_policy_of_off_names_the_key_the_call_and_the_command() -> None:
    """For a kernel of a preset, and for one of none; whether a call, its environment or `backend` says so."""
    request = ac.GemmRequest(
        ac.GemmShape(5, 3, 7), dtype=ac.CutlassDtype.F32, epilogue=ac.GemmEpilogue(activation="relu")
    )
    calls = {
        "it is in preset (smoke|full)": lambda **how: ac.gemm(matrix(5, 7), matrix(7, 3), **how),
        "it is in no preset": lambda **how: ac.plan(request, **how),
    }
    for preset, call in calls.items():
        for how in ({}, {"jit": "off"}, {"jit": "off", "backend": "jit"}):
            with compiler() as compiled, pytest.MonkeyPatch.context() as patch:
                patch.setenv(kernels.POLICY_VARIABLE, "auto" if how else "off")
                with pytest.raises(ac.KernelNotFoundError) as caught:
                    call(**how)
                said = str(caught.value)
                site = re.escape(f"asked for by {__file__}:{call.__code__.co_firstlineno}")
                forbids = "jit='off' or ATOMR_CUTLASS_JIT=off forbids to compile that"
                for part in (r"cutlass_\w+_[0-9a-f]{10}", preset, COMMAND, f"{forbids}, {site}$"):
                    assert re.search(part, said), (how, part, said)
                assert compiled == []


def case_a_backend_of_jit_under_off_is_to_be_left_out() -> None:
    """Neither a preset nor a pack cures it, least of all where the table has the kernel."""
    with compiler(built=True):
        with pytest.raises(ac.KernelNotFoundError) as caught:
            ac.gemm(matrix(5, 7), matrix(7, 3), backend="jit", jit="off")
        passed_over = "backend='jit' passes over the table and asks for cutlass_"
        assert re.match(rf"{passed_over}\w+: leave it out; the table has that; jit='off'", str(caught.value))


def case_a_table_alone_is_no_policy() -> None:
    """`backend="prebuilt"` is what the call itself says: the error has the command, and nothing of a policy."""
    with compiler(), pytest.raises(ac.KernelNotFoundError) as caught:
        ac.gemm(matrix(5, 7), matrix(7, 3), backend="prebuilt")
    assert re.search(COMMAND, str(caught.value))
    assert "forbids" not in str(caught.value)


def case_what_a_message_lacks_is_asked_for_where_the_message_is_made() -> None:
    """A mailbox's thread has nobody's code above it, and a planner of one's own is not who asks."""
    request = ac.GemmRequest(ac.GemmShape(5, 3, 7), dtype=ac.CutlassDtype.F32)
    for planner in (ac.plan, lambda request, device: ac.plan(request, device, backend="auto")):
        actor = ac.CutlassActor(2, planner=planner)
        mailbox = actor.start()
        try:
            for frozen in (False, True):
                with compiler(), thawed(), pytest.MonkeyPatch.context() as patch:
                    if frozen:
                        ac.freeze()
                    else:
                        patch.setenv(kernels.POLICY_VARIABLE, "off")
                    for ask in (actor.handle, mailbox.ask):
                        message = ac.CutlassMsg.Gemm(request, {"a": operand(matrix(5, 7)), "b": operand(matrix(7, 3))})
                        line = sys._getframe().f_lineno - 1
                        refused(ac.KernelNotFoundError, f"asked for by {__file__}:{line}", lambda: ask(message))  # noqa: B023
        finally:
            mailbox.stop()
        assert kernels.called_from.get() == ""


def case_explain_loads_no_compiler_in_a_frozen_process() -> None:
    with compiler(), thawed(), pytest.MonkeyPatch.context() as patch:
        ac.freeze()
        patch.setattr(kernels, "toolchain", lambda: pytest.fail("looks for a compiler"))
        explained = ac.explain(ac.GemmRequest(ac.GemmShape(5, 3, 7), dtype=ac.CutlassDtype.F32))
        assert explained.kernel is None
        assert explained.reason == "the table has no kernel for it, and the process is frozen"


def case_what_is_compiled_is_a_warning_where_that_is_asked_for() -> None:
    for by_variable in (False, True):
        with compiler() as compiled, thawed(), pytest.MonkeyPatch.context() as patch:
            if by_variable:
                patch.setenv(kernels.POLICY_VARIABLE, "warn")
            else:
                ac.freeze("warn")
            a, b = matrix(5, 7), matrix(7, 3)
            with pytest.warns(RuntimeWarning, match=r"is compiled, and this process is frozen.*atomr-cutlass build"):
                got = ac.gemm(a, b)
            np.testing.assert_array_equal(got, a @ b)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                kept_plans.clear()
                ac.gemm(matrix(6, 7), b)
                # From the disk: that is no compilation.
                kernels._kernels.clear()
                kept_plans.clear()
                ac.gemm(a, b)
            assert len(compiled) == 1


def case_a_slow_row_serves_a_frozen_process_and_nothing_compiles_behind_it() -> None:
    for policy in kernels.FREEZES:
        with compiler(built=True) as compiled, thawed(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "in_background", lambda *_: pytest.fail("compiles in the background"))
            ac.freeze(policy)
            kept_plans.clear()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                a, b = matrix(64, 64), matrix(64, 64)
                for jit in (None, "background"):
                    np.testing.assert_array_equal(ac.gemm(a, b, jit=jit), a @ b)
            assert compiled == []


def case_freezing_waits_for_what_compiles_in_the_background() -> None:
    gate, ended = threading.Event(), []
    with thawed():
        thread = threading.Thread(target=lambda: (gate.wait(60), ended.append(1)))
        thread.start()
        kernels._background["name", "sm_80"] = (thread, [])
        try:
            threading.Timer(0.1, gate.set).start()
            ac.freeze()
            assert ended == [1]
        finally:
            del kernels._background["name", "sm_80"]


def case_unknown_policies_are_refused() -> None:
    refused(ac.InvalidOperandError, "policy is 'off'; valid: error, warn", lambda: ac.freeze("off"))
    refused(ac.InvalidOperandError, "jit is 'warn'", lambda: ac.gemm(matrix(2, 2), matrix(2, 2), jit="warn"))
    assert kernels.frozen() == ""


# ----------------------------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fresh() -> None:
    """Lets go of the plans of earlier cases: those alive count as used."""
    kept_plans.clear()
    recording._plans.clear()
    gc.collect()


def case_every_kernel_of_a_run_is_recorded_with_shapes_and_counts() -> None:
    fresh()
    with tempfile.TemporaryDirectory() as name, compiler() as compiled:
        path = Path(name) / "keys.jsonl"
        with ac.record(path):
            for _ in range(3):
                ac.gemm(operand(matrix(5, 7)), operand(matrix(7, 3)), out=operand(matrix(5, 3)))
            ac.gemm(operand(matrix(6, 7)), operand(matrix(7, 3)), out=operand(matrix(6, 3)))
            made = ac.plan(ac.GemmRequest(ac.GemmShape(5, 3, 7), dtype=ac.CutlassDtype.F32))
        kept = ac.gemm(operand(matrix(5, 7)), operand(matrix(3, 7).T), out=operand(matrix(5, 3)))
        assert kept.shape == (5, 3)
        (line,) = lines(path)
        assert line["name"] == compiled[0] == made.kernel_name
        assert key_file.read(path)[0].name == compiled[0]
        assert line["count"] == 3, line
        assert [(s["m"], s["n"], s["k"]) for s in line["shapes"]] in ([(5, 3, 7), (6, 3, 7)], [(3, 5, 7), (3, 6, 7)])
        # A second run adds to the file; what lives from before counts too.
        with ac.record(path):
            pass
        assert {line["name"] for line in lines(path)} == set(compiled)
        assert len(compiled) == 2


def case_kernels_of_the_table_are_recorded_too() -> None:
    fresh()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "keys.jsonl"
        with ac.record(path):
            ac.gemm(matrix(5, 7), matrix(7, 3), backend="prebuilt")
            # Written at once: a process may be killed.
            assert len(lines(path)) == 1
        assert key_file.read(path)[0].op == "gemm"


def case_threads_and_processes_record_in_one_file() -> None:
    fresh()
    with tempfile.TemporaryDirectory() as name, compiler():
        path = Path(name) / "keys.jsonl"
        with ac.record(path):
            work = [
                threading.Thread(target=lambda m=m: ac.gemm(matrix(m, 7), matrix(7, 3), backend="jit"))
                for m in range(1, 17)
            ]
            for thread in work:
                thread.start()
            for thread in work:
                thread.join()
        assert sum(line["count"] for line in lines(path)) == 16
        assert sum(len(line["shapes"]) for line in lines(path)) == 16

        key = key_file.read(path)[0]
        children = []
        for child in range(8):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    for number in range(4):
                        recording.Recording(path).note([(key, {"m": 1000 + 10 * child + number, "n": 1, "k": 1})])
                    status = 0
                finally:
                    os._exit(status)
            children.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8
        recorded = lines(path)
        assert sum(line["count"] for line in recorded) == 16 + 32
        assert sum(len(line["shapes"]) for line in recorded) == 16 + 32
        assert list(Path(name).iterdir()) == [path]


def case_a_file_that_is_none_of_keys_is_left_as_it_is() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "notes.txt"
        path.write_text("buy milk\n")

        def enter(where: object) -> None:
            with ac.record(where):
                pytest.fail("entered")

        refused(ac.InvalidOperandError, "has something else", lambda: enter(path))
        refused(ac.InvalidOperandError, "cannot record kernels", lambda: enter(Path(name) / "nowhere" / "keys.jsonl"))
        refused(ac.InvalidOperandError, "path is 7", lambda: enter(7))
        refused(ac.InvalidOperandError, "cannot record", lambda: enter("a\0b"))
        assert path.read_text() == "buy milk\n"


def case_a_file_to_which_nothing_is_added_is_not_replaced() -> None:
    with tempfile.TemporaryDirectory() as name:
        path, link = Path(name) / "keys.jsonl", Path(name) / "link.jsonl"
        path.touch(0o600)
        link.symlink_to(path)
        before = path.stat()
        for where in (path, link):
            with ac.record(where):
                pass
        assert link.is_symlink()
        assert (path.stat().st_ino, path.stat().st_mode) == (before.st_ino, before.st_mode)


def case_a_recording_that_fails_is_no_reason_for_a_call_to_fail() -> None:
    fresh()
    with tempfile.TemporaryDirectory() as name, compiler():
        path = Path(name) / "keys.jsonl"
        a, b = matrix(5, 7), matrix(7, 3)
        with contextlib.ExitStack() as stack:
            stack.enter_context(ac.record(path))
            path.write_text("spoilt\n")
            with pytest.warns(RuntimeWarning, match=re.escape(f"cannot record kernels in {path}")):
                np.testing.assert_array_equal(ac.gemm(a, b), a @ b)
            path.unlink()
        assert len(lines(path)) == 1


if __name__ == "__main__":
    fake_cases.of_packs_alone()
    fake_cases.run(globals())
