"""The errors that the package raises: each says what was given, what was expected and how to cure it."""

from __future__ import annotations

# The generator raises these two by itself, and knows nothing of the package.
from .generator.errors import CutlassError, InvalidOperandError
from .generator.rules import Status

__all__ = [
    "CacheError",
    "CompileError",
    "ContextPoisonedError",
    "CutlassError",
    "DeviceUnavailableError",
    "InvalidOperandError",
    "KernelNotFoundError",
    "LibraryError",
    "UnsupportedError",
]


class UnsupportedError(CutlassError):
    """No kernel can serve the request, and the message says why and what would."""


class KernelNotFoundError(CutlassError, LookupError):
    """A kernel could serve the request, but this installation lacks it."""


class CompileError(CutlassError):
    """A kernel's source did not compile.

    Attributes:
        log: what the compiler said.
        source: the source text.
        options: the compiler's options.
        source_path: where the source was left for a look at it, if it was.
    """

    def __init__(
        self,
        message: str,
        *,
        log: str = "",
        source: str = "",
        options: tuple[str, ...] = (),
        source_path: str | None = None,
    ) -> None:
        super().__init__(message)
        self.log = log
        self.source = source
        self.options = options
        self.source_path = source_path


class CacheError(CutlassError):
    """The kernel cache cannot be read or written safely."""


class DeviceUnavailableError(CutlassError):
    """The GPU, its driver or a run-time compiler is not there."""


class LibraryError(CutlassError):
    """A library below this package failed.

    Attributes:
        lib: the library's name, such as `cuda`.
        msg: what it said.
    """

    def __init__(self, lib: str, msg: str) -> None:
        super().__init__(lib, msg)  # by which process pools copy it
        self.lib = lib
        self.msg = msg

    def __str__(self) -> str:
        return f"{self.lib}: {self.msg}"


class ContextPoisonedError(CutlassError):
    """A sticky CUDA error has made the context unusable; only a new process or context cures it."""


def require(status: Status) -> None:
    """Raises UnsupportedError, with the reason, for what is not supported."""
    if not status:
        raise UnsupportedError(status.reason)
