"""Trainers of TRL that take steps on completions that were drawn before, with clocks around their parts."""

import importlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

# Nothing is looked for on the Hub.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

STOCK, BRIDGE, LIGER, BOTH = "stock", "bridge", "liger", "bridge and liger"
WITH_BRIDGE, WITH_LIGER = (BRIDGE, BOTH), (LIGER, BOTH)
"""Candidates whose head is the bridge's, and those whose other layers are Liger's: TRL leaves the head out of these."""
QWEN = "qwen2.5-0.5b"
SMOLLM2 = "smollm2-135m"
TWO_LAYERS = f"{QWEN}, 2 layers"
TINY = "tiny"
_QWEN_SIZES = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_SIZES = {
    QWEN: _QWEN_SIZES,
    TWO_LAYERS: {**_QWEN_SIZES, "num_hidden_layers": 2},
    SMOLLM2: {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    TINY: {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 258,
        "tie_word_embeddings": True,
    },
}
MODELS = QWEN, SMOLLM2, TINY
"""The models that may be asked for by name."""
_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """One trainer on batches of so many completions of so many tokens."""

    trainer: str
    model: str
    sequences: int
    tokens: int


@contextmanager
def installed(candidate: str) -> Iterator[None]:
    """TRL with the bridge in it for the candidate of this name."""
    if candidate not in WITH_BRIDGE:
        yield
        return
    bridge: Any = importlib.import_module("torch_bridge")
    bridge.install("trl")
    try:
        yield
    finally:
        bridge.uninstall("trl")


class Clock:
    """How long marked stretches took, each from `start` to `stop` with all work before and in it done.

    The first step of a run compiles, and is left out: `calls` counts it too.
    """

    def __init__(self, torch: Any) -> None:
        self._torch, self.calls, self.milliseconds, self._began = torch, 0, 0.0, 0.0

    def now(self) -> float:
        if self._torch.cuda.is_available():
            self._torch.cuda.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        self._began = self.now()

    def stop(self, *, counts: bool) -> None:
        if counts:
            self.milliseconds += 1e3 * (self.now() - self._began)


def timed_head(clock: Clock) -> AbstractContextManager[None]:
    """The fused heads of TRL with a clock around their forwards and backwards."""
    return replaced_heads(lambda original: _TimedHead(original, clock))


@contextmanager
def replaced_heads(replacement: Callable[[Any], Any]) -> Iterator[None]:
    """What `replacement` makes of the fused heads of TRL, in their places."""
    places = [
        (importlib.import_module("trl.trainer.utils"), "_ChunkedLogProbFunction"),
        (importlib.import_module("trl.trainer.distillation_trainer"), "ChunkedDivergenceFunction"),
    ]
    originals = [getattr(module, name) for module, name in places]
    for (module, name), original in zip(places, originals, strict=True):
        setattr(module, name, replacement(original))
    try:
        yield
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


class _TimedHead:
    """A fused head whose calls, and whose gradients of hidden, are timed. A backward begins when the gradient of its
    first output is there, and ends with the gradient of hidden.
    """

    def __init__(self, original: Any, clock: Clock) -> None:
        self._original, self._clock = original, clock

    def apply(self, hidden: Any, *arguments: Any, **options: Any) -> Any:
        clock = self._clock
        clock.calls += 1
        counts = clock.calls > 1
        # A view of hidden has a gradient of its own, which nothing else adds to.
        hidden = hidden.view_as(hidden)
        clock.start()
        outputs = self._original.apply(hidden, *arguments, **options)
        clock.stop(counts=counts)
        if hidden.requires_grad:
            outputs[0].register_hook(lambda _: clock.start())
            hidden.register_hook(lambda _: clock.stop(counts=counts))
        return outputs


def run(case: Case, candidate: str, folder: str, steps: int) -> Any:
    """A trainer that has trained for so many steps."""
    trainer = TRAINERS[case.trainer](importlib.import_module("trl"), case, options(case, candidate, folder, steps))
    trainer.train()
    return trainer


def options(case: Case, candidate: str, folder: str, steps: int) -> dict[str, Any]:
    """The options of a trainer. The weights that it draws next are the same in every call."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": folder,
        "use_cpu": not on_gpu,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": on_gpu,
        "max_steps": steps,
        "logging_steps": 1,
        "learning_rate": 1e-6,
        "per_device_train_batch_size": case.sequences,
        "use_liger_kernel": candidate in WITH_LIGER,
    }


def _model(name: str) -> Any:
    """A model of random weights, or of a checkpoint's folder; in bfloat16 on a GPU."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    if name not in _SIZES:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES[name])).to(dtype)


def byte_tokenizer() -> Any:
    """A tokenizer of bytes: the ids of completions are drawn, and their text is read by nobody."""
    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _completions(case: Case) -> list[list[int]]:
    """The completions of a batch, whose ids are spread over the bytes."""
    torch: Any = importlib.import_module("torch")
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, 258, (case.sequences, case.tokens), generator=generator).tolist()


def _timed(kind: type[Any]) -> type[Any]:
    """A trainer that keeps how long its steps took, and how long what follows the preparation of a batch did."""

    class Timed(kind):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.step_ms: list[float] = []
            self.core_ms: list[float] = []
            self._clock = Clock(importlib.import_module("torch"))
            self._prepared = 0.0
            super().__init__(*arguments, **options)
            # The optimizer's step comes after `training_step`, and before the callback.
            self.add_callback(_end_of_step(self))

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            self._began = self._clock.now()
            return super().training_step(*arguments, **options)

        def _prepare_inputs(self, batch: Any) -> Any:
            found = super()._prepare_inputs(batch)
            self._prepared = self._clock.now()
            return found

        def end_step(self) -> None:
            now = self._clock.now()
            self.step_ms.append(1e3 * (now - self._began))
            self.core_ms.append(1e3 * (now - self._prepared))

    return Timed


def _end_of_step(trainer: Any) -> Any:
    transformers: Any = importlib.import_module("transformers")

    class EndOfStep(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            trainer.end_step()

    return EndOfStep()


def _dataset(rows: list[dict[str, Any]]) -> Any:
    return importlib.import_module("datasets").Dataset.from_list(rows)


def _prompts(case: Case) -> Any:
    return _dataset([{"prompt": chr(97 + i % 26) * _PROMPT_TOKENS} for i in range(case.sequences)])


def _grpo(trl: Any, case: Case, options: dict[str, Any]) -> Any:
    return replaying_grpo(trl, case, options, itertools.repeat(_completions(case)))


def replaying_grpo(trl: Any, case: Case, options: dict[str, Any], batches: Iterator[list[list[int]]]) -> Any:
    """A GRPOTrainer that takes the completions of its steps from `batches`."""

    class Replaying(_timed(trl.GRPOTrainer)):  # type: ignore[misc]
        def _generate_single_turn(self, *_: Any, **__: Any) -> Any:
            return next(batches), None

    group = min(8, case.sequences)
    return Replaying(
        model=_model(case.model),
        reward_funcs=lambda completion_ids, **_: [float(sum(x) % 11) for x in completion_ids],
        args=trl.GRPOConfig(num_generations=group, max_completion_length=case.tokens, beta=0.0, **options),
        processing_class=byte_tokenizer(),
        train_dataset=_prompts(case),
    )


def _sft(trl: Any, case: Case, options: dict[str, Any]) -> Any:
    rows = [{"input_ids": x} for x in _completions(case)]
    return _timed(trl.SFTTrainer)(
        model=_model(case.model),
        args=trl.SFTConfig(max_length=case.tokens, **options),
        processing_class=byte_tokenizer(),
        train_dataset=_dataset(rows * (options["max_steps"] + 1)),
    )


def _distillation(trl: Any, case: Case, options: dict[str, Any]) -> Any:
    completions = _completions(case)

    class Replaying(_timed(trl.DistillationTrainer)):  # type: ignore[misc]
        def _generate_single_turn(self, *_: Any, **__: Any) -> Any:
            return completions

    return Replaying(
        model=_model(case.model),
        teacher_model=_model(case.model),
        args=trl.DistillationConfig(max_completion_length=case.tokens, beta=0.5, **options),
        processing_class=byte_tokenizer(),
        train_dataset=_prompts(case),
    )


TRAINERS: dict[str, Callable[[Any, Case, dict[str, Any]], Any]] = {
    "grpo": _grpo,
    "sft": _sft,
    "distillation": _distillation,
}


def device_bytes(torch: Any) -> int:
    """What is in use on the device, by whatever process; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def peaks(torch: Any, candidate: str, before: int) -> tuple[float | None, float | None, float | None]:
    """The most MiB that torch's allocator held, that JAX's did, and that are in use on the device beyond `before`:
    neither allocator gives back what it once took. None without a GPU.
    """
    if not torch.cuda.is_available():
        return None, None, None
    of_jax = 0
    if candidate in WITH_BRIDGE:
        jax: Any = importlib.import_module("jax")
        of_jax = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    held = torch.cuda.max_memory_allocated(), of_jax, device_bytes(torch) - before
    return held[0] / 2**20, held[1] / 2**20, held[2] / 2**20


def state_mib(trainer: Any) -> float:
    """MiB that a trainer holds with any head: weights, gradients of what is trained, and the optimizer's state."""
    models = [x for x in (trainer.model, getattr(trainer, "teacher_model", None)) if x is not None]
    weights = [x for model in models for x in model.parameters()]
    gradients = [x for x in trainer.model.parameters() if x.requires_grad]
    moments = [x for state in trainer.optimizer.state.values() for x in state.values()]
    return sum(x.nbytes for x in (*weights, *gradients, *moments)) / 2**20
