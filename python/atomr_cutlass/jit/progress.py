"""Compilations that somebody waits for: each is said once, on a terminal or through `logging`; several have a bar."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

QUIET_VARIABLE = "ATOMR_CUTLASS_QUIET"

_SILENT_SECONDS = 1.0
_PAUSE_SECONDS = 0.1


@dataclass(eq=False)
class _Compilation:
    name: str
    seconds: float
    folder: Callable[[], Path]
    start: float = field(default_factory=time.monotonic)
    announced: bool = False

    def __str__(self) -> str:
        return f"compiling {self.name}: about {self.seconds:.0f} s, once; it is kept in {self.folder()}"


_running: list[_Compilation] = []
_finished = 0
_changed = threading.Condition()
_reporter: threading.Thread | None = None


@contextlib.contextmanager
def announced(name: str, seconds: float, folder: Callable[[], Path]) -> Iterator[None]:
    """Says that a kernel is being compiled if the block takes longer than a second, unless ATOMR_CUTLASS_QUIET is set.

    Args:
        name: of the kernel.
        seconds: how long its compilation takes, about.
        folder: finds the folder of the cache.
    """
    global _finished, _reporter  # noqa: PLW0603
    if os.environ.get(QUIET_VARIABLE, "0") != "0":
        yield
        return
    compilation = _Compilation(name, seconds, folder)
    with _changed:
        _running.append(compilation)
        if _reporter is None:
            _finished = 0
            _reporter = threading.Thread(target=_report, name="atomr-cutlass-progress", daemon=True)
            _reporter.start()
        reporter = _reporter
    try:
        yield
    finally:
        with _changed:
            _running.remove(compilation)
            _finished += 1
            last = not _running
            _changed.notify()
        if last and compilation.announced:
            # Else what the caller prints next would be mixed with the bar. Not for ever: another may have begun.
            reporter.join(timeout=_PAUSE_SECONDS)


def _report() -> None:
    """Runs beside compilations until there are none."""
    global _reporter  # noqa: PLW0603
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    show, close = _terminal() if on_terminal else (_log, lambda: None)
    try:
        while True:
            with _changed:
                _changed.wait(_PAUSE_SECONDS)
                if not _running:
                    _reporter = None
                    return
                now = time.monotonic()
                new = [c for c in _running if not c.announced and now - c.start >= _SILENT_SECONDS]
                done, total = _finished, _finished + len(_running)
                for compilation in new:
                    compilation.announced = True
            show([str(compilation) for compilation in new], done, total)
    finally:
        close()


def _log(messages: list[str], _done: int, _total: int) -> None:
    import logging  # which importing the package need not

    for message in messages:
        logging.getLogger("atomr_cutlass").info("%s", message)


def _terminal() -> tuple[Callable[[list[str], int, int], None], Callable[[], None]]:
    """Two functions: one shows messages and, once several kernels are compiled, a bar; the other removes the bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("")

    def show(messages: list[str], done: int, total: int) -> None:
        for message in messages:
            console.print(f"atomr_cutlass: {message}", soft_wrap=True, markup=False, highlight=False)
            if total > 1:
                bar.start()
        bar.update(task, completed=done, total=total)

    return show, bar.stop


def _forget() -> None:
    """After a fork: the threads that compile are the parent's."""
    global _changed, _reporter
    _changed, _reporter = threading.Condition(), None
    _running.clear()


os.register_at_fork(after_in_child=_forget)
