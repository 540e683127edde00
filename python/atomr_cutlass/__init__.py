"""CUTLASS kernels as a Python package."""
