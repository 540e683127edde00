"""Tuning on the GPU: the fastest kernel is found, is right, and is what later plans and calls take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import atomr_cutlass as ac
from atomr_cutlass import _core
from atomr_cutlass.generator.dtypes import CutlassDtype as D
from atomr_cutlass.pipeline import tuning, verify
from atomr_cutlass.pipeline.operation import operation_of
from atomr_cutlass.pipeline.select import rank

pytestmark = [pytest.mark.gpu]

COLUMN = ac.GemmLayout.COL_MAJOR
SHAPE = ac.ConvShape.nhwc(8, 28, 28, 64, 128, 3, 3, padding=1)
REQUESTS: dict[str, Any] = {
    "gemm": ac.GemmRequest(ac.GemmShape(777, 1000, 1032), dtype=D.BF16, layout_b=COLUMN),
    "few rows": ac.GemmRequest(ac.GemmShape(5, 4096, 2048), dtype=D.BF16, layout_b=COLUMN),
    "long k": ac.GemmRequest(ac.GemmShape(256, 264, 32768), dtype=D.BF16, layout_b=COLUMN),
    "fp8": ac.GemmRequest(ac.GemmShape(512, 1024, 768), dtype=D.F8E4M3, scaling="vector", layout_b=COLUMN),
    "grouped": ac.GroupedGemmRequest(
        ac.GroupedGemmShape([ac.GemmShape(m, 256, 512) for m in (96, 0, 300)]), dtype=D.BF16
    ),
    "fprop": ac.ConvFwdRequest(SHAPE, dtype=D.BF16),
    "wgrad": ac.ConvWgradRequest(SHAPE, dtype=D.BF16),
}


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    tuning.clear()
    yield
    tuning.clear()


@pytest.mark.parametrize("name", REQUESTS)
def test_tune(name: str, tmp_path: Path) -> None:
    request = REQUESTS[name]
    from atomr_cutlass.pipeline import devices

    search = operation_of(request).search(request, devices.get(0))
    if search is None or not rank(search):
        pytest.skip("the table has no kernel for it")
    path = tmp_path / "tuned.jsonl"
    (record,) = ac.tune([request], path, seconds=2.0)
    print(f"{name}: {record.microseconds} us of {record.tried}, the model's choice {record.chosen_microseconds} us")
    assert 0 < record.microseconds <= record.chosen_microseconds
    assert record.tried >= 1
    result = verify.run(request, jit="off")
    assert result.ok
    assert result.kernel == record.key.name
    tuning.clear()
    assert ac.load_tuning(path) == 1
    assert ac.plan(request, jit="off").kernel_name == record.key.name
    assert ac.tune([request], path) == [record]  # which is not measured again


def test_calls_of_arrays_follow(torch: Any) -> None:
    request = REQUESTS["gemm"]
    (record,) = ac.tune([request], seconds=2.0)
    a = torch.randn(777, 1032, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(1000, 1032, device="cuda", dtype=torch.bfloat16).T
    out = ac.gemm(a, b)
    torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=2e-2, atol=2e-1)
    plan = ac.plan(request)
    assert plan.kernel_name == record.key.name


def test_all_gpus_of_the_host_share_the_requests(tmp_path: Path) -> None:
    if _core.device_count() < 2:
        pytest.skip("there is one GPU")
    requests = [
        ac.GemmRequest(ac.GemmShape(m, 1024, 512), dtype=D.BF16, layout_b=COLUMN) for m in (64, 512, 1000, 2048)
    ]
    records = ac.tune(requests, tmp_path / "tuned.jsonl", device=None, seconds=1.0)
    models = {record.gpu for record in records}
    assert len(records) == len(requests) * len(models)
    assert len((tmp_path / "tuned.jsonl").read_text(encoding="utf-8").splitlines()) == len(records)
    for request in requests:
        assert verify.run(request, jit="off").ok


@pytest.mark.filterwarnings("ignore:.* left out")  # problems of other tests' plans
def test_recorded_calls_are_tuned(torch: Any, tmp_path: Path) -> None:
    """A recording of calls, of which most plans follow from that of another, leads to what the calls then use."""
    keys, rows = tmp_path / "keys.jsonl", (96, 160, 224, 288)
    b = torch.randn(1024, 768, device="cuda", dtype=torch.bfloat16).T

    def call(m: int) -> None:
        a = torch.randn(m, 768, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(ac.gemm(a, b).float(), a.float() @ b.float(), rtol=2e-2, atol=2e-1)

    with ac.record(keys):
        for m in rows:
            call(m)
    # Plans of other tests that are alive count as used.
    extents = {ac.GemmShape(m, 1024, 768) for m in rows}
    requests = [request for request in ac.recorded_requests(keys) if request.shape in extents]
    assert {request.shape for request in requests} == extents
    records = ac.tune(requests, tmp_path / "tuned.jsonl", seconds=1.0)
    for m in rows:
        call(m)
    again = tmp_path / "again.jsonl"
    with ac.record(again):
        pass
    used = {json.loads(line)["name"] for line in again.read_text(encoding="utf-8").splitlines()}
    assert {record.key.name for record in records} <= used
