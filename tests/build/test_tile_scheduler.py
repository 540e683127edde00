"""The model of CUTLASS's tile schedulers against their own host code."""

import random
from pathlib import Path

import pytest

from atomr_cutlass import _core
from atomr_cutlass.jit.toolchain import CUTLASS
from cmake_build import compiled, said_by
from generator.toolchain import system_nvcc

# Reads problems, a line each, and says what CUTLASS makes of them.
SCHEDULERS = """
#include <cstdio>
#include "cutlass/gemm/kernel/tile_scheduler_params.h"
using StreamK = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamKParams;
using Persistent = StreamK::UnderlyingParams;
using Order = Persistent::RasterOrder;
using Orders = Persistent::RasterOrderOptions;
int main() {
  unsigned x, y, z, k;
  int cm, cn, sms, clusters, swizzle, raster;
  while (std::scanf("%u %u %u %d %d %d %d %d %u %d", &x, &y, &z, &cm, &cn, &sms, &swizzle, &raster, &k, &clusters) ==
         10) {
    cutlass::gemm::GemmCoord cluster(cm, cn, 1);
    auto const order = raster == 1 ? Orders::AlongM : raster == 2 ? Orders::AlongN : Orders::Heuristic;
    cutlass::KernelHardwareInfo hardware{};
    hardware.sm_count = sms;
    hardware.max_active_clusters = clusters;
    // As a kernel hands them over: whole clusters.
    dim3 const blocks = Persistent::get_tiled_cta_shape_mnl({int(x), int(y), 1, int(z)}, cluster, x, y);
    Persistent params;
    params.initialize(blocks, cluster, hardware, swizzle, order);
    dim3 const grid = Persistent::get_grid_shape(blocks, cluster, hardware, swizzle, order);
    StreamK cut;
    cut.initialize(blocks, k, cluster, hardware, 1, swizzle, order, StreamK::ReductionMode::Deterministic,
                   StreamK::DecompositionMode::Heuristic, nullptr);
    dim3 const cut_grid = StreamK::get_grid_shape(blocks, cluster, hardware, swizzle, order);
    std::printf("%u %u %llu %d %d %u %u %u %u %d\\n", params.problem_tiles_m_ * cm, params.problem_tiles_n_ * cn,
                (unsigned long long)params.blocks_per_problem_, 1 << params.log_swizzle_size_,
                params.raster_order_ == Order::AlongM ? 1 : 2, grid.x * grid.y * grid.z,
                cut_grid.x * cut_grid.y * cut_grid.z, cut.sk_tiles_, cut.sk_units_, cut.divmod_splits_.divisor);
  }
}
"""

Problem = tuple[int, int, int, int, int, int, int, int, int]


def _problems() -> list[Problem]:
    chosen = random.Random(4)
    made = []
    for _ in range(4000):
        side = chosen.choice((3, 12, 80))
        made.append((
            chosen.randint(1, side), chosen.randint(1, side), chosen.choice((1, 1, 1, 2, 7)),
            *chosen.choice(((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2))), chosen.choice((132, 114, 148, 78)),
            chosen.choice((1, 2, 4, 8)), chosen.choice((0, 1, 2)), chosen.choice((1, 8, 9, 16, 33, 64, 500)),
        ))  # fmt: skip
    return made


def _modelled(problem: Problem) -> tuple[int, ...]:
    x, y, z, cluster_m, cluster_n, multiprocessors, swizzle, raster, k_tiles = problem
    asked = ((x, y, z), (cluster_m, cluster_n), multiprocessors, swizzle, raster)
    tiles = _core.tile_list(*asked)
    uncut = _core.tile_list(*asked, truncate=False)
    _, cut, units, splits = _core.decompose(uncut, k_tiles)
    stream_k = (cut, units, 1) if splits == 1 else (0, 0, splits)
    return (tiles.rows, tiles.columns, tiles.tiles, tiles.swizzle, tiles.raster, tiles.blocks, uncut.blocks, *stream_k)


def _clusters(problem: Problem) -> int:
    """The clusters at once, as a launch is told of them."""
    size = problem[3] * problem[4]
    return _core.blocks_at_once(problem[5], size) // size


@pytest.mark.slow
@pytest.mark.skipif(not system_nvcc(), reason="no nvcc")
def test_tile_lists_are_those_of_cutlass(tmp_path: Path) -> None:
    program = compiled(SCHEDULERS, tmp_path / "schedulers", "-arch=sm_80", f"-I{CUTLASS}")
    problems = _problems()
    asked = tmp_path / "problems"
    asked.write_text("".join(" ".join(map(str, (*one, _clusters(one)))) + "\n" for one in problems))
    said = said_by(Path("/bin/sh"), "-c", f"'{program}' < '{asked}'")
    answers = [tuple(map(int, line.split())) for line in said.splitlines()]
    assert len(answers) == len(problems)
    wrong = [(one, is_, _modelled(one)) for one, is_ in zip(problems, answers, strict=True) if is_ != _modelled(one)]
    assert not wrong, wrong[:5]
