"""`rlk grpo`: the command line of the trainer."""

import argparse
import functools
import sys
import typing
from dataclasses import fields, replace
from pathlib import Path

from rlk_jax.core.terminal import OutputConsole
from rlk_jax.grpo.config import BadInput, Diverged, GrpoConfig
from rlk_jax.grpo.extras import TRAINER_PACKAGES, require_packages
from rlk_jax.grpo.shortage import shortage_is_bad_input
from rlk_jax.grpo.stopping import StopRequest, stop_on_signal
from rlk_jax.grpo.tasks import Task, load_task

_DESCRIPTION = (
    "Train a language model by GRPO: a Hugging Face checkpoint (--model) on prompts and rewards of your own, or a "
    "small built-in policy on sums, with a supervised warm start."
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command `grpo`, with its output folder and one option for each field of `GrpoConfig`."""
    parser = subparsers.add_parser("grpo", help=_DESCRIPTION, description=_DESCRIPTION)
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints, metrics and report")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    existing.add_argument("--overwrite", action="store_true", help="delete the run in --out and start again")
    types_of = typing.get_type_hints(GrpoConfig)
    for option in fields(GrpoConfig):
        flag, help_text = "--" + option.name.replace("_", "-"), option.metadata["help"]
        if types_of[option.name] is bool:
            parser.add_argument(flag, action="store_true", help=help_text)
            continue
        kind = _plain_type(types_of[option.name])
        if option.default is not None:
            help_text += " (default: %(default)s)"
        parser.add_argument(flag, type=kind, default=option.default, metavar=kind.__name__.upper(), help=help_text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train as the parsed arguments say.

    Returns the exit status: 0 when done, 1 when diverged, 2 for bad input, too little memory or files that cannot be
    written, 128 + signal when interrupted. Raises BrokenPipeError where nobody reads the output any more.
    """
    with stop_on_signal() as stop:
        try:
            config = GrpoConfig(**{option.name: getattr(arguments, option.name) for option in fields(GrpoConfig)})
            return _train(config, arguments, stop)
        except BrokenPipeError:  # Nobody is there who reads what went wrong.
            raise
        except (BadInput, Diverged, OSError) as error:
            print(f"rlk grpo: error: {error}", file=sys.stderr)
            return 1 if isinstance(error, Diverged) else 2


def _train(config: GrpoConfig, arguments: argparse.Namespace, stop: StopRequest) -> int:
    # Imported here so that `rlk grpo --help` does not wait for flax, orbax and matplotlib.
    require_packages(TRAINER_PACKAGES, extra="grpo")
    from rlk_jax.grpo.run_folder import RunFolder
    from rlk_jax.grpo.steps import build_steps, make_mesh
    from rlk_jax.grpo.text_steps import build_text_steps
    from rlk_jax.grpo.text_task import TextTask, load_text_task
    from rlk_jax.grpo.trainer import say_stopped, train

    folder, console = RunFolder(arguments.out), OutputConsole()
    if config.save_hf is not None and Path(config.save_hf).exists() and any(Path(config.save_hf).iterdir()):
        raise BadInput(f"save_hf: {config.save_hf} is not empty")
    mesh = make_mesh(config)
    task: Task | TextTask
    if config.model is None:
        task = load_task(config)
        config = replace(config, vocab_size=task.vocab_size)  # The folder keeps it, whatever the default becomes.
        build = functools.partial(build_steps, config, task, mesh)
    else:
        task = text = load_text_task(config)
        build = functools.partial(build_text_steps, config, text, mesh)
    with shortage_is_bad_input(task.longest.advice):
        steps = build()
    if task.dropped:
        console.print(f"left out prompts of more than {config.max_prompt_tokens} tokens: {task.dropped}")
    if stop.signal is not None:  # Nothing has been deleted by --overwrite yet.
        return say_stopped(console, stop.signal, is_saved=arguments.resume)
    if arguments.resume:
        opened = folder.resume(config, task.digests)
    else:
        opened = folder.start(config, task.digests, overwrite=arguments.overwrite)
    with opened, folder.keep_programs(), shortage_is_bad_input(task.longest.advice):
        return train(config, steps, folder, console, stop)


def _plain_type(annotation: typing.Any) -> type:
    """`int`, `float` or `str`, from a type annotation that may be optional."""
    return next((member for member in typing.get_args(annotation) if member is not type(None)), annotation)
