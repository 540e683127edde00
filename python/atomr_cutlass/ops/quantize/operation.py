"""Quantization and its inverse as operations."""

from __future__ import annotations

from types import MappingProxyType

from ...pipeline.operation import IN_BACKGROUND, NO_CHECK, Operation

_BOTH = NO_CHECK | {
    "precision": "the kernels compute in float32, whatever the element types",
    "fast_accum": "nothing is added up",
    "workspace_size": "there is one kernel for each form, whose workspace is 4 bytes at most",
    "batch_invariant": "nothing is added up: elements depend on others through their scale alone",
}
_ONE_KERNEL = "each form and element type has one kernel: there is nothing to choose, bind or tune"


class QuantizeOperation(Operation):
    """From an array to narrow elements and their scales."""

    name = "quantize"
    unplanned = _ONE_KERNEL
    refuses = MappingProxyType(
        _BOTH
        | dict.fromkeys(("c", "beta"), "the kernels read x alone")
        | dict.fromkeys(("alpha", "scale_a", "scale_d"), "a factor of x changes the scales alone: multiply those")
        | dict.fromkeys(
            ("bias", "activation", "epilogue"),
            "the kernels divide x by its scales, and compute nothing else: apply it to x before",
        )
        | {
            "scale_b": "there is one operand",
            "amax": "it is the scale times the largest value of `dtype`",
        }
    )
    spelled = MappingProxyType({"out_dtype": "dtype", IN_BACKGROUND: 'jit="auto"'})


class DequantizeOperation(Operation):
    """From narrow elements and their scales to an array."""

    name = "dequantize"
    unplanned = _ONE_KERNEL
    refuses = MappingProxyType(
        _BOTH
        | dict.fromkeys(("c", "beta", "bias"), "the kernels read values and scales alone")
        | dict.fromkeys(("activation", "epilogue"), "the kernels multiply by scales alone: apply it to the result")
        | {"scale_b": "there is one operand", "amax": "the kernels write the result alone"}
    )
    spelled = MappingProxyType(
        {"alpha": "global_scale", "scale_a": "scales", "scale_d": "global_scale", IN_BACKGROUND: 'jit="auto"'}
    )


OPERATIONS = (QuantizeOperation(), DequantizeOperation())
