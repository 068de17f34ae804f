"""The tokens of a checkpoint that files beside tokenizer.json name or describe, as transformers reads them."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from rlk_jax.models.text_files import object_if_there

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
"""Today's name of a list of tokens that have no name, and an older one."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""How a token is found in a text, and whether it is left out of decoded texts."""


def add_special_tokens(directory: Path, settings: Mapping[str, Any], backend: tokenizers.Tokenizer) -> dict[str, str]:
    """Give a tokenizer the tokens of a directory whose tokenizer_config.json holds the settings. Those are found in a
    text before the rest of it is cut. The result is the tokens that have a name (`bos_token` and its like), as text.

    Where the settings have added_tokens_decoder, it alone describes tokens. Where they have none, two files of older
    checkpoints do, special_tokens_map.json and added_tokens.json, but for the tokens that the tokenizer has.
    """
    path, own = directory / "tokenizer_config.json", backend.get_added_tokens_decoder()
    named, unnamed = _named(settings, path), _unnamed(settings, path)
    if "added_tokens_decoder" in settings:
        described = _tokens_by_id(settings["added_tokens_decoder"], path)
    else:
        older_path = directory / "special_tokens_map.json"
        older = object_if_there(older_path)
        named = _named_by_both(named, _named(older, older_path))
        unnamed = _unnamed_by_both(unnamed, older, older_path)
        described = {**_older_added(directory, {x.content for x in (*named.values(), *unnamed)}), **own}
    if backend.padding is not None and "pad_token" not in settings:
        named.setdefault("pad_token", AddedToken(backend.padding["pad_token"], special=True))
    texts = {name: token.content for name, token in named.items()}
    for token in described.values():
        token.special = token.special or token.content in texts.values()
    known = {token.content for token in (*own.values(), *described.values())}
    new = {token.content: token for token in (*named.values(), *unnamed) if token.content not in known}
    backend.add_tokens([*(described[x] for x in sorted(described)), *new.values()])
    return texts


def added_tokens(backend: tokenizers.Tokenizer) -> list[Any]:
    """The tokens that a tokenizer finds in a text before it cuts the rest, and how, as values of JSON."""
    found = sorted(backend.get_added_tokens_decoder().items())
    return [[x, token.content, *(getattr(token, flag) for flag in _FLAGS)] for x, token in found]


def _named(fields: Mapping[str, Any], path: Path) -> dict[str, AddedToken]:
    """The tokens that a file names. Settings such as add_bos_token end like names, and hold no token."""
    given = {name: x for name, x in fields.items() if name in _NAMES}
    given |= {name: x for name, x in fields.items() if name.endswith("_token") and isinstance(x, str | dict)}
    extra = fields.get(_LISTS[0])
    given |= extra if isinstance(extra, dict) else {}
    return {name: _token(x, path, special=True) for name, x in given.items() if x is not None}


def _named_by_both(config: Mapping[str, AddedToken], older: Mapping[str, AddedToken]) -> dict[str, AddedToken]:
    """The tokens of both files: special_tokens_map.json has the last word, but for names that are a model's own."""
    return {**older, **config, **{name: older[name] for name in _NAMES if name in older}}


def _unnamed_by_both(config: list[AddedToken], fields: Mapping[str, Any], path: Path) -> list[AddedToken]:
    """The tokens that both files list. Those of special_tokens_map.json follow the others; under the older name of the
    list, they count only where there are no others.
    """
    older = _unnamed(fields, path)
    return [*config, *older] if isinstance(fields.get(_LISTS[0]), list) else config or older


def _unnamed(fields: Mapping[str, Any], path: Path) -> list[AddedToken]:
    """The tokens that a file lists without a name."""
    lists = [fields[name] for name in _LISTS if isinstance(fields.get(name), list)]
    return [_token(x, path, special=True) for x in next(filter(None, lists), [])]


def _tokens_by_id(given: Any, path: Path) -> dict[int, AddedToken]:
    """The tokens of added_tokens_decoder by their ids, which decide their order alone."""
    if not isinstance(given, dict) or not all(x.isdecimal() for x in given):
        raise ValueError(f"{path} has an added_tokens_decoder that is no object of tokens by their ids.")
    return {int(x): _token(token, path) for x, token in given.items()}


def _older_added(directory: Path, special: Collection[str]) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json by their ids, some of which are special."""
    path = directory / "added_tokens.json"
    found = object_if_there(path)
    if not all(type(x) is int for x in found.values()):
        raise ValueError(f"{path} has a token whose id is no integer.")
    return {x: AddedToken(text, special=text in special) for text, x in found.items()}


def _token(given: Any, path: Path, **flags: bool) -> AddedToken:
    """A token that a file gives as its text, or as an object with flags."""
    fields = given if isinstance(given, dict) else {"content": given}
    flags = {flag: fields[flag] for flag in _FLAGS if flag in fields} | flags
    if not isinstance(fields.get("content"), str) or not all(type(x) is bool for x in flags.values()):
        raise ValueError(f"{path} has a token that is none: {given!r}.")
    return AddedToken(fields["content"], **flags)
