"""Kernels in Triton, called through jax-triton: NVIDIA GPUs from compute capability 8.0 on.

call.py launches kernels under every supported jax-triton. rows.py and linear_logp.py are what others import: they need
neither triton nor jax-triton until one of their functions runs. The `*_kernels.py` beside them hold the device code.
"""
