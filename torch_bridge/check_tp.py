"""`rlk check-tp --bridge`: check torch_bridge on a head that is spread over the processes that torchrun starts.

torchrun --nproc-per-node 4 -m rlk_jax.cli check-tp --bridge
"""

import argparse
import functools
import os
import sys
import time
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlk_jax.checker import tensor_parallel
from rlk_jax.checker.check_tp import Ranks, check_ranks
from rlk_jax.checker.tensor_parallel import (
    Allowed,
    Differences,
    Metric,
    TensorParallelArrays,
    TensorParallelProblem,
    TensorParallelResults,
)
from torch_bridge import _exchange
from torch_bridge.linear_logp import linear_logp


def run(options: argparse.Namespace) -> int:
    """Run the command. The exit status is 0 where all passed, 1 where anything failed, 2 for unusable options."""
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) < 2:
        print("rlk check-tp: error: --bridge needs at least 2 processes of torchrun", file=sys.stderr)
        return 2
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    try:
        name = torch.cuda.get_device_name(device) if has_gpu else "cpu"
        text = f"{dist.get_world_size()} x {name} in as many processes, {dist.get_backend()}"
        compare, stress = functools.partial(_compare, device), functools.partial(_stress, device)
        with jax.default_device(_exchange.jax_device(device)):
            return check_ranks(options, Ranks(dist.get_world_size(), text, _say, compare, stress))
    finally:
        dist.destroy_process_group()


def _say(text: str) -> None:
    """Print in the first process alone."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _own_shard(problem: TensorParallelProblem) -> slice:
    """The part of the padded vocabulary that this rank holds."""
    width = problem.width(dist.get_world_size())
    return slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)


def _rank_results(
    problem: TensorParallelProblem, arrays: TensorParallelArrays, device: torch.device
) -> TensorParallelResults:
    """The results of the op under test on this rank."""
    shard = _own_shard(problem)

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_dlpack(jax.numpy.asarray(x)).to(device)

    hidden, weight = tensor(arrays.hidden).requires_grad_(), tensor(arrays.weight[shard]).requires_grad_()
    bias = None if arrays.bias is None else tensor(arrays.bias[shard]).requires_grad_()
    output: Any = linear_logp(
        hidden,
        weight,
        tensor(arrays.target_ids),
        bias,
        global_vocab_size=problem.vocab_size,
        tp_group=dist.group.WORLD,
        vocab_start_index=shard.start,
        implementation=problem.implementation,
    )
    operands = [hidden, weight] if bias is None else [hidden, weight, bias]
    gradients = torch.autograd.grad(output, operands, tensor(arrays.upstream))
    return TensorParallelResults(output.detach(), *gradients, *[None] * (3 - len(gradients)))


def _compare(device: torch.device, problem: TensorParallelProblem, mode: str, allowed: Allowed) -> list[Metric]:
    """A metric for each result, and one that says whether all ranks hold the same bits of what they share."""
    arrays, shard = tensor_parallel.make_arrays(problem, dist.get_world_size()), _own_shard(problem)
    actual = _rank_results(problem, arrays, device)
    expected = tensor_parallel.reference_results(problem, arrays, mode)
    metrics = []
    for name, a, e in zip(TensorParallelResults._fields, actual, expected, strict=True):
        if a is not None:
            e = np.asarray(e, np.float64)
            e = e[shard] if name in ("weight_grad", "bias_grad") else e
            found = tensor_parallel.differences(a.double().cpu().numpy(), e, allowed)
            largest, squares = (torch.from_numpy(x).to(device) for x in (found.largest, found.squares))
            dist.all_reduce(squares)
            passed = _on_every_rank(found.elements_passed, device)
            whole = Differences(_max_over_ranks(largest).cpu().numpy(), squares.cpu().numpy(), passed)
            metrics.append(tensor_parallel.metric_of(name, whole, allowed))
    same = all(map(_same_bits, (actual.output, actual.hidden_grad)))
    return [*metrics, tensor_parallel.same_on_all(_on_every_rank(same, device))]


def _max_over_ranks(x: Tensor) -> Tensor:
    """The elementwise maximum of `x` over all ranks, written into `x`."""
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def _on_every_rank(passed: bool, device: torch.device) -> bool:
    """Whether `passed` is true on every rank."""
    return not _max_over_ranks(torch.tensor(float(not passed), device=device))


def _same_bits(x: Tensor) -> bool:
    """Whether this rank holds the same bits as the first rank."""
    first = x.contiguous().view(torch.uint8).clone()
    dist.broadcast(first, 0)
    return torch.equal(first, x.contiguous().view(torch.uint8))


def _stress(device: torch.device, problem: TensorParallelProblem) -> tuple[bool, float, int | None]:
    """Run a large problem, which has no reference, and give what `Ranks.stress` asks for."""
    arrays = tensor_parallel.make_arrays(problem, dist.get_world_size())

    def synchronised() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    _rank_results(problem, arrays, device)
    start = synchronised()
    results: Any = _rank_results(problem, arrays, device)
    milliseconds = 1e3 * (synchronised() - start)
    finite = all(bool(x.isfinite().all()) for x in results if x is not None)
    stats = _exchange.jax_device(device).memory_stats() or {}
    return _on_every_rank(finite, device), milliseconds, stats.get("peak_bytes_in_use")
