"""CUTLASS kernels as a Python package: looked up in a prebuilt table, launched on the caller's arrays and stream.

Importing does nothing but import: no CUDA initialisation, no folder, no compiler. What `gemm` does not need is loaded
when it is first asked for.
"""

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import *  # noqa: F403 - all that it has in __all__
from .generator.archs import SmArch
from .generator.dtypes import CutlassDtype
from .generator.epilogue.tree import EpilogueVisitorTree
from .generator.matrix import is_fp4_supported, is_fp8_supported, is_supported_for
from .generator.variables import objections
from .ops.gemm.function import gemm
from .pipeline.plan import Plan
from .pipeline.plan import Plan as OpPlan
from .pipeline.plan_cache import CachedPlan, PlanCache, PlanKey
from .pipeline.planning import plan
from .pipeline.table import KernelInfo, kernels, load_pack

if TYPE_CHECKING:  # the names of _DEFERRED, for type checkers and editors
    from . import epilogue
    from .epilogue import EvtBuilder
    from .jit.kernels import freeze
    from .jit.record import record
    from .ops.conv2d.function import conv2d, conv2d_dgrad, conv2d_wgrad
    from .ops.conv2d.operation import ConvDgradRequest, ConvFwdRequest, ConvLayout, ConvShape, ConvWgradRequest
    from .ops.gated_gemm.function import gated_gemm, interleave
    from .ops.gated_gemm.operation import GatedGemmRequest
    from .ops.gemm.operation import GemmLayout, GemmRequest, GemmShape
    from .ops.gemm.suites import suite_requests
    from .ops.gemv.function import gemv
    from .ops.gemv.operation import GemvRequest, GemvShape
    from .ops.grouped_gemm.function import grouped_gemm
    from .ops.grouped_gemm.operation import GroupedGemmRequest, GroupedGemmShape
    from .ops.matmul.function import matmul
    from .ops.matmul.operation import HeuristicKey, MatmulEpilogue, MatmulRequest, ScaleSet
    from .ops.quantize import reference as quantization
    from .ops.quantize.function import QuantizedArray, dequantize, quantize
    from .pipeline.bindings import BoundPlan
    from .pipeline.explanation import Explanation, explain
    from .pipeline.heuristic import HeuristicCache, heuristics
    from .pipeline.recorded import recorded_requests
    from .pipeline.request import GemmEpilogue
    from .pipeline.tune import load_tuning, tune
    from .pipeline.tuning import TuneRecord
    from .serving.actor import CutlassActor, CutlassProps, mock_props, props
    from .serving.messages import CutlassMsg, RefitMsg
    from .serving.supervisor import exit_for_restart, supervise

__all__ = [
    "BoundPlan",
    "CachedPlan",
    "ConvDgradRequest",
    "ConvFwdRequest",
    "ConvLayout",
    "ConvShape",
    "ConvWgradRequest",
    "CutlassActor",
    "CutlassDtype",
    "CutlassMsg",
    "CutlassProps",
    "EpilogueVisitorTree",
    "EvtBuilder",
    "Explanation",
    "GatedGemmRequest",
    "GemmEpilogue",
    "GemmLayout",
    "GemmRequest",
    "GemmShape",
    "GemvRequest",
    "GemvShape",
    "GroupedGemmRequest",
    "GroupedGemmShape",
    "HeuristicCache",
    "HeuristicKey",
    "KernelInfo",
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
    "TuneRecord",
    "conv2d",
    "conv2d_dgrad",
    "conv2d_wgrad",
    "dequantize",
    "epilogue",
    "exit_for_restart",
    "explain",
    "freeze",
    "gated_gemm",
    "gemm",
    "gemv",
    "grouped_gemm",
    "heuristics",
    "interleave",
    "is_fp4_supported",
    "is_fp8_supported",
    "is_supported_for",
    "kernels",
    "load_pack",
    "load_tuning",
    "matmul",
    "mock_props",
    "plan",
    "props",
    "quantization",
    "quantize",
    "record",
    "recorded_requests",
    "suite_requests",
    "supervise",
    "tune",
    "version",
]
__all__ += errors.__all__

_DEFERRED = {
    "jit.kernels": ("freeze",),
    "jit.record": ("record",),
    "serving.actor": ("CutlassActor", "CutlassProps", "mock_props", "props"),
    "pipeline.bindings": ("BoundPlan",),
    "ops.conv2d.function": ("conv2d", "conv2d_dgrad", "conv2d_wgrad"),
    "epilogue": ("EvtBuilder", "epilogue"),
    "pipeline.explanation": ("Explanation", "explain"),
    "ops.gated_gemm.function": ("gated_gemm", "interleave"),
    "ops.gemv.function": ("gemv",),
    "ops.grouped_gemm.function": ("grouped_gemm",),
    "ops.matmul.function": ("matmul",),
    "ops.matmul.operation": ("HeuristicKey", "MatmulEpilogue", "MatmulRequest", "ScaleSet"),
    "pipeline.heuristic": ("HeuristicCache", "heuristics"),
    "serving.messages": ("CutlassMsg", "RefitMsg"),
    "pipeline.recorded": ("recorded_requests",),
    "pipeline.tune": ("load_tuning", "tune"),
    "pipeline.tuning": ("TuneRecord",),
    "ops.quantize.function": ("QuantizedArray", "dequantize", "quantize"),
    "ops.quantize.reference": ("quantization",),
    "ops.conv2d.operation": ("ConvDgradRequest", "ConvFwdRequest", "ConvLayout", "ConvShape", "ConvWgradRequest"),
    "pipeline.request": ("GemmEpilogue",),
    "ops.gated_gemm.operation": ("GatedGemmRequest",),
    "ops.gemm.operation": ("GemmLayout", "GemmRequest", "GemmShape"),
    "ops.gemm.suites": ("suite_requests",),
    "ops.gemv.operation": ("GemvRequest", "GemvShape"),
    "ops.grouped_gemm.operation": ("GroupedGemmRequest", "GroupedGemmShape"),
    "serving.supervisor": ("exit_for_restart", "supervise"),
}  # fmt: skip
"""Names by the module that is loaded when one of them is first asked for."""

if not TYPE_CHECKING:  # a type checker would believe that this has every name
    _MODULES = {name: module for module, names in _DEFERRED.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f".{_MODULES[name]}", __name__)
        value = getattr(module, name, module)  # of `epilogue` and `quantization` the module itself
        globals()[name] = value
        return value


for _objection in objections(os.environ):
    warnings.warn(_objection, RuntimeWarning, stacklevel=2)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def version() -> str:
    """The installed version of the package."""
    from importlib import metadata

    return metadata.version("atomr-cutlass")
