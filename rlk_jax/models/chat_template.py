"""Chat templates: the program of a checkpoint that writes a chat as its model reads it.

Whoever made the checkpoint wrote the template, so it runs in jinja2's sandbox.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlk_jax.core.named_functions import first_line
from rlk_jax.models.text_files import read_text

Message = Mapping[str, str]
"""What one speaker of a chat said: an object with `role` and `content`."""


def read_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or a text or the one named "default" in tokenizer_config.json.

    A folder of additional templates is for tools and documents. Where it has a default one, transformers takes that in
    the place of chat_template.jinja, and beside any of its files it takes none of tokenizer_config.json.
    """
    path, folder = directory / "chat_template.jinja", directory / "additional_chat_templates"
    if (folder / "default.jinja").exists():
        raise ValueError(f"{folder / 'default.jinja'} is not supported: the chat template is chat_template.jinja.")
    if path.exists():
        return read_text(path)
    if any(folder.glob("*.jinja")):
        return None
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = next((x.get("template") for x in found if isinstance(x, dict) and x.get("name") == "default"), None)
    if not isinstance(found, str | None):
        raise ValueError(f"{directory}: chat_template of tokenizer_config.json is {type(found).__name__}, not a text.")
    return found


def rendered(
    template: str, special_tokens: Mapping[str, str], messages: Sequence[Message], *, begins_turn: bool = True
) -> str:
    """The chat, up to where the model's own turn begins if it begins one. Raises ValueError, in one line, for messages
    that are none and for a template that fails.
    """
    _check_messages(messages)
    given = {**special_tokens, "messages": messages, "tools": None, "documents": None}
    try:
        return _compiled(template).render(given, add_generation_prompt=begins_turn)
    except Exception as error:
        # A template fails as any program does: by its own raise_exception, by the sandbox, or by a sum of texts
        # and numbers.
        raise ValueError(f"the chat template fails: {first_line(error)}") from error


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


class _Generation(Extension):
    """The block `{% generation %}`, by which templates tell trainers what the assistant said. It writes its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own type)

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements of a block, whose variables are its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    """The program that a template is, with the names that transformers gives to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
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
