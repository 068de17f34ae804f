"""`rlk grpo`, and what the command line of the trainer is for every command."""

import argparse
import os
import sys
import typing
from dataclasses import fields
from pathlib import Path

from rlk_jax.core.absent_gpus import GPUS
from rlk_jax.core.terminal import OutputConsole
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.extras import TRAINER_PACKAGES, require_packages
from rlk_jax.grpo.run_config import BadField, BadInput, Diverged, RunConfig, flag_of
from rlk_jax.grpo.sft.config import SftConfig
from rlk_jax.grpo.shortage import shortage_is_bad_input
from rlk_jax.grpo.stopping import StopRequest, stop_on_signal

_DESCRIPTION = (
    "Train a language model by GRPO: a Hugging Face checkpoint (--model) on prompts and rewards of your own, or a "
    "small built-in policy on sums, with a supervised warm start."
)

_LOADING = "loading"
"""What a terminal shows until a run has all that it reads."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `grpo`."""
    add_trainer(subparsers, GrpoConfig, _DESCRIPTION)


def add_trainer(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", kind: type[RunConfig], description: str
) -> None:
    """Add a command that trains, with its output folder and one option for each field of its configuration."""
    parser = subparsers.add_parser(kind.name, help=description, description=description)
    parser.add_argument("--out", type=Path, help="folder of checkpoints, metrics and report")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    way.add_argument("--overwrite", action="store_true", help="delete the run in --out and start again")
    way.add_argument("--plan", action="store_true", help="print the memory that the run needs, and do nothing else")
    parser.add_argument("--device", choices=GPUS, help="GPU that --plan is for, which need not be here")
    types_of = typing.get_type_hints(kind)
    for option in fields(kind):
        flag, help_text = flag_of(option.name), option.metadata["help"]
        if types_of[option.name] is bool:
            parser.add_argument(flag, action="store_true", help=help_text)
            continue
        plain = _plain_type(types_of[option.name])
        if option.default is not None:
            help_text += " (default: %(default)s)"
        parser.add_argument(flag, type=plain, default=option.default, metavar=plain.__name__.upper(), help=help_text)
    parser.set_defaults(run=run, kind=kind)


def run(arguments: argparse.Namespace) -> int:
    """Train, or plan, as the parsed arguments say.

    Returns the exit status: 0 when done, 1 when diverged, 2 for bad input, too little memory or files that cannot be
    written, 128 + signal when interrupted. Raises BrokenPipeError where nobody reads the output any more.
    """
    with stop_on_signal() as stop:
        try:
            require_packages(TRAINER_PACKAGES, extra="grpo")
            values = {option.name: getattr(arguments, option.name) for option in fields(arguments.kind)}
            config = arguments.kind(**values)
            return _print_plan(config, arguments, stop) if arguments.plan else _train(config, arguments, stop)
        except BrokenPipeError:  # Nobody is there who reads what went wrong.
            raise
        except (BadInput, Diverged, OSError) as error:
            said = error.of_options if isinstance(error, BadField) else str(error)
            print(f"rlk {arguments.kind.name}: error: {said}", file=sys.stderr)
            return 1 if isinstance(error, Diverged) else 2


# What follows imports late, so that `rlk grpo --help` does not wait for flax, orbax and matplotlib.


def _print_plan(config: GrpoConfig | SftConfig, arguments: argparse.Namespace, stop: StopRequest) -> int:
    console = OutputConsole()
    with console.status(_LOADING):
        from rlk_jax.grpo.plan import plan
    return plan(config, arguments.device, console, stop)


def _train(config: GrpoConfig | SftConfig, arguments: argparse.Namespace, stop: StopRequest) -> int:
    if arguments.out is None:
        raise BadInput("--out is missing: the folder of checkpoints, metrics and report")
    if arguments.device is not None:
        raise BadInput("--device is of --plan: a run takes the devices that are here")
    console = OutputConsole()
    with console.status(_LOADING):
        from rlk_jax.grpo.job import load_job
        from rlk_jax.grpo.run_folder import RunFolder
        from rlk_jax.grpo.text_task import check_weights
        from rlk_jax.grpo.trainer import say_stopped, train

        folder = RunFolder(arguments.out, arguments.kind)
        if config.save_hf is not None and not (arguments.resume and folder.has_saved(config.save_hf)):
            _check_empty(Path(config.save_hf))
        config, task, steps = load_job(config)
        for directory in config.read_models:
            check_weights(directory)
    if task.dropped:
        console.print(f"left out {config.left_out}: {task.dropped}")
    if stop.signal is not None:  # Nothing has been deleted by --overwrite yet.
        return say_stopped(console, stop.signal, is_saved=arguments.resume)
    if arguments.resume:
        opened = folder.resume(config, task.digests)
    else:
        opened = folder.start(config, task.digests, overwrite=arguments.overwrite)
    with opened, folder.keep_programs(), shortage_is_bad_input(task.longest.advice):
        return train(config, steps, folder, console, stop)


def _check_empty(directory: Path) -> None:
    """A directory that is written at the end of a run can be, and nothing is in it."""
    there = next(x for x in (directory.absolute(), *directory.absolute().parents) if x.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise BadInput(f"--save-hf: cannot write to {there}")
    if directory.exists() and any(directory.iterdir()):
        raise BadInput(f"--save-hf: {directory} is not empty: name a new directory")


def _plain_type(annotation: typing.Any) -> type:
    """`int`, `float` or `str`, from a type annotation that may be optional."""
    return next((member for member in typing.get_args(annotation) if member is not type(None)), annotation)
