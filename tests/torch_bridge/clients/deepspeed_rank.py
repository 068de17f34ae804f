"""One of two processes under DeepSpeed: python -m tests.torch_bridge.clients.deepspeed_rank PORT RANK [CASES].

A case is the name of a policy and a stage of ZeRO, as in "TRL 3"; without cases, all are run.
"""

import itertools
from typing import Any

import deepspeed
import jax
import torch
from transformers.integrations import HfDeepSpeedConfig

import rlk_jax
from tests.torch_bridge.clients.policy import (
    LEARNING_RATE,
    POLICIES,
    ROWS,
    TEMPERATURE,
    Rollout,
    device,
    largest,
    loss_of,
    main,
    rollout,
)

CASES = tuple(f"{policy} {stage}" for policy, stage in itertools.product(POLICIES, (0, 3)))
# This op would be built by a compiler while a process starts; gloo works without it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Trained:
    """A policy after one step, what its trainer logs, and the log-probs it starts from."""

    def __init__(self, policy: Any, rank: int, stage: int) -> None:
        batch = Rollout(*(x.to(device(rank)) for x in rollout(policy, rank)))
        before = [x.detach().to(device(rank), copy=True) for x in policy.parameters()]
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        }
        # TRL gathers its head if transformers knows of stage 3, which it does as long as this object is alive.
        self.known = HfDeepSpeedConfig(config)
        optimizer = torch.optim.SGD(policy.parameters(), lr=LEARNING_RATE)
        engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=config)
        logp, entropy = engine(batch.ids, batch.target_ids)
        self.elements_left = policy.lm_head.weight.numel()
        self.masked = largest(x[~batch.active] for x in (logp, entropy))
        self.off_rollout = largest([(logp - batch.old_logp)[batch.active]])
        engine.backward(loss_of(logp, entropy, batch))
        engine.step()
        self.metrics = metrics(engine, policy, batch)
        with deepspeed.zero.GatheredParameters(list(policy.parameters())):
            self.parameters = [x.detach().clone() for x in policy.parameters()]
        self.moved = largest(a - b for a, b in zip(self.parameters, before, strict=True))


def metrics(engine: Any, policy: Any, batch: Any) -> dict[str, Any]:
    """Which code made the log-probs, and statistics of the advantages of all processes' active tokens."""
    shapes = [
        (*batch.target_ids.shape, policy.lm_head.in_features),
        (policy.lm_head.out_features, policy.lm_head.in_features),
    ]
    hidden, weight = (jax.ShapeDtypeStruct(x, "float32") for x in shapes)
    ids = jax.ShapeDtypeStruct(batch.target_ids.shape, "int32")
    advantages = batch.advantages.expand_as(batch.old_logp)[batch.active]
    sums = torch.stack([torch.ones_like(advantages), advantages, advantages**2]).sum(dim=1)
    torch.distributed.all_reduce(sums)
    mean, square = (sums[1:] / sums[0]).tolist()
    return {
        "current_logp_path": "torch_bridge.linear_logp",
        "current_logp_backend": rlk_jax.explain("linear_logp", hidden, weight, ids, temperature=TEMPERATURE).choice,
        "deepspeed_zero_stage": engine.zero_optimization_stage(),
        "active_advantage_mean_global": mean,
        "active_advantage_std_global": (square - mean**2) ** 0.5,
    }


def task(rank: int, *cases: str) -> dict[str, Any]:
    found = {}
    for case in cases or CASES:
        name, stage = case.split()
        stock, bridged = (Trained(POLICIES[name](x), rank, int(stage)) for x in (False, True))
        found[case] = {
            "error": largest(a - b for a, b in zip(stock.parameters, bridged.parameters, strict=True)),
            **{x: getattr(bridged, x) for x in ("moved", "masked", "elements_left", "off_rollout", "metrics")},
        }
    return found


if __name__ == "__main__":
    main(task)
