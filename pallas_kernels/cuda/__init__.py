"""Kernels for Hopper in CUDA C++, called through jax.ffi.

build.py compiles the sources beside it into one library, kept in a cache, and registers that library's handlers.
"""
