"""The common rules of all kernels of CUTLASS 2.x, whose mainloops are those of the sm80 generation."""

from __future__ import annotations

from ..key import KernelKey, instruction_shape, shared_memory
from ..rules import OK, Status, no


def supports_mainloop(key: KernelKey) -> Status:
    """Whether a mainloop supports the stages and the alignments of a key."""
    if key.mainloop not in ("multistage", "twostage"):
        return no(f"sm80 mainloops are multistage and twostage, not {key.mainloop!r}")
    if key.mainloop == "twostage" and key.stages != 2:
        return no("a twostage mainloop has 2 stages")
    if key.mainloop == "multistage" and key.stages < 3:
        return no("a multistage mainloop has at least 3 stages")
    narrow = min(key.align_a * key.a.bits, key.align_b * key.b.bits) // 8
    if narrow < 4 and key.mainloop != "twostage":
        return no("cp.async moves at least 4 bytes: operands aligned to less need a twostage mainloop")
    if max(key.align_a * key.a.bits, key.align_b * key.b.bits, key.align_d * key.d.bits) > 128:
        return no("vector accesses are at most 16 bytes")
    return OK


def supports_scheduler(key: KernelKey) -> Status:
    """Whether a key has a supported scheduler and cluster."""
    if key.scheduler != "identity" or key.epilogue_schedule or key.cluster != (1, 1, 1):
        return no("the sm80 generation has the identity scheduler, no epilogue schedule and no clusters")
    return OK


def supports_tile(key: KernelKey) -> Status:
    """Whether warps and instructions divide the tile, and its stages fit into shared memory."""
    if 0 in key.warps or any(t % w for t, w in zip(key.tile, key.warps, strict=True)):
        return no("the warps must divide the tile")
    warp = [t // w for t, w in zip(key.tile, key.warps, strict=True)]
    if any(w % i for w, i in zip(warp, instruction_shape(key), strict=True)):
        return no("the instruction must divide the warp tile")
    shared = shared_memory(key)
    if shared > key.arch.shared_memory:
        return no(
            f"{key.stages} stages need {shared} bytes of shared memory; {key.arch.value} has {key.arch.shared_memory}"
        )
    return OK
