"""Cases that `test_tune.py` runs in a process whose GPU only takes notes: which kernels tuned choices lead to.

Kernels take as long here as `Clock` says. Every function named `case_...` is a test.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pickle
import random
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import atomr_cutlass as ac
import fake_cases
import golden_gpu
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, _core
from atomr_cutlass.generator.families import gemm_sm90
from atomr_cutlass.pipeline import devices, planning, select, tune, tuning
from atomr_cutlass.pipeline.operation import operation_of

ARCH = SmArch.SM90A
GPU: Any = None

BIASED = ac.GemmEpilogue(bias=True, activation="relu")
REQUESTS = {
    "gemm": ac.GemmRequest(ac.GemmShape(512, 1024, 768), dtype=D.BF16, layout_b=ac.GemmLayout.COL_MAJOR),
    "tree": ac.GemmRequest(ac.GemmShape(512, 1024, 768), dtype=D.BF16, epilogue=BIASED),
    "scaled": ac.GemmRequest(
        ac.GemmShape(512, 1024, 768), dtype=D.F8E4M3, scaling="vector", layout_b=ac.GemmLayout.COL_MAJOR
    ),
    "gated": ac.GatedGemmRequest(ac.GemmShape(512, 1024, 768), dtype=D.BF16, layout_b=ac.GemmLayout.COL_MAJOR),
    "grouped": ac.GroupedGemmRequest(ac.GroupedGemmShape([ac.GemmShape(96, 256, 512)] * 3), dtype=D.BF16),
    "grouped and scaled": ac.GroupedGemmRequest(
        ac.GroupedGemmShape([ac.GemmShape(96, 256, 512)] * 3),
        dtype=D.F8E4M3,
        scaling="vector",
        layout_b=ac.GemmLayout.COL_MAJOR,
    ),
    "fprop": ac.ConvFwdRequest(ac.ConvShape.nhwc(4, 28, 28, 64, 128, 3, 3, padding=1), dtype=D.BF16),
    "dgrad": ac.ConvDgradRequest(ac.ConvShape.nhwc(4, 28, 28, 64, 128, 3, 3, padding=1), dtype=D.BF16),
    "wgrad": ac.ConvWgradRequest(ac.ConvShape.nhwc(4, 28, 28, 64, 128, 3, 3, padding=1), dtype=D.BF16),
}


class Clock:
    """Seconds of launches, by what `seconds` makes of the arguments that the fake kernels note."""

    seconds: Callable[[str], float]
    timed = 0

    def __init__(self, _device: Any) -> None: ...

    def replay(self, launch: Callable[..., None], sets: Sequence[Any]) -> Any:
        GPU._library.golden_notes()
        launch(sets[0], stream=0)
        steps = [step for step in GPU._steps(()) if not step.startswith(("copy", "set"))]
        Clock.timed += 1
        return lambda: Clock.seconds(steps[-1])

    def close(self) -> None: ...


def drawn(step: str) -> float:
    """The same for the same kernel and launch options."""
    name, *arguments = step.split()
    options = [word for word in arguments if word.startswith(("split_k", "swizzle", "raster"))]
    return random.Random(f"{name} {options}").uniform(1e-5, 2e-5)


@contextmanager
def measured(seconds: Callable[[str], float] = drawn, mismatches: Callable[[str], int] = lambda _: 0) -> Iterator[None]:
    """Timings by a clock that says what it is told; kernels that are as wrong as they are told to be."""
    tuning.clear()
    Clock.seconds, Clock.timed = staticmethod(seconds), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "Clock", Clock)
        wrong = lambda plan, *_, **__: types.SimpleNamespace(mismatches=mismatches(plan.kernel_name))  # noqa: E731
        patch.setattr(tune.probe, "checked", wrong)
        yield
    tuning.clear()


def launched(request: Any) -> str:
    """The kernel and launch options of a new plan of a request."""
    plan = planning.plan(request)
    operation = operation_of(request)
    arrays = {
        label: _core.Operand((place + 1) << 38, spec.shape, spec.strides, spec.dtype.dlpack, 2, 0, False, None)
        for place, (label, spec) in enumerate(
            (label, spec)
            for slot in operation.operands(request)
            for label, spec in zip(slot.labels, slot.specs, strict=True)
        )
    }
    GPU._library.golden_notes()
    operation.launch(plan, request, arrays, stream=0)
    return next(step for step in reversed(GPU._steps(())) if not step.startswith(("copy", "set")))


def case_every_operation_takes_what_was_fastest() -> None:
    for name, request in REQUESTS.items():
        compiled = 3 if name in ("tree", "gated") else 0  # the table has none, or one
        seconds: dict[str, float] = {}

        def noted(step: str, seconds: dict[str, float] = seconds) -> float:
            name = step.partition(" ")[0]
            seconds[name] = min(drawn(step), seconds.get(name, 1.0))
            return drawn(step)

        with measured(noted):
            (record,) = ac.tune([request], compiled=compiled)
            assert record.tried >= len(seconds) > 1, name
            assert record.timings[0] == (record.key.digest, record.microseconds), name
            assert len(record.timings) > 1, name
            assert sorted(record.timings, key=lambda pair: pair[1]) == list(record.timings), name
            assert record.microseconds == round(min(seconds.values()) * 1e6, 3), name
            assert round(drawn(launched(request)) * 1e6, 3) == record.microseconds, name
            explained = ac.explain(request)
            assert explained.kernel == record.key.name
            assert "measured" in " ".join(explained.notes)
            search = operation_of(request).search(request, devices.get(0))
            assert select.decide(search)[0].tuned
            if not compiled:
                assert select.choose(search, backend="prebuilt").key == record.key


def case_calls_of_arrays_follow_requests() -> None:
    request = REQUESTS["gemm"]
    a = _core.Operand(1 << 38, (512, 768), None, D.BF16.dlpack, 2, 0, False, None)
    b = _core.Operand(2 << 38, (768, 1024), [1, 768], D.BF16.dlpack, 2, 0, False, None)
    with measured():
        ac.gemm(a, b)
        ac.tune([request])
        GPU._library.golden_notes()
        ac.gemm(a, b)
        (step,) = GPU._steps(())
        assert step.split()[0] == launched(request).split()[0]


def case_kernels_with_different_numbers_of_options_are_near_the_fastest() -> None:
    with measured(lambda _: 1e-5):
        (record,) = ac.tune([REQUESTS["gemm"]], seconds=60.0)
        assert record.tried > 100


def case_a_wrong_kernel_is_not_kept() -> None:
    request = REQUESTS["gemm"]
    with measured():
        (fastest,) = ac.tune([request])
    with measured(mismatches=lambda name: name.startswith(fastest.key.name)):
        (record,) = ac.tune([request])
        assert record.key != fastest.key
        assert fastest.key.digest not in dict(record.timings)
    with measured(mismatches=lambda _: 7), pytest.raises(ac.UnsupportedError, match="wrong in 7 elements"):
        ac.tune([request])
    with measured():
        assert tuning.find(devices.get(0).name, operation_of(request).search(request, devices.get(0)).problem) is None


def case_files() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.jsonl"
        requests = [REQUESTS["gemm"], REQUESTS["fprop"]]
        with measured():
            first = ac.tune(requests[:1], path)
            timed = Clock.timed
            assert ac.tune(requests, path)[0] == first[0]
            both = ac.tune(requests, path)
            assert Clock.timed > timed
            assert [json.loads(line)["name"] for line in path.read_text().splitlines()] == [
                record.key.name for record in both
            ]
        steps = [launched(request) for request in requests]
        with measured():
            assert ac.load_tuning(path) == 2
            assert [launched(request) for request in requests] != steps or all(
                record.chosen == record.key.name for record in both
            )
            drawn_us = [round(drawn(launched(request)) * 1e6, 3) for request in requests]
            assert drawn_us == [record.microseconds for record in both]


def case_a_kernel_that_cannot_be_had_is_passed_over() -> None:
    request = REQUESTS["gemm"]
    with measured():
        (record,) = ac.tune([request])
        GPU._table = "smoke"
        try:
            search = operation_of(request).search(request, devices.get(0))
            built = {info.key for info in select.table.kernels()}
            found = select.choose(search, jit="off")
            assert found.tuned == (record.key in built)
            alone = gemm_sm90.of_width(record.key, record.width) if record.width else record.key
            assert select.choose(search, backend="jit").key == alone
        finally:
            GPU._table = "full"


def case_options_that_no_launch_has_are_passed_over() -> None:
    request = REQUESTS["gemm"]
    search = operation_of(request).search(request, devices.get(0))
    with measured():
        (record,) = ac.tune([request])
        for change in ({"swizzle": 3}, {"split_k": 1 << 20}, {"raster": 9}, {"width": 72}, {"formulation": 99}):
            tuning.clear()
            tuning.add([tuning.dataclasses.replace(record, **change)])
            assert not select.choose(search).tuned


def case_several_gpus_share_the_requests_and_each_measures_one_at_a_time() -> None:
    requests = [ac.GemmRequest(ac.GemmShape(64 * m, 256, 512), dtype=D.BF16) for m in range(1, 7)]
    busy: collections.Counter[int] = collections.Counter()
    used: set[int] = set()
    tuned, lock = tune._tuned, threading.Lock()

    def watched(request: Any, search: Any, *more: Any) -> Any:
        index = search.device.index
        with lock:
            busy[index] += 1
            used.add(index)
            assert busy[index] == 1
        time.sleep(0.01)
        # There is one fake GPU, and one list of its notes: what is launched at once could not be told apart.
        with lock:
            record = tuned(request, operation_of(request).search(request, get(0)), *more)
            busy[index] -= 1
        return dataclasses.replace(record, gpu=search.device.name)

    get = devices.get
    with measured(), pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tuned.jsonl"
        (first,) = ac.tune(requests[:1], path)
        patch.setattr(devices, "get", lambda index=0: dataclasses.replace(get(0), index=index))
        patch.setattr(tune, "_tuned", watched)
        made = ac.tune(requests, path, device=[0, 1, 2])
        searches = [operation_of(request).search(request, get(0)) for request in requests]
        assert [record.problem for record in made] == [tuning.identity(search.tuned_problem) for search in searches]
        assert made[0] == first
        assert len(used) > 1
        assert len(path.read_text().splitlines()) == len(requests)
        assert ac.tune(requests, path, device=[0, 1, 2]) == made
        # Of several models each tunes everything.
        patch.setattr(devices, "get", lambda index=0: dataclasses.replace(get(0), index=index, name=f"model {index}"))
        both = ac.tune(requests[:2], path, device=(0, 1))
        assert [record.gpu for record in both] == ["model 0", "model 1"] * 2
    for wrong in ("all", [0, "1"], -1, [True]):
        with pytest.raises(ac.InvalidOperandError, match="expected the index of a GPU"):
            ac.tune(requests, device=wrong)


def case_a_gpu_is_left_to_another_process_that_tunes_on_it() -> None:
    with measured():
        later = threading.Thread(target=ac.tune, args=([REQUESTS["gemm"]],))
        with tune._turn((0,)):
            later.start()
            time.sleep(0.3)
            assert Clock.timed == 0
        later.join()
        assert Clock.timed > 0
    with tune._turn((0, 1)) as first, tune._turn((0, 1)) as second:
        assert {first, second} == {0, 1}


class Elsewhere(futures.ThreadPoolExecutor):
    """Other processes, as far as that matters: what goes there and comes back is a copy."""

    def submit(self, task: Any, /, *given: Any, **named: Any) -> Any:
        sent = pickle.dumps(functools.partial(task, *given, **named))
        return super().submit(lambda: pickle.loads(pickle.dumps(pickle.loads(sent)())))


def case_other_processes_tune() -> None:
    requests = [REQUESTS["gemm"], REQUESTS["grouped"], REQUESTS["fprop"], REQUESTS["tree"]]
    with measured(), tempfile.TemporaryDirectory() as folder, Elsewhere(1) as executor:
        path = Path(folder) / "tuned.jsonl"
        here = ac.tune(requests)
        there = ac.tune(requests[:2], path, executor=executor)
        assert there == here[:2]
        assert ac.tune(requests, path, executor=executor) == here
        assert len(path.read_text().splitlines()) == 4
        timed = Clock.timed
        assert ac.tune(requests, path, executor=executor, device=None) == here
        assert Clock.timed == timed
    lost: futures.Future[Any] = futures.Future()
    lost.set_exception(RuntimeError("gone"))
    dead: Any = types.SimpleNamespace(submit=lambda *_: lost)
    with pytest.raises(ac.LibraryError, match=r"a worker died, or cannot be reached \(RuntimeError: gone"):
        ac.tune(requests, executor=dead)


if __name__ == "__main__":
    GPU = golden_gpu.Gpu(Path(sys.argv[1]), ARCH)
    GPU._table = "full"
    fake_cases.run(globals())
