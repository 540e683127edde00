"""Epilogue validation: a miscompiled tree gives plausible numbers, so each kernel with a tree is checked at first use.

The kernel computes a problem of a few tiles, and its results are compared with the reference. The finding is kept in
the validation cache, beside the compiled kernels, so later processes do not repeat the check.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import numpy as np

from .. import _core
from ..arrays import symbols
from ..errors import InvalidOperandError, UnsupportedError
from ..generator.epilogue.lower import is_common
from ..jit import files, kernels
from ..jit.locks import KeyedLocks
from ..pipeline import devices
from ..pipeline.devices import Device
from ..pipeline.operation import planned_operations
from ..pipeline.probe import checked, uploaded
from ..pipeline.search import Candidate

VARIABLE = "ATOMR_CUTLASS_CHECK_EPILOGUES"
"""`on` (the default) or `off`."""

_known: dict[str, str] = {}
_locks = KeyedLocks()


def require(
    candidate: Candidate[Any], epilogue: str, device: Device, *, stream: int | None, in_background: bool
) -> bool:
    """Checks a kernel's epilogue tree, unless that has been done before on this architecture.

    The finding holds for the launched code and the driver that ran it: after a change of compiler, headers or driver
    the kernel is checked again. Block-scaled kernels are not checked: the check makes no quantized operands.

    The check uses its own streams, which must not happen during the capture of a graph. So if `stream`, on which the
    plan is launched first, is being captured, or may be because the caller's streams run on (`in_background`), only
    the validation cache is read. The result is then False for an unchecked kernel, whose plan must not be kept.
    `epilogue` is the problem's: a kernel that computes several trees gets it as an argument.
    """
    key, wanted = candidate.key, os.environ.get(VARIABLE) or "on"
    if wanted not in ("on", "off"):
        raise InvalidOperandError(f"{VARIABLE} is {wanted!r}; valid: on, off")
    if key.scale_type or wanted == "off":
        return True
    code = kernels.image_digest(key, device) if candidate.info is None else candidate.info.content
    epilogue = epilogue if is_common(key.epilogue) else key.epilogue
    which = [] if epilogue == key.epilogue else [epilogue]
    identity = "\0".join([key.to_json(), *which, str(device.capability), devices.driver(), code])
    with _locks.hold(identity):
        wrong = _known.get(identity)
        if wrong is None:
            wrong = files.recall_validation(identity)
        if wrong is None and (in_background or (stream is not None and _core.capturing(device.index, stream))):
            return False
        if wrong is None:
            symbols.refuse()
            wrong = "; ".join(_differences(candidate, epilogue, device))
            files.remember_validation(identity, wrong)
            if wrong:
                warnings.warn(f"the first use of an epilogue gave wrong results: {wrong}", RuntimeWarning, stacklevel=2)
        _known[identity] = wrong
    if wrong:
        raise UnsupportedError(
            f"{key.name} computes its epilogue wrongly on {device.name}: {wrong}. The tree is refused there; please "
            f"report it. Compute it apart from the product, or turn the check off with {VARIABLE}=off"
        )
    return True


def _differences(candidate: Candidate[Any], epilogue: str, device: Device) -> list[str]:
    """Describes how the results of a small problem differ from the reference; empty if they do not."""
    operation = planned_operations()[candidate.key.op]
    request, alone = operation.sample(candidate.key, epilogue, device)
    made = operation.plan(request, device.index, candidate=dataclasses.replace(alone, info=candidate.info))
    made.request = request
    arrays = operation.random_arrays(request, np.random.default_rng(20))
    return checked(made, arrays, uploaded(request, arrays, device.index)).differences
