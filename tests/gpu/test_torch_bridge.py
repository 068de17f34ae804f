"""torch_bridge on a GPU: the bits of the JAX op, in the order of torch's streams, without a copy."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

import rlk_jax

torch = pytest.importorskip("torch")
torch_bridge = pytest.importorskip("torch_bridge")

from tests.gpu.hopper import every_implementation  # noqa: E402
from tests.support import helpers  # noqa: E402
from tests.torch_bridge import tensors  # noqa: E402
from tests.torch_bridge.clients.policy import POLICIES, on_processes  # noqa: E402
from tests.torch_bridge.tensors import array, assert_same_bits  # noqa: E402
from tests.torch_bridge.test_errors import run  # noqa: E402
from tests.torch_bridge.test_tensor_parallel import assert_processes_agree, torchrun  # noqa: E402
from torch_bridge import _exchange  # noqa: E402

DIM, VOCAB = 256, 4096


def head(n: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [x.detach().cuda().requires_grad_(x.is_floating_point()) for x in tensors.head((n,), DIM, VOCAB, dtype)]


def bits(*found: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().contiguous().view(torch.uint8) for x in found]


@pytest.mark.parametrize("n", [1, 7, 64, 100, 500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["vd", "transposed", "dv"])
@every_implementation
def test_bits_of_linear_logp(n, dtype, layout, implementation):
    hidden, weight, ids, bias = head(n, dtype)
    if layout == "dv":
        weight = weight.detach().t().contiguous().requires_grad_()
    given = weight.t() if layout == "transposed" else weight
    options = {
        "weight_layout": "vd" if layout == "vd" else "dv",
        "return_lse": True,
        "return_entropy": True,
        "temperature": 0.8,
        "implementation": implementation,
    }
    found = torch_bridge.linear_logp(hidden, given, ids, bias, **options)
    upstream = [tensors.randn(n, seed=i).cuda() for i in range(3)]
    gradients = torch.autograd.grad(found, (hidden, weight, bias), upstream)

    def theirs(h, w, b):
        w = w.T if layout == "transposed" else w
        return tuple(rlk_jax.linear_logp(h, w, array(ids.int()), b, **options))

    values, pull_back = jax.vjp(theirs, *map(array, (hidden, weight, bias)))
    assert_same_bits(found, values)
    assert_same_bits(gradients, pull_back(tuple(map(array, upstream))))


def test_bits_of_linear_logp_in_float32():
    hidden, weight, ids, _ = head(100, torch.float32)
    options = {"implementation": "deterministic"}
    found = torch_bridge.linear_logp(hidden, weight, ids, **options)
    gradients = torch.autograd.grad(found.sum(), (hidden, weight))
    arrays = [array(x) for x in (hidden, weight)]
    expected, pull_back = jax.vjp(lambda h, w: rlk_jax.linear_logp(h, w, array(ids.int()), **options), *arrays)
    assert_same_bits([found, *gradients], [expected, *pull_back(jax.numpy.ones(100))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", ["logp", "ratio_kl", "grpo_loss"])
def test_bits_of_the_ops_over_logits(op, dtype):
    policy, ref, ids, mask, old = (x.detach().cuda() for x in tensors.policies((3, 50), vocab=2048))
    policy, ref = policy.to(dtype).requires_grad_(), ref.to(dtype)
    of_torch = {
        "logp": lambda: (torch_bridge.logp(policy, ids),),
        "ratio_kl": lambda: torch_bridge.ratio_kl(policy, ref, ids, mask, old),
        "grpo_loss": lambda: torch_bridge.grpo_loss(policy, ref, ids, old, None, mask, advantages=old, beta=0.1),
    }
    arrays = [array(x) for x in (ref, ids.int(), mask, old)]

    def of_jax(x):
        ref, ids, mask, old = arrays
        if op == "logp":
            return (rlk_jax.logp(x, ids),)
        if op == "ratio_kl":
            return tuple(rlk_jax.ratio_kl(x, ref, ids, mask, old))
        return tuple(rlk_jax.grpo_loss(x, ref, ids, old, None, mask, advantages=old, beta=0.1))

    found = tuple(of_torch[op]())
    upstream = [tensors.randn(*x.shape, seed=i).cuda() for i, x in enumerate(found)]
    differentiable = [(x, g) for x, g in zip(found, upstream, strict=True) if x.requires_grad]
    outputs, given = zip(*differentiable, strict=True)
    (gradient,) = torch.autograd.grad(outputs, policy, given)
    expected, pull_back = jax.vjp(of_jax, array(policy))
    assert_same_bits([*found, gradient], [*expected, *pull_back(tuple(map(array, upstream)))])


@every_implementation
def test_bits_of_det_gemm(implementation):
    a, b = tensors.randn(100, DIM, dtype=torch.bfloat16).cuda(), tensors.randn(DIM, 512, dtype=torch.bfloat16).cuda()
    found = torch_bridge.det_gemm(a.requires_grad_(), b.requires_grad_(), implementation=implementation)
    upstream = tensors.randn(100, 512, dtype=torch.bfloat16, seed=3).cuda()
    gradients = torch.autograd.grad(found, (a, b), upstream)
    expected, pull_back = jax.vjp(
        lambda a, b: rlk_jax.det_gemm(a, b, implementation=implementation), array(a), array(b)
    )
    assert_same_bits([found, *gradients], [expected, *pull_back(array(upstream))])


def test_memory_is_shared_both_ways():
    tensor = tensors.randn(64, DIM).cuda()
    found = _exchange.to_jax(tensor)
    assert found.unsafe_buffer_pointer() == tensor.data_ptr()
    assert _exchange.to_torch(found).data_ptr() == tensor.data_ptr()
    assert _exchange.lend(tensor).unsafe_buffer_pointer() == tensor.data_ptr()


def test_rows_at_an_address_that_xla_does_not_read_from():
    _, weight, ids, _ = head(65)
    base = tensors.randn(65 * DIM + 1, dtype=torch.bfloat16).cuda()
    hidden = base[1:].view(65, DIM)
    assert torch.equal(
        torch_bridge.linear_logp(hidden, weight, ids), torch_bridge.linear_logp(hidden.clone(), weight, ids)
    )


def test_bad_ids_do_not_wait_for_the_gpu():
    hidden, weight, ids, _ = head(8)
    ids[3] = VOCAB
    found = torch_bridge.linear_logp(hidden, weight, ids)
    assert found.isnan().tolist() == [i == 3 for i in range(8)]
    with pytest.raises(ValueError, match="target_ids out of range"):
        torch_bridge.linear_logp(hidden, weight, ids, validate=True)


def test_two_streams_and_jax_never_see_each_others_memory():
    """500 rounds: torch makes the inputs on two streams, late; JAX computes in between; all is freed at once."""
    _, weight, _, _ = head(1)
    cases = []
    for n in (100, 192, 300):
        hidden, _, ids, _ = head(n)
        hidden = hidden.detach()
        logp = torch_bridge.linear_logp(hidden.clone().requires_grad_(), weight, ids)
        cases.append((hidden, ids, bits(logp, *torch.autograd.grad(logp.sum(), weight))))
    noise, other = torch.randn(2048, 2048, device="cuda"), jax.jit(lambda x: (x @ x) / 50)
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = array(noise)
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(500):
        hidden, ids, expected = cases[i % 3]
        with torch.cuda.stream(streams[i % 2]):
            torch.mm(noise, noise)
            late = (hidden * 2 * 0.5).requires_grad_()
            logp = torch_bridge.linear_logp(late, weight, ids)
            (gradient,) = torch.autograd.grad(logp.sum(), weight)
            torch.mm(noise, noise)
            found = bits(logp, gradient)
            unequal = sum((a != b).any().long() for a, b in zip(found, expected, strict=True))
            del late, logp, gradient, found
            torch.cuda.current_stream().wait_stream(streams[(i + 1) % 2])
            wrong += unequal
        x = other(x)
    torch.cuda.synchronize()
    assert int(wrong) == 0


def test_jax_has_one_stream():
    """What `_exchange.follow` relies on: every program of every thread runs on it."""
    device = _exchange.jax_device(torch.device("cuda", 0))
    ask = _exchange._compute_stream.__wrapped__
    jax.block_until_ready([jax.jit(lambda x: x @ x)(jax.numpy.ones((512, 512))) for _ in range(4)])
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, [device] * 16))
    assert set(found) == {_exchange._compute_stream(device)} != {0}


def test_a_cuda_graph_is_refused_and_leaves_all_as_it_was():
    hidden, weight, ids, _ = head(8)
    expected = torch_bridge.linear_logp(hidden, weight, ids)
    with pytest.raises(RuntimeError, match="a CUDA graph cannot capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch_bridge.linear_logp(hidden, weight, ids)
    assert torch.equal(torch_bridge.linear_logp(hidden, weight, ids), expected)


def test_a_cuda_graph_of_the_first_call_is_refused():
    code = """import torch, torch_bridge
x = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
with torch.cuda.graph(torch.cuda.CUDAGraph()): torch_bridge.det_gemm(x, x)"""
    assert "RuntimeError: torch_bridge: a CUDA graph cannot capture" in run(code).stderr


def test_cuda_graphs_of_torch_compile_leave_the_ops_out():
    hidden, weight, ids, _ = head(8)

    def loss(hidden):
        return (torch_bridge.linear_logp(hidden * 2, weight, ids, validate=False) * 3).sum()

    (expected,) = torch.autograd.grad(loss(hidden), hidden)
    compiled = torch.compile(loss, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):  # Graphs are captured from the second call on.
        (found,) = torch.autograd.grad(compiled(hidden), hidden)
        assert torch.equal(found, expected)


def test_a_gpu_that_jax_does_not_see():
    code = "import torch, torch_bridge; x = torch.ones(16, 16, device='cuda'); torch_bridge.det_gemm(x, x)"
    assert "ValueError: JAX does not see cuda:0" in run(code).stderr


MEMORY = """
import sys, jax, jax.numpy as jnp, rlk_jax, torch, torch_bridge
n, d, v = 8192, 4096, 151936
options = {"memory_budget": int(sys.argv[2]), "implementation": "mosaic"}
if sys.argv[1] == "jax":
    h, w, t = jnp.ones((n, d), jnp.bfloat16), jnp.ones((v, d), jnp.bfloat16), jnp.zeros(n, jnp.int32)
    f = jax.jit(jax.grad(lambda h, w: rlk_jax.linear_logp(h, w, t, **options).sum(), (0, 1)))
    gradients = jax.block_until_ready(f(h, w))
else:
    h, w = (torch.ones(x, d, dtype=torch.bfloat16, device="cuda", requires_grad=True) for x in (n, v))
    t = torch.zeros(n, dtype=torch.int32, device="cuda")
    gradients = torch.autograd.grad(torch_bridge.linear_logp(h, w, t, **options).sum(), (h, w))
    torch.cuda.synchronize()
peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"] + torch.cuda.max_memory_allocated()
print(peak - 2 * (h.nbytes + w.nbytes) - t.nbytes)
"""


@pytest.mark.parametrize("budget", [512 * 2**20, 2 * 8192 * 151936 * 11 // 10], ids=["default", "everything kept"])
def test_what_was_kept_is_held_once(budget):
    """Beside inputs and gradients, forward and backward hold what one program of the JAX op does, and 5 % more."""

    def used(way: str) -> int:
        command = [sys.executable, "-c", MEMORY, way, str(budget)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert used("bridge") <= 1.05 * used("jax")


def needs(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs; this machine has {torch.cuda.device_count()}")


def test_a_tensor_on_another_gpu_than_the_current_one():
    needs(2)
    torch.cuda.set_device(0)
    here, there = ([x.detach().to(f"cuda:{i}") for x in tensors.head((8,), DIM, VOCAB, torch.bfloat16)] for i in (0, 1))
    hidden, weight, ids, bias = there
    found = torch_bridge.linear_logp(hidden.requires_grad_(), weight, ids, bias)
    found.sum().backward()
    assert torch.cuda.current_device() == 0 and found.device == hidden.grad.device == hidden.device
    expected = torch_bridge.linear_logp(*here)
    assert torch.equal(found.detach().cpu(), expected.cpu()) and torch.cuda.current_device() == 0


@pytest.mark.parametrize("count", [2, 4])
def test_processes_of_nccl(count):
    needs(count)
    assert_processes_agree("nccl", "cuda", count)


def test_four_processes_that_share_gpus():
    assert_processes_agree("gloo", "cuda")


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_check_tp_under_torchrun(count, dtype):
    needs(count)
    sizes = ("--tokens", "300", "--hidden-size", "512", "--vocab-size", "50257", "--uneven-shards", "--run-stress")
    found = torchrun("--dtype", dtype, *sizes, count=count)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    assert "nccl" in found.stdout and "[result] PASS" in found.stdout


@pytest.mark.parametrize("policy", POLICIES)
def test_fsdp2_on_two_gpus(policy):
    needs(2)
    if policy == "TRL":
        pytest.importorskip("trl")
    for rank in on_processes("tests.torch_bridge.clients.fsdp2_rank", policy):
        found = rank[policy]
        assert found["bytes_left"] == 0 and found["masked"] == 0 and found["moved"] > 1
        helpers.assert_error(found["error"], "sharded_training", "float32", "forward")


def test_deepspeed_on_two_gpus():
    """ZeRO-0 and ZeRO-3, FusedLMHead and TRL's policy."""
    needs(2)
    pytest.importorskip("trl")
    pytest.importorskip("deepspeed")
    for rank in on_processes("tests.torch_bridge.clients.deepspeed_rank"):
        assert {name.rpartition(" ")[0] for name in rank} == {*POLICIES}
        for name, found in rank.items():
            assert found["masked"] == 0 and found["moved"] > 1
            assert (found["elements_left"] == 0) == name.endswith(" 3")
            for error in ("error", "off_rollout"):
                helpers.assert_error(found[error], "sharded_training", "float32", "forward")


def test_lists_of_ids_stay_on_their_device():
    """What `padded_allowed_ids` makes of tensors on a GPU is there, and an op reads it."""
    ids, offsets = torch.tensor([7, 3, 9, 4]), torch.tensor([0, 2, 3, 4])
    found = torch_bridge.padded_allowed_ids(ids.cuda(), offsets.cuda())
    assert found.is_cuda and torch.equal(found.cpu(), torch_bridge.padded_allowed_ids(ids, offsets))
    hidden, weight, _, bias = head(3)
    logp = torch_bridge.linear_logp(hidden, weight, torch.tensor([3, 9, 4]).cuda(), bias, allowed_ids=found)
    assert (logp[0] < 0).item() and logp[1:].tolist() == [0, 0]
