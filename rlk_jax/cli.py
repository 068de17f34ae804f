"""The command line: `rlk doctor` says what would run here and why, `rlk check` whether it is right, `rlk check-tp`
whether tensor parallelism is, `rlk grpo` and `rlk sft` train, `rlk prompts` writes prompts for them, `rlk
import-model` converts a GGUF, `rlk generate` prints what a model writes, `rlk build-cuda` compiles.
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TextIO

import rlk_jax
from rlk_jax.checker import check_tp
from rlk_jax.checker import command as check
from rlk_jax.checker.candidates import NAMES
from rlk_jax.commands import build_cuda, doctor, generate, import_model, prompts
from rlk_jax.core.backend import is_start_error, not_started
from rlk_jax.core.terminal import did_you_mean
from rlk_jax.grpo import command as grpo
from rlk_jax.grpo.run_config import BadInput
from rlk_jax.grpo.sft import command as sft


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Bad input, files that cannot be read or written, and a JAX that cannot start are one line and status 2. Bad usage
    ends the process with status 2, as argparse does it. Where nobody reads the output any more, as behind head, nothing
    is said, and the status is the one that SIGPIPE would give.
    """
    parser = _Parser(prog="rlk", description=__doc__)
    parser.add_argument("--version", action="version", version=f"rlk {rlk_jax.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in (doctor, check, check_tp, grpo, sft, prompts, import_model, generate, build_cuda):
        command.add_parser(subparsers)
    name = "rlk"
    try:
        with _written_output():
            options, unknown = parser.parse_known_args(argv)
            if unknown:
                _refuse(subparsers.choices[options.command], unknown)
            name = f"rlk {options.command}"
            return options.run(options)
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except (BadInput, OSError) as problem:
        print(f"{name}: error: {problem}", file=sys.stderr)
        return 2
    except (AssertionError, RuntimeError) as problem:
        if not is_start_error(problem):
            raise
        print(f"{name}: error: {not_started(problem)}; rlk doctor says what mends it", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """The parser of the command line, and of each command. It says which choice is most like a word that is none."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        super().error(message + (did_you_mean(wrong[1], re.findall(r"[\w.-]+", wrong[2])) if wrong else ""))


def _refuse(command: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """End the process with the usage of the command and what the first unknown argument may have been meant as."""
    word, options = unknown[0].partition("=")[0], command._option_string_actions
    takers = [name for name, action in options.items() if word in (action.choices or ())]
    if "--candidate" in options and (":" in word or word in NAMES):
        takers.append("--candidate")
    hint = f" (did you mean {takers[0]} {word}?)" if takers else did_you_mean(word, options)
    command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


@contextmanager
def _written_output() -> Iterator[None]:
    """Write all output at the end. What cannot be written raises OSError, and does not fail again when Python ends."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError:
        for stream in (sys.stdout, sys.stderr):
            _drop_what_cannot_be_written(stream)
        raise


def _drop_what_cannot_be_written(stream: TextIO) -> None:
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
