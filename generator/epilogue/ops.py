"""The operations of epilogue trees: C++ and the reference have a function of the same name for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """An operation on single values.

    Attributes:
        name: of the function in `epilogue_ops.h` and in `reference.tree`.
        arity: how many values it takes.
        attributes: names of the numbers that are part of it.
        commutative: whether swapping its values leaves the result's bits unchanged.
    """

    name: str
    arity: int
    attributes: tuple[str, ...] = ()
    commutative: bool = False


ACTIVATION_OPS = ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "hardswish")

LEAKY_SLOPE = 0.01
"""The default slope of leaky_relu."""

ACTIVATIONS = ("identity", *ACTIVATION_OPS, "leaky_relu")
"""The names of activations in calls and requests."""

_UNARY = ("negate", "absolute", "square", "sqrt", "rsqrt", "reciprocal", "exp", "log", *ACTIVATION_OPS)
_SYMMETRIC = ("add", "multiply", "maximum", "minimum", "equal", "not_equal")
_BINARY = ("subtract", "divide", "less", "less_equal", "greater", "greater_equal")

# The first value times the derivative of an activation at the second.
GRADIENT_OPS = tuple(f"d_{name}" for name in ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"))

OPS = {
    op.name: op
    for op in (
        *(Op(name, 1) for name in _UNARY),
        Op("leaky_relu", 1, ("slope",)),
        Op("clamp", 1, ("low", "high")),
        *(Op(name, 2, commutative=True) for name in _SYMMETRIC),
        *(Op(name, 2) for name in (*_BINARY, *GRADIENT_OPS)),
        Op("fma", 3),
        Op("select", 3),
    )
}
"""Operations by name. Comparisons give 1 or 0; `select(mask, x, y)` is x where the mask is not 0; `fma(x, y, z)` is
x * y + z, rounded once."""
