"""Extents in whole tiles."""

from __future__ import annotations


def round_up(extent: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not smaller."""
    return -(-extent // multiple) * multiple


def round_down(extent: int, multiple: int) -> int:
    """The largest multiple of `multiple` that is not larger."""
    return extent // multiple * multiple
