"""The overhead of the actor: many small GEMMs through it, against direct calls of one plan. Prints JSON.

On a GPU it needs PyTorch. With --fake it needs neither: launches do nothing and events have been reached, so what is
left is what the host does for a request, the array framework's part but for its allocation excepted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from facts import deliver, machine, now

import atomr_cutlass as ac
from atomr_cutlass import _core
from atomr_cutlass.arrays import operands

ROOT = Path(__file__).resolve().parents[1]

M, N, K = 16, 64, 64
REQUEST = ac.GemmRequest(
    ac.GemmShape(M, N, K), dtype=ac.CutlassDtype.BF16, layout_b=ac.GemmLayout.COL_MAJOR, arch=ac.SmArch.SM90A
)

Route = Callable[[int], None]
"""Serves so many requests, and returns when all are done."""


class Launches:
    """A plan that launches nothing."""

    key = REQUEST.plan_key()

    def __call__(self, *_arrays: Any, **_options: Any) -> None:
        """Does nothing."""


def routes(plan: Any, planner: Any, a: Any, b: Any, out: Any, stream: int) -> tuple[dict[str, Route], Any]:
    """How requests can be served, by name; and the mailbox to be stopped at the end."""
    actor = ac.CutlassActor(8, planner=planner)
    mailbox = actor.start()

    def message() -> Any:
        return ac.CutlassMsg.Gemm(REQUEST, {"a": a, "b": b}, out=out)

    def launch() -> None:
        plan(a, b, out=out, alpha=1.0, beta=0.0, stream=stream)

    def direct(count: int) -> None:
        for _ in range(count):
            launch()
        _core.synchronize(0, stream)

    def direct_waited(count: int) -> None:
        for _ in range(count):
            launch()
            _core.synchronize(0, stream)

    def messages(count: int) -> None:
        for _ in range(count):
            message()

    def handled(count: int) -> None:
        for _ in range(count):
            actor.handle(message())

    def waited(count: int) -> None:
        for _ in range(count):
            mailbox.ask(message())

    def mailed(count: int) -> None:
        for future in [mailbox.ask(message(), block=False) for _ in range(count)]:
            future.get()

    async def answer() -> None:
        await mailbox.ask(message(), block=False)

    async def gather(count: int) -> None:
        await asyncio.gather(*(answer() for _ in range(count)))

    found: dict[str, Route] = {
        "plan": direct,
        "plan, each waited for": direct_waited,
        "messages made, not sent": messages,
        "handle": handled,
        "mailbox, each waited for": waited,
        "mailbox": mailed,
        "mailbox, asyncio": lambda count: asyncio.run(gather(count)),
    }
    return found, mailbox


@contextlib.contextmanager
def on_fake_gpu() -> Iterator[dict[str, Any]]:
    """Arguments of `routes` over the tests' GPU."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import pytest

    from fake_gpu import FakeGpu, operands_of

    plan = Launches()
    with pytest.MonkeyPatch.context() as patch:
        FakeGpu().install(patch)
        patch.setattr(_core, "synchronize", lambda _device, _stream: None)
        a, b = operands_of(REQUEST).values()
        _, out = operands.empty((M, N), ac.CutlassDtype.BF16.dlpack, 0, a)
        yield {"plan": plan, "planner": lambda _request, _device: plan, "a": a, "b": b, "out": out, "stream": 0}


@contextlib.contextmanager
def on_gpu() -> Iterator[dict[str, Any]]:
    """Arguments of `routes` over PyTorch's tensors."""
    import torch

    a = torch.randn(M, K, device="cuda").bfloat16()
    b = torch.randn(N, K, device="cuda").bfloat16().T
    out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
    yield {
        "plan": ac.plan(REQUEST), "planner": ac.plan, "a": a, "b": b, "out": out,
        "stream": torch.cuda.current_stream().cuda_stream,
    }  # fmt: skip


def measured(route: Route, count: int, repeats: int) -> dict[str, float]:
    """Microseconds of a request and requests a second: the median run, after one that does not count."""
    route(count)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        route(count)
        seconds.append(time.perf_counter() - begin)
    middle = statistics.median(seconds)
    return {"us": 1e6 * middle / count, "per_second": count / middle, "spread": (max(seconds) - min(seconds)) / middle}


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fake", action="store_true", help="over the tests' GPU: host time, without a GPU")
    parser.add_argument("--count", type=int, default=2000, help="requests in a run")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write JSON here instead of to standard output")
    given = parser.parse_args()
    results: dict[str, Any] = {"time": now(), "machine": machine(), "fake": given.fake, "shape": [M, N, K]}
    with on_fake_gpu() if given.fake else on_gpu() as arguments:
        found, mailbox = routes(**arguments)
        results["routes"] = {name: measured(route, given.count, given.repeats) for name, route in found.items()}
        mailbox.stop()
    deliver(results, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
