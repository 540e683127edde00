"""The analytic model: how long a kernel would take for a problem, before anything is launched.

cpp/src/estimate.h describes its parts; estimate_constants.inc has its constants, correction.h what timings taught
beside them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeAlias

from .. import _core
from ..arrays import symbols
from ..generator.epilogue.lower import is_common
from ..generator.families import gemm_sm90
from ..generator.key import KernelKey, shared_memory

if TYPE_CHECKING:
    from .devices import Device

Extents: TypeAlias = tuple[int, ...]
"""M, N, K, batches, leading dimensions of A and B, whether K is divided (1) or into how many slices (more), bytes of
operands that are copied first, and where they are not 0 the bits of operands that are bound (`settled` of
kernel_abi.h), copies, and elements to which the first rows of A and B are aligned if that is less than a vector; for a
convolution those of `ConvSearch.extents`."""

model = _core.TimeModel()
DIVIDED_MOST_BYTES = int(model.constants["DIVIDED_MOST_BYTES"])


@functools.lru_cache(8192)
def kernel_of(key: KernelKey) -> _core.ModelKernel:
    """A kernel as the model describes it."""
    widths = gemm_sm90.widths(key)
    first_and_step = (widths.start, widths.step) if widths else (0, 0)
    return _core.ModelKernel(key, is_common(key.epilogue), shared_memory(key), first_and_step)


def launch(key: KernelKey, extents: Extents, device: Device, shared_bytes: int, split_k: int = 1) -> _core.ModelLaunch:
    """The launch options with the best estimate, for a kernel and the extents of a formulation."""
    return model.launch(kernel_of(key), extents, device, shared_bytes, split_k)


def slices(key: KernelKey, extents: Extents, device: Device) -> tuple[int, ...]:
    """The numbers of slices that a kernel may divide K into; empty where it must divide K and no number is worth it."""
    return model.slices(kernel_of(key), extents, device)


def least(key: KernelKey, extents: Extents, device: Device) -> float:
    """A lower bound in seconds of the estimates of all kernels of these types, whatever their tile and generation."""
    trace, kernel = symbols.current(), kernel_of(key)
    return model.least(kernel, extents, device) if trace is None else trace.least(model, kernel, extents, device)
