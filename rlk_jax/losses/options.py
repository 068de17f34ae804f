"""Which loss of the GRPO family is computed: one frozen dataclass that checks itself."""

from dataclasses import dataclass
from typing import Literal, get_args

from rlk_jax.core import checks
from rlk_jax.losses.checks import (
    check_constant_length,
    check_dual_clip,
    check_importance,
    check_log_ratio_bound,
    check_unused_option,
)

LossType = Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "luspo", "cispo", "sapo", "vespo"]
Normaliser = Literal["tokens", "sequence_mean", "sequence_sum", "constant"]
KlEstimator = Literal["k1", "k2", "k3", "ratio_k3"]

ImportanceLevel = Literal["token", "sequence"]
ImportanceBeyond = Literal["truncate", "mask"]

_NORMALISERS: dict[LossType, Normaliser] = {
    "dapo": "tokens",
    "grpo": "sequence_mean",
    "dr_grpo": "constant",
    "bnpo": "tokens",
    "gspo": "sequence_mean",
    "luspo": "sequence_sum",
    "cispo": "tokens",
    "sapo": "sequence_mean",
    "vespo": "tokens",
}

_POSITIVE = (
    "dual_clip",
    "cispo_ratio_cap",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "importance_cap",
    "importance_floor",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)
_OF_SEQUENCES: tuple[LossType, ...] = ("gspo", "luspo", "vespo")
"""The loss types whose ratios or weights are those of whole sequences."""
_CLIPPED: tuple[LossType, ...] = ("dapo", "grpo", "dr_grpo", "bnpo", "gspo", "luspo")
_USED_BY: dict[str, tuple[LossType, ...]] = {
    "clip_eps": _CLIPPED,
    "clip_eps_high": _CLIPPED,
    "dual_clip": _CLIPPED,
    "cispo_ratio_cap": ("cispo",),
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
}
"""The options that not every loss type uses, each with the loss types that use it."""


@dataclass(frozen=True)
class LossOptions:
    """Which loss `policy_loss` computes; docs/losses.md has the formulas and other libraries' names.

    Attributes:
      loss_type: the objective of a token, and the normaliser when `normaliser` is None.
      clip_eps, clip_eps_high: the clip range [1 − clip_eps, 1 + clip_eps_high]; clip_eps_high None is clip_eps.
      dual_clip: where the advantage is negative, the ratio counts as at most this; None for no bound.
      cispo_ratio_cap: the largest ratio by which cispo weighs a token (the ratio itself, not its excess over 1).
      sapo_temperature_pos, sapo_temperature_neg: temperatures of sapo's gate, for positive advantages and all others.
      vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: the shape of vespo's weights, where advantages are
        not negative and elsewhere.
      beta: weight of the KL to the reference; above 0 it requires `ref_logps`.
      kl_estimator: which estimate of that KL is used: `k1_kl`, `k2_kl`, `k3_kl`, or "ratio_k3", which is k3 times the
        ratio that the loss has: its mean over old samples is the KL, and its gradient the KL's.
      entropy_coef: weight of an entropy bonus, which is subtracted from the loss; above 0 it requires `entropy`.
      log_ratio_bound: log-ratios (policy to old, to reference, and old to rollout) count as at most this and at least
        its negative before exp or KL is taken of them; None for no bound. The bound is a constant, so a token beyond it
        has no gradient from that ratio or KL, and is not pulled back by it.
      importance_cap: the largest importance weight exp(old − rollout); given together with `rollout_logps`.
      importance_floor: the smallest importance weight; None for none.
      importance_level: whether a token's weight is its own ("token") or the product over its sequence ("sequence").
      importance_beyond: whether a weight beyond cap or floor is cut to it ("truncate") or is 0 ("mask").
      normaliser: "tokens" (mean over active tokens of the batch), "sequence_mean" (mean over sequences of their mean
        over tokens), "sequence_sum" (mean over sequences of their sum over tokens) or "constant" (sum over tokens /
        (sequences · max_completion_length)).
      max_completion_length: the length that the "constant" normaliser counts.

    Raises ValueError for a value that cannot work, and for a changed option that the loss type does not use.
    """

    loss_type: LossType = "dapo"
    clip_eps: float = 0.2
    clip_eps_high: float | None = None
    dual_clip: float | None = None
    cispo_ratio_cap: float = 5.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    beta: float = 0.0
    kl_estimator: KlEstimator = "k3"
    log_ratio_bound: float | None = None
    importance_cap: float | None = None
    normaliser: Normaliser | None = None
    max_completion_length: int | None = None
    entropy_coef: float = 0.0
    importance_floor: float | None = None
    importance_level: ImportanceLevel = "token"
    importance_beyond: ImportanceBeyond = "truncate"
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        checks.require_one_of("loss_type", self.loss_type, get_args(LossType))
        checks.require_one_of("kl_estimator", self.kl_estimator, get_args(KlEstimator))
        checks.require_one_of("normaliser", self.normaliser, (None, *get_args(Normaliser)))
        checks.require_one_of("importance_level", self.importance_level, get_args(ImportanceLevel))
        checks.require_one_of("importance_beyond", self.importance_beyond, get_args(ImportanceBeyond))
        for name in ("clip_eps", "clip_eps_high", "beta", "entropy_coef"):
            if (value := getattr(self, name)) is not None:
                checks.require_not_negative(name, value)
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None:
                checks.require_positive(name, value)
        check_log_ratio_bound(self.log_ratio_bound)
        for name, users in _USED_BY.items():
            if self.loss_type not in users:
                check_unused_option(self.loss_type, name, getattr(self, name), getattr(LossOptions, name))
        check_dual_clip(self.dual_clip, self.upper_clip)
        check_importance(self)
        check_constant_length(self.normalised_by, self.max_completion_length)

    @property
    def upper_clip(self) -> float:
        """The upper end of the clip range."""
        return 1.0 + (self.clip_eps if self.clip_eps_high is None else self.clip_eps_high)

    @property
    def normalised_by(self) -> Normaliser:
        """The normaliser that was given, or else that of the loss type."""
        return self.normaliser or _NORMALISERS[self.loss_type]

    @property
    def is_sum_over_tokens(self) -> bool:
        """Whether the loss is a sum over tokens of what each one's own log-prob gives, divided by counts of the mask.

        The gradient of a token's log-prob is then the same whatever the log-probs of other tokens are; of any other
        loss it depends on those of the token's sequence.
        """
        return self.loss_type not in _OF_SEQUENCES


def check_loss_options(options: object) -> None:
    """Raises ValueError unless the options are `LossOptions`, which a dictionary of options and None are not."""
    if not isinstance(options, LossOptions):
        raise ValueError(f"options must be LossOptions, got {type(options).__name__}.")
