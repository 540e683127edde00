"""CUTLASS kernels as a Python package: looked up in a prebuilt table, launched on the caller's arrays and stream.

Importing does nothing but import: no CUDA initialisation, no folder, no compiler.
"""

from . import epilogue
from .actor import CutlassActor, CutlassProps, props
from .bindings import BoundPlan
from .conv import conv2d, conv2d_dgrad, conv2d_wgrad
from .epilogue import EpilogueVisitorTree, EvtBuilder
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
from .explanation import Explanation, explain
from .gated import gated_gemm, interleave
from .gemm import gemm
from .generator.archs import SmArch
from .generator.dtypes import CutlassDtype
from .generator.matrix import is_fp4_supported, is_fp8_supported, is_supported_for
from .grouped import grouped_gemm
from .matmul_request import HeuristicCache, HeuristicKey, MatmulEpilogue, MatmulRequest, ScaleSet, matmul
from .messages import CutlassMsg, RefitMsg
from .op_plan import OpPlan
from .plan import Plan
from .plan_cache import CachedPlan, PlanCache, PlanKey
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
from .table import KernelInfo, kernels, load_pack

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


def version() -> str:
    """The installed version of the package."""
    from importlib import metadata

    return metadata.version("atomr-cutlass")
