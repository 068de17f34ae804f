"""Which loss of the GRPO family is computed: one frozen dataclass that checks itself."""

from dataclasses import dataclass
from typing import Literal, get_args

from rlk_jax.core import checks
from rlk_jax.losses.checks import (
    check_constant_length,
    check_dual_clip,
    check_log_ratio_bound,
    check_unused_option,
)

LossType = Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo", "sapo"]
Normaliser = Literal["tokens", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]

_NORMALISERS: dict[LossType, Normaliser] = {
    "dapo": "tokens",
    "grpo": "sequence_mean",
    "dr_grpo": "constant",
    "bnpo": "tokens",
    "gspo": "sequence_mean",
    "cispo": "tokens",
    "sapo": "sequence_mean",
}

_POSITIVE = (
    "dual_clip",
    "cispo_ratio_cap",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "importance_cap",
)
_CLIPPED: tuple[LossType, ...] = ("dapo", "grpo", "dr_grpo", "bnpo", "gspo")
_USED_BY: dict[str, tuple[LossType, ...]] = {
    "clip_eps": _CLIPPED,
    "clip_eps_high": _CLIPPED,
    "dual_clip": _CLIPPED,
    "cispo_ratio_cap": ("cispo",),
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
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
      beta: weight of the KL to the reference; above 0 it requires `ref_logps`.
      kl_estimator: which estimate of that KL is used: `k1_kl`, `k2_kl` or `k3_kl`.
      log_ratio_bound: log-ratios (policy to old, to reference, and old to rollout) count as at most this and at least
        its negative before exp or KL is taken of them; None for no bound. The bound is a constant, so a token beyond it
        has no gradient from that ratio or KL, and is not pulled back by it.
      importance_cap: truncates the importance weights exp(old − rollout); given together with `rollout_logps`.
      normaliser: "tokens" (mean over active tokens of the batch), "sequence_mean" (mean over sequences of their mean
        over tokens) or "constant" (sum over tokens / (sequences · max_completion_length)).
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

    def __post_init__(self) -> None:
        checks.require_one_of("loss_type", self.loss_type, get_args(LossType))
        checks.require_one_of("kl_estimator", self.kl_estimator, get_args(KlEstimator))
        checks.require_one_of("normaliser", self.normaliser, (None, *get_args(Normaliser)))
        for name in ("clip_eps", "clip_eps_high", "beta"):
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
        check_constant_length(self.normalised_by, self.max_completion_length)

    @property
    def upper_clip(self) -> float:
        """The upper end of the clip range."""
        return 1.0 + (self.clip_eps if self.clip_eps_high is None else self.clip_eps_high)

    @property
    def normalised_by(self) -> Normaliser:
        """The normaliser that was given, or else that of the loss type."""
        return self.normaliser or _NORMALISERS[self.loss_type]


def check_loss_options(options: object) -> None:
    """Raises ValueError unless the options are `LossOptions`, which a dictionary of options and None are not."""
    if not isinstance(options, LossOptions):
        raise ValueError(f"options must be LossOptions, got {type(options).__name__}.")
