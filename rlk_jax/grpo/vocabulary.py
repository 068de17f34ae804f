"""The vocabulary of prompts and answers: PAD, EOS, and one token for each character."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

PAD, EOS = 0, 1
_SPECIALS = 2
_PRINTABLE_ASCII = "".join(map(chr, range(ord(" "), ord("~") + 1)))
VOCAB_SIZE = _SPECIALS + len(_PRINTABLE_ASCII)
"""The tokens of the smallest vocabulary."""


@dataclass(frozen=True)
class Characters:
    """The characters that have tokens. Printable ASCII has the same ids in every vocabulary."""

    others: str = ""
    """The characters beside printable ASCII, each once. Their ids follow, in this order."""

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Characters":
        """The smallest vocabulary that can encode these texts. It depends on the set of their characters alone."""
        return cls("".join(sorted(set().union(*texts) - set(_PRINTABLE_ASCII))))

    @property
    def size(self) -> int:
        """How many tokens there are, PAD and EOS included."""
        return VOCAB_SIZE + len(self.others)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text whose characters are all in the vocabulary."""
        return [self._ids[character] for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids up to the first EOS; PAD is skipped."""
        ids = list(ids)
        ids = ids[: ids.index(EOS)] if EOS in ids else ids
        return "".join(self._all[i - _SPECIALS] for i in ids if i != PAD)

    @property
    def _all(self) -> str:
        return _PRINTABLE_ASCII + self.others

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: i for i, character in enumerate(self._all, start=_SPECIALS)}
