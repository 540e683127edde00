"""GEMM: `gemm` and its requests."""
