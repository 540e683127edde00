"""Quantization and its inverse as operations."""

from __future__ import annotations

from types import MappingProxyType

from ...pipeline.operation import Operation

_NO_PRODUCT = dict.fromkeys(
    ("c", "alpha", "beta", "bias", "activation", "epilogue", "scale_a", "scale_b", "scale_d", "amax", "precision",
     "fast_accum"),
    "nothing is multiplied",
) | {
    "workspace_size": "there is one kernel for each form, whose workspace is 4 bytes at most",
    "batch_invariant": "nothing is added up: elements depend on others through their scale alone",
}  # fmt: skip


_ONE_KERNEL = "each form and element type has one kernel: there is nothing to choose, bind or tune"


class QuantizeOperation(Operation):
    """Elements of few bits and their scales, of an array."""

    name = "quantize"
    unplanned = _ONE_KERNEL
    refuses = MappingProxyType({**_NO_PRODUCT, "out": "values and scales are allocated together, as kernels take them"})
    spelled = MappingProxyType({"out_dtype": "dtype"})


class DequantizeOperation(Operation):
    """An array, of elements of few bits and their scales."""

    name = "dequantize"
    unplanned = _ONE_KERNEL
    refuses = MappingProxyType({**_NO_PRODUCT, "out": "the result is a new array"})


OPERATIONS = (QuantizeOperation(), DequantizeOperation())
