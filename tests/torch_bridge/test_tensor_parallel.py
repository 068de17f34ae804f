"""A head between processes: the values of one, its bits on the edges of groups, one message for one's mistake."""

import itertools
import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_bridge
from rlk_jax.checker.processes import free_port, run_together
from rlk_jax.cli import main
from rlk_jax.core.fixed_order import ColumnGroups
from rlk_jax.core.rank_columns import RankColumns
from tests.support.helpers import HANG_S
from tests.torch_bridge.rank import UNEVEN
from tests.torch_bridge.tensors import head


def messages(count: int, device: str) -> dict[str, str]:
    """What each of rank.py's mistakes, of rank 1, has all ranks say."""
    ranges = list(itertools.pairwise(UNEVEN[count]))
    start, end = ranges[1]
    width, differently = end - start, "the processes call linear_logp differently"
    shifted = sorted([(start + 1, end + 1), *ranges[:1], *ranges[2:]])
    partition = f"TP vocab shards must form a contiguous [0, {shifted[-1][1]}) partition; got ranges={shifted}"
    said = {
        "bad target": "target_ids out of range: expected [0, 15]",
        "wrong bias": f"bias must have V={width} elements, got shape (2,)",
        "empty shard": "lm_head_weight must contain at least one vocab row",
        "gap": partition,
        "other vocabulary": "global_vocab_size must match the TP vocab partition size: got 15, 16, covered 16",
        "other tokens": differently,
        "other options": differently,
        "other mask": differently,
        "other ranking": differently,
        "long list": "return_top_k must be at most the vocabulary size 16, got 17.",
        "other validate": differently,
        "other reduction": differently,
        "other dtype": differently,
        "no tensor": "hidden must be a torch.Tensor, got numpy.ndarray",
        "other implementation": differently,
        "unknown implementation": "implementation must be one of",
        "freed weight": f"a tensor of shape ({width}, 8) has no memory: its storage has been freed.",
        "float start": f"vocab_start_index must be an integer, got {float(start)}.",
        "nothing allowed": "every token that counts needs an allowed id: rows 4 to 4 of the flat tokens have none.",
        "few words": "allowed_mask must be [*lead, ceil(V / 32)] with target_ids' lead shape (33,) and 32 words, got",
        "other z-loss": differently,
        "other smoothing": differently,
        "no reduction": "reduction must be one of ('mean', 'sum', 'none'), got 'average'.",
        "other kind": "the processes call linear_kl differently",
        "bad temperature": "temperature must be positive and finite, got values in [0.0, 0.0]",
        "other teacher": f"student and teacher must share one vocabulary, got {width} and 16 tokens",
        "other list": "the processes call linear_kl differently",
        "bad list": "teacher_ids out of range: expected [0, 15], or -1 as padding, got values in [0, 16].",
        "other teacher vocabulary": "global_vocab_size must match the TP vocab partition size: got 15, 16, covered 16",
        "second derivative": "torch_bridge has no second derivatives",
    }
    return said | ({"other device": differently} if device == "cuda" else {})


def assert_processes_agree(backend: str, device: str, count: int = 4) -> None:
    """All checks of rank.py hold on as many processes, and all say the same of one's mistake."""
    port = free_port()
    of_rank = [[str(port), str(count), str(rank), backend, device] for rank in range(count)]
    commands = [["-m", "tests.torch_bridge.rank", *arguments] for arguments in of_rank]
    finished = run_together(commands, timeout_s=HANG_S)
    for process in finished:
        assert process.code == 0, process.stderr[-3000:]
    said = finished[0].stdout.splitlines()
    for name, message in messages(count, device).items():
        assert any(line.startswith(f"{name}: {message}") for line in said), (name, said)
    assert all(process.stdout.splitlines() == said for process in finished)


def test_two_processes():
    assert_processes_agree("gloo", "cpu", count=2)


@pytest.mark.full
def test_four_processes():
    """In `make test`, test_two_processes catches what is wrong between ranks. Higher degrees have
    test_whole_groups_keep_the_order_of_sums and tests/ops/linear_logp/sharding.
    """
    assert_processes_agree("gloo", "cpu")


def test_a_start_needs_a_group():
    hidden, weight, ids, bias = head((3,))
    with pytest.raises(ValueError, match=r"vocab_start_index requires a tensor-parallel group\."):
        torch_bridge.linear_logp(hidden, weight, ids, bias, vocab_start_index=8)


def test_a_group_needs_torch_distributed():
    hidden, weight, ids, bias = head((3,))
    with pytest.raises(RuntimeError, match="requires an initialized process group"):
        torch_bridge.linear_logp(hidden, weight, ids, bias, tp_group=object())


def test_a_mesh_is_no_group():
    hidden, weight, ids, bias = head((3,))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(
            ValueError, match=r"tp_group must be a process group, got DeviceMesh: .* its get_group\(\)\."
        ):
            torch_bridge.linear_logp(hidden, weight, ids, bias, tp_group=mesh)
        assert torch_bridge.linear_logp(hidden, weight, ids, bias, tp_group=mesh.get_group()).shape == (3,)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranges", "groups"),
    [
        (((0, 128), (128, 500)), [ColumnGroups(2, 64), ColumnGroups(6, 64)]),
        (((256, 512), (0, 256)), [ColumnGroups(4, 64), ColumnGroups(4, 64)]),
        (((0, 250), (250, 500)), None),
        (((0, 512), (512, 1024)), None),
    ],
)
def test_whole_groups_keep_the_order_of_sums(ranges, groups):
    found = RankColumns(ranges, 500)
    assert found.on_group_edges == (groups is not None)
    if groups is not None:
        assert [found.groups(rank) for rank in range(2)] == groups


def torchrun(*options: str, count: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += ["-m", "rlk_jax.cli", "check-tp", "--bridge", *options]
    no_gpus = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # check-tp takes the GPUs that torch sees; JAX sees none here.
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=no_gpus)


@pytest.mark.full
def test_check_tp_under_torchrun():
    """In `make test`, test_two_processes runs this command in its processes, with the variables that torchrun sets."""
    small = ("--tokens", "16", "--hidden-size", "16", "--vocab-size", "100", "--uneven-shards", "--no-bias")
    stress = ("--run-stress", "--stress-tokens", "8", "--stress-hidden-size", "8", "--stress-vocab-size", "64")
    found = torchrun(*small, *stress)
    assert found.returncode == 0, found.stderr[-3000:]
    sections = [line.split()[0] for line in found.stdout.splitlines() if line.startswith("[")]
    assert sections == ["[env]", "[correctness]", "[stress]", "[result]"] and "[result] PASS" in found.stdout
    assert torchrun(*small, "--atol", "0", "--rtol", "0").returncode == 1


@pytest.mark.parametrize("options", [(), ("--processes", "2"), ("--reduction", "canonical")])
def test_check_tp_needs_torchrun(options, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["check-tp", "--bridge", *options]) == 2
    assert "--bridge" in capsys.readouterr().err
