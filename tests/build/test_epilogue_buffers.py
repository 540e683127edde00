"""How the results of a tile are divided among the buffers that TMA stores."""

from pathlib import Path

import pytest

from atomr_cutlass.jit.toolchain import CUTLASS, OURS
from cmake_build import compiled, said_by
from generator.toolchain import system_nvcc

SECTOR = 32
"""Bytes of device memory that are written at once: half of one is read before, and takes 2 us longer a tile."""

# Of each number of columns, the mainloop's stages and D's order: what a buffer holds of 128 and 192 rows of 16 bits.
BUFFERS = """
#include <cstdio>
#include "atomr_cutlass/epilogue_tma.h"
int main() {
  for (int piece : {8, 16}) {
    for (int columns = 16; columns <= 256; columns += 16) {
      for (int stage_bytes = 16384; stage_bytes <= 65536; stage_bytes += 2048) {
        for (int rows : {128, 192}) {
          for (int enough : {4, 8}) {
            auto const made =
                atomr_cutlass::EpilogueBuffers::beside(columns, 4, 2 * rows, stage_bytes, piece, enough);
            std::printf("%d %d %d %d\\n", piece, columns, made.columns, made.count);
          }
        }
      }
    }
  }
}
"""


@pytest.mark.slow
@pytest.mark.skipif(not system_nvcc(), reason="no nvcc")
def test_buffers_of_row_major_results_hold_whole_sectors(tmp_path: Path) -> None:
    program = compiled(BUFFERS, tmp_path / "buffers", "-arch=sm_90a", f"-I{OURS.parent}", f"-I{CUTLASS}")
    halved = set()
    for line in said_by(program).splitlines():
        piece, columns, held, count = map(int, line.split())
        assert columns % held == 0
        assert count >= 2
        if piece == 16:
            assert held * 2 % SECTOR == 0, (columns, held)
        halved |= {(piece, columns)} if held < columns else set()
    assert {(16, 64), (8, 48)} <= halved, "buffers are halved where that leaves a mainloop another stage"
    assert (16, 48) not in halved
