"""Kernels compiled at run time, by NVRTC, and kept on disk."""
