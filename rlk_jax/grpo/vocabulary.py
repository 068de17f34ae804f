"""The vocabulary of prompts and answers: PAD, EOS, and one token for each printable ASCII character."""

from collections.abc import Sequence

PAD, EOS = 0, 1
_FIRST_CHARACTER, _LAST_CHARACTER = " ", "~"
_SPECIALS = 2
VOCAB_SIZE = _SPECIALS + ord(_LAST_CHARACTER) - ord(_FIRST_CHARACTER) + 1


def encode(text: str) -> list[int]:
    """Token ids of printable ASCII text. Raises ValueError naming the first character that is not."""
    for character in text:
        if not _FIRST_CHARACTER <= character <= _LAST_CHARACTER:
            raise ValueError(f"character {character!r} is not printable ASCII")
    return [ord(character) - ord(_FIRST_CHARACTER) + _SPECIALS for character in text]


def decode(ids: Sequence[int]) -> str:
    """The text of ids up to the first EOS; PAD is skipped."""
    ids = list(ids)
    ids = ids[: ids.index(EOS)] if EOS in ids else ids
    return "".join(chr(i - _SPECIALS + ord(_FIRST_CHARACTER)) for i in ids if i != PAD)
