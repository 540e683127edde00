"""Compilations that somebody waits for: each is said once, on a terminal or through `logging`; several have a bar."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which importing the package need not
    from rich.progress import Progress

QUIET_VARIABLE = "ATOMR_CUTLASS_QUIET"

_SILENT_SECONDS = 1.0

_lock = threading.RLock()
_running: list[threading.Timer] = []
_finished = 0
_bar: Progress | None = None


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
        lambda: _announce(timer, f"compiling {name}: about {seconds:.0f} s, once; it is kept in {folder()}"),
    )
    timer.daemon = True
    with _lock:
        _running.append(timer)
    try:
        timer.start()
        yield
    finally:
        _finish(timer)


def _announce(timer: threading.Timer, message: str) -> None:
    """Says what takes long: on a terminal above a bar, once there are several."""
    global _bar  # noqa: PLW0603
    if sys.stderr is None or not sys.stderr.isatty():
        import logging  # which importing the package need not

        logging.getLogger("atomr_cutlass").info("%s", message)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with _lock:
        if timer not in _running:  # it has ended meanwhile
            return
        if _bar is None:
            columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            _bar = Progress(*columns, console=Console(stderr=True), transient=True)
            _bar.add_task("")
        _bar.console.print(f"atomr_cutlass: {message}", soft_wrap=True, markup=False, highlight=False)
        _bar.update(_bar.task_ids[0], completed=_finished, total=_finished + len(_running))
        if _finished + len(_running) > 1:
            _bar.start()


def _finish(timer: threading.Timer) -> None:
    global _bar, _finished  # noqa: PLW0603
    with _lock:
        if timer not in _running:  # a child that was forked meanwhile: the thread is its parent's
            return
        timer.cancel()
        _running.remove(timer)
        _finished += 1
        if _bar is not None:
            _bar.update(_bar.task_ids[0], completed=_finished, total=_finished + len(_running))
        if not _running:
            if _bar is not None:
                _bar.stop()  # else what the caller prints next would be mixed with it
            _bar, _finished = None, 0


def _forget() -> None:
    """After a fork: the threads that compile are the parent's."""
    global _bar, _finished, _lock
    _bar, _finished, _lock = None, 0, threading.RLock()
    _running.clear()


os.register_at_fork(after_in_child=_forget)
