"""attention: causal attention over a KV cache, whose tokens have the same bits in training and in decoding."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float, Int

from rlk_jax.core.checks import require_values
from rlk_jax.core.dispatch import CallFacts, choose, facts_of
from rlk_jax.ops.attention.autodiff import attended
from rlk_jax.ops.attention.checks import check_call, checked_operands
from rlk_jax.ops.attention.options import AttentionConfig, AttentionInputs, AttentionOptions


def attention(
    query: Float[Array, "B T H E"],
    key: Float[Array, "B S G E"],
    value: Float[Array, "B S G F"],
    *,
    start: int | Int[Array, ""] = 0,
    padding: Int[Array, " B"] | None = None,
    segment_starts: Int[Array, "B T"] | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    validate: bool | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H F"]:
    """Causal softmax attention over the slots of a KV cache.

        O = softmax(softcap(scale·Q·Kᵀ))·V          softcap(x) = c·tanh(x / c)

    Args:
      query: `[B, T, H, E]`, bfloat16 or float16, of the tokens in slots start … start + T − 1. H is a multiple of G;
        heads share keys in order (GQA).
      key, value: `[B, S, G, E]` and `[B, S, G, F]`, of query's dtype. S is at least start + T.
      start: the slot of the first query, a number or an int scalar array.
      padding: `[B]`, how many first slots of each row stand before its sequence; None where none do.
      segment_starts: `[B, T]`, for rows that hold several sequences one behind the other: the first slot of the
        sequence of each query. It ascends along a row.
      scale: what scores are multiplied by; None for 1/√E.
      sliding_window: a query sees itself and the slots before it, so many in all; None for all of its sequence.
      logit_softcap: c; None for no softcap.
      validate: whether values of start, padding and segment_starts are checked; None for "where they can be read".
        Under jit, bad values are NaN rows, and are reported to `jax.experimental.checkify`.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here
        (`rlk_jax.explain` tells).

    Returns:
      `[B, T, H, F]` in query's dtype. It is 0 for a query that stands before its sequence, NaN for one that sees what
      is not finite, and NaN in rows of the batch whose start, padding or segment_starts do not fit.

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and for second derivatives.
      TypeError: JAX's own, for forward-mode differentiation.

    Gradients flow to query, key and value, in their dtype; one that is not needed costs no work. Sums run in float32;
    softmax weights and their gradients are rounded to query's dtype before they are multiplied.

    Same bits: the implementations that promise bits give a token's output and the gradient of its query the same raw
    bits alone, in any batch, behind any padding, beside other sequences, prefilled at once or in parts, and decoded one
    by one. The gradients of a sequence's keys and values have the same bits wherever the sequence stands. What no query
    of a sequence sees, NaN included, changes nothing for it. docs/attention.md has the whole contract.

    Source: FlashAttention (arXiv 2205.14135) for never holding all scores; batch invariance as in "Defeating
    Nondeterminism in LLM Inference" (Thinking Machines, 2025).
    """
    inputs = AttentionInputs(query, key, value, start, padding, segment_starts)
    options = AttentionOptions(scale, sliding_window, logit_softcap, validate, implementation)
    inputs, config = check_call(inputs, options)
    require_values(inputs)
    chosen = choose(_facts(inputs, config), implementation)
    return attended(chosen.functions, config, checked_operands(inputs, validate))


def _facts(inputs: AttentionInputs, config: AttentionConfig) -> CallFacts:
    """The facts by which dispatch decides a call."""
    return facts_of("attention", inputs[:3], config)


def describe(arguments: Mapping[str, Any]) -> tuple[CallFacts, str | None]:
    """Check a call's arguments, by name. Returns the facts that dispatch decides by, and the implementation named."""
    given = dict(arguments)
    inputs = AttentionInputs(*(given.pop(name) for name in AttentionInputs._fields))
    options = AttentionOptions(**given)
    return _facts(*check_call(inputs, options)), options.implementation
