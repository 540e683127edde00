"""The analytic model: how long a kernel would take for a problem, before anything is launched.

cpp/src/estimate.h says of which parts it consists, and estimate_constants.inc which constants it has.
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
"""M, N, K, batches, leading dimensions of A and B, whether K is divided, and bytes of an operand that is copied before;
those of a convolution are `ConvFormulation.extents`.
"""

model = _core.TimeModel()
DIVIDED_MOST_BYTES = int(model.constants["DIVIDED_MOST_BYTES"])


@functools.lru_cache(8192)
def kernel_of(key: KernelKey) -> _core.ModelKernel:
    """A kernel as the model describes it."""
    widths = gemm_sm90.widths(key)
    told = (widths.start, widths.step) if widths else (0, 0)
    return _core.ModelKernel(key, is_common(key.epilogue), shared_memory(key), told)


def launch(key: KernelKey, extents: Extents, device: Device, shared_bytes: int, split_k: int = 1) -> _core.ModelLaunch:
    """The launch options that are best for a kernel and a problem as the kernel sees it (`KernelSearch.extents`)."""
    return model.launch(kernel_of(key), extents, device, shared_bytes, split_k)


def slices(key: KernelKey, extents: Extents, device: Device) -> tuple[int, ...]:
    """The slices of K that a kernel may be run with; of what is divided that may be none."""
    return model.slices(kernel_of(key), extents, device)


def least(key: KernelKey, extents: Extents, device: Device) -> float:
    """A time that no kernel of these types is estimated to stay below, whatever its tile and generation."""
    trace, kernel = symbols.current(), kernel_of(key)
    return model.least(kernel, extents, device) if trace is None else trace.least(model, kernel, extents, device)
