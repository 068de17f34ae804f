"""The configuration of a `rlk grpo` run: one frozen dataclass that checks itself."""

import typing
from dataclasses import dataclass, fields
from typing import ClassVar

from rlk_jax.grpo.run_config import BadField, RunConfig, with_marks
from rlk_jax.grpo.run_config import BadInput as BadInput
from rlk_jax.grpo.run_config import option as _option
from rlk_jax.grpo.vocabulary import VOCAB_SIZE
from rlk_jax.losses import LossOptions
from rlk_jax.ops.linear_kl.options import DivergenceKind

_ARITHMETIC_FIELDS = ("max_operand", "demonstration_errors")
_BUILT_IN_FIELDS = (
    "warmup_steps",
    "warmup_learning_rate",
    "rollout_buckets",
    "width",
    "layers",
    "heads",
    "vocab_size",
    *_ARITHMETIC_FIELDS,
)
"""Fields of the built-in policy, which a given model has not."""
_MODEL_FIELDS = (
    "reward",
    "eval_prompts",
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "lora_rank",
    "remat",
    "save_hf",
    "show_every",
    "teacher",
)
"""Fields of a given model, which the built-in policy has not."""


_TEACHER_FIELDS = ("teacher_kind", "teacher_beta", "teacher_coef", "teacher_only")
"""Fields that say how a policy learns from a teacher."""


@dataclass(frozen=True)
class GrpoConfig(RunConfig):
    """One run of `rlk grpo`. Equal configurations give equal parameters, bit for bit, on equal CPUs and versions;
    docs/grpo.md says what holds on GPUs.

    Raises BadInput, in one line that names the field, for a value that cannot work.
    """

    name: ClassVar[str] = "grpo"
    files_digest: ClassVar[str] = "prompts_digest"
    measured: ClassVar[str] = "held-out reward"

    warmup_steps: int = _option(500, "supervised steps before GRPO", minimum=0)
    grpo_steps: int = _option(200, "GRPO steps", minimum=1)
    prompts_per_step: int = _option(32, "prompts per GRPO step", minimum=1)
    samples_per_prompt: int = _option(8, "completions per prompt: one group", minimum=2)
    updates_per_rollout: int = _option(3, "optimizer steps on each rollout", minimum=1)
    rollout_buckets: int = _option(
        1, "equal parts of a rollout; a part holds prompts of about the same length, padded to little more", minimum=1
    )
    warmup_learning_rate: float = _option(2e-3, "learning rate of the supervised phase", above=0)
    clip_eps: float = _option(0.2, "clip range of the probability ratio", above=0)
    beta: float = _option(0.01, "weight of the KL to the reference", minimum=0)
    loss_type: str = _option("dapo", "objective of a token: dapo, grpo, dr_grpo, bnpo, gspo, luspo, cispo, sapo, vespo")
    normaliser: str | None = _option(
        None, "what the loss is divided by: tokens, sequence_mean, sequence_sum, constant (default: the loss type's)"
    )
    max_completion_length: int | None = _option(
        None, "length that the normaliser constant counts (default: max-new-tokens of a model)", minimum=1
    )
    kl_estimator: str = _option("k3", "estimate of the KL: k1, k2, k3 or ratio_k3")
    clip_eps_high: float | None = _option(None, "upper clip range (default: clip-eps)", above=0)
    dual_clip: float | None = _option(None, "largest ratio where the advantage is negative (default: none)", above=0)
    cispo_ratio_cap: float = _option(5.0, "largest ratio by which cispo weighs a token", above=0)
    sapo_temperature_pos: float = _option(1.0, "temperature of sapo's gate for positive advantages", above=0)
    sapo_temperature_neg: float = _option(1.05, "temperature of sapo's gate for other advantages", above=0)
    vespo_k_pos: float = _option(2.0, "k of vespo's weights where advantages are not negative", above=0)
    vespo_lambda_pos: float = _option(3.0, "lambda of vespo's weights where advantages are not negative", above=0)
    vespo_k_neg: float = _option(3.0, "k of vespo's weights where advantages are negative", above=0)
    vespo_lambda_neg: float = _option(2.0, "lambda of vespo's weights where advantages are negative", above=0)
    entropy_coef: float = _option(0.0, "weight of an entropy bonus", minimum=0)
    importance_cap: float | None = _option(
        None, "largest importance weight between rollouts and training (default: no weights)", above=0
    )
    importance_floor: float | None = _option(None, "smallest importance weight (default: none)", above=0)
    importance_level: str = _option("token", "whose importance weight a token has: its own (token) or its sequence's")
    importance_beyond: str = _option("truncate", "weights beyond cap or floor: truncate cuts them, mask makes them 0")
    log_ratio_bound: float | None = _option(
        None,
        "bound of log-ratios in the loss and its KL, so that no token makes them infinite (default: none)",
        above=0,
    )
    width: int = _option(64, "model width", minimum=1)
    layers: int = _option(2, "decoder layers", minimum=1)
    heads: int = _option(4, "attention heads", minimum=1)
    vocab_size: int | None = _option(
        None,
        "tokens of the policy; those beyond the characters mean nothing (default: as many as the characters need)",
        minimum=VOCAB_SIZE,
        below=2**31,
    )
    max_operand: int = _option(69, "largest operand of the arithmetic prompts", minimum=4, below=1000)
    demonstration_errors: float = _option(
        0.5, "share of arithmetic warm-start answers that are another prompt's, for GRPO to correct", minimum=0, below=1
    )
    prompts: str | None = _option(
        None,
        "JSONL file of prompts: with a model, of any columns that rewards take; without one, of prompt/answer pairs, "
        "instead of arithmetic",
    )
    max_prompt_tokens: int | None = _option(
        None, "leave out prompts of the file that have more tokens (default: none)", minimum=1
    )
    reward: str = _option(
        "exact",
        'rewards of completions: "module:function", "path/file.py:function", exact or last_number, with a weight '
        '"module:function=0.5", several by commas',
    )
    eval_prompts: str | None = _option(
        None, "JSONL file of held-out prompts of a model (default: a fifth of the prompts is held out)"
    )
    max_new_tokens: int = _option(128, "tokens of a completion of a model, at most", minimum=1)
    temperature: float = _option(1.0, "temperature that completions of a model are sampled at", above=0)
    top_k: int | None = _option(None, "sample among so many most probable tokens (default: all)", minimum=1)
    top_p: float | None = _option(None, "sample among the fewest tokens of this probability (default: all)", above=0)
    min_p: float | None = _option(None, "sample among tokens so probable beside the first (default: all)", above=0)
    show_every: int = _option(10, "steps between printed completions of a model", minimum=1)
    teacher: str | None = _option(
        None, "directory of a Hugging Face checkpoint, a frozen teacher: a model also learns its distribution of tokens"
    )
    teacher_kind: str = _option("reverse", "divergence from the teacher: reverse, forward or jsd")
    teacher_beta: float = _option(0.5, "the teacher's share of the mixture of jsd", above=0, below=1)
    teacher_coef: float = _option(1.0, "weight of the divergence from the teacher", above=0)
    teacher_only: bool = _option(
        False, "train on the divergence from the teacher alone (on-policy distillation), not on rewards"
    )
    shuffle_advantages: bool = _option(False, "control: permute advantages over the samples, so nothing is learnt")

    def __post_init__(self) -> None:
        super().__post_init__()
        changed = {option.name for option in fields(self) if getattr(self, option.name) != option.default}
        for name in _ARITHMETIC_FIELDS:
            if self.prompts is not None and name in changed:
                raise BadField(f"`{name}` is of the arithmetic prompts: it has no meaning beside `prompts`")
        if self.max_prompt_tokens is not None and self.prompts is None:
            raise BadField("`max_prompt_tokens` is of a prompts file: it has no meaning without `prompts`")
        self._check_teacher(changed)
        self._check_model(changed)
        self._check_loss()
        self._check_schedule_warmup("grpo_steps")
        if self.width % self.heads or self.width // self.heads % 2:
            raise BadField(f"`width` must be an even multiple of `heads`, got {self.width} and {self.heads}")
        self._check_batch("prompts_per_step", self.samples_per_prompt, ("micro_batches", "rollout_buckets"))

    def _check_model(self, changed: set[str]) -> None:
        """Options of a given model and of the built-in policy do not mix."""
        if self.model is None:
            for name in _MODEL_FIELDS:
                if name in changed:
                    raise BadField(f"`{name}` is of a given model: it has no meaning without `model`")
            return
        for name in _BUILT_IN_FIELDS:
            if name in changed and (name, self.warmup_steps) != ("warmup_steps", 0):
                raise BadField(f"`{name}` is of the built-in policy: it has no meaning beside `model`")
        # A given model has no warm start.
        object.__setattr__(self, "warmup_steps", 0)
        if self.prompts is None:
            raise BadField("`model` needs `prompts`, a JSONL file (rlk prompts arithmetic writes one)")

    def _check_teacher(self, changed: set[str]) -> None:
        """Options of a teacher need one, and one that replaces GRPO's loss leaves no meaning to options of this."""
        if self.teacher is None:
            for name in _TEACHER_FIELDS:
                if name in changed:
                    raise BadField(f"`{name}` is of a teacher: it has no meaning without `teacher`")
            return
        if self.teacher_kind not in typing.get_args(DivergenceKind):
            raise BadField(f"`teacher_kind` must be reverse, forward or jsd, got {self.teacher_kind!r}")
        if "teacher_beta" in changed and self.teacher_kind != "jsd":
            raise BadField(f"`teacher_beta` is of jsd: it has no meaning beside `teacher_kind` {self.teacher_kind}")
        if self.lora_rank is not None:
            raise BadField("`teacher` does not go with `lora_rank`: linear_kl takes no low-rank term of a head")
        if self.teacher_only:
            for option in fields(LossOptions):
                if option.name in changed and (option.name, self.beta) != ("beta", 0):
                    raise BadField(f"`{option.name}` is of GRPO's loss: it has no meaning beside `teacher_only`")
            if self.shuffle_advantages:
                raise BadField("`shuffle_advantages` is of GRPO's loss: it has no meaning beside `teacher_only`")
            # The loss that is dropped has no reference.
            object.__setattr__(self, "beta", 0.0)

    def _check_loss(self) -> None:
        """The loss, and what it does not go with."""
        normalised_by = self.loss_options().normalised_by
        if self.packing and normalised_by.startswith("sequence"):
            why = "a row would count as one sequence"
            raise BadField(f"`packing` does not go with `normaliser` {normalised_by}: {why}")

    def loss_options(self) -> LossOptions:
        """The options of the loss of GRPO's updates. Raises BadInput for numbers that it does not take."""
        given = {
            option.name: getattr(self, option.name) for option in fields(LossOptions) if hasattr(self, option.name)
        }
        if self.model is not None and (self.normaliser == "constant" or self.loss_type == "dr_grpo"):
            given["max_completion_length"] = self.max_completion_length or self.max_new_tokens
        try:
            return LossOptions(**given)
        except ValueError as error:
            raise BadField(with_marks(str(error), [x.name for x in fields(LossOptions)])) from error

    @property
    def total_steps(self) -> int:
        return self.warmup_steps + self.grpo_steps

    @property
    def scheduled_updates(self) -> tuple[int, int]:
        return self.grpo_steps * self.updates_per_rollout, self.schedule_warmup * self.updates_per_rollout

    @property
    def sampled_with(self) -> tuple[float, int | None, float | None, float | None]:
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def read_models(self) -> list[str]:
        return [*super().read_models, *([] if self.teacher is None else [self.teacher])]

    @property
    def left_out(self) -> str:
        return f"prompts of more than {self.max_prompt_tokens} tokens"

    def shows(self, step: int) -> bool:
        return step % self.show_every == 0 or step + 1 == self.total_steps
