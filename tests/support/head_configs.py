"""Configurations of linear_logp's head for tests of plans, which run nothing."""

import dataclasses
from typing import Any

from rlk_jax.core.fixed_order import column_groups
from rlk_jax.core.head import HeadConfig


def head_config(size: int, **changes: Any) -> HeadConfig:
    """A plain head of `size` columns with some fields changed."""
    plain = HeadConfig(
        vocab_size=size,
        real_vocab_size=size,
        logit_softcap=None,
        return_lse=False,
        return_entropy=False,
        groups=column_groups(changes.get("real_vocab_size", size)),
        weight_layout="vd",
        may_ignore=False,
        memory_budget=None,
    )
    return dataclasses.replace(plain, **changes)
