"""Text of a Hugging Face checkpoint: its tokenizer.json, its chat template, and the tokens that end a completion.

The template is a program of whoever made the checkpoint, so it runs in jinja2's sandbox.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, str]
"""What one speaker of a chat said: an object with `role` and `content`."""


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
    digest: str
    """A hash of all that decides which ids a text has, by which a resumed run notices another tokenizer."""

    @property
    def vocab_size(self) -> int:
        """The largest id of a token, plus one. A model may have more rows."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be called."""
        return self.template is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a text with the special tokens that tokenizer.json puts around every text, often one in front."""
        return self.backend.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def chat_text(self, messages: Sequence[Message]) -> str:
        """The chat as the model reads it, up to where its own turn begins.

        Raises ValueError, in one line, for messages that are none, and for a template that is missing or fails.
        """
        _check_messages(messages)
        if self.template is None:
            raise ValueError("this checkpoint has no chat template: give the prompt as text.")
        given = {**self.special_tokens, "messages": messages, "tools": None, "documents": None}
        try:
            return _compiled(self.template).render(given, add_generation_prompt=True)
        except Exception as error:
            # A template fails as any program does: by its own raise_exception, by the sandbox, or by a sum of texts
            # and numbers.
            raise ValueError(f"the chat template fails: {one_line(error)}") from error

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of `chat_text`. The template has written all special tokens, so none is added."""
        return self.backend.encode(self.chat_text(messages), add_special_tokens=False).ids

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
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{directory} has no tokenizer.json: it comes with a checkpoint, beside config.json.")
    text = path.read_bytes()
    try:
        backend = tokenizers.Tokenizer.from_buffer(text)
    except Exception as error:  # The package raises plain exceptions.
        raise ValueError(f"{path} is damaged: {one_line(error)}") from error
    # The file may keep what its author's training did with long and short texts; nothing is cut or filled here.
    backend.no_truncation()
    backend.no_padding()
    settings = _read_object(directory / "tokenizer_config.json")
    numbers = [_read_object(directory / name) for name in ("generation_config.json", "config.json")]
    special = _special_tokens(settings)
    template = _template(directory, settings)
    stops = _stop_ids(directory, backend, special, numbers)
    padding = _pad_id(backend, special, numbers, stops)
    decisive = json.dumps([template, special, stops, padding], sort_keys=True).encode()
    digest = hashlib.sha256(hashlib.sha256(text).digest() + decisive).hexdigest()
    return Tokenizer(backend, template, special, stops, padding, digest)


def one_line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return found


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names, as text; old files write an object for each."""
    given = {name: settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {name: x.get("content") if isinstance(x, dict) else x for name, x in given.items()}
    return {name: x for name, x in texts.items() if isinstance(x, str)}


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or a text or the one named "default" in tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = next((x.get("template") for x in found if isinstance(x, dict) and x.get("name") == "default"), None)
    if not isinstance(found, str | None):
        raise ValueError(f"{directory}: chat_template of tokenizer_config.json is {type(found).__name__}, not a text.")
    return found


def _stop_ids(
    directory: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str], numbers: Sequence[Mapping[str, Any]]
) -> tuple[int, ...]:
    """The tokens that end a completion: the ids of the first file that gives some, or else the eos_token."""
    for fields in numbers:
        given = fields.get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if any(type(x) is not int or x < 0 for x in ids):
            raise ValueError(f"{directory} has an eos_token_id that is no token: {given!r}.")
        if ids:
            return tuple(sorted(set(ids)))
    stop = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if stop is None:
        raise ValueError(
            f"{directory} names no token that ends a completion: there is no eos_token_id in generation_config.json "
            f"or config.json, and no eos_token of tokenizer.json in tokenizer_config.json."
        )
    return (stop,)


def _pad_id(
    backend: tokenizers.Tokenizer,
    special: Mapping[str, str],
    numbers: Sequence[Mapping[str, Any]],
    stops: Sequence[int],
) -> int:
    """The token that fills rows: the one of that name, or else the first that ends a completion."""
    named = backend.token_to_id(special["pad_token"]) if "pad_token" in special else None
    given = [named, *(fields.get("pad_token_id") for fields in numbers)]
    # Old checkpoints of Llama write -1 for none.
    return next((x for x in given if isinstance(x, int) and x >= 0), stops[0])


def _check_messages(messages: Any) -> None:
    """The messages of a chat are a list of objects that say who speaks and what."""
    if not isinstance(messages, list | tuple):
        raise ValueError(f"a chat is a list of messages, not {type(messages).__name__}.")
    if not messages:
        raise ValueError("a chat needs at least one message.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {i} of a chat is an object with role and content, not {type(message).__name__}.")
        for name in ("role", "content"):
            if name not in message:
                raise ValueError(f"message {i} of a chat has no {name}.")
            if not isinstance(message[name], str):
                raise ValueError(f"{name} of message {i} of a chat is a text, not {type(message[name]).__name__}.")


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    """The program that a template is, with the names that transformers gives to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter of this name writes JSON for web pages, with letters escaped."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    """A template calls this for a chat that the model was not trained on."""
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    """Templates that tell the model the date call this."""
    return datetime.now().strftime(form)
