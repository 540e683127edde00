"""A kernel to be compiled at run time, and a toolchain that is nowhere: for compilers that only seem to compile."""

from pathlib import Path

from atomr_cutlass import SmArch
from atomr_cutlass.generator.matrix import expand
from atomr_cutlass.jit.compiler import Unit
from atomr_cutlass.jit.toolchain import Toolchain

KEY = expand("smoke", [SmArch.SM80])[0]
TOOLS = Toolchain(Path("/a/libnvrtc.so"), (13, 0), "V13.0.88", (Path("/a/include"),), {"cutlass": "1", "ours": "2"})
UNIT = Unit.of(KEY, "sm_80")
