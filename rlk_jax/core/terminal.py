"""What commands print with."""

import difflib
import unicodedata
from collections.abc import Iterable
from typing import Any

from rich.console import Console


class OutputConsole(Console):
    """A console that prints every text as it is, also in tables: "[a]" and ":a:" in a path are no markup and no emoji.

    To it, a pipe that nobody reads is an error like any other. rich would end the process with status 1, which says
    something else of a command.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError again that rich has caught."""
        raise


def escaped(text: str, *, kept: str = "") -> str:
    """A text of which every character can be seen, and none does anything to a terminal but those of `kept`: others are
    escaped as in Python.
    """
    return "".join(x if x in kept or _is_shown_as_is(x) else ascii(x)[1:-1] for x in text)


def _is_shown_as_is(character: str) -> bool:
    # Python counts no space but the plain one as printable.
    return character.isprintable() or unicodedata.category(character) == "Zs"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that is most like this one, to stand behind an error; empty where none is like it."""
    like = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {like[0]}?)" if like else ""
