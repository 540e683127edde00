"""cuda-python, imported where a kernel has to be compiled or found, and nowhere else."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

from ..errors import DeviceUnavailableError

# cuda.core puts itself together while it is imported: a thread that imports it meanwhile finds half of it.
_lock = threading.RLock()


CURE = "pip install 'atomr-cutlass[cu13]' (or [cu12], the driver's major version)"


def load(name: str) -> Any:
    """A module of cuda-python, such as `cuda.core.utils`.

    Raises:
        DeviceUnavailableError: it cannot be imported; names the extra that brings it.
    """
    with _lock:
        try:
            return importlib.import_module(name)
        # It imports bindings of the CUDA that its extra names, which fail in more ways than ImportError.
        except Exception as error:
            raise missing(name, str(error)) from error


def missing(what: str, why: str = "") -> DeviceUnavailableError:
    """The error that says what is missing for compiling, and the command that brings it."""
    return DeviceUnavailableError(
        f"{what} is missing{f' ({why})' if why else ''}, so kernels cannot be compiled at run time: {CURE}"
    )


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
