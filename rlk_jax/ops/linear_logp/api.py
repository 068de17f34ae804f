"""linear_logp: log-probabilities of the taken tokens from hidden states and the LM head, without the logits."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, overload

from jaxtyping import Array, ArrayLike, Float, Int

from rlk_jax.core.dispatch import CallFacts, bound_arguments
from rlk_jax.core.mesh import AxisName, explicit_spec, mesh_of_processes
from rlk_jax.core.shard import Reduction
from rlk_jax.core.shard_checks import no_axis_options
from rlk_jax.core.tokens import LinearLogp, RankedLogp
from rlk_jax.ops.linear_logp.call import facts_of_call, on_device
from rlk_jax.ops.linear_logp.checks import check_call, head_inputs
from rlk_jax.ops.linear_logp.options import HeadInputs, HeadOptions, LowRank, WeightLayout
from rlk_jax.ops.linear_logp.sharding.agreement import agree
from rlk_jax.ops.linear_logp.sharding.vocab_parallel import over_explicit_axes


@overload
def linear_logp(
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "*lead"],
    bias: Float[Array, " V"] | None = None,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    return_top_k: None = None,
    return_target_rank: Literal[False] = False,
    **options: Any,
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
    return_top_k: None = None,
    return_target_rank: Literal[False] = False,
    **options: Any,
) -> LinearLogp: ...


@overload
def linear_logp(
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "*lead"],
    bias: Float[Array, " V"] | None = None,
    *,
    return_top_k: int | None = None,
    return_target_rank: bool = False,
    **options: Any,
) -> RankedLogp: ...


def linear_logp(  # type: ignore[misc]  # mypy wants the overloads' **options here too
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    target_ids: Int[Array, "*lead"],
    bias: Float[Array, " V"] | None = None,
    *,
    temperature: float | Float[ArrayLike, "*lead"] = 1.0,
    low_rank: LowRank | tuple[Any, ...] | None = None,
    allowed_ids: Int[Array, "*lead K"] | None = None,
    allowed_mask: Int[Array, "*lead words"] | None = None,
    logit_softcap: float | None = None,
    ignore_index: int | None = None,
    global_vocab_size: int | None = None,
    weight_layout: WeightLayout = "vd",
    return_lse: bool = False,
    return_entropy: bool = False,
    return_top_k: int | None = None,
    return_target_rank: bool = False,
    axis_name: AxisName | None = None,
    vocab_start_index: int | Int[ArrayLike, ""] | None = None,
    reduction: Reduction = "sum",
    reduce_hidden_grad: bool = True,
    memory_budget: int | None = None,
    validate: bool | None = None,
    implementation: str | None = None,
) -> Float[Array, "*lead"] | LinearLogp | RankedLogp:
    """Log-probability of each target token under the LM head.

        z = softcap(hidden·(W + s·B·A)ᵀ + bias) / temperature,   softcap(x) = c·tanh(x/c)
        logp = z[target] − ln Σ_v exp z_v,   lse = ln Σ_v exp z_v,   entropy = −Σ_v p_v·ln p_v     (natural logarithms)

    The sums are over the tokens v that a row allows: all of them unless `allowed_ids` or `allowed_mask` is given.

    Args:
      hidden: last hidden states `[*lead, D]`, already shifted so that a row predicts its target. bfloat16, float16 or
        float32.
      lm_head_weight: `[V, D]`, or `[D, V]` with `weight_layout="dv"`. Same dtypes; sums run in float32.
      target_ids: `[*lead]`, any integer dtype.
      bias: `[V]` or None.
      temperature: positive; a scalar or one per token. Not differentiated.
      low_rank: a low-rank adapter of the head (LoRA), `(A, B, scale)` or `rlk_jax.LowRank`, or None. A is `[r, D]` and
        B `[V, r]`, or `[D, r]` and `[r, V]` with `weight_layout="dv"`. Neither B·A nor a sum with W is made:
        scale·hidden·Aᵀ is rounded once to hidden's dtype, and its products with B go on with the sums of hidden·Wᵀ. A
        and B are rounded to the dtypes of hidden and the weight; the scale is not differentiated. With `axis_name`, B
        is this rank's shard, and A is the same on every rank.
      allowed_ids: the ids that each row may take, integers `[*lead, K]`: those that a sampler kept with top-k or top-p.
        −1 is padding; order and duplicates do not matter. Other tokens have z = −inf, and gradients of their logits are
        exactly 0, also where these are NaN or infinite. A row that counts must allow its own target. Ids are those of
        the whole vocabulary, on every rank of `axis_name` too.
      allowed_mask: the same as packed bits, int32 or uint32 `[*lead, ceil(V/32)]`, of which one of the two is given:
        bit i of word j is token 32·j + i. V is the head's, or `global_vocab_size`; bits behind it are ignored.
      logit_softcap: c > 0 (Gemma), or None. Not differentiated.
      ignore_index: tokens with this id give 0 in every output and exactly 0 in every gradient, whatever their hidden
        row holds. It must lie outside the vocabulary.
      global_vocab_size: true vocabulary size where the head's last rows are padding: they count as logits of −inf. With
        `axis_name` it is that of the whole head; shards may be padding in part or altogether.
      weight_layout: "vd" (Hugging Face, tied embeddings) or "dv" (Flax Linear kernels). Neither layout is transposed in
        memory.
      return_lse, return_entropy: also return these, from the same pass, differentiable.
      return_top_k: k from 1 to 128 and at most V: also return the ids int32 and the log-probs float32 `[*lead, k]` of
        the k most probable tokens of the same distribution, most probable first. Tokens of equal logits stand in
        ascending order of their ids. Where fewer than k tokens have a logit above −inf, the rest are id −1, log-prob
        −inf. Rows whose logp is NaN have id −1, log-prob NaN; ignored ones have id −1, log-prob 0. They have no
        gradient.
      return_target_rank: also return how many tokens stand before the target in that order, int32 `[*lead]`: 0 for the
        most probable token, −1 for rows whose logp is NaN and for ignored ones.
      axis_name: inside shard_map, the mesh axis (or axes) that the vocabulary is spread over. lm_head_weight and bias
        are then this rank's shard, all shards equally wide; hidden and target_ids (ids of the whole vocabulary) are the
        same on every rank of the axis, and so are the results. Take gradients outside the shard_map, or under
        check_vma=True: inside one with check_vma=False JAX counts a result that n ranks share n times, as for psum.
        `rlk_jax.vocab_parallel` has the form for whole arrays.
      vocab_start_index: first column of this rank's shard, where that is not the rank's index times the shard's width:
        equally wide shards may stand in another order than ranks.
      reduction: how dH is summed over the ranks, in float32: "sum" is the fastest way, "canonical" goes by the
        softmax's fixed tree, with the same bits at 1, 2, 4 and 8 ranks.
      reduce_hidden_grad: False leaves each rank its own part of dH, for callers that sum it themselves (sequence
        parallelism: hidden gathered over the axis).
      memory_budget: bytes for the logits and their gradients that are held at a time, and the copies beside them. At
        least one block of them is always held. `mosaic` and `cuda` hold it from the forward to the backward, and a copy
        of it in a backward that is a program of its own. None means the implementation's default. Implementations that
        promise bits give the same bits for every budget.
      validate: True checks target ids, temperatures and allowed tokens before launch (small read-backs); False never
        waits for the device; None checks concrete arrays and nothing under jit. A bad row that is not checked gives NaN
        in its outputs and in every gradient it reaches, and is reported under `jax.experimental.checkify`.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here
        (`rlk_jax.explain` tells).

    Returns:
      float32 logp `[*lead]`, or `LinearLogp(logp, lse, entropy)` where more was asked for (None for what was not), or
      `RankedLogp(logp, lse, entropy, top_ids, top_logps, target_rank)` where the last three were.

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and for second derivatives.
      TypeError: JAX's own, for forward-mode differentiation.

    Gradients flow to hidden, lm_head_weight, bias, A, B and a LowRank's inputs, in their dtypes. An operand that needs
    none costs no work.
    A row whose upstream gradients are all 0 costs none either: it contributes exactly 0, even if it holds NaN.

    Same bits: the implementations that promise bits (docs/linear_logp.md lists them and has the whole contract) give a
    row the same raw bits in any batch, at any position and beside any neighbours, and dW, db the same bits with ignored
    rows anywhere; `xla` promises accuracy only.

    Source: RL-Kernel's linear_logp; the pair (max, ln Σ) as in online softmax (Milakov and Gimelshein,
    arXiv 1805.02867).
    """
    inputs = head_inputs(hidden, lm_head_weight, target_ids, bias, temperature, low_rank, allowed_ids, allowed_mask)
    options = HeadOptions(
        logit_softcap=logit_softcap,
        ignore_index=ignore_index,
        global_vocab_size=global_vocab_size,
        weight_layout=weight_layout,
        return_lse=return_lse,
        return_entropy=return_entropy,
        return_top_k=return_top_k,
        return_target_rank=return_target_rank,
        axis_name=axis_name,
        reduction=reduction,
        reduce_hidden_grad=reduce_hidden_grad,
        memory_budget=memory_budget,
        validate=validate,
        implementation=implementation,
    )
    return _values(inputs, options, vocab_start_index)


def smoothed_linear_logp(*args: Any, label_smoothing: float, **options: Any) -> Any:
    """What `linear_logp` returns for its other arguments, for `linear_cross_entropy`. With label_smoothing s > 0, logp
    is the mean of all tokens' log-probabilities under the smoothed target, which gives s in equal parts to all tokens
    of the vocabulary and 1 − s to the target.
    """
    inputs, own, start = inputs_and_options(bound_arguments("linear_cross_entropy", linear_logp, *args, **options))
    return _values(inputs, replace(own, label_smoothing=label_smoothing), start)


def _values(inputs: HeadInputs, options: HeadOptions, vocab_start_index: Any) -> Any:
    """The values that the options ask for."""
    if any(map(explicit_spec, inputs)):
        no_axis_options(options, vocab_start_index)
        return over_explicit_axes(inputs, options)
    if options.axis_name is None and (mesh := mesh_of_processes(inputs)) is not None:
        agree(mesh, inputs, options)
        options = replace(options, validate=False)
    return on_device(inputs, options, vocab_start_index)


def inputs_and_options(arguments: Mapping[str, Any]) -> tuple[HeadInputs, HeadOptions, Any]:
    """A call's arguments, by name, as its arrays, its options and its vocab_start_index."""
    given = dict(arguments)
    arrays = (
        "hidden",
        "lm_head_weight",
        "target_ids",
        "bias",
        "temperature",
        "low_rank",
        "allowed_ids",
        "allowed_mask",
    )
    inputs = head_inputs(*(given.pop(name) for name in arrays))
    start = given.pop("vocab_start_index")
    return inputs, HeadOptions(**given), start


def describe(arguments: Mapping[str, Any], label_smoothing: float = 0.0) -> tuple[CallFacts, str | None]:
    """Check a call's arguments, by name. Returns the facts that dispatch decides by, and the implementation named."""
    inputs, options, start = inputs_and_options(arguments)
    options = replace(options, label_smoothing=label_smoothing)
    inputs, config, _ = check_call(inputs, options, start)
    return facts_of_call(inputs, config), options.implementation
