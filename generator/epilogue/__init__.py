"""Epilogue visitor trees: the operations on an accumulator before it is stored, and their C++."""
