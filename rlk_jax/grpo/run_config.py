"""What the configuration of every run has, by whichever command: a frozen dataclass that checks itself."""

import math
import numbers
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

_MARKED = re.compile("`([a-z_]+)`")


class BadInput(ValueError):
    """An input of the user that cannot work; the command line shows it as one line."""


class BadField(BadInput):
    """Fields of a configuration that cannot work. The message has their names in backquotes. Python shows them as they
    are, and the command line, by `of_options`, as its options. `marked` is the message for another `BadField`.
    """

    def __init__(self, message: str) -> None:
        self.marked = message
        super().__init__(_MARKED.sub(r"\1", message))
        self.of_options = _MARKED.sub(lambda found: flag_of(found[1]), message)


def flag_of(name: str) -> str:
    """The option of the command line that gives a field its value."""
    return "--" + name.replace("_", "-")


def with_marks(message: str, names: Iterable[str]) -> str:
    """A message of other code for `BadField`: the names of fields in it get their backquotes, but not in a value."""
    return re.sub(rf"(?<!['\w])({'|'.join(names)})(?!['\w(])", r"`\1`", message)


class Diverged(ArithmeticError):
    """A number in training is not finite; the command line shows it as one line."""


class Bounds(NamedTuple):
    """The bounds of a number: at least `minimum`, greater than `above`, less than `below`."""

    minimum: float | None = None
    above: float | None = None
    below: float | None = None


def option(
    default: Any,
    description: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of a configuration, with its command-line help and the bounds of its value."""
    return field(default=default, metadata={"help": description, "bounds": Bounds(minimum, above, below)})


@dataclass(frozen=True)
class RunConfig:
    """What every command that trains has: the options of its model, its updates and its devices.

    Raises BadInput, in one line that names the field, for a value that cannot work.
    """

    name: ClassVar[str]
    """The command, which metrics have as the name of its steps, too."""
    files_digest: ClassVar[str]
    """What the hash of the files that a run is trained on is called, by which its folder is known."""
    measured: ClassVar[str]
    """What an evaluation measures, as the heading of a table."""

    seed: int = option(0, "seed of weights, batches and samples", minimum=0, below=2**32)
    model: str | None = option(
        None, "directory of a Hugging Face checkpoint to train, instead of the built-in policy; it needs prompts"
    )
    learning_rate: float = option(3e-4, "learning rate of the updates", above=0)
    schedule: str = option("constant", "learning rate over the updates: constant, linear or cosine, to 0")
    schedule_warmup: int = option(0, "steps over which the learning rate rises from 0", minimum=0)
    max_gradient_norm: float = option(1.0, "norm that gradients are clipped to", above=0)
    micro_batches: int = option(1, "equal parts of a batch whose gradients are added up, to save memory", minimum=1)
    packing: bool = option(
        False,
        "updates pack several sequences into a row of tokens, and skip micro-batches that are empty then",
    )
    skip_nonfinite: bool = option(
        False, "skip an update whose loss or gradient is not finite, instead of ending the run"
    )
    lora_rank: int | None = option(
        None,
        "train low-rank terms (LoRA) of this rank beside a model's frozen weights (default: train these)",
        minimum=1,
    )
    remat: bool = option(False, "recompute each layer of a model in the backward pass, to save memory")
    save_hf: str | None = option(None, "directory to write the trained model to, as transformers and vLLM load it")
    mesh: str = option(
        "data=1,tensor=1", "devices along each mesh axis: batches are sharded over data, the LM head over tensor"
    )
    implementation: str | None = option(
        None, "implementation of linear_logp (default: the fastest that runs; with invariant, one that promises bits)"
    )
    compute_dtype: str = option(
        "float32",
        "dtype of dense layers, attention and LM head: float32 or bfloat16; parameters are float32",
    )
    invariant: bool = option(
        False, "use layers of rlk_jax.nn: the log-probs of a rollout are those of training, bit for bit (bfloat16 only)"
    )
    checkpoint_every: int = option(100, "steps between checkpoints", minimum=1)

    def __post_init__(self) -> None:
        for option in fields(self):
            _check_bounds(option.name, getattr(self, option.name), option.metadata["bounds"])
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise BadField(f"`compute_dtype` must be float32 or bfloat16, got {self.compute_dtype!r}")
        if self.invariant and self.compute_dtype != "bfloat16":
            raise BadField(f"`invariant` needs `compute_dtype` bfloat16, got {self.compute_dtype}")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise BadField(f"`schedule` must be constant, linear or cosine, got {self.schedule!r}")
        if self.lora_rank is not None and self.mesh_shape[1] > 1:
            raise BadField(f"`lora_rank` needs a whole head, as in `mesh` data=N,tensor=1, got {self.mesh}")
        if self.packing and self.micro_batches == 1:
            raise BadField("`packing` needs `micro_batches` of at least 2: what it saves is whole parts of a batch")

    def _check_schedule_warmup(self, steps: str) -> None:
        """`steps` names the field that counts the steps of the schedule."""
        warmup, most = self.schedule_warmup, getattr(self, steps)
        if warmup > most:
            raise BadField(f"`schedule_warmup` ({warmup}) must be at most `{steps}` ({most})")

    def _check_batch(self, taken: str, rows_for_each: int, parts: Sequence[str]) -> None:
        """`taken` names the field that counts what a step takes, for each of which it has so many rows; `parts` names
        those that cut the rows of a device.
        """
        count, data = getattr(self, taken), self.mesh_shape[0]
        if count % data:
            raise BadField(f"`{taken}` ({count}) must be a multiple of the data axis ({data})")
        rows = count * rows_for_each // data
        for name in parts:
            if rows % getattr(self, name):
                raise BadField(f"`{name}` ({getattr(self, name)}) must divide a device's {rows} samples of a step")

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """Devices along ("data", "tensor"). Raises BadInput when `mesh` does not read `data=N,tensor=M`."""
        names, _, sizes = zip(*(part.partition("=") for part in self.mesh.split(",")), strict=True)
        if names != ("data", "tensor") or not all(re.fullmatch("[1-9][0-9]{0,8}", size) for size in sizes):
            raise BadField(f"`mesh` must read data=N,tensor=M with N, M at least 1, got {self.mesh!r}")
        return int(sizes[0]), int(sizes[1])

    @property
    def total_steps(self) -> int:
        """Steps of all phases; checkpoints and metrics number them from 0 through all."""
        raise NotImplementedError

    @property
    def scheduled_updates(self) -> tuple[int, int]:
        """The updates that the schedule of the learning rate spans, and those over which the rate rises."""
        raise NotImplementedError

    @property
    def sampled_with(self) -> tuple[float, int | None, float | None, float | None]:
        """temperature, top_k, top_p and min_p of completions. A run that draws none has log-probs of temperature 1."""
        return 1.0, None, None, None

    @property
    def smooths_labels(self) -> bool:
        """Whether a loss has smoothed labels."""
        return False

    @property
    def read_models(self) -> list[str]:
        """Directories of the checkpoints whose weights the run reads."""
        return [] if self.model is None else [self.model]

    @property
    def left_out(self) -> str:
        """What is too long for the run, for a person to read."""
        raise NotImplementedError

    def evaluates(self, done: int) -> bool:
        """Whether held-out rows are measured after so many steps, beside before and after the run."""
        return False

    def shows(self, step: int) -> bool:
        """Whether completions that a step has drawn are printed."""
        return False


def _check_bounds(name: str, value: Any, bounds: Bounds) -> None:
    if value is None:
        return
    minimum, above, below = bounds
    if isinstance(value, numbers.Real) and not math.isfinite(value):
        raise BadField(f"`{name}` must be finite, got {value}")
    if minimum is not None and value < minimum:
        raise BadField(f"`{name}` must be at least {minimum}, got {value}")
    if above is not None and value <= above:
        raise BadField(f"`{name}` must be greater than {above}, got {value}")
    if below is not None and value >= below:
        raise BadField(f"`{name}` must be less than {below}, got {value}")
