"""Calls an op in a fork made before JAX starts, then uses one, and calls all in a fork made after.

The first line of stdout is what the import of torch_bridge has made of XLA_PYTHON_CLIENT_PREALLOCATE. Each of the
others is the fork, the op, and what it said.
"""

import os
from collections.abc import Callable

import torch

import torch_bridge

IDS, LOGITS, HIDDEN = torch.arange(4), torch.ones(4, 16), torch.ones(4, 8)
ROWS, PER_TOKEN = LOGITS.reshape(2, 2, 16), torch.zeros(2, 2)
ACTIONS, MASK = PER_TOKEN.long(), torch.ones(2, 2)
OPS: dict[str, Callable[[], object]] = {
    "linear_logp": lambda: torch_bridge.linear_logp(HIDDEN, torch.ones(16, 8), IDS),
    "logp": lambda: torch_bridge.logp(LOGITS, IDS),
    "ratio_kl": lambda: torch_bridge.ratio_kl(ROWS, ROWS, ACTIONS, MASK, PER_TOKEN),
    "grpo_loss": lambda: torch_bridge.grpo_loss(
        ROWS, ROWS, ACTIONS, PER_TOKEN, torch.ones(2), MASK, samples_per_prompt=2
    ),
    "det_gemm": lambda: torch_bridge.det_gemm(HIDDEN.bfloat16(), torch.ones(8, 16).bfloat16()),
}


def in_a_fork(name: str, calls: dict[str, Callable[[], object]]) -> None:
    """Make the calls in a fork of this process, which prints what each said, and wait for it."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    for op, call in calls.items():
        try:
            call()
            print(name, op, "ran", flush=True)
        except Exception as error:
            print(name, op, f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)


def main() -> None:
    print(os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"], flush=True)
    in_a_fork("before", {"logp": OPS["logp"]})
    logits = LOGITS.clone().requires_grad_()
    found = torch_bridge.logp(logits, IDS).sum()
    in_a_fork("after", OPS | {"backward": found.backward})
