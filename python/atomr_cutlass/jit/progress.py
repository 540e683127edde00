"""Compilations that somebody waits for: each is said once, on a terminal or through `logging`; several have a bar."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .locks import renewed

if TYPE_CHECKING:  # which importing the package need not
    from rich.progress import Progress

QUIET_VARIABLE = "ATOMR_CUTLASS_QUIET"

_SILENT_SECONDS = 1.0


@contextlib.contextmanager
def announced(name: str, seconds: float, folder: Callable[[], Path]) -> Iterator[None]:
    """Says that a kernel is being compiled if the block takes longer than a second, unless ATOMR_CUTLASS_QUIET is set.

    `seconds` is how long that takes, about; `folder` finds the folder of the cache.
    """
    if os.environ.get(QUIET_VARIABLE, "0") != "0":
        yield
        return
    timer = threading.Timer(
        _SILENT_SECONDS,
        lambda: _waiting.announce(timer, f"compiling {name}: about {seconds:.0f} s, once; it is kept in {folder()}"),
    )
    timer.daemon = True
    with _waiting.lock:
        _waiting.running.append(timer)
    try:
        timer.start()
        yield
    finally:
        _waiting.finish(timer)


class _Waiting:
    """The compilations that run, how many have ended since none did, and the bar that shows both."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.running: list[threading.Timer] = []
        self._finished = 0
        self._bar: Progress | None = None

    def announce(self, timer: threading.Timer, message: str) -> None:
        """Says what takes long: on a terminal above a bar, once there are several."""
        if sys.stderr is None or not sys.stderr.isatty():
            import logging  # which importing the package need not

            logging.getLogger("atomr_cutlass").info("%s", message)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        with self.lock:
            if timer not in self.running:  # it has ended meanwhile
                return
            if self._bar is None:
                columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
                self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
                self._bar.add_task("")
            self._bar.console.print(f"atomr_cutlass: {message}", soft_wrap=True, markup=False, highlight=False)
            if self._count() > 1:
                self._bar.start()

    def finish(self, timer: threading.Timer) -> None:
        with self.lock:
            if timer not in self.running:  # a child that was forked meanwhile: the thread is its parent's
                return
            timer.cancel()
            self.running.remove(timer)
            self._finished += 1
            self._count()
            if not self.running:
                if self._bar is not None:
                    self._bar.stop()  # else what the caller prints next would be mixed with it
                self._bar, self._finished = None, 0

    def _count(self) -> int:
        total = self._finished + len(self.running)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._finished, total=total)
        return total


_waiting = renewed(sys.modules[__name__], "_waiting", _Waiting)
