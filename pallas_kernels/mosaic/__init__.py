"""Kernels for Hopper in Pallas Mosaic GPU: one warp-specialised TMA + wgmma main loop, and kernels as epilogues on it.

main_loop.py multiplies, statistics.py and dlogits.py are the epilogues of linear_logp's two products with the head,
gradients.py those of its gradients, fold.py folds partial softmaxes, launch.py launches kernels without a product.
"""
