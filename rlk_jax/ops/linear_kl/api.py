"""linear_kl: the divergence of a student from a frozen teacher over the whole vocabulary, without the logits."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int

from rlk_jax.core.checks import require_values
from rlk_jax.core.dispatch import CallFacts, choose, facts_of
from rlk_jax.core.gemm import WeightLayout
from rlk_jax.core.mesh import AxisName
from rlk_jax.core.shard import Reduction, check_edges
from rlk_jax.ops.linear_kl.autodiff import divergences
from rlk_jax.ops.linear_kl.checks import check_call, tokens_of_call
from rlk_jax.ops.linear_kl.options import DivergenceKind, KlConfig, KlInputs, KlOptions, OneHead, Operands


def linear_kl(
    hidden: Float[Array, "*lead D"],
    lm_head_weight: Float[Array, "V D"] | Float[Array, "D V"],
    teacher_hidden: Float[Array, "*lead Dt"] | None = None,
    teacher_weight: Float[Array, "Vt Dt"] | Float[Array, "Dt Vt"] | None = None,
    bias: Float[Array, " V"] | None = None,
    teacher_bias: Float[Array, " Vt"] | None = None,
    *,
    completion_mask: Bool[Array, "*lead"] | Int[Array, "*lead"] | Float[Array, "*lead"] | None = None,
    kind: DivergenceKind = "forward",
    beta: float = 0.5,
    temperature: float | Float[ArrayLike, "*lead"] = 1.0,
    teacher_temperature: float | Float[ArrayLike, "*lead"] | None = None,
    teacher_ids: Int[Array, "*lead k"] | None = None,
    teacher_logps: Float[Array, "*lead k"] | None = None,
    logit_softcap: float | None = None,
    teacher_logit_softcap: float | None = None,
    weight_layout: WeightLayout = "vd",
    teacher_weight_layout: WeightLayout = "vd",
    global_vocab_size: int | None = None,
    teacher_global_vocab_size: int | None = None,
    axis_name: AxisName | None = None,
    vocab_start_index: int | Int[ArrayLike, ""] | None = None,
    reduction: Reduction = "sum",
    reduce_hidden_grad: bool = True,
    memory_budget: int | None = None,
    validate: bool | None = None,
    implementation: str | None = None,
) -> Float32[Array, "*lead"]:
    """Divergence of each token's next-token distribution under the student from that under the teacher.

        p = softmax(softcap(hidden·Wᵀ + bias) / temperature),   softcap(x) = c·tanh(x/c);   q likewise of the teacher
        forward = Σ_v q_v·ln(q_v / p_v),   reverse = Σ_v p_v·ln(p_v / q_v)     (natural logarithms)
        jsd = beta·Σ_v q_v·ln(q_v / m_v) + (1 − beta)·Σ_v p_v·ln(p_v / m_v),   m = beta·q + (1 − beta)·p

    The sums are over all tokens v of the vocabulary; where the teacher lists k tokens of a row alone, they are over
    these and the rest together, whose p is Σ p_v over the tokens that are not listed, and whose q is 1 − Σ q_v.

    Args:
      hidden: the student's last hidden states `[*lead, D]`. bfloat16, float16 or float32, as every array here.
      lm_head_weight: the student's head, `[V, D]`, or `[D, V]` with `weight_layout="dv"`.
      teacher_hidden, teacher_weight: the teacher's, `[*lead, Dt]` and `[Vt, Dt]`; of any width. The teacher is frozen:
        it gets no gradient, and no memory is taken for one. None where the teacher lists tokens.
      bias, teacher_bias: `[V]` and `[Vt]`, or None.
      completion_mask: `[*lead]`, bool, integer or float: a token counts where it is not 0. The others give 0 and
        exactly 0 in every gradient, whatever they hold. None means that all count.
      kind: "forward" is KL(teacher ‖ student), "reverse" is KL(student ‖ teacher), "jsd" the generalised
        Jensen-Shannon divergence.
      beta: the teacher's share of the mixture of "jsd", in [0, 1]; 0 is "forward" and 1 is "reverse", as in TRL. The
        other kinds do not look at it.
      temperature: positive; a scalar or one per token. Not differentiated. The divergence is not multiplied by its
        square.
      teacher_temperature: the same for the teacher; None for that of the student.
      teacher_ids, teacher_logps: `[*lead, k]`, in the place of the teacher's head and of all its options: the tokens
        that it lists, integers in any order, each once, with −1 where a row has fewer; and their log-probs under it, at
        its own temperature, in bfloat16, float16 or float32. Those of a row may not have more than 1.02 of probability
        together, to which log-probs in bfloat16 may come; a rest below 1e-7, which rounding hides, counts as 1e-7, and
        as 0 where all tokens are listed.
      logit_softcap, teacher_logit_softcap: c > 0 (Gemma), or None. Not differentiated.
      weight_layout, teacher_weight_layout: "vd" (Hugging Face, tied embeddings) or "dv" (Flax Linear kernels).
      global_vocab_size, teacher_global_vocab_size: the true vocabulary size where a head's last rows are padding, which
        is left out; None where the head has none. Both heads must come to the same number. With `axis_name` they are
        those of the whole heads.
      axis_name: inside shard_map, the mesh axis (or axes) that the vocabulary is spread over, as in `linear_logp`. Both
        heads and biases are then this rank's shards, which hold the same tokens and are equally wide on all ranks;
        hidden states, mask, temperatures and what a teacher lists, by its ids in the whole vocabulary, are the same on
        every rank of the axis, and so is the divergence.
      vocab_start_index, reduction, reduce_hidden_grad: as in `linear_logp`.
      memory_budget: bytes for the logits and gradients that are held at a time; None for the implementation's default.
        At least one block of them is always held. Implementations that promise bits give the same bits for every
        budget.
      validate: True checks temperatures and what the teacher lists before launch (one small read-back); False never
        waits for the device; None checks concrete arrays and nothing under jit. A row with a bad value that is not
        checked gives NaN in its divergence and in every gradient it reaches, and is reported under
        `jax.experimental.checkify`.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here
        (`rlk_jax.explain` tells).

    Returns:
      The divergence, float32 `[*lead]`. It is ∞ where a token has a probability under the first distribution and none
      under the second; "jsd" is finite.

    Raises:
      ValueError: for every argument that does not fit, before anything runs, and for second derivatives.
      TypeError: JAX's own, for forward-mode differentiation.

    Gradients flow to hidden, lm_head_weight and bias, in their dtypes. An operand that needs none costs no work, and a
    row whose upstream gradient is 0 contributes exactly 0. All differences of probabilities and log-probabilities are
    taken in float32: where student and teacher are the same arrays under the same options, divergence and gradients
    are exactly 0.

    Same bits: the implementations that promise bits (docs/linear_kl.md lists them) give a row the same raw bits in any
    batch, at any position and beside any neighbours, for every memory budget, and the gradients of head and bias the
    same bits with masked rows anywhere, at 1, 2, 4 and 8 ranks too (that of hidden with reduction="canonical"); `xla`
    promises accuracy only.

    Source: GKD (Agarwal et al., arXiv 2306.13649) as TRL's `generalized_jsd_loss` has it; MiniLLM (Gu et al.,
    arXiv 2306.08543) for the reverse KL.
    """
    arrays = (hidden, lm_head_weight, teacher_hidden, teacher_weight, bias, teacher_bias)
    given = KlInputs(*arrays, completion_mask, temperature, teacher_temperature, teacher_ids, teacher_logps)
    options = KlOptions(
        kind=kind,
        beta=beta,
        logit_softcap=logit_softcap,
        teacher_logit_softcap=teacher_logit_softcap,
        weight_layout=weight_layout,
        teacher_weight_layout=teacher_weight_layout,
        global_vocab_size=global_vocab_size,
        teacher_global_vocab_size=teacher_global_vocab_size,
        axis_name=axis_name,
        reduction=reduction,
        reduce_hidden_grad=reduce_hidden_grad,
        memory_budget=memory_budget,
        validate=validate,
        implementation=implementation,
    )
    inputs, config, shard = check_call(given, options, vocab_start_index)
    require_values(inputs)
    chosen = choose(_facts_of_heads(inputs, config), implementation)
    if shard is not None and chosen.promises_bits:
        check_edges(shard)
    student = _rows_of(inputs.hidden, inputs.lm_head_weight, inputs.bias)
    teacher = None
    if config.teacher is not None:
        teacher = _rows_of(inputs.teacher_hidden, inputs.teacher_weight, inputs.teacher_bias)
    tokens = tokens_of_call(inputs, config, validate)
    found = divergences(chosen.functions, config, shard, Operands(student, teacher), tokens, vocab_start_index)
    return found.reshape(inputs.hidden.shape[:-1])


def _rows_of(hidden: Any, weight: Any, bias: Any) -> OneHead:
    """A head beside the hidden states of all tokens as rows `[N, D]`."""
    dim = hidden.shape[-1]
    rows = jnp.asarray(hidden).reshape(hidden.size // dim, dim)
    return OneHead(rows, jnp.asarray(weight), None if bias is None else jnp.asarray(bias))


def _facts_of_heads(inputs: KlInputs, config: KlConfig) -> CallFacts:
    """The facts by which dispatch decides a call."""
    return facts_of("linear_kl", inputs[:6], config)


def describe(arguments: Mapping[str, Any]) -> tuple[CallFacts, str | None]:
    """Check a call's arguments, by name. Returns the facts that dispatch decides by, and the implementation named."""
    given = dict(arguments)
    inputs = KlInputs(*(given.pop(name) for name in KlInputs._fields))
    start = given.pop("vocab_start_index")
    options = KlOptions(**given)
    inputs, config, _ = check_call(inputs, options, start)
    return _facts_of_heads(inputs, config), options.implementation
