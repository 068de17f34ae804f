"""The machine on which tests run Mosaic's kernels in Pallas' interpreter."""

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import Machine

MACHINE = Machine(2, plgpu.InterpretGPUParams(detect_races=True))
"""Two multiprocessors, and so clusters of two blocks."""
