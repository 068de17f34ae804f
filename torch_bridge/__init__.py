"""The ops of `rlk_jax` for PyTorch trainers, over DLPack. Holds no maths of its own."""
