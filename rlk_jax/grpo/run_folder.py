"""The output folder of a run: its files, its lock, and what may be done to a folder that exists already."""

import fcntl
import glob
import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

import jax
import orbax.checkpoint as ocp

from rlk_jax.core.files import written_whole
from rlk_jax.core.program_cache import is_users, use_xla_cache, xla_cache
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.run_config import BadField, BadInput, RunConfig
from rlk_jax.grpo.steps import Jitted, TrainState

KEPT_CHECKPOINTS = 2
_MAY_CHANGE = (
    "prompts",
    "eval_prompts",
    "data",
    "eval_data",
    "model",
    "teacher",
    "skip_nonfinite",
    "save_hf",
    "show_every",
)
"""Fields in which a resumed run may differ: its files, which have digests, may have moved, and it may skip what had
ended it, or show and save something else.
"""
_REWARD = "reward_digest"
"""What the folder keeps of the source of the rewards; null where the run may go on with another one."""


_OF_TOKENS = ("prompt_ids_digest", "token_ids_digest")
_READ = {
    "prompts_digest": ("other rows", ("prompts", "eval_prompts")),
    "data_digest": ("other rows", ("data", "eval_data")),
    "tokenizer_digest": ("another tokenizer", ("model",)),
    "model_digest": ("other weights", ("model",)),
    "teacher_digest": ("other weights", ("teacher",)),
    _REWARD: ("another source", ("reward",)),
    "prompt_ids_digest": ("other tokens", ("prompts", "eval_prompts")),
    "token_ids_digest": ("other tokens", ("data", "eval_data")),
}
"""What has changed where a digest has, and the options that name it. Those of tokens, which other changes change, come
last.
"""


@dataclass(frozen=True)
class RunFolder:
    """Where one run keeps its files. It holds paths only; nothing is touched before `start` or `resume`.

    Raises BadInput for a path that Orbax would take for a pattern: it would not find the parts of a checkpoint there,
    and leave one that cannot be read, without an error.
    """

    path: Path
    kind: type[RunConfig] = GrpoConfig
    """The configuration of the command whose run it is: a folder of another command is none of its own."""

    def __post_init__(self) -> None:
        whole = str(self.path.absolute())
        if glob.escape(whole) != whole:
            raise BadInput(f"--out: Orbax writes no checkpoints below a folder with *, ? or [ in its name, got {whole}")

    @property
    def command(self) -> str:
        """The command, as messages name it."""
        return f"rlk {self.kind.name}"

    @property
    def config(self) -> Path:
        """The configuration and digests of what the run reads, as JSON."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per step, from step 0."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Orbax checkpoints, named by the number of steps done."""
        return self.path / "checkpoints"

    @property
    def programs(self) -> Path:
        """The compilation cache of a run on a GPU."""
        return self.path / "programs"

    @property
    def summary(self) -> Path:
        """What held-out rows gave before and after, as JSON."""
        return self.path / "summary.json"

    @property
    def before(self) -> Path:
        """What held-out rows of a given model gave before training, as JSON."""
        return self.path / "before.json"

    @property
    def completions(self) -> Path:
        """The completions of a given model with their rewards, one JSON line for each."""
        return self.path / "completions.jsonl"

    @property
    def report(self) -> Path:
        """The plot of what was measured, as PNG."""
        return self.path / "report.png"

    @property
    def page(self) -> Path:
        """The page of a run of a given model: its plot, and completions before and after it."""
        return self.path / "report.html"

    @contextmanager
    def start(self, config: RunConfig, digests: Mapping[str, str], *, overwrite: bool) -> Iterator[None]:
        """Make the folder ready for a new run, and lock it while the context is open. `digests` are hashes, by name, of
        what the run reads beside its configuration; that of its files is among them.

        Raises BadInput for a folder that holds anything but a run, and changes nothing in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"cannot make folder {self.path}: {error.strerror}") from error
        with self._locked():
            if any(self.path.iterdir()):
                self._read_config()
                if not overwrite:
                    raise BadInput(f"{self.path} is not empty: {self._ways_on()}")
                self._delete_results()
            self._write_config(asdict(config) | dict(digests))
            yield

    @contextmanager
    def resume(self, config: RunConfig, digests: Mapping[str, str]) -> Iterator[None]:
        """Check that the folder holds a run of this very configuration, and lock it while the context is open.

        The prompts file may have moved. Raises BadInput naming what differs.
        """
        self._read_config()  # A folder that holds no run is not even locked.
        with self._locked():
            self._check_resumable(asdict(config) | dict(digests))
            yield

    def _check_resumable(self, now: dict[str, Any]) -> None:
        before = self._read_config()
        # A run of an older version had what is now the default.
        before = {option.name: option.default for option in fields(self.kind)} | before
        is_released = before.get(_REWARD, "") is None
        if is_released:
            before[_REWARD] = now.get(_REWARD)
        if changes := _changes(before, now):
            raise BadField(f"cannot resume {self.path}: {'; '.join(changes)}")
        if not self._has_checkpoint():
            raise BadInput(f"cannot resume {self.path}: it has no checkpoint; --overwrite starts again")
        if is_released:
            self._write_config(before)

    def _has_checkpoint(self) -> bool:
        if not self.checkpoints.exists():  # Orbax would make the folder.
            return False
        with open_checkpoints(self) as checkpoints:
            return checkpoints.latest_step() is not None

    def _ways_on(self) -> str:
        """What may be done with the run that the folder holds."""
        resume = "--resume continues its run, " if self._has_checkpoint() else "its run has no checkpoint, "
        return f"{resume}--overwrite starts again"

    def release_reward(self) -> None:
        """Let the run go on with another source of its rewards, because this one failed."""
        self._write_config({**self._read_config(), _REWARD: None})

    def has_saved(self, directory: str) -> bool:
        """Whether the folder's run is finished, and this is the directory that it wrote its model to."""
        saved = self._read_config().get("save_hf") if self.summary.exists() else None
        return saved is not None and Path(saved).resolve() == Path(directory).resolve()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes out while the context is open: the files of two runs would mix."""
        folder = os.open(self.path, os.O_RDONLY)
        try:
            self._lock(folder)
            yield
        finally:
            os.close(folder)

    def _lock(self, folder: int) -> None:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(f"{self.path} is in use by another {self.command}") from error
        except OSError as error:  # Some network file systems have no locks.
            warning = f"{self.path} cannot be locked ({error.strerror}): run no second {self.command} in it"
            print(f"{self.command}: warning: {warning}", file=sys.stderr)

    @contextmanager
    def keep_programs(self) -> Iterator[None]:
        """While the context is open, keep what is compiled for a GPU in a compilation cache in the folder.

        XLA tunes a program for a GPU by timing, so one that is compiled anew could add up in another order than the
        run did before. A cache that the user has set is used instead; one of this project makes room for it.
        """
        before = xla_cache()
        if not _tunes_programs() or is_users(before):
            yield
            return
        if self.checkpoints.exists() and not self.programs.exists():
            warning = f"no {self.programs}: what is compiled anew may have other bits"
            print(f"{self.command}: warning: {warning}", file=sys.stderr)
        use_xla_cache(before._replace(folder=str(self.programs.absolute()), least_seconds=0, most_bytes=-1))
        try:
            yield
        finally:
            use_xla_cache(before)

    def _write_config(self, values: dict[str, Any]) -> None:
        """Write the whole file or nothing: a folder with half a configuration would not count as a run any more."""
        with written_whole(self.config) as new:
            write_json(new, values)

    def _delete_results(self) -> None:
        """Delete all but the configuration. Raises BadInput when something is left, which the new run would read."""
        try:
            for folder in (self.checkpoints, self.programs):
                # A link itself is removed below; what it points to stays.
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder)
            files = (self.metrics, self.summary, self.report, self.before, self.completions, self.page)
            for path in (self.checkpoints, self.programs, *files):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise BadInput(f"cannot overwrite {self.path}: {error}") from error

    def _read_config(self) -> dict[str, Any]:
        try:
            config = json.loads(self.config.read_text())
        except (OSError, ValueError):
            config = None
        if not isinstance(config, dict) or self.kind.files_digest not in config:
            raise BadInput(f"{self.path} holds no run of {self.command}: --resume and --overwrite touch nothing else")
        return config

    @contextmanager
    def metrics_after(self, step: int) -> Iterator[TextIO]:
        """The metrics file, cut after its first `step` lines and open to append. Raises BadInput when it has fewer."""
        with self.metrics.open("a+") as file:
            file.seek(0)
            for _ in range(step):
                if not file.readline().endswith("\n"):
                    raise BadInput(f"cannot resume {self.path}: {self.metrics.name} does not have {step} lines")
            file.truncate(file.tell())
            yield file


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What keeps a run from going on with another configuration: its options, and what it reads, in a few words each.

    A digest says nothing where an option of what it hashes has changed, nor one of tokens where anything else has.
    """
    changed = [x for x in {**now, **before} if x not in _MAY_CHANGE and before.get(x) != now.get(x)]
    found = [f"`{x}` was {before.get(x)!r}, now {now.get(x)!r}" for x in changed if x not in _READ]
    for digest, (what, options) in _READ.items():
        is_said = any(x in changed for x in options) or (found and digest in _OF_TOKENS)
        if digest in changed and not is_said:
            files = [str(now[x]) for x in options if now.get(x)] or [f"--{options[0]}"]
            found.append(f"the run began with {what} of {' and '.join(files)}")
    return found


def _tunes_programs() -> bool:
    return jax.default_backend() == "gpu"


@contextmanager
def open_checkpoints(folder: RunFolder) -> Iterator[ocp.CheckpointManager]:
    """The checkpoint manager of a run. It writes synchronously and atomically, and keeps the last few checkpoints."""
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT_CHECKPOINTS, enable_async_checkpointing=False)
    manager = ocp.CheckpointManager(folder.checkpoints.absolute(), options=options)
    try:
        yield manager
    finally:
        manager.close()


def save_checkpoint(checkpoints: ocp.CheckpointManager, step: int, state: Any) -> None:
    """Write the state after `step` steps. Raises BadInput naming the checkpoint when it cannot be written."""
    try:
        with _quiet_failures():
            checkpoints.save(step, args=ocp.args.StandardSave(state))
    except (OSError, ValueError) as error:  # Orbax raises ValueError where a file cannot be written.
        reason = str(error).partition("\n")[0]
        raise BadInput(f"cannot write checkpoint {checkpoints.directory / str(step)}: {reason}") from error


@contextmanager
def _quiet_failures() -> Iterator[None]:
    """Keep from stderr what Orbax's threads say of a checkpoint that cannot be written: the command says it in a line.

    Orbax raises the first failure, and stops waiting for the other writes. They then find its event loop closed, or are
    never begun, and Python says so whenever they end; for that reason it stays quiet after a failure.
    """
    log, say, warned = logging.getLogger("absl"), sys.unraisablehook, warnings.catch_warnings()

    def say_others(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            say(unraisable)

    warned.__enter__()
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    log.addFilter(_nothing)
    sys.unraisablehook = say_others
    yield
    log.removeFilter(_nothing)
    sys.unraisablehook = say
    warned.__exit__(None, None, None)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def restore_latest_checkpoint(
    checkpoints: ocp.CheckpointManager, begin: Jitted[[], TrainState]
) -> tuple[TrainState, int]:
    """The newest saved state, which has no teacher, and its step, or what `begin` returns and 0 when there is none.
    Where there is one, only the types and shardings of `begin` are asked for: what it returns would take as much memory
    again.

    Raises BadInput naming the checkpoint when it cannot be read.
    """
    step = checkpoints.latest_step()
    if step is None:
        return begin(), 0
    like = jax.tree.map(_shape_of, begin.lower().out_info.saved)
    try:
        return TrainState(**checkpoints.restore(step, args=ocp.args.StandardRestore(like))), step
    except Exception as error:  # Orbax and its storage raise many types of errors.
        raise BadInput(f"cannot read checkpoint {checkpoints.directory / str(step)}: it is damaged") from error


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")
