"""One of two processes under FSDP2: python -m tests.torch_bridge.clients.fsdp2_rank PORT RANK POLICIES."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import torch_bridge
from tests.torch_bridge.clients.policy import LEARNING_RATE, POLICIES, Rollout, device, largest, loss_of, main, rollout


class Trained:
    """A policy after one step."""

    def __init__(self, policy: Any, rank: int, *, reshards: bool = True) -> None:
        batch = Rollout(*(x.to(device(rank)) for x in rollout(policy, rank)))
        policy.to(device(rank))
        before = [x.detach().clone() for x in policy.parameters()]
        for module in (*policy.units(), policy):
            fully_shard(module, reshard_after_forward=reshards)
        self.lm_head, gathered = policy.lm_head, []
        policy.owner().register_forward_pre_hook(lambda *_: gathered.append(policy.lm_head.weight))
        optimizer = torch.optim.SGD(policy.parameters(), lr=LEARNING_RATE)
        logp, entropy = policy(batch.ids, batch.target_ids)
        self.bytes_left = gathered[0].untyped_storage().size()
        self.masked = largest(x[~batch.active] for x in (logp, entropy))
        loss_of(logp, entropy, batch).backward()
        optimizer.step()
        self.parameters = [x.full_tensor().detach() for x in policy.parameters()]
        self.moved = largest(a - b for a, b in zip(self.parameters, before, strict=True))


def refused(weight: Tensor) -> str:
    """The error of the bridge for a head that is not gathered."""
    try:
        torch_bridge.linear_logp(torch.zeros(1, weight.shape[1]), weight, torch.tensor([0]))
    except ValueError as error:
        return str(error)
    return ""


def logits_error(lm_head: Any) -> float:
    """The error of the logits that a sharded head gives where FSDP gathers it for them."""
    register_fsdp_forward_method(lm_head, "logits")
    hidden = torch.ones(2, lm_head.in_features, device=lm_head.weight.device)
    with torch.no_grad():
        expected = nn.functional.linear(hidden, lm_head.weight.full_tensor(), lm_head.bias.full_tensor())
        return largest([lm_head.logits(hidden) - expected])


def task(rank: int, *names: str) -> dict[str, Any]:
    found = {}
    for name in names:
        stock, bridged = (Trained(POLICIES[name](x), rank) for x in (False, True))
        gathered_once = Trained(POLICIES[name](True), rank, reshards=False)
        errors = (
            largest(a - b for a, b in zip(stock.parameters, x.parameters, strict=True))
            for x in (bridged, gathered_once)
        )
        found[name] = {
            "error": max(errors),
            "moved": bridged.moved,
            "masked": bridged.masked,
            "bytes_left": bridged.bytes_left,
            "refused": refused(bridged.lm_head.weight),
            "logits": logits_error(bridged.lm_head) if isinstance(bridged.lm_head, torch_bridge.FusedLMHead) else None,
        }
    return found


if __name__ == "__main__":
    main(task)
