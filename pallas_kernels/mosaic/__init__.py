"""Kernels for Hopper in Pallas Mosaic GPU.

main_loop.py is the one warp-specialised TMA + wgmma loop that multiplies. Kernels with a product are epilogues on it:
partials.py and dlogits.py for linear_logp's two products with the head, hidden_gradient.py and weight_gradient.py for
those that give its gradients, gemm.py for det_gemm, two_heads.py for those that need the products with two heads.
launch.py launches kernels without a product: fold.py folds partial softmaxes, and logits.py holds the kernels over
materialised logits. head_kernels.py lists the kernels of linear_logp and det_gemm.
"""

from pallas_kernels.mosaic.kernel_text import take_out_dump_names

take_out_dump_names()
