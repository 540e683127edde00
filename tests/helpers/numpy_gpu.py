"""A GPU whose plans compute in NumPy, with the functions of the package: `run` compares it with the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import request_calls
from atomr_cutlass.pipeline import devices, probe, verify
from atomr_cutlass.pipeline.operation import operation_of

Array = np.ndarray[Any, Any]
Compute = Callable[[Any, dict[str, Array]], None]
"""(the work of a request, a part of it) -> nothing; writes the part's results."""


def install(
    monkeypatch: pytest.MonkeyPatch, *, compute: Compute | None = None, served_by: str = "prebuilt"
) -> list[dict[str, Any]]:
    """Puts it in place of a GPU; gives the options of every plan that is made.

    Args:
        monkeypatch: takes it away again.
        compute: what computes a part; None: the operation's function on the reference computes it all.
        served_by: `prebuilt`, or `jit` where another kernel than the plan's first serves it.
    """
    asked: list[dict[str, Any]] = []
    name = "a_kernel" if served_by == "prebuilt" else "a_better_kernel"

    def planned(request: Any, **how: Any) -> SimpleNamespace:
        asked.append(how)
        main = SimpleNamespace(key=SimpleNamespace(math=request.math))
        kernel = SimpleNamespace(name="a_kernel")
        return SimpleNamespace(
            request=request, device=0, kernel_name=name, kernel=kernel, main=main, rewrite=""
        )  # fmt: skip

    def written(made: Any, arrays: dict[str, Array], _views: dict[str, Any]) -> dict[str, Array]:
        operation = operation_of(made.request)
        if compute is None:
            return request_calls.results_of(made.request, arrays)
        labels = {label for slot in operation.operands(made.request) if slot.written for label in slot.labels}
        own = {label: array.copy(order="K") if label in labels else array for label, array in arrays.items()}
        work = operation.probe(made.request, own)
        for part in work.parts():
            compute(work, part)
        return {label: own[label] for label in labels}

    monkeypatch.setattr(devices, "problem", lambda: "")
    monkeypatch.setattr(devices, "get", lambda _: SimpleNamespace(name="a GPU"))
    monkeypatch.setattr(verify, "plan", planned)
    monkeypatch.setattr(verify, "uploaded", lambda *_: {})
    monkeypatch.setattr(verify, "_timed", lambda *_: (5, 1e-3))
    monkeypatch.setattr(probe, "_written", written)
    return asked


def write_nothing(_work: Any, _part: dict[str, Array]) -> None:
    """Computes nothing."""
