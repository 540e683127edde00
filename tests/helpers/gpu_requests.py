"""Requests of every operation that plans are made of, as the registry knows them, with their operands on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import atomr_cutlass as ac
import request_calls
from atomr_cutlass.arrays import operands
from atomr_cutlass.epilogue import EvtBuilder
from atomr_cutlass.pipeline import probe as probes
from atomr_cutlass.pipeline.operation import Arrays, operation_of, planned_operations
from atomr_cutlass.pipeline.probe import Check
from atomr_cutlass.pipeline.request import RequestOptions

EXTENT = 128


def request_of(name: str, **values: Any) -> Any:
    """A small request of an operation: what options of the command line describe."""
    return planned_operations()[name].request(RequestOptions(EXTENT, values))


def with_bias(request: Any) -> Any:
    """The request with a bias and an activation; skips where the operation has none."""
    return _fused(request, "bias", ac.GemmEpilogue(bias=True, activation="relu"))


def with_tree(request: Any) -> Any:
    """The request with a tree that no preset has a kernel for; skips where the operation has none."""
    tree = EvtBuilder().add_bias("shift", dtype=request.dtype).activation("hardswish").scale(0.5).build()
    return _fused(request, "epilogue", ac.GemmEpilogue(tree=tree))


def _fused(request: Any, option: str, epilogue: ac.GemmEpilogue) -> Any:
    reason = operation_of(request).refuses.get(option)
    if reason:
        pytest.skip(reason)
    return dataclasses.replace(request, epilogue=epilogue)


class Placed:
    """A request with its operands in a GPU's memory.

    Attributes:
        request: the request.
        host: the operands by label; results are poison.
        views: the same on the GPU.
    """

    def __init__(self, request: Any, device: int, seed: int) -> None:
        """Places random operands on the GPU of an index."""
        self.request = request
        self._operation, self._slots = operation_of(request), operation_of(request).operands(request)
        self.host: Arrays = self._operation.random_arrays(request, np.random.default_rng(seed))
        self.views: Mapping[str, Any] = probes.uploaded(request, self.host, device)

    @property
    def bound(self) -> Any:
        """The operand that a plan can keep, on the GPU: of groups a list."""
        slot = self._operation.bound_slot(self.request)
        kept = [self.views[label] for label in slot.labels]
        return kept if slot.listed else kept[0]

    def spoil(self) -> None:
        """Fills the results with poison again."""
        for slot in self._slots:
            for label in slot.labels if slot.written else ():
                operands.copy_in(self.host[label], self.views[label])

    def launch(self, made: Any, stream: int = 0) -> None:
        """Launches a plan, or one with the operand bound, into the results that are placed."""
        kept = self._operation.bound_slot(self.request).labels if isinstance(made, ac.BoundPlan) else ()
        given = {label: view for label, view in self.views.items() if label not in kept}
        self._operation.launch(made, self.request, given, stream=stream)

    def call(self, torch: Any, **options: Any) -> list[Any]:
        """The results of the operation's function, which PyTorch allocates."""
        read = {
            label: torch.from_dlpack(self.views[label])
            for slot in self._slots
            for label in slot.labels
            if not slot.written
        }
        made = request_calls.call(self.request, read, **options)
        return made if isinstance(made, list) else [made]

    def assert_right(self, made: Any, results: Sequence[Any] | None = None) -> None:
        """Compares results with the reference.

        Args:
            made: a plan of the request, which says how its kernel computes.
            results: of a call, awaited; None: those that a plan was launched into.
        """
        labels = self._slots[-1].labels
        given = [self.views[label] for label in labels] if results is None else map(operands.as_operand, results)
        got = dict(zip(labels, map(operands.download, given), strict=True))
        probe = self._operation.probe(self.request, self.host | got)
        check = Check(probe.limits(probes._math(self.request, made)))
        for part in probe.parts():
            probe.compare(part, check)
        probe.finish(check)
        assert check.mismatches == 0, check
