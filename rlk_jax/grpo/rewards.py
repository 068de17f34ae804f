"""Rewards that functions give to completions: functions of users, by name, and the built-in ones; with weights."""

import copy
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlk_jax.core.named_functions import NamedFunction, first_line, named_function
from rlk_jax.core.packages import installed_version
from rlk_jax.grpo.config import BadInput
from rlk_jax.grpo.exact_answers import BUILT_INS
from rlk_jax.grpo.prompt_rows import ARGUMENTS, Messages, PromptRows
from rlk_jax.grpo.run_config import BadField
from rlk_jax.grpo.shortage import start_of

_LARGEST = float(np.finfo(np.float32).max)
_SHOWN_VALUE = 40
"""So many characters of a value that is no number are shown."""
type _Batch = dict[str, list[Any]]
"""What functions are given: prompts, completions and columns, by name, with one value for each completion."""


@dataclass(frozen=True)
class RewardFunction:
    """One function that gives rewards, and what it takes."""

    name: str
    """The name as the user wrote it."""
    weight: float
    function: Callable[..., Any]
    needs: tuple[str, ...]
    """The columns without which it cannot be called."""
    takes: frozenset[str] | None
    """The names of all arguments that it takes, or None where it takes any."""
    digest: str
    """A hash of the function's name and source."""
    read_answer: Callable[[Any], Any] | None = None
    """Raises ValueError for an answer that a built-in function cannot read."""


@dataclass(frozen=True)
class Rewards:
    """Several reward functions and their weights."""

    functions: tuple[RewardFunction, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The functions as the user wrote them, without their weights."""
        return tuple(reward.name for reward in self.functions)

    @property
    def digest(self) -> str:
        """A hash of the functions' sources and weights, by which a resumed run notices that they have changed."""
        hashed = [[reward.digest, reward.weight] for reward in self.functions]
        return hashlib.sha256(json.dumps(hashed).encode()).hexdigest()

    def check_rows(self, rows: PromptRows, path: Path) -> None:
        """Raise BadInput where a function needs a column that the file or one of its rows lacks, or where a built-in
        one cannot read an answer. Call it before a run begins: a run would come to it later, or give the function None.
        """
        self._check_columns(rows.columns)
        for reward in self.functions:
            for name in reward.needs:
                if lines := rows.lacking[name]:
                    others = f" (and in {len(lines) - 1} lines behind it)" if len(lines) > 1 else ""
                    raise BadInput(
                        f'{path}, line {lines[0]}: "{name}" is missing{others}; reward {reward.name} needs it, for its '
                        f"argument {name} has no default"
                    )
            if reward.read_answer is None:
                continue
            for line, answer in zip(rows.lines, rows.columns["answer"], strict=True):
                try:
                    reward.read_answer(answer)
                except ValueError as error:
                    raise BadInput(f"{path}, line {line}: {error}; reward {reward.name} reads it") from error

    def score(
        self, prompts: Sequence[str | Messages], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> np.ndarray:
        """What each function gives to each completion, as float32 [N, functions], without weights.

        Raises BadInput, in one line, for a function that raises, or gives anything but one finite number for each
        completion.
        """
        self._check_columns(columns)
        batch: _Batch = {"prompts": list(prompts), "completions": list(completions)}
        batch |= {name: list(column) for name, column in columns.items()}
        sizes = {name: len(values) for name, values in batch.items()}
        if len({*sizes.values()}) > 1:
            raise BadInput(f"prompts, completions and columns must have one value for each completion, got {sizes}")
        found = [_scores_of(reward, batch) for reward in self.functions]
        return np.array(found, np.float32).reshape(len(self.functions), len(completions)).T

    def combined(self, scores: np.ndarray) -> np.ndarray:
        """The weighted sum of what `score` gave, as float32 [N]. That of a row does not depend on the other rows."""
        columns = zip(self.functions, np.asarray(scores, np.float64).T, strict=True)
        return sum((reward.weight * x for reward, x in columns), np.zeros(len(scores))).astype(np.float32)

    def _check_columns(self, columns: Collection[str]) -> None:
        for reward in self.functions:
            if missing := [name for name in reward.needs if name not in columns]:
                there = ", ".join(columns) or "none"
                raise BadInput(f"reward {reward.name} needs {', '.join(missing)}; columns of the prompts: {there}")


def load_rewards(spec: str) -> Rewards:
    """The rewards of `--reward`: "module:function" or "path/to/file.py:function" or a built-in one's name, several
    separated by commas, each with an optional weight, as in "exact,my_rewards:brevity=0.5".

    Raises BadInput, in one line, where it does not read so or a function cannot be loaded or called.
    """
    functions: list[RewardFunction] = []
    for part in spec.split(","):
        reward = _reward(part.strip())
        if any(reward.function == other.function for other in functions):
            raise BadInput(f"reward {reward.name} is there twice; one weight says what it counts")
        functions.append(reward)
    return Rewards(tuple(functions))


def _reward(part: str) -> RewardFunction:
    """The function of one part of a specification, and its weight."""
    name, weight = _name_and_weight(part)
    if own := BUILT_INS.get(name):
        digest = f"{name} of rlk-jax {installed_version('rlk-jax')}"
        return RewardFunction(name, weight, own.function, *_arguments_of(name, own.function), digest, own.read_answer)
    try:
        found = named_function(name)
    except ValueError as error:
        raise BadField(f"`reward`: {error}") from error
    digest = f"{name.rpartition(':')[2]} {_source_digest(name, found)}"
    return RewardFunction(name, weight, found.function, *_arguments_of(name, found.function), digest)


def _name_and_weight(part: str) -> tuple[str, float]:
    """What stands before and behind the `=` of one part of a specification; the weight is 1 where there is none."""
    module, colon, rest = part.rpartition(":")
    function, equals, weight = (x.strip() for x in rest.partition("="))
    is_readable = bool(module and function) if colon else function in BUILT_INS
    if not is_readable:
        known = f"module:function, path/file.py:function, {' or '.join(BUILT_INS)}"
        raise BadInput(f"a reward reads {known}, with =0.5 behind it for a weight, got {part!r}")
    name = module + colon + function
    try:
        number = float(weight) if equals else 1.0
    except ValueError:
        number = np.nan
    if not abs(number) <= _LARGEST:
        raise BadInput(f"the weight of reward {name} must be a finite number, got {weight!r}")
    return name, number


def _source_digest(name: str, found: NamedFunction) -> str:
    """A hash of the file in which the function's name was found, and of the one that defines the function."""
    modules = found.module, sys.modules.get(getattr(found.function, "__module__", None) or "")
    files = [file for module in modules if (file := getattr(module, "__file__", None))]
    try:
        sources = [Path(file).read_bytes() for file in files]
    except OSError as error:
        raise BadInput(f"cannot read the source of reward {name}: {error}") from error
    if not sources:
        raise BadInput(f"reward {name} has no file whose change a resumed run could notice")
    return " ".join(hashlib.sha256(source).hexdigest() for source in sources)


def _arguments_of(name: str, function: Callable[..., Any]) -> tuple[tuple[str, ...], frozenset[str] | None]:
    """The fields `needs` and `takes` of a reward function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise BadInput(f"reward {name} does not say which arguments it takes: {first_line(error)}") from error
    if by_place := [x.name for x in parameters if x.kind is x.POSITIONAL_ONLY]:
        raise BadInput(f"reward {name} takes {', '.join(by_place)} by position only; functions get arguments by name")
    named = [x for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    needs = tuple(x.name for x in named if x.default is x.empty and x.name not in ARGUMENTS)
    takes_any = any(x.kind is x.VAR_KEYWORD for x in parameters)
    return needs, None if takes_any else frozenset(x.name for x in named)


def _scores_of(reward: RewardFunction, batch: _Batch) -> list[float]:
    """One finite number for each completion."""
    size = len(batch["completions"])
    try:
        values = _called(reward, batch)
    except (Exception, SystemExit) as error:
        raise BadInput(f"reward {reward.name} raised {_raised(error, reward, batch)}") from error
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise BadInput(f"reward {reward.name} must return a list of numbers, got {type(values).__name__}")
    if len(values) != size:
        raise BadInput(f"reward {reward.name} must return a number for each completion: {size}, got {len(values)}")
    numbers = []
    for place, value in enumerate(values):
        if (number := _finite_number(value)) is None:
            shown = " ".join(repr(value)[:_SHOWN_VALUE].split())
            raise BadInput(f"reward {reward.name} must return finite numbers, got {shown} {_where(place, batch)}")
        numbers.append(number)
    return numbers


def _called(reward: RewardFunction, batch: _Batch) -> Any:
    """What a function returns for a batch; an array as a list. It gets copies, so that it may change them."""
    taken = {name: values for name, values in batch.items() if reward.takes is None or name in reward.takes}
    values = reward.function(**copy.deepcopy(taken))
    return list(np.asarray(values)) if hasattr(values, "__array__") else values


def _raised(error: BaseException, reward: RewardFunction, batch: _Batch) -> str:
    """An error of a function, and the first row that raises it alone, where there is one."""
    size = len(batch["completions"])
    for place in range(size):
        try:
            _called(reward, {name: values[place : place + 1] for name, values in batch.items()})
        except (Exception, SystemExit) as alone:
            if type(alone) is type(error):
                return f"{type(alone).__name__}: {first_line(alone)} {_where(place, batch)}"
    return f"{type(error).__name__}: {first_line(error)} (in this batch of {size}, and for no row of it alone)"


def _where(place: int, batch: _Batch) -> str:
    """Which row of a batch this is, with the beginnings of its texts; the last message stands for a chat."""
    prompt, completion = batch["prompts"][place], batch["completions"][place]
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return f"(in row {place + 1} of the batch: prompt {start_of(question)}, completion {start_of(completion)})"


def _finite_number(value: Any) -> float | None:
    """A value as a number that float32 holds, or None where it is none."""
    try:
        number = np.nan if isinstance(value, str | bytes) or np.ndim(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= _LARGEST else None
