"""Grouped GEMM: several products of different extents in one launch."""
