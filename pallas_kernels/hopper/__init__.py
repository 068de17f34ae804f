"""Shared by the kernels for Hopper in Mosaic and in CUDA C++: tile sizes, the cut vocabulary, and arrays."""
