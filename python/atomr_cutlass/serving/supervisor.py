"""Restart in a fresh process after the loss of the CUDA context, which a process cannot restore."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from ..checks import check_integer, check_number, shown
from ..errors import ContextPoisonedError, InvalidOperandError, LibraryError

POISONED_STATUS = 75
"""The exit status that requests a restart: EX_TEMPFAIL of sysexits.h."""


def exit_for_restart(error: ContextPoisonedError) -> None:
    """Ends this process at once so that `supervise` starts another; meant as an actor's `on_poisoned`.

    Exit handlers do not run, since they could wait for the GPU for ever; standard output and error are flushed.
    """
    print(f"atomr_cutlass: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(POISONED_STATUS)


def supervise(target: Callable[..., object], *args: Any, restarts: int = 3, pause: float = 1.0) -> None:
    """Runs a function in a fresh process, and again in another one whenever it loses its CUDA context.

    The process is spawned, not forked: CUDA does not survive fork. So `target` and `args` have to be importable and
    picklable, and a script has to call this under `if __name__ == "__main__":`.

    Args:
        target: the function, called anew in each process. It reports the loss of its context by raising
            ContextPoisonedError, or through an actor with `on_poisoned=ac.exit_for_restart`.
        args: its arguments.
        restarts: the most restarts.
        pause: seconds before each.

    Raises:
        InvalidOperandError: an argument of the wrong kind, or one that cannot be pickled.
        ContextPoisonedError: the context was lost more than `restarts` times.
        LibraryError: the process ended with another status than 0.
    """
    if not callable(target):
        raise InvalidOperandError(f"target is {shown(target)}; expected a function")
    check_integer(restarts, "restarts", "a number of times, from 0")
    check_number(pause, "pause")
    if not 0 <= pause < 1e6:  # the range of a platform's sleep
        raise InvalidOperandError(f"pause is {pause}; expected seconds, from 0")
    context = multiprocessing.get_context("spawn")
    for attempt in range(restarts + 1):
        process = context.Process(target=_worker, args=(target, args))
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidOperandError(
                f"{_name(target)} and its arguments go to another process, and cannot be pickled: {error}"
            ) from error
        try:
            process.join()
        finally:
            if process.is_alive():  # this process was interrupted while it waited
                process.terminate()
                process.join()
        if process.exitcode == 0:
            return
        if process.exitcode != POISONED_STATUS:
            raise LibraryError("worker", f"{_name(target)} ended with status {process.exitcode}")
        if attempt < restarts:
            warnings.warn(
                f"{_name(target)} lost its CUDA context: it is started again in a fresh process "
                f"({attempt + 1} of {restarts} times)",
                RuntimeWarning,
                stacklevel=2,
            )
            time.sleep(pause)
    raise ContextPoisonedError(f"{_name(target)} lost its CUDA context {restarts + 1} times: it is not started again")


def _worker(target: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        target(*args)
    except ContextPoisonedError as error:
        exit_for_restart(error)


def _name(target: Callable[..., object]) -> str:
    return getattr(target, "__qualname__", repr(target))
