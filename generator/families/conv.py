"""The shared parts of the convolution families: operands by operation, activations, and the rules of all keys."""

from __future__ import annotations

from ..epilogue.lower import COMMON, LINEAR, is_gated, split
from ..key import COLUMN, ROW, KernelKey
from ..rules import NOT_GATED, OK, Status, accumulator, conv_types, no, supports_conv_tree

OPERATIONS = {"conv2d_fprop": "Fprop", "conv2d_dgrad": "Dgrad", "conv2d_wgrad": "Wgrad"}
"""Operations as CUTLASS's enumerations name them."""

LAYOUTS = {"conv2d_fprop": ROW + COLUMN, "conv2d_dgrad": ROW + ROW, "conv2d_wgrad": COLUMN + ROW}
"""A and B of the implicit GEMM: x (n p q, r s c) and w; dy (n h w, r s k) and w; dy transposed and x."""

ACTIVATIONS = {
    "relu": "Relu",
    "leaky_relu": "LeakyRelu",
    "sigmoid": "Sigmoid",
    "silu": "Silu",
    "tanh": "Tanh",
    "hardswish": "Hardswish",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
}
"""Activations by name -> their struct in activation.h."""

EPILOGUES = ("lc", *(f"lc_{name}" for name in ACTIVATIONS))
"""Ids of the epilogues: the linear combination (with a bias if the call has one), and activations of it."""


def activation_cpp(key: KernelKey) -> str:
    """The C++ type of a key's activation; void without one."""
    return "void" if key.epilogue == "lc" else f"atomr_cutlass::{ACTIVATIONS[key.epilogue.removeprefix('lc_')]}"


def supports_conv(key: KernelKey) -> Status:
    """Whether a key meets the common rules of all families of convolutions."""
    base, program = split(key.epilogue)
    if is_gated(key.epilogue):
        return NOT_GATED
    if base not in ((LINEAR,) if program else (*EPILOGUES, COMMON)):
        return no(f"unknown epilogue {key.epilogue!r}; valid: {', '.join(EPILOGUES)}, {COMMON}, and trees on {LINEAR}")
    if program or base == COMMON:
        tree = supports_conv_tree(key)
        if not tree:
            return tree
    elif key.op == "conv2d_wgrad" and key.epilogue != LINEAR:
        return no("the gradient of a filter has no bias and no activation: its epilogue is lc")
    types = conv_types(key.op, key.a, key.b, key.d, key.math, tree=bool(program))
    if not types:
        return types
    if key.acc is not accumulator(key.a):
        return no(f"{key.a.value} operands accumulate in {accumulator(key.a).value}, not {key.acc.value}")
    if key.layout_a + key.layout_b + key.layout_d != LAYOUTS[key.op] + ROW:
        return no(f"the layouts of {key.op} are {', '.join(LAYOUTS[key.op] + ROW)}: NHWC tensors as an implicit GEMM")
    return OK
