"""CUTLASS kernels as a Python package: looked up in a prebuilt table, launched on the caller's arrays and stream.

Importing does nothing but import: no CUDA initialisation, no folder, no compiler.
"""

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
from .explain import Explanation, explain
from .gemm import gemm
from .generator.archs import SmArch
from .generator.dtypes import CutlassDtype
from .generator.matrix import is_fp4_supported, is_fp8_supported, is_supported_for
from .plan import Plan, plan
from .requests import GemmEpilogue, GemmLayout, GemmRequest, GemmShape
from .table import KernelInfo, kernels, load_pack

__all__ = [
    "CacheError",
    "CompileError",
    "ContextPoisonedError",
    "CutlassDtype",
    "CutlassError",
    "DeviceUnavailableError",
    "Explanation",
    "GemmEpilogue",
    "GemmLayout",
    "GemmRequest",
    "GemmShape",
    "InvalidOperandError",
    "KernelInfo",
    "KernelNotFoundError",
    "LibraryError",
    "Plan",
    "SmArch",
    "UnsupportedError",
    "explain",
    "gemm",
    "is_fp4_supported",
    "is_fp8_supported",
    "is_supported_for",
    "kernels",
    "load_pack",
    "plan",
    "version",
]


def version() -> str:
    """The installed version of the package."""
    from importlib import metadata

    return metadata.version("atomr-cutlass")
