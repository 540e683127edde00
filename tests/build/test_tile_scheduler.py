"""The model of tile schedulers against their own host code."""

import random
from pathlib import Path

import pytest

from atomr_cutlass import _core
from atomr_cutlass.jit.toolchain import CUTLASS, OURS
from cmake_build import compiled, said_by
from generator.toolchain import system_nvcc

# Reads problems, a line each, and says what kernels' own list and CUTLASS's stream-K make of them.
SCHEDULERS = """
#include <cstdio>
#include "atomr_cutlass/tile_list.h"
using StreamK = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamKParams;
using Persistent = StreamK::UnderlyingParams;
using Order = Persistent::RasterOrder;
using Orders = Persistent::RasterOrderOptions;
template <int kM, int kN>
void say(dim3 tiles, cutlass::KernelHardwareInfo const& hardware, int swizzle, Orders order) {
  auto const problem = cute::make_shape(int(tiles.x), int(tiles.y), 1, int(tiles.z));
  cute::Shape<cute::_1, cute::_1, cute::_1> tile;
  cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::_1> cluster;
  using List = atomr_cutlass::TileList<cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::_1>>;
  typename List::Arguments const args{swizzle, order};
  auto const list = List::to_underlying_arguments(problem, tile, cluster, hardware, args);
  dim3 const grid = List::get_grid_shape(list, problem, tile, cluster, hardware, args);
  std::printf("%u %d %d %u ", list.clusters * kM * kN, list.width.divisor, list.raster_order_ == Order::AlongM ? 1 : 2,
              grid.x * grid.y * grid.z);
}
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
    auto* const says = cm == 1 && cn == 1 ? say<1, 1>
                       : cm == 2 && cn == 1 ? say<2, 1>
                       : cm == 1 && cn == 2 ? say<1, 2>
                       : cm == 2 && cn == 2 ? say<2, 2>
                       : cm == 4 && cn == 1 ? say<4, 1> : say<4, 2>;
    says(dim3(x, y, z), hardware, swizzle, order);
    // As a kernel hands them over: whole clusters.
    dim3 const blocks = Persistent::get_tiled_cta_shape_mnl({int(x), int(y), 1, int(z)}, cluster, x, y);
    Persistent params;
    params.initialize(blocks, cluster, hardware, swizzle, order);
    StreamK cut;
    cut.initialize(blocks, k, cluster, hardware, 1, swizzle, order, StreamK::ReductionMode::Deterministic,
                   StreamK::DecompositionMode::Heuristic, nullptr);
    dim3 const cut_grid = StreamK::get_grid_shape(blocks, cluster, hardware, swizzle, order);
    std::printf("%u %u %llu %d %d %u %u %u %d\\n", params.problem_tiles_m_ * cm, params.problem_tiles_n_ * cn,
                (unsigned long long)params.blocks_per_problem_, 1 << params.log_swizzle_size_,
                params.raster_order_ == Order::AlongM ? 1 : 2, cut_grid.x * cut_grid.y * cut_grid.z, cut.sk_tiles_,
                cut.sk_units_, cut.divmod_splits_.divisor);
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
    arguments = ((x, y, z), (cluster_m, cluster_n), multiprocessors, swizzle, raster)
    tiles = _core.tile_list(*arguments)
    padded = _core.tile_list(*arguments, stream_k=True)
    _, cut, units, splits = _core.decompose(padded, k_tiles)
    stream_k = (cut, units, 1) if splits == 1 else (0, 0, splits)
    return (
        tiles.tiles, tiles.swizzle, tiles.raster, tiles.blocks, padded.rows, padded.columns, padded.tiles,
        padded.swizzle, padded.raster, padded.blocks, *stream_k,
    )  # fmt: skip


def _clusters(problem: Problem) -> int:
    """The clusters at once, as a launch is told of them."""
    size = problem[3] * problem[4]
    return _core.blocks_at_once(problem[5], size) // size


@pytest.mark.slow
@pytest.mark.skipif(not system_nvcc(), reason="no nvcc")
def test_tile_lists_are_those_of_kernels(tmp_path: Path) -> None:
    program = compiled(SCHEDULERS, tmp_path / "schedulers", "-arch=sm_90a", f"-I{OURS.parent}", f"-I{CUTLASS}")
    problems = _problems()
    problem_file = tmp_path / "problems"
    problem_file.write_text("".join(" ".join(map(str, (*problem, _clusters(problem)))) + "\n" for problem in problems))
    said = said_by(Path("/bin/sh"), "-c", f"'{program}' < '{problem_file}'")
    answers = [tuple(map(int, line.split())) for line in said.splitlines()]
    assert len(answers) == len(problems)
    modelled = map(_modelled, problems)
    wrong = [found for found in zip(problems, answers, modelled, strict=True) if found[1] != found[2]]
    assert not wrong, wrong[:5]
