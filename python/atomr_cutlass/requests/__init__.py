"""Requests: what a caller wants computed, without saying how."""

from .gemm import GemmEpilogue, GemmLayout, GemmRequest, GemmShape, refuse_epilogue

__all__ = ["GemmEpilogue", "GemmLayout", "GemmRequest", "GemmShape", "refuse_epilogue"]
