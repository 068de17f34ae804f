"""`rlk generate`: the text that a checkpoint writes behind a prompt, as it is drawn."""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlk_jax.core.files import written_whole
from rlk_jax.core.packages import MODEL_PACKAGES
from rlk_jax.core.terminal import OutputConsole, escaped
from rlk_jax.grpo.config import BadInput
from rlk_jax.grpo.extras import require_packages
from rlk_jax.grpo.run_config import BadField, with_marks
from rlk_jax.grpo.shortage import shortage_is_bad_input
from rlk_jax.grpo.usage import Throughput

if TYPE_CHECKING:
    from rlk_jax.models import RecordedToken, Tokenizer

_DESCRIPTION = "Print the text that a model writes behind a prompt, token by token."


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `generate`."""
    parser = subparsers.add_parser("generate", help=_DESCRIPTION, description=_DESCRIPTION)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="directory of a Hugging Face checkpoint")
    add("--prompt", required=True, help="what the model is asked, or in front of what it writes")
    help_text = "put the prompt through the chat template, as the user's message (default: where there is a template)"
    add("--chat", action=argparse.BooleanOptionalAction, help=help_text)
    add("--system", help="the system's message, in front of the user's")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="most tokens to draw (default: %(default)s)")
    help_text = "0 takes the most probable token each time (default: %(default)s)"
    add("--temperature", type=float, default=0.0, metavar="T", help=help_text)
    add("--top-k", type=int, metavar="K", help="draw from the K most probable tokens")
    add("--top-p", type=float, metavar="P", help="draw from the fewest most probable tokens that have P together")
    add("--min-p", type=float, metavar="P", help="draw from tokens at least P times as probable as the first one")
    add("--seed", type=int, default=0, metavar="N", help="what is drawn (default: %(default)s)")
    add("--kind", choices=("stock", "invariant"), default="stock", help="the model's layers (default: %(default)s)")
    help_text = "what weights are rounded to and layers compute in (default: %(default)s)"
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help=help_text)
    help_text = "write tokens, log-probs and what each token was drawn among, as an .npz of NumPy"
    add("--record", type=Path, metavar="FILE", help=help_text)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Record:
    """What is known of a completion: what --record writes."""

    prompt_ids: list[int]
    temperature: float
    """That of log-probs."""
    tokens: "list[RecordedToken]" = field(default_factory=list)

    def kept(self, drawn: "Iterable[RecordedToken]") -> Iterator[int]:
        """The ids of tokens, which are added to the record as they are drawn."""
        for token in drawn:
            self.tokens.append(token)
            yield token.id

    def write(self, path: Path) -> None:
        """Write the arrays that docs/models.md explains, by their names there, over an old file whole or not at all."""
        arrays: dict[str, Any] = {
            "prompt_ids": np.array(self.prompt_ids, np.int32),
            "ids": np.array([token.id for token in self.tokens], np.int32),
            "logps": np.array([token.logp for token in self.tokens], np.float32),
            "temperature": self.temperature,
        }
        if self.tokens:
            allowed = jax.tree.map(lambda *x: np.stack(x), *(token.allowed for token in self.tokens))
            arrays |= {name: x for name, x in allowed._asdict().items() if x is not None}
        with written_whole(path) as new, new.open("wb") as file:
            np.savez(file, **arrays)


class _Begun(NamedTuple):
    """A completion before its first token is drawn."""

    tokenizer: "Tokenizer"
    drawn: Iterator[int]
    """The tokens, which are drawn as they are asked for."""
    record: _Record | None
    """Where they are recorded, if they are."""


def run(options: argparse.Namespace) -> int:
    """Print the text, and on stderr how many tokens it took. The exit status is 130 where the user has interrupted it.
    Raises BadInput for what cannot work.
    """
    try:
        with shortage_is_bad_input("--max-new-tokens and --dtype decide how much it takes"):
            # On a terminal something moves until there is text; stdout is left to the text.
            with OutputConsole(stderr=True).status("loading and compiling"):
                begun = _begun(options)
                first = list(itertools.islice(begun.drawn, 1))
            _print_text(begun.tokenizer, itertools.chain(first, begun.drawn))
        if begun.record is not None:
            begun.record.write(options.record)
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)  # The shell's own prompt begins a line.
        return 130


def _begun(options: argparse.Namespace) -> _Begun:
    """The completion that the options ask for. Raises BadInput for what cannot work."""
    require_packages(MODEL_PACKAGES, extra="grpo")
    if not options.prompt:
        raise BadInput("--prompt is empty")
    if not 0 <= options.seed < 2**32:
        raise BadInput(f"--seed must be at least 0 and less than {2**32}, got {options.seed}")
    if not options.model.is_dir():
        raise BadInput(f"--model {options.model} is no directory")
    if options.record is not None:
        _check_writable(options.record)
    # Imported here so that `rlk generate --help` does not wait for flax.
    from rlk_jax import models
    from rlk_jax.grpo.text_task import given_tokenizer, warn_beyond

    try:
        sampling = models.Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
        tokenizer = given_tokenizer(options.model)
        prompt_ids = _prompt_ids(tokenizer, options)
        model = models.load(options.model, dtype=options.dtype, kind=options.kind)
        warn_beyond(model.config, len(prompt_ids) + options.max_new_tokens, "rlk generate")
        asked = model, jnp.asarray(prompt_ids, jnp.int32), jax.random.key(options.seed)
        limits = {"max_new_tokens": options.max_new_tokens, "stop_ids": tokenizer.stop_ids}
        if options.record is None:
            return _Begun(tokenizer, models.stream(*asked, sampling=sampling, **limits), None)
        record = _Record(prompt_ids, sampling.scored_temperature)
        return _Begun(tokenizer, record.kept(models.stream_recorded(*asked, sampling=sampling, **limits)), record)
    except ValueError as error:
        marked = with_marks(str(error), [*(x.name for x in fields(models.Sampling)), "max_new_tokens", "dtype", "kind"])
        raise BadInput(BadField(marked).of_options) from error


def _check_writable(path: Path) -> None:
    """A file can be written there, in the place of one that may be there. Raises BadInput."""
    is_file_or_free = path.is_file() if path.exists() else path.parent.is_dir()
    if not (is_file_or_free and os.access(path.parent, os.W_OK | os.X_OK)):
        raise BadInput(f"--record: cannot write to {path}")


def _prompt_ids(tokenizer: "Tokenizer", options: argparse.Namespace) -> list[int]:
    """The prompt as the model reads it."""
    is_chat = tokenizer.has_chat_template if options.chat is None else options.chat
    if is_chat:
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        return tokenizer.chat([*system, {"role": "user", "content": options.prompt}])
    if options.system is not None:
        raise BadInput("--system is a message of a chat, and the prompt is given to the model as it stands")
    return tokenizer.encode(options.prompt)


def _print_text(tokenizer: "Tokenizer", drawn: Iterable[int]) -> None:
    """Print text as soon as its tokens are drawn, and behind it how many they were and how fast they came.

    On a terminal, control characters other than line ends and tabs are escaped; a file or a pipe has the text itself.
    """
    speed, count = Throughput(), 0

    def counted() -> Iterator[int]:
        nonlocal count
        for token in drawn:
            count += 1
            if count > 1:  # The first token is the prompt's work.
                speed.add("decoding", 1, time.perf_counter())
            yield token

    for text in tokenizer.stream(counted()):
        print(escaped(text, kept="\n\t") if sys.stdout.isatty() else text, end="", flush=True)
    print(flush=True)
    rate = speed.per_second.get("decoding")
    print(f"{count} tokens" + ("" if rate is None else f", {rate:.1f} tokens/s"), file=sys.stderr)
