"""Fixtures that several files of unit tests share."""

from __future__ import annotations

import pytest

from atomr_cutlass import CutlassActor
from fake_gpu import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A fake GPU in the place of the driver."""
    made = FakeGpu()
    made.install(monkeypatch)
    return made


@pytest.fixture
def actor(gpu: FakeGpu) -> CutlassActor:
    """An actor on the fake GPU."""
    return CutlassActor(8, planner=gpu.plan)
