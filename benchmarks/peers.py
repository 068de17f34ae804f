"""Other libraries' per-token log-probabilities on torch tensors. Each is imported only where it is asked for.

Each entry of `PEERS` returns `loss(hidden, weight, target_ids) -> Tensor`: per-token log-probs (or their negatives), or
a mean loss where the name says so.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.common import Candidate, Launch


def _torch_eager() -> Callable[..., Any]:
    def logp(hidden: Any, weight: Any, target_ids: Any) -> Any:
        logits = (hidden @ weight.T).float()
        return logits.gather(1, target_ids[:, None])[:, 0] - logits.logsumexp(1)

    return logp


def _torch_compile() -> Callable[..., Any]:
    torch: Any = importlib.import_module("torch")
    return torch.compile(_torch_eager())


def _cce() -> Callable[..., Any]:
    cce: Any = importlib.import_module("cut_cross_entropy")
    return lambda h, w, t: cce.linear_cross_entropy(h, w, t, reduction="none")


def _liger_sm90() -> Callable[..., Any]:
    liger: Any = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
    return lambda h, w, t: liger.LigerFusedScaledCrossEntropySM90Function.apply(h, w, t)[0]


def _liger_triton() -> Callable[..., Any]:
    liger: Any = importlib.import_module("liger_kernel.transformers.functional")
    return lambda h, w, t: liger.liger_fused_linear_cross_entropy(h, w, t)


def _quack() -> Callable[..., Any]:
    quack: Any = importlib.import_module("quack.linear_cross_entropy")
    return lambda h, w, t: quack.chunked_linear_cross_entropy(h, w, t)


def _trl() -> Callable[..., Any]:
    trl: Any = importlib.import_module("trl.kernels")
    columns = importlib.import_module("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE
    return lambda h, w, t: trl.ChunkedLogProbFunction.apply(h, w, None, t, 1.0, columns, None, 1.0, ())[0]


def _verl_torch() -> Callable[..., Any]:
    verl: Any = importlib.import_module("verl.utils.experimental.torch_functional")
    fused = verl.FusedLinearForPPO()
    return lambda h, w, t: fused(h, w, t)[0]


def _verl_triton() -> Callable[..., Any]:
    verl: Any = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    return lambda h, w, t: verl.linear_cross_entropy(h, w, t, 1.0, "none")[0]


PEERS = {
    "torch eager": _torch_eager,
    "torch.compile": _torch_compile,
    "trl": _trl,
    "verl torch (and entropy)": _verl_torch,
    "verl triton (and entropy)": _verl_triton,
    "cce": _cce,
    "liger sm90": _liger_sm90,
    "liger triton (mean loss)": _liger_triton,
    "quack (mean loss)": _quack,
}


def logp_launches(arguments: tuple[jax.Array, ...], upstream: jax.Array) -> dict[str, Launch]:
    """The "forward" and "forward+backward" of torch.compile over logits `[N, V]`.

    Raises what importing torch or the first run raises.
    """
    torch: Any = importlib.import_module("torch")

    @torch.compile
    def logp(logits: Any, token_ids: Any) -> Any:
        return logits.float().log_softmax(-1).gather(1, token_ids[:, None])[:, 0]

    if jax.default_backend() != "gpu":
        raise RuntimeError("peers are measured on GPUs only")
    logits, token_ids = (torch.from_dlpack(x) for x in arguments)
    ids = token_ids.long()
    return both_passes(lambda logits: logp(logits, ids), (logits,), torch.from_dlpack(upstream))


def candidates(
    name: str, arguments: tuple[jax.Array, ...], upstream: jax.Array, work: Mapping[str, int] | None = None
) -> dict[str, Candidate]:
    """The "forward" and "forward+backward" of a peer over hidden states, a weight and target ids, with their memory.

    Raises what importing the peer or its first run raises.
    """
    torch: Any = importlib.import_module("torch")
    loss = PEERS[name]()
    if jax.default_backend() != "gpu":
        raise RuntimeError("peers are measured on GPUs only")
    hidden, weight, target_ids = (torch.from_dlpack(x) for x in arguments)
    ids = target_ids.long()
    found = both_passes(lambda h, w: loss(h, w, ids), (hidden, weight), torch.from_dlpack(upstream))
    results = {"forward": 0, "forward+backward": arguments[0].nbytes + arguments[1].nbytes}
    return {what: Candidate(x, extra_bytes(x, results[what]), work[what] if work else 1) for what, x in found.items()}


def both_passes(loss: Callable[..., Any], tensors: tuple[Any, ...], g: Any) -> dict[str, Launch]:
    """The "forward" of a torch loss, without gradients, and its "forward+backward"; each has run once here."""
    torch: Any = importlib.import_module("torch")
    operands = [x.detach().clone().requires_grad_() for x in tensors]

    def forward() -> Any:
        with torch.no_grad():
            return loss(*tensors)

    def both() -> Any:
        values = loss(*operands)
        return torch.autograd.grad(values, operands, g.to(values.dtype) if values.ndim else None)

    def wait(x: Any) -> None:
        if g.is_cuda:
            torch.cuda.synchronize()

    found = {"forward": Launch(forward, wait), "forward+backward": Launch(both, wait)}
    for launch in found.values():
        wait(launch.start())
    return found


def extra_bytes(launch: Launch, result_bytes: int) -> int:
    """The most that a run holds beyond what was held before and its results."""
    return max(0, peak_bytes(launch) - result_bytes)


def peak_bytes(launch: Launch) -> int:
    """The most that torch's allocator holds during one run, beyond what it held before; the result counts."""
    torch: Any = importlib.import_module("torch")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    launch.wait(launch.start())
    return torch.cuda.max_memory_allocated() - before
