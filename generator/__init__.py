"""The kernel generator: the kernels that can be compiled, their names, and their source text.

Standard library only. It is imported as `generator` by the build and as `atomr_cutlass.generator` by the
installed package, so every import inside it is relative.
"""
