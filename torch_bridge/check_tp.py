"""`rlk check-tp --bridge`: torch_bridge on a head spread over the processes that torchrun starts.

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

from rlk_jax.checker import check_tp
from rlk_jax.checker.check_tp import Allowed, Arrays, Differences, Metric, Problem, Ranks, Results
from torch_bridge import _exchange
from torch_bridge.linear_logp import linear_logp


def run(options: argparse.Namespace) -> int:
    """The exit status: 0 where all passed, 1 where anything failed, 2 for options that fit nothing."""
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
            return check_tp.check(options, Ranks(dist.get_world_size(), text, _say, compare, stress))
    finally:
        dist.destroy_process_group()


def _say(text: str) -> None:
    """By the first process alone."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _here(problem: Problem) -> slice:
    """This rank's columns."""
    width = problem.width(dist.get_world_size())
    return slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)


def _results(problem: Problem, arrays: Arrays, device: torch.device) -> Results:
    """Of this rank."""
    here = _here(problem)

    def tensor(x: np.ndarray) -> Tensor:
        return torch.from_dlpack(jax.numpy.asarray(x)).to(device)

    hidden, weight = tensor(arrays.hidden).requires_grad_(), tensor(arrays.weight[here]).requires_grad_()
    bias = None if arrays.bias is None else tensor(arrays.bias[here]).requires_grad_()
    output: Any = linear_logp(
        hidden,
        weight,
        tensor(arrays.target_ids),
        bias,
        global_vocab_size=problem.vocab_size,
        tp_group=dist.group.WORLD,
        vocab_start_index=here.start,
        implementation=problem.implementation,
    )
    operands = [hidden, weight] if bias is None else [hidden, weight, bias]
    gradients = torch.autograd.grad(output, operands, tensor(arrays.upstream))
    return Results(output.detach(), *gradients, *[None] * (3 - len(gradients)))


def _compare(device: torch.device, problem: Problem, mode: str, allowed: Allowed) -> list[Metric]:
    """A metric for each result, and whether all ranks hold the same bits of what they share."""
    arrays, here = check_tp.make(problem, dist.get_world_size()), _here(problem)
    actual, expected = _results(problem, arrays, device), check_tp.reference(problem, arrays, mode)
    metrics = []
    for name, a, e in zip(Results._fields, actual, expected, strict=True):
        if a is not None:
            own = np.asarray(e, np.float64)[here] if name in ("weight_grad", "bias_grad") else np.asarray(e, np.float64)
            found = check_tp.differences(a.double().cpu().numpy(), own, allowed)
            largest, squares = (torch.from_numpy(x).to(device) for x in (found.largest, found.squares))
            dist.all_reduce(squares)
            passed = _everywhere(found.elements_passed, device)
            whole = Differences(_greatest(largest).cpu().numpy(), squares.cpu().numpy(), passed)
            metrics.append(check_tp.metric_of(name, whole, allowed))
    same = all(map(_same_bits, (actual.output, actual.hidden_grad)))
    return [*metrics, check_tp.same_on_all(_everywhere(same, device))]


def _greatest(x: Tensor) -> Tensor:
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def _everywhere(passed: bool, device: torch.device) -> bool:
    """Whether it holds on every rank."""
    return not _greatest(torch.tensor(float(not passed), device=device))


def _same_bits(x: Tensor) -> bool:
    """As the first rank's."""
    first = x.contiguous().view(torch.uint8).clone()
    dist.broadcast(first, 0)
    return torch.equal(first, x.contiguous().view(torch.uint8))


def _stress(device: torch.device, problem: Problem) -> tuple[bool, float, int | None]:
    """A large problem without a reference: finite values and gradients, time and memory."""
    arrays = check_tp.make(problem, dist.get_world_size())

    def synchronised() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    _results(problem, arrays, device)
    start = synchronised()
    results: Any = _results(problem, arrays, device)
    milliseconds = 1e3 * (synchronised() - start)
    finite = all(bool(x.isfinite().all()) for x in results if x is not None)
    stats = _exchange.jax_device(device).memory_stats() or {}
    return _everywhere(finite, device), milliseconds, stats.get("peak_bytes_in_use")
