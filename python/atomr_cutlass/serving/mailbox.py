"""A Pykka mailbox that launches the work of successive messages, and answers each when its work is done.

Imported only when a mailbox is started.
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

    An exception of `begin` ends the mailbox, so it returns errors as the work's result. `in_flight` limits both the
    works in flight and the waiting messages; beyond that, sending blocks.
    """

    # A daemon: other threads are joined before exit handlers, so a running mailbox would keep the process alive.
    use_daemon_thread = True
    actor_inbox: _Inbox

    def __init__(self, begin: Callable[[Any], Work], in_flight: int) -> None:
        self._begin = begin
        self._answers = _Answers(in_flight)
        super().__init__()
        _running.add(self.actor_ref)

    def on_start(self) -> None:
        """Marks the thread as one that must not wait for room."""
        _this_thread.is_awaited_in = os.getpid()

    def on_receive(self, message: Any) -> Work:
        """Launches the work of a message once fewer than `in_flight` works run."""
        self._answers.slots.acquire()
        return self._begin(message)

    def on_stop(self) -> None:
        """Refuses further messages, and waits until all received ones are answered."""
        self.actor_inbox.close()
        self._answers.close()
        _running.discard(self.actor_ref)

    def _create_actor_inbox(self) -> _Inbox:  # type: ignore[override] # a static method of Pykka's
        return _Inbox(self._answers)

    @staticmethod
    def _create_future() -> _Reply:
        return _Reply()


class _Reply(pykka.Future[Any]):
    """The future of a message's answer, which is set when its work is done.

    `await` does not block the event loop, unlike with Pykka's own futures.
    """

    def __init__(self) -> None:
        super().__init__()
        self.envelope: Any = None
        self.answers: _Answers | None = None
        self.answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.answer.set_running_or_notify_cancel()  # a cancelled `await` does not cancel the work

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
        # The thread of an idle mailbox keeps the last envelope, which must not keep operands and results alive.
        if self.envelope is not None:
            self.envelope.message = self.envelope.reply_to = self.envelope = None

    def __await__(self) -> Generator[Any, None, Any]:
        if self._get_hook is not None:  # of a future derived by `map` and similar methods: only `get` computes it
            return asyncio.get_running_loop().run_in_executor(None, self.get).__await__()
        return asyncio.wrap_future(self.answer).__await__()


def _log_failure(answer: concurrent.futures.Future[Any]) -> None:
    if error := answer.exception():
        logging.getLogger("atomr_cutlass").error("a message that wanted no answer failed", exc_info=error)


class _Inbox(queue.Queue[Any]):
    """The messages that were sent and not yet received; connects each reply with the thread that answers it."""

    def __init__(self, answers: _Answers) -> None:
        super().__init__()
        self._answers = answers
        self._closed = False

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Adds a message, waiting for room; if the mailbox has stopped, answers with ActorDeadError."""
        del block, timeout  # Pykka passes neither
        if item.reply_to is None:  # of `tell`; Pykka would stop an actor at an error without a reply
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
        """Answers later messages, and those that wait for room, with ActorDeadError."""
        with self.mutex:
            self._closed = True
            self.not_full.notify_all()


class _Answers:
    """Waits for works and answers their messages, with a thread for each stream in use, in the stream's order."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.slots = threading.Semaphore(bound)  # acquired before each launch, released by its answer
        self._lock = threading.Lock()
        self._streams: dict[int, queue.SimpleQueue[tuple[Work, _Reply]]] = {}

    def add(self, work: Work, reply: _Reply) -> None:
        """Arranges the answer for when the work is done: at once for work that is not in flight."""
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
        """Waits until all work is answered; idle threads end by themselves."""
        for _ in range(self.bound):
            self.slots.acquire()

    def _serve(self, stream: int, waiting: queue.SimpleQueue[tuple[Work, _Reply]]) -> None:
        _this_thread.is_awaited_in = os.getpid()
        while self._serve_next(stream, waiting):
            pass

    def _serve_next(self, stream: int, waiting: queue.SimpleQueue[tuple[Work, _Reply]]) -> bool:
        """Answers the next work; False ends the thread. Operands are released with this call's variables."""
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
            del reply  # the error's traceback refers to this frame
            self.slots.release()


_this_thread = threading.local()
"""Has `is_awaited_in`, a process id, in threads that serve messages: other threads of that process wait for them."""


def _must_go_on() -> bool:
    """Whether this thread must not wait for room: it serves messages, or runs an event loop."""
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
    """Stops the mailboxes in a forked child, which lacks their threads: `ask` raises ActorDeadError there."""
    for mailbox in _running:
        # A new event: a thread that the child lacks may have held the lock of the old one.
        mailbox.actor_stopped = threading.Event()
        mailbox.actor_stopped.set()
    _running.clear()


os.register_at_fork(after_in_child=_retire_in_child)
