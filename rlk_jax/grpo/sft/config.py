"""The configuration of a `rlk sft` run: one frozen dataclass that checks itself."""

from dataclasses import dataclass
from typing import ClassVar

from rlk_jax.core.checks import require_not_negative
from rlk_jax.grpo.run_config import BadField, RunConfig, option, with_marks
from rlk_jax.ops.linear_logp.checks import check_label_smoothing


@dataclass(frozen=True)
class SftConfig(RunConfig):
    """One run of `rlk sft`. Equal configurations give equal parameters, bit for bit, on equal CPUs and versions;
    docs/grpo.md says what holds on GPUs.

    Raises BadInput, in one line that names the field, for a value that cannot work.
    """

    name: ClassVar[str] = "sft"
    files_digest: ClassVar[str] = "data_digest"
    measured: ClassVar[str] = "held out"

    model: str | None = option(None, "directory of the Hugging Face checkpoint to train")
    data: str | None = option(None, "JSONL file of prompts and their completions")
    eval_data: str | None = option(None, "JSONL file of held-out rows (default: a fifth of the data is held out)")
    max_tokens: int | None = option(
        None, "leave out rows of more tokens, prompt and completion together (default: none)", minimum=3
    )
    steps: int = option(100, "steps, of one update each", minimum=1)
    rows_per_step: int = option(32, "rows of the data per step", minimum=1)
    learning_rate: float = option(1e-5, "learning rate of the updates", above=0)
    weight_decay: float = option(
        0.0, "weight decay of the model's matrices, times the learning rate (AdamW)", minimum=0
    )
    eval_every: int | None = option(
        None, "steps between losses of the held-out rows (default: before and after the run alone)", minimum=1
    )
    z_loss: float = option(0.0, "weight of the square of ln Σ exp z in the loss", minimum=0)
    label_smoothing: float = option(0.0, "part of each target that is spread evenly over the vocabulary, from 0 to 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, what in (("model", "a Hugging Face checkpoint's directory"), ("data", "a JSONL file of completions")):
            if getattr(self, name) is None:
                raise BadField(f"`{name}` is missing: {what}")
        try:
            require_not_negative("z_loss", self.z_loss)
            check_label_smoothing(self.label_smoothing)
        except ValueError as error:
            raise BadField(with_marks(str(error), ["z_loss", "label_smoothing"])) from error
        self._check_schedule_warmup("steps")
        self._check_batch("rows_per_step", 1, ("micro_batches",))

    @property
    def total_steps(self) -> int:
        return self.steps

    @property
    def scheduled_updates(self) -> tuple[int, int]:
        return self.steps, self.schedule_warmup

    def evaluates(self, done: int) -> bool:
        return self.eval_every is not None and done % self.eval_every == 0

    @property
    def smooths_labels(self) -> bool:
        return self.label_smoothing > 0

    @property
    def left_out(self) -> str:
        return f"rows of more than {self.max_tokens} tokens"
