"""Kernels for Hopper in CUDA C++, called through jax.ffi.

build.py compiles the sources beside it into one library, keeps that in a cache, and registers its handlers with XLA.
kernels.py has the kernels as functions of arrays.
"""
