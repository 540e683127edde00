"""A Pykka mailbox that launches one message's work after the other, and answers when each is done.

Imported only where a mailbox is started.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import pykka

from .messages import CutlassMsg, Work

_IDLE_SECONDS = 10.0


class Mailbox(pykka.ThreadingActor):
    """A thread that hands messages to `begin` in the order in which they were sent; see `CutlassActor.start`.

    Whatever `begin` raises ends the mailbox, so errors are the work's result. `in_flight` is how many works are in
    flight at most, and how many messages wait in the mailbox before sending waits.
    """

    # Others are joined before exit handlers run: a mailbox that nobody stops would keep the process from ending.
    use_daemon_thread = True
    actor_inbox: _Inbox

    def __init__(self, begin: Callable[[Any], Work], in_flight: int) -> None:
        self._begin = begin
        self._answers = _Answers(in_flight)
        super().__init__()
        _running.add(self.actor_ref)

    def on_start(self) -> None:
        """Tells the thread from those that may wait for room."""
        _this_thread.is_awaited_in = os.getpid()

    def on_receive(self, message: Any) -> Work:
        """Launches the work of a message, once there is room for it."""
        self._answers.slots.acquire()
        return self._begin(message)

    def on_stop(self) -> None:
        """Has everything answered that was received; what is sent from now on is refused."""
        self.actor_inbox.close()
        self._answers.close()
        _running.discard(self.actor_ref)

    def _create_actor_inbox(self) -> _Inbox:  # type: ignore[override] # a static method of Pykka's
        return _Inbox(self._answers)

    @staticmethod
    def _create_future() -> _Reply:
        return _Reply()


class _Reply(pykka.Future[Any]):
    """The answer to a message, to come: of work, when it is done.

    `await` leaves the event loop free, unlike that of Pykka's own futures.
    """

    def __init__(self) -> None:
        super().__init__()
        self.envelope: Any = None
        self.answers: _Answers | None = None
        self.answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.answer.set_running_or_notify_cancel()  # whoever stops awaiting it does not cancel the work

    def get(self, *, timeout: float | None = None) -> Any:
        if self._get_hook is not None:
            return super().get(timeout=timeout)
        try:
            return self.answer.result(timeout)
        except concurrent.futures.TimeoutError:
            if self.answer.done():
                raise
            raise pykka.Timeout(f"no answer came in {timeout} seconds") from None

    def set(self, value: Any = None) -> None:
        self._let_go()
        if self.answers is not None and isinstance(value, Work):
            self.answers.add(value, self)
        else:
            self.answer.set_result(value)

    def set_exception(self, exc_info: Any = None) -> None:
        self._let_go()
        self.answer.set_exception((exc_info or sys.exc_info())[1])

    def _let_go(self) -> None:
        # The thread of an idle mailbox still has the last envelope: neither operands nor results are to live as long.
        if self.envelope is not None:
            self.envelope.message = self.envelope.reply_to = self.envelope = None

    def __await__(self) -> Generator[Any, None, Any]:
        if self._get_hook is not None:  # of a future made from another, by map and the like: only `get` computes it
            return asyncio.get_running_loop().run_in_executor(None, self.get).__await__()
        return asyncio.wrap_future(self.answer).__await__()


def _log_failure(answer: concurrent.futures.Future[Any]) -> None:
    if error := answer.exception():
        logging.getLogger("atomr_cutlass").error("a message that wanted no answer failed", exc_info=error)


class _Inbox(queue.Queue[Any]):
    """The messages that were sent and not yet received; has each answered when its work is done."""

    def __init__(self, answers: _Answers) -> None:
        super().__init__()
        self._answers = answers
        self._closed = False

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Takes a message, when there is room; once the mailbox has stopped, the answer is that error."""
        del block, timeout  # Pykka gives neither
        if item.reply_to is None:  # of a message that was told; Pykka stops an actor whose error nobody awaits
            item.reply_to = _Reply()
            item.reply_to.answer.add_done_callback(_log_failure)
        reply: _Reply = item.reply_to
        reply.envelope, reply.answers = item, self._answers
        waits = isinstance(item.message, CutlassMsg) and not _must_go_on()
        with self.mutex:
            while waits and not self._closed and self._qsize() >= self._answers.bound:
                self.not_full.wait()
            if not self._closed:
                self._put(item)
                self.not_empty.notify()
                return
        stopped = pykka.ActorDeadError("the mailbox has stopped")
        reply.set_exception((type(stopped), stopped, None))

    def close(self) -> None:
        """Answers whatever is sent from now on, or waits for room, with the error that the mailbox has stopped."""
        with self.mutex:
            self._closed = True
            self.not_full.notify_all()


class _Answers:
    """Waits for work, in the order of each stream, in a thread for each stream that is in use."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.slots = threading.Semaphore(bound)  # to be acquired before work is launched that is added
        self._lock = threading.Lock()
        self._streams: dict[int, queue.SimpleQueue[tuple[Work, _Reply]]] = {}

    def add(self, work: Work, reply: _Reply) -> None:
        """Has work answered when it is done: at once, if nothing is in flight."""
        if work.stream is None:
            self._answer(work, reply)
            return
        with self._lock:
            waiting = self._streams.get(work.stream)
            if waiting is None:
                waiting = self._streams[work.stream] = queue.SimpleQueue()
                name = f"atomr-cutlass-stream-{work.stream:x}"
                threading.Thread(target=self._serve, args=(work.stream, waiting), name=name, daemon=True).start()
            waiting.put((work, reply))

    def close(self) -> None:
        """Waits until everything is answered; the threads end when they have been idle."""
        for _ in range(self.bound):
            self.slots.acquire()

    def _serve(self, stream: int, waiting: queue.SimpleQueue[tuple[Work, _Reply]]) -> None:
        _this_thread.is_awaited_in = os.getpid()
        while self._serve_next(stream, waiting):
            pass

    def _serve_next(self, stream: int, waiting: queue.SimpleQueue[tuple[Work, _Reply]]) -> bool:
        """Whether there may be more. Operands live no longer than this call's variables."""
        try:
            found = waiting.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            with self._lock:
                if waiting.empty():
                    del self._streams[stream]
                    return False
        else:
            self._answer(*found)
        return True

    def _answer(self, work: Work, reply: _Reply) -> None:
        try:
            answer = work.result()
        except BaseException as error:  # noqa: BLE001 - it is the answer
            reply.set_exception((type(error), error, error.__traceback__))
        else:
            reply.set(answer)
        finally:
            del reply  # an error's traceback has this frame
            self.slots.release()


_this_thread = threading.local()
"""Those that serve have `is_awaited_in`, their process: others wait there for them, not in a child of it."""


def _must_go_on() -> bool:
    """Whether this thread must not wait: it serves, or runs an event loop."""
    if getattr(_this_thread, "is_awaited_in", None) == os.getpid():
        return True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_running: set[pykka.ActorRef[Any]] = set()


@atexit.register
def _stop_all() -> None:
    for mailbox in list(_running):
        mailbox.stop()


def _retire_in_child() -> None:
    """Threads do not survive fork: whoever asks in the child gets ActorDeadError instead of waiting for ever."""
    for mailbox in _running:
        # A new one: the old one's own lock may have been held by a thread that is gone.
        mailbox.actor_stopped = threading.Event()
        mailbox.actor_stopped.set()
    _running.clear()


os.register_at_fork(after_in_child=_retire_in_child)
