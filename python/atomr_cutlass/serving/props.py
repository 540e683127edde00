"""How actors are made: props, which create any number of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .actor import CutlassActor


@dataclass(frozen=True)
class CutlassProps:
    """How to make actors.

    Attributes:
        plan_cache_capacity: how many plans each keeps.
        stream: where the work of messages that name no stream goes, or None; see `CutlassActor`.
        mock: whether they do without a GPU.
    """

    plan_cache_capacity: int
    stream: Any = None
    mock: bool = False

    def create(self, *, mock: bool | None = None, **options: Any) -> CutlassActor:
        """A new actor; `mock`, where it is given, overrides, and `options` are further arguments of CutlassActor."""
        chosen = {"mock": self.mock if mock is None else mock, "stream": self.stream}
        return CutlassActor(self.plan_cache_capacity, **{**chosen, **options})


def props(plan_cache_capacity: int, *, stream: Any = None) -> CutlassProps:
    """How to make actors that keep this many plans each, and launch on this stream; see `CutlassActor`."""
    return CutlassProps(plan_cache_capacity, stream)


def mock_props(plan_cache_capacity: int = 64) -> CutlassProps:
    """How to make actors for tests where there is no GPU: they only render, and refuse operands (LibraryError)."""
    return CutlassProps(plan_cache_capacity, mock=True)
