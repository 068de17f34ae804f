"""Text of a Hugging Face checkpoint: its tokenizer.json, its chat template, and the tokens that end a completion."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from rlk_jax.core.named_functions import first_line
from rlk_jax.models.chat_template import Message, read_template, rendered
from rlk_jax.models.special_tokens import add_special_tokens, added_tokens
from rlk_jax.models.text_files import object_if_there


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids and back, as `load_tokenizer` reads it from a checkpoint's directory."""

    backend: tokenizers.Tokenizer
    """What tokenizer.json describes."""
    template: str | None
    """The text of the chat template, where the checkpoint has one."""
    special_tokens: Mapping[str, str]
    """The tokens that templates know by a name (`bos_token` and its like), as text."""
    stop_ids: tuple[int, ...]
    """The tokens that end a completion, in rising order; there is at least one."""
    pad_id: int
    """The token that fills rows. Nothing reads what it fills, so any token of the model will do."""
    model_rows: int | None
    """How many tokens the model has, where the checkpoint's config.json says it."""
    digest: str
    """A hash of all that decides which ids a text has, by which a resumed run notices another tokenizer."""

    @property
    def vocab_size(self) -> int:
        """The largest id of a token, plus one. A model may have more tokens, or fewer."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be called."""
        return self.template is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a text with the special tokens that tokenizer.json puts around every text, often one in front.

        Raises ValueError, in one line, for a text with a lone surrogate, or with a token that the model does not have.
        """
        return self._ids(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def chat_text(self, messages: Sequence[Message]) -> str:
        """The chat as the model reads it, up to where its own turn begins.

        Raises ValueError, in one line, for messages that are none, and for a template that is missing or fails.
        """
        if self.template is None:
            raise ValueError("this checkpoint has no chat template: give the prompt as text.")
        return rendered(self.template, self.special_tokens, messages)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of `chat_text`. The template has written all special tokens, so none is added. Raises as it and
        `encode` do.
        """
        return self._ids(self.chat_text(messages), add_special_tokens=False)

    def completion(self, text: str, messages: Sequence[Message] | None = None) -> list[int]:
        """The ids that a model would have to sample for `decode` to give this text, and the token that ends it: in a
        chat the one by which the template ends a turn, else the `eos_token`, or where that ends none the first that
        does.

        Raises as `encode` and `chat_text` do, and for a text that holds a token which ends it.
        """
        ids = self._ids(text, add_special_tokens=False)
        if early := [x for x in ids if x in self.stop_ids]:
            token = self.backend.id_to_token(early[0])
            raise ValueError(f"the completion holds {token!r}, which ends it: leave it out, as it is added at the end.")
        return [*ids, self._end(text, messages)]

    def _end(self, completion: str, messages: Sequence[Message] | None) -> int:
        """The token that ends a completion of this chat, or of a text."""
        if messages is not None and self.template is not None:
            chat = [*messages, {"role": "assistant", "content": completion}]
            text = rendered(self.template, self.special_tokens, chat, begins_turn=False)
            if ends := [x for x in self._ids(text, add_special_tokens=False) if x in self.stop_ids]:
                return ends[-1]
        eos = self.backend.token_to_id(self.special_tokens.get("eos_token", ""))
        return eos if eos in self.stop_ids else self.stop_ids[0]

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text, which the model can read."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds {text[error.start]!r}, a lone surrogate, which is no character."
            ) from None
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if self.model_rows is not None and (beyond := [x for x in ids if x >= self.model_rows]):
            token = self.backend.id_to_token(beyond[0])
            raise ValueError(f"the text has token {beyond[0]}, {token!r}, of a model of {self.model_rows} tokens.")
        return ids

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of ids that come one by one, as soon as it is certain: a part of a character waits for the rest, and
        is not said where the rest never comes.

        tokenizers.decoders.DecodeStream does the same, but raises at bytes that are no text, which models do sample.
        """
        before, waiting = list[int](), list[int]()
        for token in ids:
            waiting.append(token)
            # What a token says may depend on the one before it: the first of a text has no space in front.
            said, text = self.decode(before), self.decode(before + waiting)
            if len(text) > len(said) and not text.endswith("\ufffd"):
                yield text[len(said) :]
                before, waiting = waiting, []


def load_tokenizer(directory: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint's directory. Raises ValueError, in one line, for files that are missing, damaged,
    or that name no token at which a completion ends.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory: that of a checkpoint is wanted.")
    backend, text = _read_backend(directory)
    settings = object_if_there(directory / "tokenizer_config.json")
    if settings.get("split_special_tokens"):
        raise ValueError(f"{directory / 'tokenizer_config.json'} has split_special_tokens, which is not supported.")
    special = add_special_tokens(directory, settings, backend)
    # The file may keep what its author's training did with long and short texts; nothing is cut or filled here.
    backend.no_truncation()
    backend.no_padding()
    template = read_template(directory, settings)
    ids = {name: backend.token_to_id(token) for name, token in special.items()}
    numbers = {name: object_if_there(directory / name) for name in ("generation_config.json", "config.json")}
    rows = numbers["config.json"].get("vocab_size")
    rows = rows if isinstance(rows, int) else None
    ends = {name: fields.get("eos_token_id") for name, fields in numbers.items()}
    stops = _stop_ids(directory, {**ends, "eos_token": ids.get("eos_token")}, rows)
    padding = _pad_id([ids.get("pad_token"), *(fields.get("pad_token_id") for fields in numbers.values())], stops, rows)
    decisive = json.dumps([template, special, added_tokens(backend), stops, padding], sort_keys=True).encode()
    digest = hashlib.sha256(hashlib.sha256(text).digest() + decisive).hexdigest()
    return Tokenizer(backend, template, special, stops, padding, rows, digest)


def _read_backend(directory: Path) -> tuple[tokenizers.Tokenizer, bytes]:
    """What tokenizer.json describes, and what it holds."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{directory} has no tokenizer.json: it comes with a checkpoint, beside config.json.")
    text = path.read_bytes()
    try:
        return tokenizers.Tokenizer.from_buffer(text), text
    except Exception as error:  # The package raises plain exceptions.
        raise ValueError(f"{path} is damaged: {first_line(error)}") from error


def _stop_ids(directory: Path, given: Mapping[str, Any], rows: int | None) -> tuple[int, ...]:
    """The tokens that end a completion: those of the first file that gives some, or else the eos_token."""
    for name, value in given.items():
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(x) is not int or x < 0 for x in ids):
            raise ValueError(f"{directory}: {name} has an eos_token_id that is no token: {value!r}.")
        if rows is not None and (beyond := [x for x in ids if x >= rows]):
            raise ValueError(f"{directory}: {name} ends completions at token {beyond[0]} of a model of {rows} tokens.")
        if ids:
            return tuple(sorted(set(ids)))
    raise ValueError(
        f"{directory} names no token that ends a completion: there is no eos_token_id in generation_config.json "
        f"or config.json, and no eos_token in tokenizer_config.json or special_tokens_map.json."
    )


def _pad_id(given: Iterable[Any], stops: Sequence[int], rows: int | None) -> int:
    """The token that fills rows: the first that is given, or else the first that ends a completion.

    Old fine-tunes of Llama name a token that they added to the tokenizer alone. Nothing reads what a pad fills, so the
    first one that ends a completion stands in for a token that the model does not have.
    """
    # Old checkpoints of Llama write -1 for none.
    found = next((x for x in given if isinstance(x, int) and x >= 0), stops[0])
    return found if rows is None or found < rows else stops[0]
