"""Record, build, freeze on a GPU that takes notes (`golden_gpu`): what `test_ahead_of_time.py` runs, a process a step.

Kernels compute nothing there. What is compared is which of them are launched, in which order and with which arguments.
Compilation is put in place too: an image says which kernel it is of. The rest, from a page's code down to the driver,
is the package's own.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import fake_cases
import fake_table
import golden_gpu
import page_examples
from atomr_cutlass import _core
from atomr_cutlass.generator.key import KernelKey
from atomr_cutlass.jit import kernels
from atomr_cutlass.jit.compiler import Images
from atomr_cutlass.jit.toolchain import Toolchain

TOOLS = Toolchain(Path("nvrtc"), (13, 0), "nvrtc V13.0.0", (), {"cutlass": "c", "atomr_cutlass": "a"})


class Notes(golden_gpu.Gpu):
    """The launches on the GPU of this process, whose kernels are the package's business."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.golden_notes.restype = ctypes.c_char_p
        self._layout = _core.layout()

    def launches(self) -> list[str]:
        """Those since the last call, with the arguments of each."""
        return [step for step in self._steps([]) if not step.startswith(("upload", "download", "fill"))]


def run_pages(library: str) -> None:
    """Prints what each program launches."""
    notes = Notes(Path(library))
    launched = {}
    for name, blocks in page_examples.programs().items():
        notes.launches()
        try:
            page_examples.run(name, blocks)
        except Exception as error:
            raise RuntimeError(name) from error
        launched[name] = notes.launches()
    print(json.dumps(launched))


def record(library: str) -> None:
    """Runs the pages with an empty table, and compiles what they need."""
    kernels.load = lambda key, _target: (golden_gpu.images(key), "compiled")  # type: ignore[assignment]
    kernels.toolchain = lambda: TOOLS  # type: ignore[assignment]
    run_pages(library)


def build(*arguments: str) -> None:
    """`atomr-cutlass build`, whose compiler is put in place."""
    from atomr_cutlass.cli.app import app
    from atomr_cutlass.pipeline import pack_build

    def info(_image: bytes, name: str, size: int) -> bytes:
        key = keys[name.removesuffix("_info")]
        made = pack_build._INFO.pack(_core.LAYOUT_DIGEST, 0, 0, fake_table.row(key).shared_bytes, 128, 1, 1, 1, 0)
        assert len(made) == size
        return made

    keys: dict[str, KernelKey] = {}

    def load(key: KernelKey, _target: Any) -> tuple[Images, str]:
        keys[key.name] = key
        return golden_gpu.images(key), "compiled"

    kernels.load = load  # type: ignore[assignment]
    pack_build.toolchain = lambda: TOOLS  # type: ignore[assignment]
    pack_build.elf.variable = info
    app(["build", *arguments])


def frozen(library: str) -> None:
    """Freezes at once, and runs the pages."""
    import atomr_cutlass as ac

    ac.freeze()
    run_pages(library)
    assert kernels.toolchain.cache_info().misses == 0, "a compiler was looked for"
    assert kernels.store.cache_info().misses == 0, "the disk cache was looked at"
    assert "nvrtc" not in Path("/proc/self/maps").read_text()


if __name__ == "__main__":
    fake_cases.of_packs_alone()
    globals()[sys.argv[1]](*sys.argv[2:])
