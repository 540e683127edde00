"""Walks over every cell of the matrix that a GPU can run: which those are, and the records of those that are right.

With ATOMR_CUTLASS_TEST_JIT set, cells are compiled at run time (with the value `ready`: those that have been compiled
before, by tools/compile_table.py); else they are those of the table, packs included. With
ATOMR_CUTLASS_TEST_RECORDS set to a file, that gets a line for each cell whose results were right, which
`tools/verified.py` takes into the package's records.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from atomr_cutlass import SmArch
from atomr_cutlass.arrays.layouts import MatrixSpec
from atomr_cutlass.epilogue import EvtBuilder, validate
from atomr_cutlass.generator.epilogue import common
from atomr_cutlass.generator.epilogue.common import COMMON_ACTIVATIONS, COMMON_ROWS
from atomr_cutlass.generator.epilogue.lower import LINEAR, SCALED, base_of, epilogue_id, is_common
from atomr_cutlass.generator.key import COLUMN, RAGGED, REALIGNED, ROW, UNALIGNED, KernelKey
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.generator.rules import FEW, FP8_TYPES, SLICED
from atomr_cutlass.jit import kernels
from atomr_cutlass.ops.conv2d import reference as conv_reference
from atomr_cutlass.ops.conv2d.kernels import ConvFormulation, ConvSearch
from atomr_cutlass.ops.conv2d.problem import ConvGeometry, ConvProblem, conv_geometry, result_shape
from atomr_cutlass.ops.gemm.helpers import LEAST_SLICE, LEAST_SLICES
from atomr_cutlass.ops.gemm.kernels import GemmSearch
from atomr_cutlass.ops.gemm.problem import GemmProblem
from atomr_cutlass.pipeline import devices, select, table, verification
from atomr_cutlass.pipeline.devices import Device
from atomr_cutlass.pipeline.search import Candidate
from atomr_cutlass.pipeline.table import KernelInfo

COMPILED = "ATOMR_CUTLASS_TEST_JIT" in os.environ
RECORDS = "ATOMR_CUTLASS_TEST_RECORDS"
"""Names the file that gets the records."""

ARCHS = (SmArch.SM90A, SmArch.SM80, SmArch.SM89)
"""The archs that a Hopper GPU runs: its own, and the portable ones as PTX."""


def keys(*ops: str, want: Callable[[KernelKey], bool] = lambda _: True) -> list[KernelKey]:
    """The cells of these operations: of `full`, and the other rows of the table."""
    found = dict.fromkeys([*expand("full", ARCHS), *(info.key for info in table.kernels())])
    return [key for key in found if key.op in ops and want(key)]


def is_plain(key: KernelKey) -> bool:
    """Whether a cell has no epilogue tree, and no activation."""
    return key.epilogue in (LINEAR, SCALED)


def epilogues(key: KernelKey) -> list[str]:
    """The epilogues of problems that a cell with a tree, an activation or a gate is launched for."""
    if not is_common(key.epilogue):
        return [key.epilogue]
    base = base_of(key.epilogue)
    rows = [row for row in COMMON_ROWS if row]
    activations = [name for name in COMMON_ACTIVATIONS if name]
    found = [common.bias(row, activation) for row, activation in zip(rows * 2, (None, *activations), strict=False)]
    found += [common.bias(None, activation) for activation in activations]
    if key.op != "grouped_gemm":
        found.append(common.residual(key.d))
    if key.op == "gemm" and base == SCALED:
        # Without arrays of scales, as factors of the tree have their places.
        factors = (common.scaled(column=False), common.scaled(column=True), common.narrowed(), common.quantize())
        return [*(common.on(base, epilogue) for epilogue in found), *factors, *map(_with_all_factors, activations)]
    return [common.on(base, epilogue) for epilogue in found]


def _with_all_factors(activation: str) -> str:
    """The epilogue of activation(acc * column * row + bias) * scale, with the largest magnitude before the last."""
    made = EvtBuilder().binary("multiply", "rows", "column").binary("multiply", "columns", "row")
    made = made.add_bias("bias", dtype="bf16").activation(activation).quantize("e4m3", scale="scale", amax="largest")
    return epilogue_id(LINEAR, made.build().program)


def row_of(key: KernelKey) -> KernelInfo | None:
    """The cell's row of the table, or None for one to be compiled; skips what cannot be run here."""
    device = devices.get(0)
    info = None if COMPILED else next((row for row in table.kernels(op=key.op) if row.key == key), None)
    if info is None and not COMPILED:
        pytest.skip("the table lacks it; ATOMR_CUTLASS_TEST_JIT=1 compiles it")
    if devices.rank_arch(key.arch, device, ptx=info is None or info.ptx) is None:
        pytest.skip(f"code for {key.arch.value} does not run on {device.name}")
    if os.environ.get("ATOMR_CUTLASS_TEST_JIT") == "ready" and not kernels.ready(key, device):
        pytest.skip("it has not been compiled yet")
    shared = 0 if info is None else info.shared_bytes
    if shared > device.shared_memory:
        pytest.skip(f"{shared} bytes of shared memory are more than {device.name} has")
    return info


def trees_right(key: KernelKey, checked: str) -> None:
    """Asserts that a cell computes each of its trees as the reference does, and records it."""
    info, device = row_of(key), devices.get(0)
    for epilogue in epilogues(key):
        assert validate._differences(Candidate(key, info, 0.0, None), epilogue, device) == [], epilogue
    right(key, info, checked)


def right(key: KernelKey, info: KernelInfo | None, checked: str) -> None:
    """Records that the results of a cell were right.

    Args:
        key: the cell, which was launched.
        info: its row of the table, or None where it was compiled.
        checked: the comparison made.
    """
    path = os.environ.get(RECORDS)
    if path:
        line = json.dumps(asdict(_record(key, info, checked))) + "\n"
        with Path(path).open("a", encoding="utf-8") as target:
            target.write(line)


def _record(key: KernelKey, info: KernelInfo | None, checked: str) -> verification.Record:
    device = devices.get(0)
    source, cutlass = verification.identity(key, info)
    image = ""
    if info is None:
        from atomr_cutlass.jit.toolchain import toolchain

        images, _ = kernels.load(key, kernels.target_for(key, device))
        image, compiler = hashlib.sha256(images.kernel).hexdigest()[:16], toolchain().compiler
    else:
        compiler = info.content.split(" ", 2)[2]
    translated = devices.rank_arch(key.arch, device, ptx=True) == devices.TRANSLATED
    return verification.Record(
        kernel=key.name, how=verification.RUNS_AS_PTX if translated else verification.RUNS, source=source,
        cutlass=cutlass, compiler=compiler, on=device.name, driver=devices.driver(), date=_began(), checked=checked,
        image=image,
    )  # fmt: skip


@functools.cache
def _began() -> str:
    """One date for a process, so that its records have much in common."""
    return dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")


# ----------------------------------------------------------------------------------------------------------------------
# GEMM
# ----------------------------------------------------------------------------------------------------------------------


def gemm_shapes(key: KernelKey) -> list[tuple[int, int, int]]:
    """M, N and K that a GEMM cell serves: one that ends inside tiles, whole tiles, and one smaller than a tile."""
    (tile_m, tile_n, tile_k), (cluster_m, cluster_n, _) = key.tile, key.cluster
    if {key.a, key.b} & {*FP8_TYPES}:
        along_m = key.layout_d == COLUMN
        unit_m = max(key.align_d if along_m else 1, key.align_a if key.layout_a == COLUMN else 1)
        unit_n = max(1 if along_m else key.align_d, key.align_b if key.layout_b == ROW else 1)
        unit_k, whole = key.align_a, (tile_m, tile_n, 2 * tile_k)
    else:
        unit_m = unit_n = unit_k = max(key.align_a, key.align_b, key.align_d)
        whole = (tile_m * cluster_m, tile_n * cluster_n, 4 * tile_k)
    if key.mainloop == RAGGED:  # operands that others read as well are left to them
        return [(2 * tile_n + 3, 3 * tile_m + 5, 5 * tile_k + 1), (tile_n, 2 * tile_m - 1, 4 * tile_k - 1), (1, 9, 9)]
    if key.mainloop in (UNALIGNED, REALIGNED):
        return [(2 * tile_m + 3, 2 * tile_n + 2, 5 * tile_k + 1), (tile_m, tile_n, 4 * tile_k - 1), (1, 2, 9)]
    # D has no more rows than the cell serves where that is for few of them.
    rows = tile_n - 3 if key.mainloop == FEW else 2 * tile_m + unit_m
    found = [(rows, 2 * tile_n + unit_n, 5 * tile_k + unit_k), whole, (unit_m, unit_n, unit_k)]
    return [(m, n, k + least_k(key)) for m, n, k in found]


def least_k(key: KernelKey) -> int:
    """The K from which a cell serves problems."""
    return LEAST_SLICES * LEAST_SLICE if key.scheduler == SLICED else 0


def search(key: KernelKey, problem: GemmProblem, device: Device | None = None) -> GemmSearch:
    """The search for a problem in which a cell serves it, on the GPU unless another device is given."""
    return GemmSearch(problem, device or devices.get(0), batch_invariant=key.scheduler == SLICED)


def candidate(key: KernelKey, problem: GemmProblem, info: KernelInfo | None) -> Candidate[Any]:
    """A cell for a problem, without slices of K but where it adds them up itself."""
    found = replace(select.candidate_of(search(key, problem), key), info=info)
    return found if key.scheduler == SLICED else replace(found, split_k=1)


# ----------------------------------------------------------------------------------------------------------------------
# Convolutions
# ----------------------------------------------------------------------------------------------------------------------

CHANNELS = (
    (64, 96), (160, 136), (72, 40), (68, 36), (66, 34), (67, 35), (8, 64), (4, 64), (2, 64), (1, 64), (3, 64), (32, 32),
)  # fmt: skip
"""Channels of images and of results: of every alignment, few, and as many as a vector has."""


def conv_problems(key: KernelKey, device: Device, most: int = 3) -> list[ConvProblem]:
    """Convolutions that a cell serves as they stand: borders, strides, dilation, and groups where it has them."""
    found = []
    for geometry in _geometries(key):
        problem = _conv_problem(key, geometry)
        if ConvSearch(problem, device, formulations=[[ConvFormulation(problem)]]).serves(key):
            found.append(problem)
            if len(found) == most:
                break
    return found


def _geometries(key: KernelKey) -> Iterator[ConvGeometry]:
    how: list[dict[str, Any]] = [
        {"stride": 1, "padding": 1, "dilation": 1}, {"stride": 2, "padding": ((2, 0), (1, 1)), "dilation": 1},
        {"stride": 1, "padding": 2, "dilation": 2},
    ]  # fmt: skip
    for c, k in CHANNELS:
        for groups in {"": (1,), "depthwise": (c,)}.get(key.group_mode, (4, 2)):
            wide = c if key.group_mode == "depthwise" else groups * k
            for taps in (3, 5):
                for geometry in how:
                    x, w = (2, 13, 11, c * (groups if groups != c or groups == 1 else 1)), (wide, taps, taps)
                    channels = x[3] // groups
                    yield conv_geometry(x, (*w, channels), groups=groups, **geometry)


def _conv_problem(key: KernelKey, g: ConvGeometry) -> ConvProblem:
    shapes = {"conv2d_fprop": (g.x_shape, g.w_shape, g.y_shape), "conv2d_dgrad": (g.y_shape, g.w_shape, g.x_shape)}
    a, b, d = shapes.get(key.op, (g.y_shape, g.x_shape, g.w_shape))
    specs = [MatrixSpec(shape, _dense(shape), dtype, 256) for shape, dtype in ((a, key.a), (b, key.b), (d, key.d))]
    return ConvProblem(key.op, g, specs[0], specs[1], None, specs[2], key.math, 0)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for extent in shape[:0:-1]:
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))


def conv_expected(problem: ConvProblem, a: Any, b: Any) -> tuple[Any, Any]:
    """The reference's result from host arrays, and the sum of magnitudes."""
    g = problem.geometry
    given = (problem.op, a, b, result_shape(problem.op, g))
    options: dict[str, Any] = {
        "stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups
    }  # fmt: skip
    math = "default" if problem.math == "fast" else problem.math
    want = conv_reference.convolution(*given, **options, out_dtype=problem.d.dtype, math=math)
    return want, conv_reference.absolute_convolution(*given, **options)
