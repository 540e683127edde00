"""Named suites of GEMMs: the linear layers of language models, for `atomr-cutlass tune` and the benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...checks import expect, shown
from ...errors import InvalidOperandError

if TYPE_CHECKING:  # the benchmarks need the table alone
    from .operation import GemmRequest

MODELS: Mapping[str, Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        "llama-3-8b": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
        "llama-3-70b": {"qkv": (10240, 8192), "out": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
        "qwen-2.5-7b": {"qkv": (4608, 3584), "out": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)},
        "qwen-3-8b": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
        "deepseek-v3": {
            "q_kv_a": (2112, 7168),
            "q_b": (24576, 1536),
            "kv_b": (32768, 512),
            "out": (7168, 16384),
            "gate_up": (36864, 7168),
            "down": (7168, 18432),
            "expert_gate_up": (4096, 7168),
            "expert_down": (7168, 2048),
        },
    }
)
"""N x K of the linear layers, from the models' published configurations."""

ROWS = (
    1, 2, 3, 4, 7, 8, 13, 16, 24, 32, 50, 64, 100, 128, 200, 256, 384, 512, 777, 1024, 1500, 2048, 3000, 4096, 8192,
    16384,
)  # fmt: skip
"""M of the suites: powers of two and others."""


def projections(model: str) -> Mapping[str, tuple[int, int]]:
    """N x K of a model's linear layers, by their names.

    Raises:
        InvalidOperandError: an unknown model.
    """
    if not isinstance(model, str) or model not in MODELS:
        raise InvalidOperandError(f"no model {shown(model)}; valid: {', '.join(MODELS)}")
    return MODELS[model]


def suite_requests(models: str | Sequence[str], like: GemmRequest, rows: Sequence[int] = ROWS) -> list[GemmRequest]:
    """The GEMMs of models' linear layers, such as `tune` takes: each layer for each number of rows.

    Args:
        models: a name of a model, or several: `llama-3-8b`, `llama-3-70b`, `qwen-2.5-7b`, `qwen-3-8b`, `deepseek-v3`.
        like: has the element types, layouts, epilogue and everything else that is not an extent. Weights of PyTorch's
            layers, (N, K) in memory, are a column-major B.
        rows: values of M.

    Returns:
        The requests, each once: some layers of models are alike.

    Raises:
        InvalidOperandError: an unknown model, a number of rows that is no extent, or an argument of another kind.
    """
    from .operation import GemmRequest

    expect(like, GemmRequest, "like")
    expect(models, (str, Sequence), "models", "a name of a model, or several")
    expect(rows, Sequence, "rows", "a sequence of integers")
    names = [models] if isinstance(models, str) else models
    layers = [extents for name in names for extents in projections(name).values()]
    shapes = (dataclasses.replace(like.shape, m=m, n=n, k=k) for n, k in layers for m in rows)
    return list(dict.fromkeys(dataclasses.replace(like, shape=shape) for shape in shapes))
