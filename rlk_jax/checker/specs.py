"""What the checker knows of each op: inputs, gold, results, rows that keep their bits. An op joins by one entry."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlk_jax.checker import gold
from rlk_jax.checker.inputs import Draw, Sizes
from rlk_jax.checker.options import SHORT, Unusable

Results = dict[str, np.ndarray]
"""Outputs by their names; gradients by "gradient:" and the input's."""


@dataclass(frozen=True)
class Problem:
    """One call: arrays in the op's order, options, and an upstream gradient of each output, of its shape."""

    inputs: dict[str, np.ndarray]
    options: dict[str, Any]
    upstream: dict[str, np.ndarray]


@dataclass(frozen=True)
class Output:
    name: str
    shape: Callable[[Sizes], tuple[int, ...]]
    dtype: str | None = "float32"
    """None for the inputs'."""
    differentiable: bool = True


@dataclass(frozen=True)
class Arrangement:
    """The same rows in another call, and how they are found in a result of either."""

    name: str
    problem: Problem
    here: Callable[[np.ndarray], np.ndarray]
    there: Callable[[np.ndarray], np.ndarray]
    """In the first call's."""
    sums: bool = False
    """Results over all rows keep their bits too."""


@dataclass(frozen=True)
class OpSpec:
    """One op of `rlk_jax`, declared."""

    op: str
    inputs: Callable[[Draw], dict[str, np.ndarray]]
    """Its positional arguments, in order."""
    gold: Callable[[Problem], tuple[Results, float]]
    """All results in float64, and the largest finite |logit|."""
    outputs: tuple[Output, ...]
    gradients: tuple[str, ...]
    """Inputs that are differentiated."""
    no_gradients: tuple[str, ...] = field(default=(), kw_only=True)
    """Inputs of real numbers whose gradients are 0 or None."""
    shape: Callable[[Sizes], tuple[int, ...]]
    """What names a case."""
    padding: Mapping[str, Any]
    """Inputs with a row per token, and what they hold in rows of padding."""
    per_row: frozenset[str]
    """Results with a row per token; the others are sums over rows."""
    modes: tuple[str, ...]
    arrangements: "Callable[[OpSpec, Problem], Iterator[Arrangement]]" = lambda spec, problem: arrange_rows(
        spec, problem
    )
    forward_only: tuple[str, ...] = ("bad-ids",)
    """Modes without gradients: those of bad ids are left to each op's own tests."""
    lead: int = 2
    """Leading dimensions of tokens."""
    large_class: str | None = None
    """The contract's class of peaked and huge logits, whose errors are measured by the largest |logit|."""
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    sizes: Callable[[Sizes], Sizes] = lambda sizes: sizes
    """The smallest that it takes from what is asked for."""
    options: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    unchecked: Mapping[str, Any] = field(default_factory=lambda: {"validate": False})
    """Options of rlk_jax's own implementations that let bad ids through to them."""

    def problem(self, draw: Draw, grad_mode: str = "random", grad_seed: int = 123) -> Problem:
        """With upstream gradients of ones, or random ones; zeros of what is not differentiated."""
        draw = replace(draw, sizes=self.sizes(draw.sizes))
        random, upstream = np.random.default_rng(grad_seed), {}
        for output in self.outputs:
            shape = output.shape(draw.sizes)
            ones = grad_mode == "ones" or not output.differentiable
            g = output.differentiable * (np.ones(shape) if ones else random.normal(size=shape))
            upstream[output.name] = draw.cast(g) if output.dtype is None else np.asarray(g, output.dtype)
        return Problem(self.inputs(draw), self.options(draw.sizes), upstream)

    def dtype_of(self, name: str | None) -> str:
        """The dtype of this name, or the op's first; raises `Unusable`."""
        short = self.dtypes[0] if name is None else SHORT.get(name, name)
        if short not in self.dtypes:
            raise Unusable(f"{self.op} takes {', '.join(self.dtypes)}, not {name}")
        return short

    def modes_of(self, name: str) -> Sequence[str]:
        """This one, or all that the op has; raises `Unusable`."""
        if name not in ("all", *self.modes):
            raise Unusable(f"{self.op} has no input mode {name!r}; it has {', '.join(self.modes)}")
        return self.modes if name == "all" else [name]

    def op_class(self, mode: str) -> str:
        """The contract's."""
        return self.large_class if self.large_class and mode in ("peaked", "huge") else self.op


_MANY = 130


def arrange_rows(spec: OpSpec, problem: Problem) -> Iterator[Arrangement]:
    """Rows alone, reversed and repeated to 130, and in a batch of 130 with padding before or behind them."""
    rows = np.arange(len(_rows(spec, problem.inputs[next(iter(spec.padding))])))
    padding = np.full(max(5, _MANY - len(rows)), -1)
    yield _of_rows(spec, problem, "alone", rows[len(rows) // 2 :][:1])
    yield _of_rows(spec, problem, "reversed", np.resize(rows[::-1], max(_MANY, len(rows))))
    yield _of_rows(spec, problem, "padding before", np.concatenate([padding, rows]))
    yield _of_rows(spec, problem, "padding behind", np.concatenate([rows, padding]), sums=True)


def _rows(spec: OpSpec, x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, *x.shape[spec.lead :])


def _of_rows(spec: OpSpec, problem: Problem, name: str, index: np.ndarray, sums: bool = False) -> Arrangement:
    """Rows by their numbers; −1 is padding, which has no upstream gradient."""
    real = index >= 0

    def arranged(x: np.ndarray, filling: Any) -> np.ndarray:
        found = _rows(spec, x)[index]
        found[~real] = filling
        return found.reshape(*[1] * (spec.lead - 1), *found.shape)

    inputs = {n: arranged(x, spec.padding[n]) if n in spec.padding else x for n, x in problem.inputs.items()}
    upstream = {n: arranged(g, 0) for n, g in problem.upstream.items()}
    changed = replace(problem, inputs=inputs, upstream=upstream)
    return Arrangement(name, changed, lambda x: _rows(spec, x)[real], lambda x: _rows(spec, x)[index[real]], sums)


def arrange_sequences(spec: OpSpec, problem: Problem) -> Iterator[Arrangement]:
    """Masked columns behind all sequences; masked groups behind all groups."""
    yield _padded(spec, problem, "padding columns", 0, 3)
    yield _padded(spec, problem, "padding sequences", problem.options["samples_per_prompt"], 0)


def _padded(spec: OpSpec, problem: Problem, name: str, sequences: int, columns: int) -> Arrangement:
    def padded(x: np.ndarray, filling: Any) -> np.ndarray:
        widths = ((0, sequences), (0, columns), (0, 0))[: x.ndim]
        return np.pad(x, widths, constant_values=filling)

    batch, seq = problem.inputs["completion_mask"].shape
    inputs = {n: padded(x, spec.padding[n]) for n, x in problem.inputs.items()}
    return Arrangement(name, replace(problem, inputs=inputs), lambda x: x[:batch, :seq], lambda x: x, sums=True)


def _largest(logits: np.ndarray) -> float:
    return float(np.abs(logits[np.isfinite(logits)]).max(initial=0))


def _logp_inputs(draw: Draw) -> dict[str, np.ndarray]:
    return {"logits": draw.logits(0), "token_ids": draw.ids()}


def _logp_gold(problem: Problem) -> tuple[Results, float]:
    logits, g = problem.inputs["logits"], problem.upstream["logp"]
    found = gold.softmax(logits.reshape(-1, logits.shape[-1]), problem.inputs["token_ids"], 1.0, (g, 0 * g, 0 * g), {})
    results = {"logp": found.values[0].reshape(g.shape), "gradient:logits": found.d_raw.reshape(logits.shape)}
    return results, _largest(found.logits)


def _linear_logp_inputs(draw: Draw) -> dict[str, np.ndarray]:
    vocab, dim = draw.sizes.vocab, draw.sizes.hidden
    scale = (35.0 if draw.mode == "huge" else 0.01 if draw.mode == "peaked" else 1.0) / dim**0.5
    weight, bias = draw.tensor(1, vocab, dim, scale=scale), draw.tensor(2, vocab, scale=scale)
    if draw.mode == "ties":
        weight, bias = np.repeat(weight[:1], vocab, axis=0), 0 * bias
    return {
        "hidden": draw.tensor(0, *draw.sizes.lead, dim),
        "lm_head_weight": weight,
        "target_ids": draw.ids(),
        "bias": draw.cast(bias.astype(np.float32) + draw.peak),
    }


def _linear_logp_gold(problem: Problem) -> tuple[Results, float]:
    hidden, weight, ids, bias = problem.inputs.values()
    h, w = np.asarray(hidden, np.float64).reshape(-1, hidden.shape[-1]), np.asarray(weight, np.float64)
    g = problem.upstream["logp"]
    found = gold.softmax(h @ w.T + np.asarray(bias, np.float64), ids, 1.0, (g, 0 * g, 0 * g), {})
    results = {
        "logp": found.values[0].reshape(g.shape),
        "gradient:hidden": (found.d_raw @ w).reshape(hidden.shape),
        "gradient:lm_head_weight": found.d_raw.T @ h,
        "gradient:bias": found.d_raw.sum(axis=0),
    }
    return results, _largest(found.logits)


def _policies(draw: Draw) -> dict[str, np.ndarray]:
    """What ratio_kl takes: a reference near the policy, or the same where there are ties."""
    lead, ids, mask = draw.sizes.lead, draw.ids(), draw.mask()
    policy = draw.logits(0)
    noise = 0 if draw.mode == "ties" else 0.3 * draw.tensor(1, *policy.shape).astype(np.float32)
    ref = draw.cast(policy.astype(np.float32) + noise)
    old = gold.logps(policy, ids) + 0.2 * draw.tensor(3, *lead).astype(np.float32)
    if draw.mode == "masked-nan":
        policy[~mask], ref[~mask], ids[~mask], old[~mask] = np.nan, np.nan, -100, np.nan
    return {
        "policy_logits": policy,
        "ref_logits": ref,
        "action_ids": ids,
        "completion_mask": mask,
        "old_logps": old.astype(np.float32),
    }


def _ratio_kl_gold(problem: Problem) -> tuple[Results, float]:
    upstream = problem.upstream
    policy, ref, ids, mask, old = problem.inputs.values()
    ratio, kl, gradient = gold.ratio_kl(policy, ref, ids, mask, old, (upstream["ratio"], upstream["kl"]))
    results = {"ratio": ratio, "kl": kl, "gradient:policy_logits": gradient}
    return results, _largest(policy)


def _grpo_inputs(draw: Draw) -> dict[str, np.ndarray]:
    policy, ref, ids, mask, old = _policies(draw).values()
    rewards = draw.tensor(4, draw.sizes.batch).astype(np.float32)
    # So that ratios are on either side of the clip.
    old = old + 0.3 * draw.tensor(5, *draw.sizes.lead).astype(np.float32)
    return {
        "policy_logits": policy,
        "ref_logits": ref,
        "action_ids": ids,
        "old_logps": old,
        "rewards": rewards,
        "completion_mask": mask,
    }


_BETA, _CLIP, _GROUP = 0.1, 0.2, 4


def _whole_groups(sizes: Sizes) -> Sizes:
    """At least two."""
    return replace(sizes, batch=_GROUP * max(2, -(-sizes.batch // _GROUP)))


def _grpo_options(sizes: Sizes) -> dict[str, Any]:
    return {"samples_per_prompt": _GROUP, "beta": _BETA, "clip_eps": _CLIP}


def _grpo_gold(problem: Problem) -> tuple[Results, float]:
    policy, ref, ids, old, rewards, mask = problem.inputs.values()
    boundaries = range(0, len(rewards) + 1, problem.options["samples_per_prompt"])
    advantages = gold.group_advantages(rewards, boundaries)
    found = gold.grpo_loss(policy, ref, ids, mask, old, advantages, clip=(_CLIP, _CLIP), beta=_BETA)
    results = {name: np.asarray(x) for name, x in found._asdict().items()}
    results["gradient:policy_logits"] = problem.upstream["loss"] * results.pop("gradient")
    return results, _largest(policy)


def _det_gemm_inputs(draw: Draw) -> dict[str, np.ndarray]:
    m, k, n = _gemm_shape(draw.sizes)
    return {"a": draw.tensor(0, m, k), "b": draw.tensor(1, k, n, scale=k**-0.5)}


def _gemm_shape(sizes: Sizes) -> tuple[int, int, int]:
    return sizes.batch * sizes.seq, sizes.k_dim, sizes.n_dim


def _det_gemm_gold(problem: Problem) -> tuple[Results, float]:
    a, b, g = (np.asarray(x, np.float64) for x in (*problem.inputs.values(), problem.upstream["c"]))
    return {"c": a @ b, "gradient:a": g @ b.T, "gradient:b": a.T @ g}, _largest(a)


def _per_token(sizes: Sizes) -> tuple[int, ...]:
    return sizes.lead


def _scalar(sizes: Sizes) -> tuple[int, ...]:
    return ()


def _logits_shape(sizes: Sizes) -> tuple[int, ...]:
    return *sizes.lead, sizes.vocab


_MASKED = {"policy_logits": np.nan, "ref_logits": np.nan, "action_ids": -100, "completion_mask": False, "old_logps": 0}
_OF_POLICIES = ("random", "constant", "peaked", "neg-inf", "ties", "masked-nan", "bad-ids")

SPECS = {
    spec.op: spec
    for spec in (
        OpSpec(
            "logp",
            _logp_inputs,
            _logp_gold,
            outputs=(Output("logp", _per_token),),
            gradients=("logits",),
            shape=_logits_shape,
            padding={"logits": 100.0, "token_ids": 0},
            per_row=frozenset(("logp", "gradient:logits")),
            modes=("random", "constant", "peaked", "huge", "neg-inf", "ties", "bad-ids"),
            large_class="logp_large",
        ),
        OpSpec(
            "linear_logp",
            _linear_logp_inputs,
            _linear_logp_gold,
            outputs=(Output("logp", _per_token),),
            gradients=("hidden", "lm_head_weight", "bias"),
            shape=lambda sizes: (*sizes.lead, sizes.hidden, sizes.vocab),
            padding={"hidden": 100.0, "target_ids": 0},
            per_row=frozenset(("logp", "gradient:hidden")),
            modes=("random", "constant", "peaked", "huge", "ties", "bad-ids"),
            # Where all rows of the head are equal dH is 0, of which no error is a fraction.
            forward_only=("bad-ids", "constant", "ties"),
            large_class="linear_logp_peaked",
        ),
        OpSpec(
            "ratio_kl",
            _policies,
            _ratio_kl_gold,
            outputs=(Output("ratio", _per_token), Output("kl", _per_token)),
            gradients=("policy_logits",),
            shape=_logits_shape,
            padding=_MASKED,
            per_row=frozenset(("ratio", "kl", "gradient:policy_logits")),
            no_gradients=("ref_logits", "old_logps"),
            modes=_OF_POLICIES,
        ),
        OpSpec(
            "grpo_loss",
            _grpo_inputs,
            _grpo_gold,
            outputs=(
                Output("loss", _scalar),
                Output("policy_loss", _scalar, differentiable=False),
                Output("kl", _scalar, differentiable=False),
            ),
            gradients=("policy_logits",),
            shape=_logits_shape,
            padding={**_MASKED, "rewards": 0},
            per_row=frozenset(("gradient:policy_logits",)),
            modes=_OF_POLICIES,
            no_gradients=("ref_logits", "old_logps", "rewards"),
            arrangements=arrange_sequences,
            sizes=_whole_groups,
            options=_grpo_options,
        ),
        OpSpec(
            "det_gemm",
            _det_gemm_inputs,
            _det_gemm_gold,
            outputs=(Output("c", lambda sizes: _gemm_shape(sizes)[::2], dtype=None),),
            gradients=("a", "b"),
            shape=_gemm_shape,
            padding={"a": 0},
            per_row=frozenset(("c", "gradient:a")),
            modes=("random", "constant"),
            lead=1,
            dtypes=("bf16", "fp16"),
            unchecked={},
        ),
    )
}
"""Every op that is checked."""
