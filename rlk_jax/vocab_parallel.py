"""The public door to linear_logp on heads that are sharded along the vocabulary, for whole arrays in pjit programs."""

from rlk_jax.ops.linear_logp.sharding.vocab_parallel import linear_logp, pad_lm_head, shard_bounds

__all__ = ["linear_logp", "pad_lm_head", "shard_bounds"]
