"""One of several gloo processes: python -m tests.torch_bridge.clients.verl_rank PORT COUNT RANK.

verl's fused entry on this rank's rows of a head, against the whole head.
"""

import sys

import torch
import torch.distributed as dist
import verl.utils.kernel.linear_cross_entropy as entry

import torch_bridge
from tests.torch_bridge.tensors import assert_close, head


def main(port: int, count: int, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    torch_bridge.install("verl")
    hidden, weight, labels, _ = head((5,), dim=8, vocab=32)
    found = entry.linear_cross_entropy(hidden, weight, labels, 1.5, "none", None)
    expected = torch.autograd.grad(sum(x.sum() for x in found), (hidden, weight))
    columns = slice(rank * 32 // count, (rank + 1) * 32 // count)
    own = weight.detach()[columns].clone().requires_grad_()
    shared = entry.linear_cross_entropy(hidden, own, labels, 1.5, "none", dist.group.WORLD)
    for x, y in zip(shared, found, strict=True):
        assert_close(x, y.double(), "linear_logp", "forward")
    parts = torch.autograd.grad(sum(x.sum() for x in shared), (hidden, own))
    # verl's callers sum hidden's gradient over the group themselves.
    dist.all_reduce(parts[0])
    for x, y in zip(parts, (expected[0], expected[1][columns]), strict=True):
        assert_close(x, y.double(), "linear_logp", "gradient")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
