"""Types for the arguments of benchmarks. What an argument may not be ends a benchmark with status 2 and one line.

Nothing here imports JAX, whose import `benchmarks.cold` measures.
"""

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path


def shapes_of(sizes: str) -> Callable[[str], str]:
    """A type for arguments that are shapes "1,2,3;4,5,6;…"; `sizes` names their numbers."""
    a_shape = _shape(sizes)

    def checked(text: str) -> str:
        if not re.fullmatch(f"{a_shape}(;{a_shape})*", text):
            raise argparse.ArgumentTypeError(f'must be "{sizes};{sizes};…" of positive integers, got {text!r}')
        return text

    return checked


def shape_of(sizes: str) -> Callable[[str], tuple[int, ...]]:
    """A type for an argument that is one shape "1,2,3"; `sizes` names its numbers."""

    def numbers(text: str) -> tuple[int, ...]:
        if not re.fullmatch(_shape(sizes), text):
            raise argparse.ArgumentTypeError(f'must be "{sizes}" of positive integers, got {text!r}')
        return tuple(map(int, text.split(",")))

    return numbers


def _shape(sizes: str) -> str:
    return ",".join(["[1-9][0-9]*"] * len(sizes.split(",")))


def batch_sizes(text: str) -> list[tuple[int, int]]:
    """The value of an argument "8x512,32x512,…": sequences and tokens of each batch."""
    a_batch = "[1-9][0-9]*x[1-9][0-9]*"
    if not re.fullmatch(f"{a_batch}(,{a_batch})*", text):
        raise argparse.ArgumentTypeError(f'must be "8x512,32x512,…", sequences x tokens, got {text!r}')
    return [(int(sequences), int(tokens)) for sequences, tokens in (x.split("x") for x in text.split(","))]


def meshes(text: str) -> list[str]:
    """The value of an argument "data=2,tensor=1;data=1,tensor=2;…": the meshes."""
    a_mesh = "data=[1-9][0-9]*,tensor=[1-9][0-9]*"
    if not re.fullmatch(f"{a_mesh}(;{a_mesh})*", text):
        raise argparse.ArgumentTypeError(f'must be "data=N,tensor=M;…" of positive integers, got {text!r}')
    return text.split(";")


def output_path(text: str) -> Path:
    """The value of an argument that names a file to write: it would be missed only when all is measured."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} to write {path.name} in")
    return path


def some_of(known: Iterable[str], *, folders: bool = False) -> Callable[[str], list[str]]:
    """A type for arguments that are comma-separated names among those that are known, or existing folders too."""
    names = tuple(dict.fromkeys(known))
    listed = ", ".join(names) + (" and folders that exist" if folders else "")

    def checked(text: str) -> list[str]:
        unknown = [x for x in text.split(",") if x not in names and not (folders and Path(x).is_dir())]
        if unknown:
            raise argparse.ArgumentTypeError(f"must be names among {listed}, got {', '.join(unknown)}")
        return text.split(",")

    return checked


def positive(text: str) -> int:
    """The value of an argument that must be a positive integer."""
    if not re.fullmatch("[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def fraction(text: str) -> float:
    """The value of an argument that must be above 0 and at most 1."""
    number = float(text)  # argparse itself reports text that is no number
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")
    return number
