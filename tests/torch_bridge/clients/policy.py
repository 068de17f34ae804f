"""Two small policies, with a head of torch's or of the bridge's, and what their trainers on two processes share."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torch_bridge
from rlk_jax.checker.processes import free_port, run_together
from tests.support.helpers import HANG_S
from torch_bridge import FusedLMHead

VOCAB, DIM, ROWS, PROMPT, COMPLETION = 300, 24, 4, 3, 6
TEMPERATURE, IGNORED = 0.7, -100
COUNT = 2
LEARNING_RATE = 10.0


class Policy(nn.Module):
    """Computes the logp and entropy of target ids, 0 where these are ignored.

    `units` are the modules that a trainer shards, each by itself; with the module `owner` the head is gathered.
    """

    def __init__(self, bridged: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.body = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.lm_head: Any = nn.Linear(DIM, VOCAB)
        if bridged:
            self.lm_head = FusedLMHead.of(self.lm_head)
        self.units = lambda: [self.body, self.lm_head]
        self.owner = lambda: self.lm_head

    def logits(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.body(self.embedding(ids)), self.lm_head.weight, self.lm_head.bias)

    def forward(self, ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(self.embedding(ids))
        if isinstance(self.lm_head, FusedLMHead):
            options = {"temperature": TEMPERATURE, "ignore_index": IGNORED, "return_entropy": True}
            found = self.lm_head(hidden, target_ids, **options)
            return found.logp, found.entropy
        masked = target_ids == IGNORED
        logp = torch.log_softmax(self.lm_head(hidden) / TEMPERATURE, dim=-1)
        of_targets = logp.gather(-1, target_ids.clamp(min=0)[..., None])[..., 0]
        return of_targets.masked_fill(masked, 0), -(logp.exp() * logp).sum(-1).masked_fill(masked, 0)


class TrlPolicy(nn.Module):
    """A policy like `Policy`, with a model as TRL's trainers make it: its own lm_head is read, but not called."""

    def __init__(self, bridged: bool) -> None:
        # A machine of GPUs may have no TRL.
        from trl.trainer.utils import add_fused_lm_head

        from tests.support import tiny_trl

        super().__init__()
        torch.manual_seed(0)
        (torch_bridge.install if bridged else torch_bridge.uninstall)("trl")
        self.model = tiny_trl.model(VOCAB)
        self.lm_head = self.model.lm_head
        add_fused_lm_head(self.model, TEMPERATURE, outputs=("log_probs", "entropy"))
        self.units = lambda: list(self.model.model.layers)
        self.owner = lambda: self

    def logits(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits

    def forward(self, ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(input_ids=ids, shift_labels=target_ids, fused_lm_head=True)
        return found.log_probs, found.entropy


POLICIES: dict[str, Callable[[bool], nn.Module]] = {"FusedLMHead": Policy, "TRL": TrlPolicy}


class Rollout(NamedTuple):
    """Sampled sequences, the target of each of their tokens or `IGNORED`, and these targets' log-probs when sampled."""

    ids: Tensor
    target_ids: Tensor
    old_logp: Tensor
    advantages: Tensor

    @property
    def active(self) -> Tensor:
        return self.target_ids != IGNORED


@torch.no_grad()
def rollout(policy: Any, rank: int) -> Rollout:
    """Samples of an unsharded policy on a rank's prompts; completions end early, on each rank at other places."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, VOCAB, (ROWS, PROMPT), generator=generator)
    logps = [torch.zeros(ROWS, PROMPT - 1)]
    for _ in range(COMPLETION):
        logp = torch.log_softmax(policy.logits(ids)[:, -1] / TEMPERATURE, dim=-1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        ids, logps = torch.cat([ids, token], dim=1), [*logps, logp.gather(1, token)]
    position = torch.arange(1, PROMPT + COMPLETION)
    lengths = torch.randint(2, COMPLETION + 1, (ROWS, 1), generator=generator)
    active = (position >= PROMPT) & (position < PROMPT + lengths)
    target_ids = ids[:, 1:].where(active, IGNORED)
    return Rollout(ids[:, :-1], target_ids, torch.cat(logps, dim=1), torch.randn(ROWS, 1, generator=generator))


def loss_of(logp: Tensor, entropy: Tensor, batch: Rollout) -> Tensor:
    """Clipped surrogate, KL to the policy of the rollout, and a bonus for entropy; a mean over active tokens."""
    difference = (logp - batch.old_logp)[batch.active]
    ratio, advantages = difference.exp(), batch.advantages.expand_as(logp)[batch.active]
    surrogate = torch.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages)
    kl = (-difference).exp() - 1 + difference
    return (0.01 * kl - surrogate - 0.1 * entropy[batch.active]).mean()


def device(rank: int) -> torch.device:
    """A GPU for each process, where there are so many."""
    return torch.device("cuda", rank) if torch.cuda.device_count() >= COUNT else torch.device("cpu")


def largest(tensors: Any) -> float:
    return max(float(x.detach().abs().max()) for x in tensors)


def on_processes(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a module that calls `main` on its processes; returns what its task returned on each of them."""
    port = str(free_port())
    finished = run_together([["-m", module, port, str(i), *arguments] for i in range(COUNT)], timeout_s=HANG_S)
    for process in finished:
        assert process.code == 0, process.stderr[-3000:]
    return [json.loads(process.stdout.splitlines()[-1]) for process in finished]


def main(task: Callable[..., dict[str, Any]]) -> None:
    """Be one process, with `module PORT RANK ARGUMENTS` as its command line: print what the task returns."""
    port, rank, *arguments = sys.argv[1:]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {**address, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(COUNT)}
    torch.set_num_threads(1)
    own = device(int(rank))
    if own.type == "cuda":
        torch.cuda.set_device(own)
    torch.distributed.init_process_group("nccl" if own.type == "cuda" else "gloo")
    found = task(int(rank), *arguments)
    torch.distributed.destroy_process_group()
    print(json.dumps(found), flush=True)
    # The process leaves without ending the interpreter: FSDP still holds groups, and one of Gloo's threads that then
    # lets go of a tensor can abort it (github.com/pytorch/pytorch/pull/179291).
    os._exit(0)
