"""The time from a fresh process to a kernel's result, step by step. Prints JSON: {step: seconds}.

    python benchmarks/fresh.py kernel|companion|lookup|jit|prebuilt KEY

`kernel` and `companion` compile that half of it, whatever the cache holds; `lookup` finds it there; `jit` and
`prebuilt` go on to the end of the first launch, and need a GPU. Run by jit.py, which fills the cache.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atomr_cutlass import _core
    from atomr_cutlass.arrays.layouts import MatrixSpec
    from atomr_cutlass.generator.key import KernelKey
    from atomr_cutlass.ops.gemm.kernels import GemmCandidate
    from atomr_cutlass.ops.gemm.problem import GemmProblem

EXTENT = 256
"""Of the products that are launched: so small that the GPU never makes the host wait."""


class Steps:
    """How long each step took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, name: str) -> None:
        """Ends a step."""
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def problem_of(key: KernelKey) -> GemmProblem:
    """A small product that the kernel computes."""
    from atomr_cutlass.arrays.layouts import MatrixSpec
    from atomr_cutlass.ops.gemm.problem import GemmProblem

    extents = (EXTENT, EXTENT)

    def spec(dtype: object, layout: str) -> MatrixSpec:
        return MatrixSpec(extents, (EXTENT, 1) if layout == "r" else (1, EXTENT), dtype)

    return GemmProblem(
        a=spec(key.a, key.layout_a), b=spec(key.b, key.layout_b), c=None, d=spec(key.d, key.layout_d), math=key.math,
        device=0,
    )  # fmt: skip


def candidate_of(key: KernelKey, backend: str) -> GemmCandidate:
    """This very kernel, `prebuilt` or `jit`, for that product."""
    import dataclasses

    from atomr_cutlass.ops.gemm.kernels import GemmSearch
    from atomr_cutlass.pipeline import devices, select, table

    candidate = select.candidate_of(GemmSearch(problem_of(key), devices.get(0)), key)
    if backend == "prebuilt":
        candidate = dataclasses.replace(candidate, info=next(info for info in table.kernels() if info.key == key))
    return candidate


def operands_of(key: KernelKey) -> tuple[_core.Operand, ...]:
    """A, B and D, on the GPU; what is in them does not matter here."""
    from atomr_cutlass import _core
    from atomr_cutlass.arrays.operands import CUDA

    problem = problem_of(key)

    def operand(spec: MatrixSpec) -> _core.Operand:
        memory = _core.Buffer(0, EXTENT * EXTENT * spec.dtype.bits // 8)
        return _core.Operand(memory.pointer, spec.shape, spec.strides, spec.dtype.dlpack, CUDA, 0, owner=memory)

    return operand(problem.a), operand(problem.b), operand(problem.d)


def main() -> None:
    """Takes the steps."""
    mode, text = sys.argv[1:]
    steps = Steps()
    from atomr_cutlass import _core, plan  # noqa: F401
    from atomr_cutlass.generator.key import KernelKey
    from atomr_cutlass.jit import kernels
    from atomr_cutlass.jit.toolchain import toolchain

    key = KernelKey.from_dict(json.loads(text))
    steps.done("import atomr_cutlass")
    if mode != "prebuilt":
        toolchain()
        steps.done("find NVRTC")
    if mode in ("kernel", "companion"):
        compile_half(key, mode)
        steps.done("compile")
    elif mode == "lookup":
        origin = kernels.load(key, key.arch.value)[1]
        steps.done("lookup")
        if origin != "disk":
            sys.exit(f"{key.name} was not in the cache")
    else:
        launch(key, mode, steps)
    print(json.dumps(steps.seconds))


def compile_half(key: KernelKey, half: str) -> None:
    """Compiles the kernel, or its companion, as `Unit.compile` has it done."""
    from atomr_cutlass.jit import compiler, worker
    from atomr_cutlass.jit.toolchain import toolchain

    unit = compiler.Unit.of(key, key.arch.value)
    options = [f"--gpu-architecture={unit.target}", *compiler.OPTIONS]
    options += [f"-I{folder}" for folder in toolchain().include]
    options += [compiler.COMPANION] if half == "companion" else []
    made, log = worker.compile_source(str(toolchain().nvrtc), unit.name, unit.source, options, "cubin")
    if made is None:
        sys.exit(log)


def launch(key: KernelKey, mode: str, steps: Steps) -> None:
    """From nothing on the GPU to the end of the first launch."""
    from atomr_cutlass import _core
    from atomr_cutlass.jit import kernels
    from atomr_cutlass.ops.gemm.plans import from_candidate
    from atomr_cutlass.pipeline import devices

    a, b, out = operands_of(key)
    steps.done("CUDA context, operands")
    if mode == "jit":
        kernels.kernel(key, devices.get(0))
        steps.done("lookup, loading in the driver")
    problem, candidate = problem_of(key), candidate_of(key, mode)
    steps.done("choice")
    plan = from_candidate(problem, candidate)
    steps.done("plan")
    plan(a, b, out=out, stream=0)
    _core.synchronize(0, 0)
    steps.done("first launch")


if __name__ == "__main__":
    main()
