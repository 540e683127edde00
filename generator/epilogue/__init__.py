"""Epilogue visitor trees: what is computed from an accumulator before it is stored, and its C++."""
