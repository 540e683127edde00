"""Work in flight: launched, and not known to be done."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import _core
from ..errors import CutlassError, InvalidOperandError
from ..jit.locks import renewed
from ..pipeline.bindings import Binding, Weights

_READS_KEPT = 64


@dataclass(eq=False)
class Work:
    """The launched work of a message, done when its events are reached; `finish` makes the answer, or raises it.

    What is kept, and what `finish` has, such as the arrays that the work uses, stays alive until `result`. `stream` is
    where it was launched; None where nothing is in flight.
    """

    finish: Callable[[], Any]
    stream: int | None = None
    events: tuple[_core.Event, ...] = ()
    kept: object = None

    def result(self) -> Any:
        """Waits for the work, lets go of its operands, and returns the answer, once."""
        finish = self.finish
        del self.finish
        for event in self.events:
            event.wait()
        self.kept = None
        return finish()


def launched(device: int, stream: int, launch: Callable[[], object]) -> _core.Event:
    """Launches work on a stream; the event is reached when it is done.

    When launching fails, what had been launched by then is waited for: the operands may be let go with the error.
    """
    try:
        launch()
        return _core.Event(device, stream)
    except InvalidOperandError:  # raised before anything is launched
        raise
    except BaseException:
        _synchronize(device, stream)
        raise


class BoundOperand:
    """A binding whose launches and refits take turns on the GPU, whatever their streams and threads.

    A refit waits there for the launches before it, and the launches after it for the refit; launches overlap. Nobody on
    the host waits, but for values that come from host memory: they are copied when all work of the GPU is done.
    """

    def __init__(self, binding: Binding, device: int) -> None:
        """Nothing has been launched yet; launches get the views `operands`, by the operand's labels."""
        self.operands = binding.operands
        self._binding = binding
        self._device = device
        self._reads: list[_core.Event] = []
        self._writes: list[_core.Event] = []
        self._lock = renewed(self, "_lock", threading.Lock)

    def launch(self, stream: int, launch: Callable[[], object]) -> _core.Event:
        """Launches work that reads the operand; see `launched`."""
        with self._lock:
            self._writes = [event for event in self._writes if not event.done]
            for event in self._writes:
                event.hold(stream)
            reached = launched(self._device, stream, launch)
            if len(self._reads) >= _READS_KEPT:
                self._reads = [event for event in self._reads if not event.done]
            self._reads.append(reached)
            return reached

    def refit(self, weights: tuple[Weights, ...]) -> tuple[_core.Event, ...]:
        """Writes new values, each in the order of its own stream; the events are reached when they are there."""
        streams = {values.stream for values in weights}
        with self._lock:
            for stream in streams:
                for event in (*self._reads, *self._writes):
                    event.hold(stream)
            try:
                self._binding.refit(weights)
                self._writes = [_core.Event(self._device, stream) for stream in streams]
            except InvalidOperandError:  # nothing has been written
                raise
            except BaseException:
                for stream in streams:
                    _synchronize(self._device, stream)
                raise
            self._reads = []
            return tuple(self._writes)


def _synchronize(device: int, stream: int) -> None:
    with contextlib.suppress(CutlassError):
        _core.synchronize(device, stream)
