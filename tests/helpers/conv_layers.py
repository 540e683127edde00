"""The convolutions of networks for images of 224 x 224: each distinct layer once.

From the papers (He et al. 2015, with the stride in the 3 x 3 convolution; Sandler et al. 2018; Howard et al. 2019; Liu
et al. 2022), in the form that torchvision gives them. Linear layers are none, but squeeze and excitation's are:
torchvision writes them as 1 x 1 convolutions of one pixel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """A square convolution: `size` rows and columns of `c` channels, to `k` channels, by `taps` rows and columns."""

    size: int
    c: int
    k: int
    taps: int
    stride: int = 1
    padding: int = 0
    groups: int = 1

    def __str__(self) -> str:
        groups = f"g{self.groups}" if self.groups > 1 else ""
        return (
            f"{self.size}x{self.size}x{self.c}-k{self.k}-{self.taps}x{self.taps}s{self.stride}p{self.padding}{groups}"
        )

    @property
    def x_shape(self) -> tuple[int, int, int]:
        """(h, w, c)."""
        return (self.size, self.size, self.c)

    @property
    def out(self) -> int:
        """Rows and columns of the result."""
        return (self.size + 2 * self.padding - self.taps) // self.stride + 1


def _resnet50() -> Iterator[Layer]:
    yield Layer(224, 3, 64, 7, 2, 3)
    size, c = 56, 64
    for width, stride, blocks in ((64, 1, 3), (128, 2, 4), (256, 2, 6), (512, 2, 3)):
        for block in range(blocks):
            step = stride if block == 0 else 1
            yield Layer(size, c, width, 1)
            yield Layer(size, width, width, 3, step, 1)
            yield Layer(size // step, width, 4 * width, 1)
            if block == 0:
                yield Layer(size, c, 4 * width, 1, step)
            size, c = size // step, 4 * width


def _convnext_tiny() -> Iterator[Layer]:
    yield Layer(224, 3, 96, 4, 4)
    size = 56
    for c in (96, 192, 384, 768):
        yield Layer(size, c, c, 7, 1, 3, c)
        if c < 768:
            yield Layer(size, c, 2 * c, 2, 2)
            size //= 2


def _inverted(size: int, c: int, wide: int, k: int, taps: int, stride: int) -> Iterator[Layer]:
    """Widen, convolve each channel by itself, narrow."""
    if wide != c:
        yield Layer(size, c, wide, 1)
    yield Layer(size, wide, wide, taps, stride, taps // 2, wide)
    yield Layer(size // stride, wide, k, 1)


def _mobilenet_v2() -> Iterator[Layer]:
    yield Layer(224, 3, 32, 3, 2, 1)
    size, c = 112, 32
    for widen, k, blocks, stride in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for block in range(blocks):
            step = stride if block == 0 else 1
            yield from _inverted(size, c, widen * c, k, 3, step)
            size, c = size // step, k
    yield Layer(size, c, 1280, 1)


def _mobilenet_v3_large() -> Iterator[Layer]:
    yield Layer(224, 3, 16, 3, 2, 1)
    size, c = 112, 16
    # Taps, channels in the middle, of squeeze (0: none) and at the end, stride.
    for taps, wide, squeeze, k, stride in (
        (3, 16, 0, 16, 1), (3, 64, 0, 24, 2), (3, 72, 0, 24, 1), (5, 72, 24, 40, 2), (5, 120, 32, 40, 1),
        (3, 240, 0, 80, 2), (3, 200, 0, 80, 1), (3, 184, 0, 80, 1), (3, 480, 120, 112, 1), (3, 672, 168, 112, 1),
        (5, 672, 168, 160, 2), (5, 960, 240, 160, 1),
    ):  # fmt: skip
        yield from _inverted(size, c, wide, k, taps, stride)
        if squeeze:
            yield Layer(1, wide, squeeze, 1)
            yield Layer(1, squeeze, wide, 1)
        size, c = size // stride, k
    yield Layer(size, c, 960, 1)


RESNET50 = tuple(dict.fromkeys(_resnet50()))
CONVNEXT_TINY = tuple(dict.fromkeys(_convnext_tiny()))
MOBILENET_V2 = tuple(dict.fromkeys(_mobilenet_v2()))
MOBILENET_V3 = tuple(dict.fromkeys(_mobilenet_v3_large()))

NETWORKS = {
    "resnet50": RESNET50,
    "convnext_tiny": CONVNEXT_TINY,
    "mobilenet_v2": MOBILENET_V2,
    "mobilenet_v3_large": MOBILENET_V3,
}

LAYERS = tuple(dict.fromkeys(layer for layers in NETWORKS.values() for layer in layers))
"""Every layer of the networks, once."""
