"""linear_logp: log-probabilities of the taken tokens from hidden states and the LM head, without the logits."""

import functools
import inspect
import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, ArrayLike, Float, Int

from rlk_jax import _shard, _transforms, dispatch, validation
from rlk_jax._problem import (
    Gather,
    Gradients,
    HeadFunctions,
    Inputs,
    LinearLogp,
    Needs,
    Operands,
    Options,
    Tokens,
    WeightLayout,
)

_NO_SECOND_DERIVATIVE = "linear_logp has no second derivative: its gradient cannot be differentiated again."


class HeadOptions(TypedDict, total=False):
    """The options that mean the same for a whole head and for shards of it."""

    temperature: float | Float[ArrayLike, "*lead"]
    logit_softcap: float | None
    ignore_index: int | None
    global_vocab_size: int | None
    weight_layout: WeightLayout
    reduction: _shard.Reduction
    memory_budget: int | None
    validate: bool | None
    implementation: str | None


class CommonOptions(HeadOptions, total=False):
    """The options that do not decide what linear_logp returns, for its overloads."""

    axis_name: _shard.AxisName | None
    vocab_start_index: int | Int[ArrayLike, ""] | None
    reduce_hidden_grad: bool


@overload
def linear_logp(
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "*lead"],
    bias: Float[Array, " V"] | None = None,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[CommonOptions],
) -> Float[Array, "*lead"]: ...


@overload
def linear_logp(
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "*lead"],
    bias: Float[Array, " V"] | None = None,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: Unpack[CommonOptions],
) -> LinearLogp: ...


def linear_logp(
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "*lead"],
    bias: Float[Array, " V"] | None = None,
    *,
    temperature: float | Float[ArrayLike, "*lead"] = 1.0,
    logit_softcap: float | None = None,
    ignore_index: int | None = None,
    global_vocab_size: int | None = None,
    weight_layout: WeightLayout = "vd",
    return_lse: bool = False,
    return_entropy: bool = False,
    axis_name: _shard.AxisName | None = None,
    vocab_start_index: int | Int[ArrayLike, ""] | None = None,
    reduction: _shard.Reduction = "sum",
    reduce_hidden_grad: bool = True,
    memory_budget: int | None = None,
    validate: bool | None = None,
    implementation: str | None = None,
) -> Float[Array, "*lead"] | LinearLogp:
    """Log-probability of each target token under the LM head.

        z = softcap(hidden·Wᵀ + bias) / temperature,   softcap(x) = c·tanh(x/c)
        logp = z[target] − ln Σ_v exp z_v,   lse = ln Σ_v exp z_v,   entropy = −Σ_v p_v·ln p_v     (natural logarithms)

    Args:
      hidden: last hidden states `[*lead, D]`, already shifted so that a row predicts its target. bfloat16, float16 or
        float32.
      lm_head_weight: `[V, D]`, or `[D, V]` with `weight_layout="dv"`. Same dtypes; sums run in float32.
      target_ids: `[*lead]`, any integer dtype.
      bias: `[V]` or None.
      temperature: positive; a scalar or one per token. Not differentiated.
      logit_softcap: c > 0 (Gemma), or None. Not differentiated.
      ignore_index: tokens with this id give 0 in every output and exactly 0 in every gradient, whatever their hidden
        row holds. It must lie outside the vocabulary.
      global_vocab_size: true vocabulary size where the head's last rows are padding: they count as logits of −inf. With
        `axis_name`, of the whole head; shards may be padding in part or altogether.
      weight_layout: "vd" (Hugging Face, tied embeddings) or "dv" (Flax Linear kernels). Neither is transposed.
      return_lse, return_entropy: also return these, from the same pass, differentiable.
      axis_name: inside shard_map, the mesh axis (or axes) that the vocabulary is spread over. lm_head_weight and bias
        are then this rank's shard, all shards equally wide; hidden and target_ids (ids of the whole vocabulary) are the
        same on every rank of the axis, and so are the results. Take gradients outside the shard_map, or under
        check_vma=True: inside one with check_vma=False JAX counts a result that n ranks share n times, as for psum.
        `rlk_jax.vocab_parallel` has the form for whole arrays.
      vocab_start_index: first column of this rank's shard, where that is not its index times the shard's width; of
        equally wide shards in another order.
      reduction: how dH is summed over the ranks, in float32: "sum" as fast as may be, "canonical" by the softmax's
        fixed tree, with the same bits at 1, 2, 4 and 8 ranks.
      reduce_hidden_grad: False leaves each rank its own part of dH, for callers that sum it themselves (sequence
        parallelism: hidden gathered over the axis).
      memory_budget: bytes for the logits and their gradients that are held at a time, and the copies beside them, never
        for less than one block of them; `mosaic` and `cuda` hold it from the forward to the backward,
        and in a backward that is a program of its own a copy of it.
        None for the implementation's default. `mosaic`, `cuda` and `deterministic` give the same bits for every budget.
      validate: True checks target ids and temperatures before launch (one small read-back); False never waits for the
        device; None checks concrete arrays and nothing under jit. A bad row that is not checked gives NaN in its
        outputs and in every gradient it reaches, and is reported under `jax.experimental.checkify`.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here
        (`rlk_jax.explain` tells).

    Returns:
      float32 logp `[*lead]`, or `LinearLogp(logp, lse, entropy)` where more was asked for (None for what was not).

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and for second derivatives.
      TypeError: JAX's own, for forward-mode differentiation.

    Gradients flow to hidden, lm_head_weight and bias, in their dtypes. An operand that needs none costs no work, and
    neither does a row whose upstream gradients are all 0: it contributes exactly 0, even if it holds NaN.

    Same bits: `mosaic`, `cuda` and `deterministic` give a row the same raw bits in any batch, at any position and
    beside any neighbours, and dW, db the same bits with ignored rows anywhere; `xla` promises accuracy only.
    docs/linear_logp.md has the whole contract.

    Source: RL-Kernel's linear_logp; the pair (max, ln Σ) as in online softmax (Milakov and Gimelshein,
    arXiv 1805.02867).
    """
    head: dict[str, Any] = {
        "logit_softcap": logit_softcap,
        "ignore_index": ignore_index,
        "global_vocab_size": global_vocab_size,
        "weight_layout": weight_layout,
        "return_lse": return_lse,
        "return_entropy": return_entropy,
        "memory_budget": memory_budget,
    }
    arrays = Inputs(hidden, lm_head_weight, target_ids, bias, temperature)
    if any(map(_shard.explicit_spec, arrays)):
        # It stands on this op.
        from rlk_jax import vocab_parallel

        validation.no_axis_options(axis_name, vocab_start_index, reduction, reduce_hidden_grad)
        return vocab_parallel.over_explicit_axes(arrays, validate, {**head, "implementation": implementation})
    if axis_name is None and (mesh := _shard.mesh_of_processes(arrays)) is not None:
        from rlk_jax import vocab_parallel

        vocab_parallel.agree(mesh, arrays, validate, {**head, "implementation": implementation})
        validate = False
    inputs, options, shard = validation.linear_logp(
        *arrays,
        axis_name=axis_name,
        vocab_start_index=vocab_start_index,
        reduction=reduction,
        reduce_hidden_grad=reduce_hidden_grad,
        validate=validate,
        **head,
    )
    validation.require_values(inputs)
    chosen = dispatch.choose(problem(inputs, options), implementation)
    if shard is not None and chosen.promises_bits:
        dispatch.check_edges(shard)
    vocab_size = options.real_vocab_size if shard is None else shard.vocab_size
    tokens = tokens_of(inputs, vocab_size, ignore_index, validate)
    lead, dim = inputs.hidden.shape[:-1], inputs.hidden.shape[-1]
    rows = jnp.asarray(inputs.hidden).reshape(math.prod(lead), dim)
    weight = jnp.asarray(inputs.lm_head_weight)
    operands = Operands(rows, weight, None if inputs.bias is None else jnp.asarray(inputs.bias))
    values = _linear_logp(chosen.functions, options, shard, operands, tokens, vocab_start_index)
    values = jax.tree.map(lambda x: x.reshape(lead), values)
    return values if return_lse or return_entropy else values.logp


def describe(*args: Any, **kwargs: Any) -> tuple[dispatch.Problem, str | None]:
    """What `dispatch` sees of the call `linear_logp(*args, **kwargs)`, and the implementation it names."""
    (inputs, options, _), implementation = check(*args, **kwargs)
    return problem(inputs, options), implementation


def check(*args: Any, **kwargs: Any) -> tuple[tuple[Inputs, Options, _shard.Shard | None], str | None]:
    """The static checks of the call `linear_logp(*args, **kwargs)`, and the implementation it names."""
    call = inspect.signature(linear_logp).bind(*args, **kwargs)
    call.apply_defaults()
    implementation = call.arguments.pop("implementation")
    return validation.linear_logp(**call.arguments), implementation


def problem(inputs: Inputs, options: Options) -> dispatch.Problem:
    """What `dispatch` sees of a call."""
    return dispatch.problem_of("linear_logp", (inputs.hidden, inputs.lm_head_weight, inputs.bias), options)


def tokens_of(inputs: Inputs, vocab_size: int, ignore_index: int | None, validate: bool | None) -> Tokens:
    """Flat tokens, ignored ones inactive."""
    counted = validation.counted(inputs.target_ids, ignore_index)
    return validation.tokens(
        inputs.target_ids, inputs.temperature, counted, vocab_size=vocab_size, validate=validate, name="target_ids"
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _linear_logp(
    functions: HeadFunctions,
    options: Options,
    shard: _shard.Shard | None,
    operands: Operands,
    tokens: Tokens,
    vocab_start_index: Any,
) -> LinearLogp:
    """One device's part of the call."""
    tokens = lax.stop_gradient(tokens)
    if operands.hidden.shape[0] == 0:
        empty = jnp.zeros(0, jnp.float32)
        return LinearLogp(empty, empty if options.return_lse else None, empty if options.return_entropy else None)
    if shard is None:
        operands, tokens = _transforms.equally_varying((operands, tokens))
        return _values(functions, options, None, None, operands, tokens, None)
    place = _shard.place(shard, vocab_start_index)
    carrier = _shard.hidden_gradient_carrier(shard, _shard.entering(shard, operands.hidden), place.order)
    operands = operands._replace(real_columns=_shard.real_columns(shard, place.start))
    tokens = _shard.local(tokens, place)
    ranks = _Ranks(place.order, _shard.is_covered(shard, tokens, operands.real_columns))
    carrier, operands, tokens, ranks = _transforms.equally_varying((carrier, operands, tokens, ranks))
    shares = _values(functions, options, shard, carrier, operands, tokens, ranks)
    return jax.tree.map(functools.partial(_shard.total, shard), shares)


class _Ranks(NamedTuple):
    """What a shard knows of the others: their order, and whose tokens' targets are in one of them alone."""

    order: Array | None
    is_covered: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _values(
    functions: HeadFunctions,
    options: Options,
    shard: _shard.Shard | None,
    carrier: Array | None,
    operands: Operands,
    tokens: Tokens,
    ranks: _Ranks | None,
) -> LinearLogp:
    """The values of linear_logp, or a shard's share of them, whose upstream gradients are those of the whole.

    A carrier, where there is one, gets the gradient of hidden in hidden's place. One custom_vjp for both passes: so the
    forward knows of the backward. The forward gathers the ranks' partial softmaxes; the backward holds no collective.
    """
    return _forward(functions, options, shard, operands, tokens, ranks)[0]


def _forward(
    functions: HeadFunctions,
    options: Options,
    shard: _shard.Shard | None,
    operands: Operands,
    tokens: Tokens,
    ranks: _Ranks | None,
) -> tuple[LinearLogp, Any, Any]:
    gather: Gather = lambda groups: groups  # noqa: E731
    if shard is not None and ranks is not None:
        gather = functools.partial(shard.gather, order=ranks.order)

    def one_batch(options: Options, shared: Any, rows: tuple[Array, Tokens]) -> tuple[LinearLogp, Any, Any]:
        hidden, tokens = rows
        return _transforms.varying_like(functions.forward(options, Operands(hidden, *shared), tokens, gather), hidden)

    def batches(shared: Any, rows: tuple[Array, Tokens]) -> tuple[LinearLogp, Any, Any]:
        kept = jax.eval_shape(functools.partial(one_batch, options), shared, rows)[2]
        one_of_many = functools.partial(one_batch, replace(options, keeps=False))
        folding = _transforms.vmap_folds_rows(lambda *x: one_of_many(*x)[:2], outputs_are_rows=True)
        return *folding(shared, rows), jax.tree.map(lambda x: jnp.zeros(0, x.dtype), kept)

    hidden, *shared = lax.stop_gradient(operands)
    forward = _transforms.unless_batched(functools.partial(one_batch, options), batches)
    values, residual, kept = forward(tuple(shared), (hidden, tokens))
    values = jax.tree.map(lambda x: jnp.where(tokens.active, x, 0), values)
    if shard is not None and ranks is not None:
        # After the pass, so that it need not wait for the ranks' answers.
        covered = ranks.is_covered
        values = _shard.shares(shard, jax.tree.map(lambda x: jnp.where(covered, x, jnp.nan), values))
    return values, residual, kept


def _save(
    functions: HeadFunctions, options: Options, shard: _shard.Shard | None, *primals: Any
) -> tuple[LinearLogp, Any]:
    carrier, operands = primals[:2]
    targets = (operands.hidden if carrier is None else carrier, operands.weight, operands.bias)
    operands, tokens, ranks = _transforms.primal_values(primals[1:])
    values, residual, kept = _forward(functions, replace(options, keeps=True), shard, operands, tokens, ranks)
    if ranks is not None:
        tokens = tokens._replace(temperature=jnp.where(ranks.is_covered, tokens.temperature, jnp.nan))
    return values, (_transforms.needs_gradient(targets), operands, tokens, residual, kept)


def _pull_back(
    functions: HeadFunctions, options: Options, shard: _shard.Shard | None, saved: Any, upstream: LinearLogp
) -> tuple[Any, ...]:
    needed, operands, tokens, residual, kept = saved
    needs = Needs(*_transforms.is_needed(needed))
    given = [None if isinstance(g, SymbolicZero) else g for g in upstream]
    upstream = LinearLogp(jnp.zeros_like(tokens.temperature) if given[0] is None else given[0], *given[1:])
    operands, upstream = _transforms.refuse_derivative(_NO_SECOND_DERIVATIVE, (operands, upstream))
    tokens = tokens.with_upstream(upstream)
    is_whole = options.hidden_gradient == "rounded"

    def one_batch(kept: Any, shared: Any, rows: Any) -> Gradients:
        hidden, tokens, residual, upstream = rows
        operands = Operands(hidden, *shared)
        # Empty where the forward ran under vmap.
        kept = kept if all(x.size for x in jax.tree.leaves(kept)) else None
        found = functions.gradients(options, needs, operands, tokens, residual, kept, upstream)
        return _transforms.varying_like(found, hidden)

    def batches(kept: Any, shared: Any, rows: Any) -> Gradients:
        outputs_are_rows = is_whole and not (needs.weight or needs.bias)
        folding = _transforms.vmap_folds_rows(functools.partial(one_batch, None), outputs_are_rows=outputs_are_rows)
        return folding(shared, rows)

    hidden, *shared = operands
    gradients = _transforms.unless_batched(one_batch, batches)
    done: Any = Operands(*gradients(kept, tuple(shared), (hidden, tokens, residual, upstream)))  # type: ignore[arg-type]
    d_carrier, done = (None, done) if is_whole else (done.hidden, done._replace(hidden=None))
    return d_carrier, done, None, None


_values.defvjp(_save, _pull_back, symbolic_zeros=True)
