"""Files that were damaged by chance."""

from __future__ import annotations

import random
from collections.abc import Iterator


def damaged(good: bytes, count: int, seed: int) -> Iterator[bytes]:
    """So many files that differ from a good one: bits, bytes, truncation, additions, swapped and missing parts."""
    chance = random.Random(seed)
    seen = 0
    while seen < count:
        bad = bytearray(good)
        kind = seen % 6
        at, other = chance.randrange(len(good)), chance.randrange(len(good))
        size = chance.randrange(1, 64)
        if kind == 0:
            bad[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            bad[at : at + size] = chance.randbytes(size)
        elif kind == 2:
            del bad[at:]
        elif kind == 3:
            bad += chance.randbytes(size)
        elif kind == 4:
            bad[at : at + size], bad[other : other + size] = bad[other : other + size], bad[at : at + size]
        else:
            del bad[at : at + size]
        if bytes(bad) != good:
            seen += 1
            yield bytes(bad)
