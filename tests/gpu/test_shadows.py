"""The shadows of CUTLASS's headers compute on the GPU what the originals do, of arguments known at run time only."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shadow_sources as sources

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

N, H, W = 4000, 200, 8
# (n, h, w, c) in the order of the modes of each operand; tests/build has them of CUTLASS's own functions.
PACKED = [[W, H, N, 1], [W, H, N, 1], [N, 1, W, H], [1, W, H, N], [1, N, W, H], [1, W]]


def _run(torch: Any, folder: Path, *, shadowed: bool) -> list[list[int]]:
    """The results of all cases, computed by one thread."""
    core = pytest.importorskip("cuda.core")
    major, minor = torch.cuda.get_device_capability()
    image = sources.compile_with_nvrtc(sources.KERNEL, folder, f"sm_{major}{minor}", shadowed=shadowed)
    found = torch.zeros(sources.CAPACITY * 8 + 8, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    device = core.Device()
    device.set_current()
    stream = device.create_stream()
    arguments = (np.int32(2), np.int64(2**33 + 1), *map(np.int64, (N, H, W)))
    kernel = core.ObjectCode.from_cubin(image).get_kernel("dynamic")
    core.launch(stream, core.LaunchConfig(grid=1, block=1), kernel, found.data_ptr(), *arguments)
    stream.sync()
    return sources.unpacked(found.cpu().numpy().tobytes())


def test_shadows_agree_with_the_originals(torch: Any, tmp_path: Path) -> None:
    names = [name for cases in sources.names().values() for name in cases]
    ours, theirs = (_run(torch, tmp_path, shadowed=shadowed) for shadowed in (True, False))
    assert sources.differing(ours, theirs, names) == {}
    assert [leaves for _, *leaves in ours[-len(PACKED) :]] == PACKED
