"""CUTLASS kernels as a Python package: looked up in a prebuilt table, launched on the caller's arrays and stream.

Importing does nothing but import: no CUDA initialisation, no folder, no compiler. What `gemm` does not need is loaded
when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    CacheError,
    CompileError,
    ContextPoisonedError,
    CutlassError,
    DeviceUnavailableError,
    InvalidOperandError,
    KernelNotFoundError,
    LibraryError,
    UnsupportedError,
)
from .gemm import gemm
from .generator.archs import SmArch
from .generator.dtypes import CutlassDtype
from .generator.epilogue.tree import EpilogueVisitorTree
from .generator.matrix import is_fp4_supported, is_fp8_supported, is_supported_for
from .op_plan import OpPlan
from .plan import Plan
from .plan_cache import CachedPlan, PlanCache, PlanKey
from .table import KernelInfo, kernels, load_pack

if TYPE_CHECKING:  # the names of _DEFERRED, for type checkers and editors
    from . import epilogue
    from .actor import CutlassActor, CutlassProps, props
    from .bindings import BoundPlan
    from .conv import conv2d, conv2d_dgrad, conv2d_wgrad
    from .epilogue import EvtBuilder
    from .explanation import Explanation, explain
    from .gated import gated_gemm, interleave
    from .grouped import grouped_gemm
    from .matmul_request import HeuristicCache, HeuristicKey, MatmulEpilogue, MatmulRequest, ScaleSet, matmul
    from .messages import CutlassMsg, RefitMsg
    from .planner import plan
    from .quantized import QuantizedArray, dequantize, quantize
    from .requests import (
        ConvDgradRequest,
        ConvFwdRequest,
        ConvLayout,
        ConvShape,
        ConvWgradRequest,
        GemmEpilogue,
        GemmLayout,
        GemmRequest,
        GemmShape,
        GroupedGemmRequest,
        GroupedGemmShape,
    )
    from .supervisor import exit_for_restart, supervise

__all__ = [
    "BoundPlan",
    "CacheError",
    "CachedPlan",
    "CompileError",
    "ContextPoisonedError",
    "ConvDgradRequest",
    "ConvFwdRequest",
    "ConvLayout",
    "ConvShape",
    "ConvWgradRequest",
    "CutlassActor",
    "CutlassDtype",
    "CutlassError",
    "CutlassMsg",
    "CutlassProps",
    "DeviceUnavailableError",
    "EpilogueVisitorTree",
    "EvtBuilder",
    "Explanation",
    "GemmEpilogue",
    "GemmLayout",
    "GemmRequest",
    "GemmShape",
    "GroupedGemmRequest",
    "GroupedGemmShape",
    "HeuristicCache",
    "HeuristicKey",
    "InvalidOperandError",
    "KernelInfo",
    "KernelNotFoundError",
    "LibraryError",
    "MatmulEpilogue",
    "MatmulRequest",
    "OpPlan",
    "Plan",
    "PlanCache",
    "PlanKey",
    "QuantizedArray",
    "RefitMsg",
    "ScaleSet",
    "SmArch",
    "UnsupportedError",
    "conv2d",
    "conv2d_dgrad",
    "conv2d_wgrad",
    "dequantize",
    "epilogue",
    "exit_for_restart",
    "explain",
    "gated_gemm",
    "gemm",
    "grouped_gemm",
    "interleave",
    "is_fp4_supported",
    "is_fp8_supported",
    "is_supported_for",
    "kernels",
    "load_pack",
    "matmul",
    "plan",
    "props",
    "quantize",
    "supervise",
    "version",
]

_DEFERRED = {
    "actor": ("CutlassActor", "CutlassProps", "props"),
    "bindings": ("BoundPlan",),
    "conv": ("conv2d", "conv2d_dgrad", "conv2d_wgrad"),
    "epilogue": ("EvtBuilder", "epilogue"),
    "explanation": ("Explanation", "explain"),
    "gated": ("gated_gemm", "interleave"),
    "grouped": ("grouped_gemm",),
    "matmul_request": ("HeuristicCache", "HeuristicKey", "MatmulEpilogue", "MatmulRequest", "ScaleSet", "matmul"),
    "messages": ("CutlassMsg", "RefitMsg"),
    "planner": ("plan",),
    "quantized": ("QuantizedArray", "dequantize", "quantize"),
    "requests": (
        "ConvDgradRequest", "ConvFwdRequest", "ConvLayout", "ConvShape", "ConvWgradRequest", "GemmEpilogue",
        "GemmLayout", "GemmRequest", "GemmShape", "GroupedGemmRequest", "GroupedGemmShape",
    ),
    "supervisor": ("exit_for_restart", "supervise"),
}  # fmt: skip
"""Names by the module that is loaded when one of them is first asked for."""

if not TYPE_CHECKING:  # a type checker would believe that this has every name
    _MODULES = {name: module for module, names in _DEFERRED.items() for name in names}
    # The module `plan`, which `gemm` needs, is bound to the name of a function that is deferred.
    del globals()["plan"]

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f".{_MODULES[name]}", __name__)
        value = module if name == _MODULES[name] else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def version() -> str:
    """The installed version of the package."""
    from importlib import metadata

    return metadata.version("atomr-cutlass")
