"""The kernel generator: what can be compiled, what it is called, and its source text.

Standard library only. It is imported as `generator` by the build and as `atomr_cutlass.generator` by the
installed package, so every import inside it is relative.
"""
