"""The configuration of a `rlk grpo` run: one frozen dataclass that checks itself."""

import math
import numbers
import re
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from rlk_jax.grpo.vocabulary import VOCAB_SIZE
from rlk_jax.losses import LossOptions

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
)
"""Fields of a given model, which the built-in policy has not."""


class BadInput(ValueError):
    """An input of the user that cannot work; the command line shows it as one line."""


class Diverged(ArithmeticError):
    """A number in training is not finite; the command line shows it as one line."""


class Bounds(NamedTuple):
    """The bounds of a number: at least `minimum`, greater than `above`, less than `below`."""

    minimum: float | None = None
    above: float | None = None
    below: float | None = None


def _option(
    default: Any,
    description: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of `GrpoConfig`, with its command-line help and the bounds of its value."""
    return field(default=default, metadata={"help": description, "bounds": Bounds(minimum, above, below)})


@dataclass(frozen=True)
class GrpoConfig:
    """One run of `rlk grpo`. Equal configurations give equal parameters, bit for bit, on equal CPUs and versions;
    docs/grpo.md says what holds on GPUs.

    Raises BadInput, in one line that names the field, for a value that cannot work.
    """

    seed: int = _option(0, "seed of weights, batches and samples", minimum=0, below=2**32)
    warmup_steps: int = _option(500, "supervised steps before GRPO", minimum=0)
    grpo_steps: int = _option(200, "GRPO steps", minimum=1)
    prompts_per_step: int = _option(32, "prompts per GRPO step", minimum=1)
    samples_per_prompt: int = _option(8, "completions per prompt: one group", minimum=2)
    updates_per_rollout: int = _option(3, "optimizer steps on each rollout", minimum=1)
    micro_batches: int = _option(1, "equal parts of a batch whose gradients are added up, to save memory", minimum=1)
    packing: bool = _option(
        False,
        "updates pack several sequences into a row of tokens, and skip micro-batches that are empty then",
    )
    rollout_buckets: int = _option(
        1, "equal parts of a rollout; a part holds prompts of about the same length, padded to little more", minimum=1
    )
    warmup_learning_rate: float = _option(2e-3, "learning rate of the supervised phase", above=0)
    learning_rate: float = _option(3e-4, "learning rate of GRPO", above=0)
    schedule: str = _option("constant", "learning rate of GRPO over its updates: constant, linear or cosine, to 0")
    schedule_warmup: int = _option(0, "GRPO steps over which its learning rate rises from 0", minimum=0)
    max_gradient_norm: float = _option(1.0, "norm that gradients are clipped to", above=0)
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
    skip_nonfinite: bool = _option(
        False, "skip an update whose loss or gradient is not finite, instead of ending the run"
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
    prompts: str | None = _option(None, "JSONL file of prompt/answer pairs, instead of arithmetic")
    max_prompt_tokens: int | None = _option(
        None, "leave out prompts of the file that have more tokens (default: none)", minimum=1
    )
    model: str | None = _option(
        None, "directory of a Hugging Face checkpoint to train, instead of the built-in policy; it needs prompts"
    )
    reward: str = _option(
        "exact", 'rewards of completions: "module:function", with a weight "module:function=0.5", several by commas'
    )
    eval_prompts: str | None = _option(
        None, "JSONL file of held-out prompts of a model (default: a fifth of the prompts is held out)"
    )
    max_new_tokens: int = _option(128, "tokens of a completion of a model, at most", minimum=1)
    temperature: float = _option(1.0, "temperature that completions of a model are sampled at", above=0)
    top_k: int | None = _option(None, "sample among so many most probable tokens (default: all)", minimum=1)
    top_p: float | None = _option(None, "sample among the fewest tokens of this probability (default: all)", above=0)
    min_p: float | None = _option(None, "sample among tokens so probable beside the first (default: all)", above=0)
    lora_rank: int | None = _option(
        None,
        "train low-rank terms (LoRA) of this rank beside a model's frozen weights (default: train these)",
        minimum=1,
    )
    remat: bool = _option(False, "recompute each layer of a model in the backward pass, to save memory")
    save_hf: str | None = _option(None, "directory to write the trained model to, as transformers and vLLM load it")
    show_every: int = _option(10, "steps between printed completions of a model", minimum=1)
    mesh: str = _option(
        "data=1,tensor=1", "devices along each mesh axis: batches are sharded over data, the LM head over tensor"
    )
    implementation: str | None = _option(
        None, "implementation of linear_logp (default: the fastest that runs; with invariant, one that promises bits)"
    )
    compute_dtype: str = _option(
        "float32",
        "dtype of dense layers, attention and LM head: float32 or bfloat16; parameters are float32",
    )
    invariant: bool = _option(
        False, "use layers of rlk_jax.nn: the log-probs of a rollout are those of training, bit for bit (bfloat16 only)"
    )
    shuffle_advantages: bool = _option(False, "control: permute advantages over the samples, so nothing is learnt")
    checkpoint_every: int = _option(100, "steps between checkpoints", minimum=1)

    def __post_init__(self) -> None:
        for option in fields(self):
            _check_bounds(option.name, getattr(self, option.name), option.metadata["bounds"])
        changed = {option.name for option in fields(self) if getattr(self, option.name) != option.default}
        for name in _ARITHMETIC_FIELDS:
            if self.prompts is not None and name in changed:
                raise BadInput(f"{name} is of the arithmetic prompts: it has no meaning beside prompts")
        if self.max_prompt_tokens is not None and self.prompts is None:
            raise BadInput("max_prompt_tokens is of a prompts file: it has no meaning without prompts")
        self._check_model(changed)
        self._check_loss()
        if self.width % self.heads or self.width // self.heads % 2:
            raise BadInput(f"width must be an even multiple of heads, got width {self.width} and {self.heads} heads")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise BadInput(f"compute_dtype must be float32 or bfloat16, got {self.compute_dtype!r}")
        if self.invariant and self.compute_dtype != "bfloat16":
            raise BadInput(f"invariant needs compute_dtype bfloat16, got {self.compute_dtype}")
        data, tensor = self.mesh_shape
        if self.lora_rank is not None and tensor > 1:
            raise BadInput(f"lora_rank needs a whole head, as in mesh data=N,tensor=1, got {self.mesh}")
        if self.prompts_per_step % data:
            raise BadInput(f"prompts_per_step ({self.prompts_per_step}) must be a multiple of the data axis ({data})")
        rows = self.prompts_per_step * self.samples_per_prompt // data
        for name in ("micro_batches", "rollout_buckets"):
            if rows % getattr(self, name):
                raise BadInput(f"{name} ({getattr(self, name)}) must divide a device's {rows} samples of a step")
        if self.packing and self.micro_batches == 1:
            raise BadInput("packing needs micro_batches of at least 2: what it saves is whole parts of a batch")

    def _check_model(self, changed: set[str]) -> None:
        """Options of a given model and of the built-in policy do not mix."""
        if self.model is None:
            for name in _MODEL_FIELDS:
                if name in changed:
                    raise BadInput(f"{name} is of a given model: it has no meaning without model")
            return
        for name in _BUILT_IN_FIELDS:
            if name in changed and (name, self.warmup_steps) != ("warmup_steps", 0):
                raise BadInput(f"{name} is of the built-in policy: it has no meaning beside model")
        # A given model has no warm start.
        object.__setattr__(self, "warmup_steps", 0)
        if self.prompts is None:
            raise BadInput("model needs prompts, a JSONL file (rlk prompts arithmetic writes one)")

    def _check_loss(self) -> None:
        """The loss, and what it does not go with."""
        normalised_by = self.loss_options().normalised_by
        if self.packing and normalised_by.startswith("sequence"):
            raise BadInput(f"packing does not go with normaliser {normalised_by}: a row would count as one sequence")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise BadInput(f"schedule must be constant, linear or cosine, got {self.schedule!r}")
        if self.schedule_warmup > self.grpo_steps:
            raise BadInput(f"schedule_warmup ({self.schedule_warmup}) must be at most grpo_steps ({self.grpo_steps})")

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """Devices along ("data", "tensor"). Raises BadInput when `mesh` does not read `data=N,tensor=M`."""
        names, _, sizes = zip(*(part.partition("=") for part in self.mesh.split(",")), strict=True)
        if names != ("data", "tensor") or not all(re.fullmatch("[1-9][0-9]{0,8}", size) for size in sizes):
            raise BadInput(f"mesh must read data=N,tensor=M with N, M at least 1, got {self.mesh!r}")
        return int(sizes[0]), int(sizes[1])

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
            raise BadInput(str(error)) from error

    @property
    def total_steps(self) -> int:
        """Steps of both phases; checkpoints and metrics number them from 0 through both."""
        return self.warmup_steps + self.grpo_steps


def _check_bounds(name: str, value: Any, bounds: Bounds) -> None:
    if value is None:
        return
    minimum, above, below = bounds
    if isinstance(value, numbers.Real) and not math.isfinite(value):
        raise BadInput(f"{name} must be finite, got {value}")
    if minimum is not None and value < minimum:
        raise BadInput(f"{name} must be at least {minimum}, got {value}")
    if above is not None and value <= above:
        raise BadInput(f"{name} must be greater than {above}, got {value}")
    if below is not None and value >= below:
        raise BadInput(f"{name} must be less than {below}, got {value}")
