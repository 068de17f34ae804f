"""The command line: `rlk doctor` says what would run here and why, `rlk check` whether it is right, `rlk check-tp`
whether tensor parallelism is, `rlk grpo` trains, `rlk prompts` writes prompts for it, `rlk import-model` converts a
GGUF, `rlk generate` prints what a model writes, `rlk build-cuda` compiles.
"""

import argparse
import sys
from collections.abc import Sequence

from rlk_jax.checker import check_tp
from rlk_jax.checker import command as check
from rlk_jax.commands import build_cuda, doctor, generate, import_model, prompts
from rlk_jax.grpo import command as grpo


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Bad usage ends the process with status 2, as argparse does it."""
    parser = argparse.ArgumentParser(prog="rlk", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in (doctor, check, check_tp, grpo, prompts, import_model, generate, build_cuda):
        command.add_parser(subparsers)
    options = parser.parse_args(argv)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
