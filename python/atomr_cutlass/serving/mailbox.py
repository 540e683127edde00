"""A Pykka mailbox around a function that handles messages one by one. Imported only where one is started."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import pykka

logger = logging.getLogger("atomr_cutlass")


def start(handle: Callable[[Any], Any]) -> pykka.ActorRef[Any]:
    """Starts a thread that hands messages to `handle` in the order in which they were sent.

    Returns:
        The mailbox: `ask(message, block=False)` gives a future, whose `get()` returns what `handle` did, or raises what
        it raised; `tell(message)` wants no answer, and errors are logged; `stop()` ends the thread after what was sent
        before. The interpreter's exit does too, so that work in flight is not cut off.
    """
    return _Mailbox.start(handle)


class _Mailbox(pykka.ThreadingActor):
    # Others are joined before exit handlers run: a mailbox that nobody stops would keep the process from ending.
    use_daemon_thread = True

    def __init__(self, handle: Callable[[Any], Any]) -> None:
        super().__init__()
        self._handle = handle
        _running.add(self.actor_ref)

    def on_receive(self, message: Any) -> Any:
        return self._handle(message)

    def on_stop(self) -> None:
        _running.discard(self.actor_ref)

    @staticmethod
    def _create_actor_inbox() -> _Inbox:
        return _Inbox()


class _Inbox(queue.Queue[Any]):
    """Gives each message a place for its answer: Pykka stops an actor whose error nobody awaits."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if item.reply_to is None:
            item.reply_to = _Unawaited()
        super().put(item, block, timeout)


class _Unawaited:
    """The answer to a message that was told, not asked."""

    def set(self, _value: Any = None) -> None:
        """Drops the answer."""

    def set_exception(self, exc_info: Any = None) -> None:
        """Logs the error."""
        logger.error("a message that wanted no answer failed", exc_info=exc_info or True)


_running: set[pykka.ActorRef[Any]] = set()


@atexit.register
def _stop_all() -> None:
    for mailbox in list(_running):
        mailbox.stop()


def _bury_in_child() -> None:
    """Threads do not survive fork: whoever asks in the child gets ActorDeadError instead of waiting for ever."""
    for mailbox in _running:
        # A new one: the old one's own lock may have been held by a thread that is gone.
        mailbox.actor_stopped = threading.Event()
        mailbox.actor_stopped.set()
    _running.clear()


os.register_at_fork(after_in_child=_bury_in_child)
