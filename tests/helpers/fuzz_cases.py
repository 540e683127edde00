"""Cases that `test_fuzz.py` runs in a process of fake driver and kernels: fuzzed calls, on arrays of a GPU."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np

import atomr_cutlass as ac
import fake_cases
import fuzz_calls
from atomr_cutlass import _core
from atomr_cutlass.arrays import operands
from fake_gpu import place
from fuzz_calls import SPOILS, Arguments, Call

DRAWN = max(1, int(os.environ.get("ATOMR_CUTLASS_TEST_FUZZ", "0"))) * 1500


def _unaligned() -> _core.Operand:
    memory = np.zeros(65, np.uint8)
    return _core.Operand(memory.ctypes.data + 1, (4, 4), None, (2, 32), operands.CUDA, 0, False, memory)


SPOILS |= {
    "GPU array": lambda: place(np.ones((4, 4), np.float32)),
    "GPU array elsewhere": lambda: place(np.ones((4, 4), np.float32), device=7),
    "GPU array unaligned": _unaligned,
    "array of no device": lambda: place(np.ones((4, 4), np.float32), device=-1),
}
# These compile.
LEFT_OUT = {("jit", "str auto"), ("jit", "str_")}


def _on_gpu(value: Any) -> Any:
    """Arrays that kernels may read, in the GPU's memory."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(member, np.ndarray) for member in value):
        return type(value)(map(_on_gpu, value))
    if isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float16, np.int32):
        return place(value)
    return value


def _moved(call: Call) -> Call:
    def arguments() -> Arguments:
        given = {name: _on_gpu(value) for name, value in call.arguments().items()}
        return given | ({"backend": "auto"} if "backend" in given else {})

    return Call(call.name, call.function, arguments, call.then, call.more, call.leave)


def _plan_calls() -> list[Call]:
    plan = ac.plan(fuzz_calls.gemm_request(arch=None))
    matrix = fuzz_calls.random(16, 16)

    def call(a: Any, b: Any, c: Any, out: Any, alpha: Any, beta: Any, stream: Any) -> Any:
        return plan(a, b, c, out=out, alpha=alpha, beta=beta, stream=stream)

    def warm(out: Any, alpha: Any, beta: Any, stream: Any, precision: Any, fast_accum: Any, jit: Any) -> Any:
        how = {"precision": precision, "fast_accum": fast_accum, "jit": jit, "stream": stream}
        return ac.gemm(matrices["a"], matrices["b"], out=out, alpha=alpha, beta=beta, **how)

    matrices = {name: place(matrix) for name in ("a", "b", "out")}
    whole = {**matrices, "c": None, "alpha": None, "beta": None, "stream": None}
    kept = {"out": matrices["out"], "alpha": 1.0, "beta": 0.0, "stream": None}
    kept |= {"precision": None, "fast_accum": False, "jit": None}
    bound = ac.BoundPlan(plan, matrices["b"])
    return [
        Call("Plan", call, lambda: whole),
        Call("gemm", warm, lambda: kept),
        Call("plan", ac.plan, lambda: {"request": fuzz_calls.gemm_request(arch=None), "device": 0}),
        Call("BoundPlan", ac.BoundPlan, lambda: {"plan": plan, "b": matrices["b"]}),
        Call("BoundPlan.refit", bound.refit, lambda: {"weights": bytes(1024), "stream": 0}),
    ]


CALLS = [_moved(call) for call in fuzz_calls.calls() if call.name != "supervise"]


def _check(calls: list[Call], drawn: int = 10**9) -> None:
    """Spoils one argument of calls: each with each value, or so many drawn at random."""
    places = [(call, name, spoil) for call in calls for name in call.parameters for spoil in SPOILS]
    places = [spoiled for spoiled in places if spoiled[1:] not in LEFT_OUT]
    chosen = places if drawn >= len(places) else random.Random(0).sample(places, drawn)
    outcomes = ((call.name, name, spoil, fuzz_calls.outcome(call, {name: spoil})) for call, name, spoil in chosen)
    raised = [f"{name} of {function} as {spoil}: {said}" for function, name, spoil, said in outcomes if said]
    assert not raised, "\n".join(raised)


def case_calls_on_gpu_arrays() -> None:
    _check(CALLS, DRAWN)


def case_plans_and_warm_calls() -> None:
    for call in _plan_calls():
        call.run({})
    _check(_plan_calls())


if __name__ == "__main__":
    fake_cases.run(globals())
