"""Quantization and dequantization."""
