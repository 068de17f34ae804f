"""linear_logp for tensors: log-probabilities of the taken tokens from hidden states and the LM head."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from rlk_jax.core.checks import check_flag
from rlk_jax.core.dispatch import choose
from rlk_jax.ops.linear_logp import api
from rlk_jax.ops.linear_logp.call import facts_of_call
from rlk_jax.ops.linear_logp.checks import check_call
from rlk_jax.ops.linear_logp.options import HeadInputs, HeadOptions
from rlk_jax.ops.logits.options import LogitsOptions
from torch_bridge import _calls, _exchange, _flops, _inputs, _options, _padding
from torch_bridge._calls import Output
from torch_bridge._inputs import HeadArguments
from torch_bridge._programs import Arrays, Op


class LinearLogp(NamedTuple):
    """What `linear_logp` and `logp` return for each token, float32 `[*lead]`; None for what was not asked for."""

    logp: Tensor
    lse: Tensor | None
    entropy: Tensor | None


class RankedLogp(NamedTuple):
    """The fields of LinearLogp, and which tokens are the most probable: their ids int64 and log-probs float32
    `[*lead, k]`, most probable first, and how many tokens are more probable than the target, int64 `[*lead]`.

    None stands for what was not asked for. These three have no gradient.
    """

    logp: Tensor
    lse: Tensor | None
    entropy: Tensor | None
    top_ids: Tensor | None
    top_logps: Tensor | None
    target_rank: Tensor | None


def linear_logp(
    hidden: Tensor,
    lm_head_weight: Tensor,
    target_ids: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    low_rank: tuple[Tensor | float | None, ...] | None = None,
    allowed_ids: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    logit_softcap: float | None = None,
    ignore_index: int | None = None,
    global_vocab_size: int | None = None,
    weight_layout: Literal["vd", "dv"] = "vd",
    return_lse: bool = False,
    return_entropy: bool = False,
    return_top_k: int | None = None,
    return_target_rank: bool = False,
    memory_budget: int | None = None,
    tp_group: Any = None,
    vocab_start_index: int = 0,
    reduce_hidden_grad: bool = True,
    validate: bool | None = None,
    implementation: str | None = None,
) -> Tensor | LinearLogp | RankedLogp:
    """Log-probability of each target token under the LM head; `rlk_jax.linear_logp` for tensors.

        z = softcap(hidden·(W + s·B·A)ᵀ + bias) / temperature,   softcap(x) = c·tanh(x/c)
        logp = z[target] − ln Σ_v exp z_v,   lse = ln Σ_v exp z_v,   entropy = −Σ_v p_v·ln p_v     (natural logarithms)

    The sums are over the tokens v that a row allows: all of them unless `allowed_ids` or `allowed_mask` is given.

    Args:
      hidden: last hidden states `[*lead, D]`, already shifted so that a row predicts its target. bfloat16, float16 or
        float32; under autocast hidden, weight and bias are cast to autocast's dtype.
      lm_head_weight: `[V, D]`, or `[D, V]` with `weight_layout="dv"`. Neither a contiguous weight nor a
        transposed view of one is copied.
      target_ids: `[*lead]`, any integer dtype.
      bias: `[V]` or None.
      temperature: positive; a number, a tensor of one number, or a tensor `[*lead]`. It is not differentiated.
      low_rank: a low-rank adapter of the head (LoRA), `(A, B, scale)`, or `(A, B, scale, inputs)` where A is applied to
        `inputs [*lead, D]`, hidden after a dropout. A is `[r, D]` and B `[V, r]`, as peft has them, or `[D, r]` and
        `[r, V]` with `weight_layout="dv"`; scale is a number. Neither B·A nor a sum with the weight is made. A and B
        are rounded to the dtypes of hidden and the weight. It cannot be given beside other ranks of a tp_group.
      allowed_ids: the ids that each row may take, `[*lead, K]`, any integer dtype: those that a sampler kept with top-k
        or top-p. −1 is padding; order and duplicates do not matter. Other tokens have z = −inf, and gradients of their
        logits are exactly 0, also where these are NaN or infinite. A row that counts must allow its own target.
      allowed_mask: the same as packed bits, int32 or uint32 `[*lead, ceil(V/32)]`, of which one of the two is given:
        bit i of word j is token 32·j + i. V is the head's, or `global_vocab_size`; bits behind it are ignored.
      logit_softcap: c > 0 (Gemma), or None. It is not differentiated.
      ignore_index: tokens with this id give 0 in every output and exactly 0 in every gradient, whatever their hidden
        row holds. It must lie outside the vocabulary.
      global_vocab_size: true vocabulary size where the head's last rows are padding: they count as logits of −inf. With
        `tp_group` it is the size of the whole head's vocabulary; the last shards may be padding, in part or entirely.
      weight_layout: "vd" (Hugging Face, tied embeddings) or "dv".
      return_lse, return_entropy: also return these, from the same pass, differentiable.
      return_top_k: k from 1 to 128 and at most V: also return the ids and log-probs of the k most probable tokens, most
        probable first and equal ones in ascending order of their ids. Where there are fewer, or the row is ignored or
        NaN, the id is −1 and the log-prob −inf, 0 or NaN. They have no gradient.
      return_target_rank: also return how many tokens stand before the target in that order, −1 for rows that are
        ignored or NaN.
      memory_budget: bytes for the logits and their gradients that are held at a time; None for the default. `mosaic`
        and `cuda` hold this memory from the forward to the backward, and once more in a backward that retains the graph
        or that torch.compile has taken.
      tp_group: the `torch.distributed` group whose ranks each hold a part of the vocabulary, of any width. Weight and
        bias are then this rank's parts; hidden, target_ids and what is allowed (ids of the whole vocabulary) are the
        same on every rank, and so are the results. Every rank must make the call; a mistake on one rank raises the same
        error on all.
      vocab_start_index: this rank's first column of the whole vocabulary.
      reduce_hidden_grad: False leaves each rank its own part of dH, for callers that sum it themselves (sequence
        parallelism); True sums it in float32.
      validate: True checks target ids, temperatures and allowed tokens before launch (small read-backs); False never
        waits for the device; None means True for CPU tensors and False for CUDA ones. A bad row that is not checked
        gives NaN in its outputs and in every gradient it reaches.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here.

    Returns:
      float32 logp `[*lead]`, or `LinearLogp(logp, lse, entropy)` where more was asked for (None for what was not), or
      `RankedLogp(logp, lse, entropy, top_ids, top_logps, target_rank)` where the last three were.

    Raises:
      ValueError: for every argument that does not fit, in rlk_jax's words, before anything runs.
      RuntimeError: for second derivatives. Torch's own errors pass through.

    Gradients flow to hidden, lm_head_weight, bias, A, B and inputs, in their dtypes; one that is not needed costs
    no work.
    Between forward and backward autograd holds these tensors, and JAX a few numbers per token and what `memory_budget`
    lets `mosaic` and `cuda` keep.

    Same bits: the results have the bits of `rlk_jax.linear_logp` on the same arrays, for the implementations that
    promise bits, although rows are padded to one of a few sizes. docs/torch_bridge.md has the rest.
    """
    options = HeadOptions(
        logit_softcap=logit_softcap,
        ignore_index=ignore_index,
        global_vocab_size=global_vocab_size,
        weight_layout=weight_layout,
        return_lse=return_lse,
        return_entropy=return_entropy,
        return_top_k=return_top_k,
        return_target_rank=return_target_rank,
        memory_budget=memory_budget,
        validate=validate,
        implementation=implementation,
    )
    tensors = hidden, lm_head_weight, target_ids, bias, temperature, low_rank, allowed_ids, allowed_mask
    return _values_of(HeadArguments(*tensors), (tp_group, vocab_start_index, reduce_hidden_grad), options)


_KEYWORDS: Any = linear_logp.__kwdefaults__
"""The keywords of `linear_logp`, and what each is by default."""
_OF_A_RANK = ("tp_group", "vocab_start_index", "reduce_hidden_grad")


def smoothed_linear_logp(*tensors: Any, label_smoothing: float, **options: Any) -> Any:
    """What `linear_logp` returns for its other arguments, for `linear_cross_entropy`: with label_smoothing, logp is a
    mean under the smoothed target, as in `rlk_jax`. The tensors are hidden, weight, ids and bias.
    """
    for name in options:
        if name not in _KEYWORDS:
            raise TypeError(f"linear_cross_entropy() got an unexpected keyword argument {name!r}")
    given = {**_KEYWORDS, **options}
    others, rank = [[given.pop(name) for name in names] for names in (HeadArguments._fields[4:], _OF_A_RANK)]
    return _values_of(HeadArguments(*tensors, *others), rank, HeadOptions(**given, label_smoothing=label_smoothing))


def _values_of(
    arguments: HeadArguments, of_a_rank: Sequence[Any], options: HeadOptions
) -> Tensor | LinearLogp | RankedLogp:
    """What the user asked for. `of_a_rank` are the arguments that say how this process stands in a group."""
    hidden, lm_head_weight, target_ids, bias, temperature, low_rank, allowed_ids, allowed_mask = arguments
    tp_group, vocab_start_index, reduce_hidden_grad = of_a_rank
    term = _inputs.low_rank_term(low_rank)
    if tp_group is not None or vocab_start_index != 0:
        # torch's compiler, which they take, needs seconds to be imported.
        from torch_bridge import _process_groups, _tensor_parallel

        if _process_groups.has_other_ranks(tp_group, vocab_start_index):
            if low_rank is not None:
                raise ValueError("low_rank cannot be given beside other ranks of a tp_group: merge the adapter.")
            rank = _process_groups.Rank(tp_group, vocab_start_index, options.global_vocab_size, reduce_hidden_grad)
            shards = _tensor_parallel.Tensors(
                hidden, lm_head_weight, bias, target_ids, temperature, allowed_ids, allowed_mask
            )
            outputs_of = functools.partial(_all_outputs, options=options)
            return _returned(_tensor_parallel.tensor_parallel_logp(shards, rank, options, outputs_of), options)
    tensors = {"hidden": hidden, "lm_head_weight": lm_head_weight, "target_ids": target_ids, "bias": bias}
    tensors |= {"allowed_ids": allowed_ids, "allowed_mask": allowed_mask}
    per_token, number = _inputs.check_head(tensors | term.tensors, temperature, options, term.scale)
    check_flag("reduce_hidden_grad", reduce_hidden_grad)
    hidden, lm_head_weight, bias, a, b, inputs = _inputs.autocast(
        hidden, lm_head_weight, bias, term.a, term.b, term.inputs
    )
    lm_head_weight, layout = _inputs.without_transpose(lm_head_weight, options.weight_layout)
    if a is not None and b is not None and layout != options.weight_layout:
        a, b = a.t(), b.t()
    checked = replace(options, weight_layout=layout, validate=_inputs.should_validate(options.validate, hidden))
    floats = (hidden, lm_head_weight, bias, a, b, inputs)
    others = (target_ids, allowed_ids, allowed_mask, per_token, number, term.scale)
    *found, _ = _linear_logp(*floats, *others, checked, _inputs.needs(*floats))
    return _returned(found, options)


def values(found: Sequence[Any], options: HeadOptions | LogitsOptions) -> Tensor | LinearLogp:
    """What the user asked for, from a custom op's outputs logp, lse and entropy."""
    if not (options.return_lse or options.return_entropy):
        return found[0]
    return LinearLogp(*_asked_for(found, options))


def _wanted(options: HeadOptions | LogitsOptions) -> tuple[bool, bool, bool]:
    """Which of logp, lse and entropy the user asked for."""
    return True, options.return_lse, options.return_entropy


def _asked_for(found: Sequence[Any], options: HeadOptions | LogitsOptions) -> list[Any]:
    """logp, lse and entropy, of which None stands for what was not asked for."""
    return [x if wanted else None for x, wanted in zip(found, _wanted(options), strict=True)]


def _returned(found: Sequence[Any], options: HeadOptions) -> Tensor | LinearLogp | RankedLogp:
    """What the user asked for, from all outputs of the custom op; torch's own functions take ids as int64."""
    if options.return_top_k is None and not options.return_target_rank:
        return values(found[:3], options)
    logp, lse, entropy = _asked_for(found[:3], options)
    top_ids, top_logps, target_rank = found[3:]
    return RankedLogp(
        logp,
        lse,
        entropy,
        None if options.return_top_k is None else top_ids.long(),
        None if options.return_top_k is None else top_logps,
        target_rank.long() if options.return_target_rank else None,
    )


def outputs(lead: Sequence[int], options: HeadOptions | LogitsOptions) -> list[Output]:
    """A custom op's outputs logp, lse and entropy."""
    return [Output(lead if wanted else (0,)) for wanted in _wanted(options)]


def _all_outputs(lead: Sequence[int], options: HeadOptions) -> list[Output]:
    """The outputs of linear_logp's custom op: those of `outputs`, and top_ids, top_logps and target_rank."""
    best = (0,) if options.return_top_k is None else (*lead, options.return_top_k)
    rank = lead if options.return_target_rank else (0,)
    return [*outputs(lead, options), Output(best, torch.int32), Output(best), Output(rank, torch.int32)]


def as_outputs(found: Any, count: int = 3) -> tuple[jax.Array, ...]:
    """What an op of `rlk_jax` returns, as so many outputs of a custom op; those that were not asked for are empty."""
    given = found if isinstance(found, tuple) else (found,)
    return tuple(jnp.zeros(0, jnp.float32) if x is None else x for x in (*given, *[None] * (count - len(given))))


def _run(
    hidden: Any,
    weight: Any,
    bias: Any,
    a: Any,
    b: Any,
    inputs: Any,
    ids: Any,
    count: Any,
    temperature: Any,
    allowed_ids: Any,
    allowed_mask: Any,
    scale: Any,
    *,
    ignore_index: int | None,
    **options: Any,
) -> tuple[jax.Array, ...]:
    ids = _padding.token_ids(ids, count, ignore_index=ignore_index)
    token_options = {"temperature": temperature, "ignore_index": _padding.ignored(ignore_index)}
    token_options["allowed_ids"], token_options["allowed_mask"] = _padding.allowed_values(allowed_ids, allowed_mask)
    low_rank = None if a is None else (a, b, scale, inputs)
    call = {"low_rank": low_rank, "validate": False, **token_options, **options}
    return as_outputs(api.smoothed_linear_logp(hidden, weight, ids, bias, **call), count=6)


@functools.lru_cache(maxsize=256)
def _skips_padding(
    device: torch.device,
    dtype: torch.dtype,
    weight: Any,
    bias: Any,
    low_rank: Any,
    options: HeadOptions,
    *,
    has_mask: bool,
) -> bool:
    """Whether what runs calls with a head, a bias and an adapter of these shapes and dtypes does no work for rows of
    padding. `has_mask` says whether rows may not take all tokens.
    """
    dim = weight[0][1 if options.weight_layout == "vd" else 0]
    operands = {
        "hidden": jax.ShapeDtypeStruct((1, dim), _exchange.DTYPES[dtype]),
        "lm_head_weight": jax.ShapeDtypeStruct(*weight),
        "target_ids": jax.ShapeDtypeStruct((1,), jnp.int32),
        "bias": None if bias is None else jax.ShapeDtypeStruct(*bias),
        "allowed_ids": jax.ShapeDtypeStruct((1, 1), jnp.int32) if has_mask else None,
    }
    with jax.default_device(_exchange.jax_device(device)):
        adapter = {}
        if low_rank is not None:
            a, b = (jax.ShapeDtypeStruct(*x) for x in low_rank)
            adapter = {"low_rank_a": a, "low_rank_b": b, "low_rank_scale": 1.0}
        inputs, config, _ = check_call(HeadInputs(**operands, **adapter, temperature=1.0), options)
        return choose(facts_of_call(inputs, config), options.implementation).skips_padding


_OP = Op("linear_logp", _run, differentiable=6)
_OPTIONS = _options.OptionFields(HeadOptions, without=_options.OF_A_MESH)


def _kernel(
    hidden: Tensor,
    lm_head_weight: Tensor,
    bias: Tensor | None,
    low_rank_a: Tensor | None,
    low_rank_b: Tensor | None,
    low_rank_inputs: Tensor | None,
    target_ids: Tensor,
    allowed_ids: Tensor | None,
    allowed_mask: Tensor | None,
    per_token: Tensor | None,
    temperature: float,
    low_rank_scale: float,
    options: HeadOptions,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logp, lse, entropy, top_ids, top_logps, target_rank, and the handle for the backward."""
    lead = target_ids.shape
    weight_and_bias = (_inputs.spec(lm_head_weight), None if bias is None else _inputs.spec(bias))
    low_rank = None
    if low_rank_a is not None and low_rank_b is not None:
        low_rank = _inputs.spec(low_rank_a), _inputs.spec(low_rank_b)
    has_mask = allowed_ids is not None or allowed_mask is not None
    call_specs = (hidden.device, hidden.dtype, *weight_and_bias, low_rank)
    skips_padding = _skips_padding(*call_specs, options, has_mask=has_mask)
    padding = _padding.flat(lead, skips_padding=skips_padding)

    def tokens() -> Arrays:
        vocab_size = lm_head_weight.shape[0 if options.weight_layout == "vd" else 1]
        checked_against = (options.global_vocab_size or vocab_size) if options.validate else None
        scale = (per_token, temperature)
        allowed = padding.allowed(allowed_ids, allowed_mask)
        tokens = padding.tokens(target_ids, scale, options.ignore_index, "target_ids", checked_against, allowed)
        return *tokens, None if low_rank_a is None else _exchange.scalar(low_rank_scale, target_ids.device)

    def rows(x: Tensor) -> jax.Array:
        return padding.rows(x, columns=1)

    lend = (rows, _exchange.lend, _exchange.lend, _exchange.lend, _exchange.lend, rows)
    call = _calls.Call(_OP, padding, _OPTIONS.static(options), lend, padding.rows)
    operands = [hidden, lm_head_weight, bias, low_rank_a, low_rank_b, low_rank_inputs]
    found: Any = call.forward(operands, tokens, needs, _all_outputs(lead, options))
    return found


def _fake(
    hidden: Tensor,
    lm_head_weight: Tensor,
    bias: Tensor | None,
    low_rank_a: Tensor | None,
    low_rank_b: Tensor | None,
    low_rank_inputs: Tensor | None,
    target_ids: Tensor,
    allowed_ids: Tensor | None,
    allowed_mask: Tensor | None,
    per_token: Tensor | None,
    temperature: float,
    low_rank_scale: float,
    options: HeadOptions,
    needs: Sequence[bool],
) -> Any:
    return _calls.fake(_all_outputs(target_ids.shape, options), hidden.device)


_linear_logp = _calls.as_torch_op(
    "linear_logp", _kernel, _fake, range(6), options=_OPTIONS, constants=range(3, 6), flops=_flops.product_flops
)
