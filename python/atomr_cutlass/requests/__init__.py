"""Requests: what a caller wants computed, without saying how."""

from .conv import ConvDgradRequest, ConvFwdRequest, ConvLayout, ConvShape, ConvWgradRequest
from .gemm import GemmEpilogue, GemmLayout, GemmRequest, GemmShape
from .grouped import GroupedGemmRequest, GroupedGemmShape

__all__ = [
    "ConvDgradRequest",
    "ConvFwdRequest",
    "ConvLayout",
    "ConvShape",
    "ConvWgradRequest",
    "GemmEpilogue",
    "GemmLayout",
    "GemmRequest",
    "GemmShape",
    "GroupedGemmRequest",
    "GroupedGemmShape",
]
