"""Random products of a matrix and a vector, checked with the reference of the GEMM that they are."""

from __future__ import annotations

from ...pipeline.operation import Array, Arrays
from ..gemm.probe import GemmProbe
from .request import GemvRequest


def product_probe(request: GemvRequest, arrays: Arrays) -> GemmProbe:
    """The request on arrays of the host, as a GEMM of one row on the same memory."""
    tree = request.tree
    reduced = {output.name for output in tree.outputs if output.reduction} if tree is not None else set()

    def row(name: str, array: Array) -> Array:
        return array if name in reduced else array[..., None, :]

    given = {name: row(name, array) for name, array in arrays.items() if name not in ("a", "x")}
    given |= {"a": row("x", arrays["x"]), "b": arrays["a"].swapaxes(-1, -2)}
    return GemmProbe(request.product, given)
