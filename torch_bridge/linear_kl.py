"""linear_kl for tensors: the divergence of a student from a frozen teacher, without the logits of either."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from torch import Tensor

import rlk_jax
from rlk_jax.core.checks import check_flag
from rlk_jax.ops.linear_kl.options import DivergenceKind, KlOptions
from rlk_jax.ops.linear_logp.options import WeightLayout
from torch_bridge import _calls, _exchange, _flops, _inputs, _options, _padding
from torch_bridge._kl_tokens import TokenTensors, check_kl, lent_tokens
from torch_bridge._programs import Arrays, Op


def linear_kl(
    hidden: Tensor,
    lm_head_weight: Tensor,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    completion_mask: Tensor | None = None,
    kind: DivergenceKind = "forward",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    teacher_ids: Tensor | None = None,
    teacher_logps: Tensor | None = None,
    logit_softcap: float | None = None,
    teacher_logit_softcap: float | None = None,
    weight_layout: WeightLayout = "vd",
    teacher_weight_layout: WeightLayout = "vd",
    global_vocab_size: int | None = None,
    teacher_global_vocab_size: int | None = None,
    memory_budget: int | None = None,
    tp_group: Any = None,
    vocab_start_index: int = 0,
    reduce_hidden_grad: bool = True,
    validate: bool | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Divergence of each token's next-token distribution under the student from that under the teacher;
    `rlk_jax.linear_kl` for tensors, which has the formulas.

    Args:
      hidden, lm_head_weight, bias: the student's, as in `linear_logp`.
      teacher_hidden, teacher_weight, teacher_bias: the teacher's, `[*lead, Dt]`, `[Vt, Dt]` and `[Vt]` or None, of any
        width. None where the teacher lists tokens. Under autocast they are cast as the student's are.
      completion_mask: `[*lead]`, bool, integer or float: a token counts where it is not 0. None means that all count.
      kind: "forward" is KL(teacher ‖ student), "reverse" is KL(student ‖ teacher), "jsd" the generalised
        Jensen-Shannon divergence.
      beta: the teacher's share of the mixture of "jsd", in [0, 1]; 0 is "forward" and 1 is "reverse", as in TRL.
      temperature, teacher_temperature: positive; a number, a tensor of one number, or a tensor `[*lead]`; None for the
        teacher's is the student's. They are not differentiated.
      teacher_ids, teacher_logps: `[*lead, k]`, in the place of the teacher's head and of all its options: the tokens
        that it lists, any integer dtype, each once, with −1 where a row has fewer; and their log-probs under it.
      logit_softcap, weight_layout, global_vocab_size and the teacher's: as in `linear_logp`. Both heads must come to
        one number of tokens.
      memory_budget: bytes for the logits and gradients that are held at a time; None for the default.
      tp_group, vocab_start_index, reduce_hidden_grad: as in `linear_logp`. Both heads and biases are then this rank's
        parts, which hold the same tokens; all else, the divergence too, is the same on every rank.
      validate: True checks temperatures and what the teacher lists before launch (one small read-back); False never
        waits for the device; None means True for CPU tensors and False for CUDA ones. A row with a bad value that is
        not checked gives NaN in its divergence and in every gradient it reaches.
      implementation: a name of `rlk_jax.dispatch.IMPLEMENTATIONS`, or None for the fastest that runs here.

    Returns:
      The divergence, float32 `[*lead]`, 0 at masked tokens.

    Raises:
      ValueError: for every argument that does not fit, in rlk_jax's words, before anything runs; for a tensor of the
        teacher that requires a gradient.
      RuntimeError: for second derivatives. Torch's own errors pass through.

    Gradients flow to hidden, lm_head_weight and bias, in their dtypes; one that is not needed costs no work. The
    teacher gets none, and neither head is copied.

    Same bits: the results have the bits of `rlk_jax.linear_kl` on the same arrays, for the implementations that promise
    bits, although rows are padded to one of a few sizes.
    """
    options = KlOptions(
        kind=kind,
        beta=beta,
        logit_softcap=logit_softcap,
        teacher_logit_softcap=teacher_logit_softcap,
        weight_layout=weight_layout,
        teacher_weight_layout=teacher_weight_layout,
        global_vocab_size=global_vocab_size,
        teacher_global_vocab_size=teacher_global_vocab_size,
        memory_budget=memory_budget,
        validate=validate,
        implementation=implementation,
    )
    if tp_group is not None or vocab_start_index != 0:
        from torch_bridge import _process_groups, _tensor_parallel_kl  # They take torch's compiler, as linear_logp's.

        if _process_groups.has_other_ranks(tp_group, vocab_start_index):
            rank = _process_groups.Rank(tp_group, vocab_start_index, global_vocab_size, reduce_hidden_grad)
            shards = _tensor_parallel_kl.Tensors(
                *(hidden, lm_head_weight, bias, teacher_hidden, teacher_weight, teacher_bias),
                *(completion_mask, teacher_ids, teacher_logps, temperature, teacher_temperature),
            )
            return _tensor_parallel_kl.tensor_parallel_kl(shards, rank, options)
    tensors = {"hidden": hidden, "lm_head_weight": lm_head_weight, "bias": bias, "teacher_hidden": teacher_hidden}
    tensors |= {"teacher_weight": teacher_weight, "teacher_bias": teacher_bias, "teacher_logps": teacher_logps}
    tensors |= {"completion_mask": completion_mask, "teacher_ids": teacher_ids}
    scale, teacher_scale = check_kl(tensors, temperature, teacher_temperature, options)
    check_flag("reduce_hidden_grad", reduce_hidden_grad)
    hidden, lm_head_weight, bias, teacher_hidden, teacher_weight, teacher_bias = _inputs.autocast(
        hidden, lm_head_weight, bias, teacher_hidden, teacher_weight, teacher_bias
    )
    lm_head_weight, layout = _inputs.without_transpose(lm_head_weight, weight_layout)
    teacher_layout = teacher_weight_layout
    if teacher_weight is not None:
        teacher_weight, teacher_layout = _inputs.without_transpose(teacher_weight, teacher_weight_layout)
    checked = replace(
        options,
        weight_layout=layout,
        teacher_weight_layout=teacher_layout,
        validate=_inputs.should_validate(validate, hidden),
    )
    floats = (hidden, lm_head_weight, bias, teacher_hidden, teacher_weight, teacher_bias)
    others = (completion_mask, teacher_ids, teacher_logps, *scale, *teacher_scale)
    divergence, _ = _linear_kl(*floats, *others, checked, _inputs.needs(*floats))
    return divergence


def _run(
    hidden: Any,
    weight: Any,
    bias: Any,
    teacher_hidden: Any,
    teacher_weight: Any,
    teacher_bias: Any,
    mask: Any,
    ids: Any,
    logps: Any,
    temperature: Any,
    teacher_temperature: Any,
    **options: Any,
) -> tuple[jax.Array]:
    ids = None if ids is None else _exchange.ids_of(ids, logps.shape)
    call = {"completion_mask": mask, "teacher_ids": ids, "teacher_logps": logps, "validate": False, **options}
    call |= {"temperature": temperature, "teacher_temperature": teacher_temperature}
    return (rlk_jax.linear_kl(hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, **call),)


# The teacher's head is among the tensors that are lent to a backward again, although it needs no gradient.
_OP = Op("linear_kl", _run, differentiable=6)
_OPTIONS = _options.OptionFields(KlOptions, without=_options.OF_A_MESH)


def _kernel(
    hidden: Tensor,
    lm_head_weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    teacher_bias: Tensor | None,
    completion_mask: Tensor | None,
    teacher_ids: Tensor | None,
    teacher_logps: Tensor | None,
    per_token: Tensor | None,
    temperature: float,
    teacher_per_token: Tensor | None,
    teacher_temperature: float | None,
    options: KlOptions,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """The divergence, and the handle for the backward."""
    heads = [hidden, lm_head_weight, bias, teacher_hidden, teacher_weight, teacher_bias]
    lead = hidden.shape[:-1]
    padding = _padding.flat(lead)
    scales = (per_token, temperature), (teacher_per_token, teacher_temperature)
    told = TokenTensors(completion_mask, teacher_ids, teacher_logps, *scales)

    def tokens() -> Arrays:
        return lent_tokens(padding, heads, told, options, validate=bool(options.validate))

    def rows(x: Tensor) -> jax.Array:
        return padding.rows(x, columns=1)

    lend = (rows, _exchange.lend, _exchange.lend) * 2
    call = _calls.Call(_OP, padding, _OPTIONS.static(options), lend, padding.rows)
    divergence, handle = call.forward(heads, tokens, needs, [_calls.Output(lead)])
    return divergence, handle


def _fake(hidden: Tensor, *others: Any) -> Any:
    return _calls.fake([_calls.Output(hidden.shape[:-1])], hidden.device)


def _check(name: str, arguments: dict[str, Any]) -> None:
    """The checks of a call from a compiled graph."""
    teacher = arguments.pop("teacher_per_token")
    _inputs.check_arguments(name, arguments if teacher is None else {**arguments, "teacher_temperature": teacher})


def _forward_flops(
    hidden: Any, weight: Any, bias: Any, teacher_hidden: Any, teacher_weight: Any, *_: Any, **__: Any
) -> int:
    """The operations of a forward: a product with each head."""
    own = _flops.product_flops(hidden, weight)
    return own if teacher_hidden is None else own + _flops.product_flops(teacher_hidden, teacher_weight)


_linear_kl = _calls.as_torch_op(
    "linear_kl", _kernel, _fake, [0, 1, 2, 3, 4, 5], options=_OPTIONS, flops=_forward_flops, check=_check
)
