"""Cases that `test_recorded.py` runs in a process whose GPU only takes notes: what recordings have of calls.

Every function named `case_...` is a test.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import atomr_cutlass as ac
import fake_cases
import golden_gpu
import tune_cases
from atomr_cutlass import CutlassDtype as D
from atomr_cutlass import SmArch, _core
from atomr_cutlass.arrays.layouts import row_major
from atomr_cutlass.jit import record as recording
from atomr_cutlass.ops.gemm import plans
from atomr_cutlass.pipeline import devices, tuning
from atomr_cutlass.pipeline.call import kept_plans
from atomr_cutlass.pipeline.operation import operation_of

ARCH = SmArch.SM90A
ROW, COLUMN = ac.GemmLayout


def array(place: int, *shape: int, columns: bool = False, dtype: D = D.BF16) -> Any:
    """An array on the GPU, row-major, or the transpose of one."""
    strides = list(row_major(shape))
    if columns:
        strides[-2:] = [1, shape[-2]]
    return _core.Operand((place + 1) << 38, shape, strides, dtype.dlpack, 2, 0, False, None)


def call(m: int, **values: Any) -> None:
    """A product with a weight as PyTorch has it."""
    ac.gemm(array(0, m, 768), array(1, 768, 1024, columns=True), **values)


@contextmanager
def recorded() -> Iterator[Path]:
    """The path of a recording of the block, without the plans before it."""
    kept_plans.clear()
    recording._plans.clear()
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.jsonl"
        with ac.record(path):
            yield path


def identities(requests: list[Any]) -> list[str]:
    return [
        tuning.identity(operation_of(request).search(request, devices.get(0)).tuned_problem) for request in requests
    ]


def expect(calls: Callable[[], Any], *requests: Any) -> None:
    """Checks that a recording of calls has the problems of these requests."""
    with recorded() as path:
        calls()
        assert identities(ac.recorded_requests(path)) == identities(list(requests)), path.read_text()


def gemm(m: int, **values: Any) -> ac.GemmRequest:
    return ac.GemmRequest(ac.GemmShape(m, 1024, 768), **{"dtype": D.BF16, "layout_b": COLUMN, **values})


def case_calls_of_every_function() -> None:
    expect(lambda: call(512), gemm(512))
    expect(lambda: call(512, batch_invariant=True), gemm(512, batch_invariant=True))
    biased = ac.GemmEpilogue(bias=True, activation="relu")
    expect(lambda: call(512, bias=array(2, 1024), activation="relu"), gemm(512, epilogue=biased))
    added = {"c": array(2, 512, 1024), "beta": 0.5, "out_dtype": D.BF16}
    expect(lambda: call(512, **added), gemm(512, epilogue=ac.GemmEpilogue(beta=1.0)))
    groups = [ac.GemmShape(m, 256, 512) for m in (96, 32)]
    expect(
        lambda: ac.grouped_gemm(
            [array(0, 96, 512), array(1, 32, 512)], [array(2, 512, 256), array(3, 512, 256)]
        ),
        ac.GroupedGemmRequest(ac.GroupedGemmShape(groups), dtype=D.BF16),
    )  # fmt: skip
    expect(
        lambda: ac.gated_gemm(array(0, 64, 512), array(1, 512, 256, columns=True)),
        ac.GatedGemmRequest(ac.GemmShape(64, 256, 512), dtype=D.BF16, layout_b=COLUMN),
    )
    expect(lambda: ac.gemv(array(0, 256, 512), array(1, 512)), ac.GemvRequest(ac.GemvShape(256, 512), dtype=D.BF16))
    expect(
        lambda: ac.conv2d(
            array(0, 4, 28, 28, 64), array(1, 128, 3, 3, 64), padding=1, bias=array(2, 128), activation="relu"
        ),
        ac.ConvFwdRequest(
            ac.ConvShape.nhwc(4, 28, 28, 64, 128, 3, 3, padding=1), dtype=D.BF16, epilogue=biased
        ),
    )  # fmt: skip


def case_matmul_records_gemms() -> None:
    def product(**values: Any) -> None:
        ac.matmul(ac.MatmulRequest(array(0, 64, 128), array(1, 128, 256), m=64, n=256, k=128, **values))

    transposed = ac.GemmShape(256, 64, 128)  # rows of D^T are columns of a column-major D
    expect(product, ac.GemmRequest(transposed, dtype=D.BF16))
    with recorded() as path:
        product(bias=array(2, 64), epilogue=ac.MatmulEpilogue.RELU_BIAS)
        (found,) = ac.recorded_requests(path)
    assert (found.shape, [operand.kind for operand in found.tree.inputs]) == (transposed, ["row"])


def case_plans_of_requests() -> None:
    for name, request in tune_cases.REQUESTS.items():
        with recorded() as path:
            ac.plan(request)
            assert identities(ac.recorded_requests(path)) == identities([request]), name


def case_calls_that_differ_in_extents_alone() -> None:
    """The plans of most follow from that of another, without being planned anew."""
    rows = [512, 544, 576, 608, 640, 672]
    planned = unittest.mock.Mock(side_effect=plans.planned)
    with recorded() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "planned", planned)
        for m in rows * 2:
            call(m)
        assert sorted(identities(ac.recorded_requests(path))) == sorted(identities(list(map(gemm, rows))))
    assert 1 < planned.call_count < len(rows)


def case_plans_from_before_the_recording() -> None:
    rows = [512, 544, 576, 608, 640, 672]
    with recorded():
        for m in rows:
            call(m)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "keys.jsonl"
            with ac.record(path):
                pass
            assert sorted(identities(ac.recorded_requests(path))) == sorted(identities(list(map(gemm, rows))))


def case_helpers_and_quantizers_have_no_problems() -> None:
    with recorded() as path:
        ac.quantize(array(0, 64, 512), scaling="row")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines
    assert [line["problems"] for line in lines] == [[]] * len(lines)


def case_tuning_of_a_recording_serves_its_calls() -> None:
    with recorded() as path:
        call(512)
        requests = ac.recorded_requests(path)
    with tune_cases.measured():
        (record,) = ac.tune(requests)
        tune_cases.GPU._library.golden_notes()
        call(512)
        (step,) = tune_cases.GPU._steps(())
        assert step.split()[0].startswith(record.key.name)
        assert round(tune_cases.drawn(step) * 1e6, 3) == record.microseconds


if __name__ == "__main__":
    tune_cases.GPU = golden_gpu.Gpu(Path(sys.argv[1]), ARCH)
    tune_cases.GPU._table = "full"
    fake_cases.run(globals())
