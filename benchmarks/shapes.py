"""Shapes of products for the benchmarks: drawn at random by class from a seed, and the projections of named models.

`CLASSES` has the classes with their ranges of M x N x K. Extents are log-uniform. N and K are then rounded to a
multiple, drawn for the whole problem: of 16 in `SHARE_OF_16` of the problems, of 8 in `SHARE_OF_8`, of nothing in the
rest; where a class has a multiple of its own, of that. M is whatever a batch happens to have. Problems whose N and K
are multiples of 8 (16 bytes of bf16) are `aligned`: TMA reads and writes them. The others are the ragged ones.

Even seeds are for fitting the model of the selection, odd ones for acceptance; `purpose` tells which one a seed is for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from atomr_cutlass.ops.gemm.suites import ROWS, projections

SPENT = frozenset(
    {
        *(13, 131, 133, 977, 979, 1301, 1303, 1305, 1307, 1531, 2101, 2103, 2105, 2107, 2109, 3001, 3003, 3005, 3301),
        *(5001, 5003, 5101, 5103, 5105, 6101, 6103, 6105, 6201, 6203, 6205, 6301, 6303, 6305, 7001, 7003, 7005),
        *(1601, 1603, 1605, 7101, 7103, 7105, 7201, 7203, 7205, 7301, 7303, 7305, 7401, 7403, 7405, 7501),
        *(7503, 7505, 7601, 7603, 7605, 8101, 8103, 8105, 9101, 9103, 9105, 9201, 9203, 9205),
        *(1607, 8107, 8109, 9301, 9303, 9305, 9401, 9403, 9405, 9501, 9503, 9505, 9601, 9603, 9605, 9701, 9703, 9705),
        *(1609, 1613, 1615, 1617, 1619, 1711, 9801, 9803, 9805, 9901, 9903, 9905, 9907, 9909, 9911, 9913, 9915, 9917),
        *(1621, 1623, 1625, 1627, 1629, 1631, 1633, 1635, 1637, 1639, 1641, 1643, 1645, 1713, 1715, 1717, 1719),
        *(9919, 9921, 9923, 9925, 9927, 9929, 9931, 9933, 9935, 9937, 9939),
        *(1721, 1723, 9941, 9943, 9945, 9947, 9949, 9951, 9953, 9955, 9957, 9959, 9961, 9963),
        *(1647, 1649, 1651, 1725, 9965, 9967, 9969, 9971, 9973, 9975, 9977, 9979, 9981, 9983),
        *(1653, 1655, 1657, 1659, 1661, 1663, 1665, 1727, 9985, 9987, 9989, 9991, 9993, 9995, 9997, 9999, 10001, 10003),
        *(10005, 10007, 10009, 10011, 10013, 10015, 10017, 10019, 10021, 10023, 10025, 10027),
    }
)
"""Odd seeds whose figures have been seen: nothing that is changed after that is accepted by them."""

SHARE_OF_16 = 0.45
SHARE_OF_8 = 0.45
"""The remaining tenth is a multiple of nothing."""

OPERAND_BYTES_AT_MOST = 1 << 30
"""Of A, B and D together, at 2 bytes an element: larger problems are drawn again."""
FLOPS_AT_MOST = 4e12
"""Larger problems are drawn again: this is a call of about 5 ms on the fastest GPU that was measured."""


@dataclass(frozen=True)
class ShapeClass:
    """Ranges of a class of products, inclusive.

    Attributes:
        name: as results are grouped by.
        m: of the rows of A and D.
        n: of the columns of B and D.
        k: of what is summed over.
        square: whether one extent, drawn from the range of M, is all three.
        multiple: of N and K; None is drawn.
        batch: of the products that are computed at once.
    """

    name: str
    m: tuple[int, int]
    n: tuple[int, int]
    k: tuple[int, int]
    square: bool = False
    multiple: int | None = None
    batch: tuple[int, int] = (1, 1)


CLASSES = MappingProxyType(
    {
        shapes.name: shapes
        for shapes in (
            ShapeClass("few rows", (1, 64), (1024, 32768), (1024, 32768)),
            ShapeClass("mid", (65, 511), (512, 16384), (512, 16384)),
            ShapeClass("large", (512, 16384), (512, 16384), (512, 16384)),
            ShapeClass("decode", (1, 256), (1024, 32768), (1024, 32768), multiple=128),
            ShapeClass("prefill", (512, 16384), (1024, 32768), (1024, 16384), multiple=128),
            ShapeClass("flat", (64, 512), (4096, 65536), (64, 4096)),
            ShapeClass("tall", (4096, 65536), (64, 512), (64, 4096)),
            ShapeClass("long k", (16, 512), (16, 512), (16384, 131072)),
            ShapeClass("small squares", (64, 1024), (64, 1024), (64, 1024), square=True),
            ShapeClass("batches", (16, 2048), (16, 2048), (16, 2048), batch=(2, 128)),
        )
    }
)


@dataclass(frozen=True)
class Shape:
    """A product of (M, K) and (K, N), or a batch of them.

    Attributes:
        group: its class, or the model and projection that it is of.
        m: rows of A and D.
        n: columns of B and D.
        k: columns of A, rows of B.
        batch: products.
    """

    group: str
    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def aligned(self) -> bool:
        """Whether the rows of A, B (either layout) and D begin at multiples of 16 bytes with elements of 2 bytes."""
        return self.n % 8 == 0 and self.k % 8 == 0

    def of_layouts(self, layouts: str) -> Shape:
        """The shape as operands of these layouts, of A and B, have it.

        M of an aligned problem becomes a multiple of 8 where A is column-major: TMA reads its columns then.
        """
        return replace(self, m=math.ceil(self.m / 8) * 8) if layouts[0] == "c" and self.aligned else self

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k

    def bytes(self, element_bytes: int) -> int:
        """Of A, B and D, each once."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * element_bytes

    def __str__(self) -> str:
        batch = f"{self.batch} of " if self.batch > 1 else ""
        return f"{batch}{self.m}x{self.n}x{self.k}"


def purpose(seed: int) -> str:
    """The purpose that a seed may still serve: `fitting`, `acceptance`, or `none: spent`."""
    if seed % 2 == 0:
        return "fitting"
    return "none: spent" if seed in SPENT else "acceptance"


def seed_facts(seed: int | None) -> dict[str, dict[int, str]]:
    """The facts of results that depend on a seed, with its purpose; none without one."""
    return {} if seed is None else {"seeds": {seed: purpose(seed)}}


def draw(names: Sequence[str], count: int, seed: int, *, aligned: bool | None = None, multiple: int = 1) -> list[Shape]:
    """Shapes drawn at random, the same ones for the same arguments.

    Args:
        names: classes of `CLASSES`; each gets `count` shapes, which do not depend on the other names.
        count: shapes of each class.
        seed: of the draw.
        aligned: keep to aligned shapes (True) or to misaligned ones (False).
        multiple: keep to shapes whose N and K are multiples of it, as aligned rows of narrower elements are.

    Raises:
        ValueError: an unknown class, or one without misaligned shapes where those are asked for.
    """
    shapes = []
    for name in names:
        if name not in CLASSES:
            raise ValueError(f"no class {name!r}; valid: {', '.join(CLASSES)}")
        source = random.Random(f"{seed} {name}")  # noqa: S311 - a repeatable draw, no secret
        found: list[Shape] = []
        if aligned is False and (CLASSES[name].multiple or 1) % 8 == 0:
            raise ValueError(f"{name} has aligned shapes alone: leave it out")
        while len(found) < count:
            shape = _one(CLASSES[name], source)
            small = shape.bytes(2) <= OPERAND_BYTES_AT_MOST and shape.flops <= FLOPS_AT_MOST
            if small and aligned in (None, shape.aligned) and shape.n % multiple == shape.k % multiple == 0:
                found.append(shape)
        shapes += found
    return shapes


def _one(of: ShapeClass, source: random.Random) -> Shape:
    share = source.random()
    drawn = 16 if share < SHARE_OF_16 else 8 if share < SHARE_OF_16 + SHARE_OF_8 else 1
    multiple = of.multiple or drawn

    def extent(bounds: tuple[int, int], step: int) -> int:
        low, high = bounds
        exact = math.exp(source.uniform(math.log(low), math.log(high)))
        return min(high, max(low, step * max(1, round(exact / step))))

    if of.square:
        side = extent(of.m, multiple)
        return Shape(of.name, side, side, side)
    shape = Shape(of.name, extent(of.m, 1), extent(of.n, multiple), extent(of.k, multiple))
    return shape if of.batch == (1, 1) else replace(shape, batch=extent(of.batch, 1))


def suite(model: str, rows: Sequence[int] = ROWS) -> list[Shape]:
    """The projections of a model for so many rows.

    Raises:
        ValueError: an unknown model.
    """
    return [Shape(f"{model} {layer}", m, n, k) for layer, (n, k) in projections(model).items() for m in rows]
