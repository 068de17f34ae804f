"""Kernels in Triton, called through jax-triton, for NVIDIA GPUs from compute capability 8.0 on.

linear_logp.py, gemm.py and rows.py are what other packages import: they need neither triton nor jax-triton until one of
their functions runs. The files `*_kernels.py` hold the device code, and call.py launches it under every supported
jax-triton.
"""
