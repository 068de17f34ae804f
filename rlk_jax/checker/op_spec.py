"""How an op is declared to the checker: an `OpSpec`, and the calls whose rows must keep their bits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlk_jax.checker.inputs import Draw, Sizes
from rlk_jax.checker.options import SHORT, Unusable
from rlk_jax.dispatch import TABLE, Implementation

Results = dict[str, np.ndarray]
"""The results of one call: outputs by their names, gradients by "gradient:" and the name of the input."""


@dataclass(frozen=True)
class Problem:
    """One call of an op: its arrays in the op's order, its options, and an upstream gradient for each output."""

    inputs: dict[str, np.ndarray]
    options: dict[str, Any]
    upstream: dict[str, np.ndarray]


INTEGERS = "integers"
"""The dtype of an output of ids or counts, which may be any of integers: torch's are int64."""


@dataclass(frozen=True)
class Output:
    """One output of an op."""

    name: str
    shape: Callable[[Sizes], tuple[int, ...]]
    dtype: str | None = "float32"
    """The name of its dtype, `INTEGERS`, or None where it has the dtype of the inputs."""
    differentiable: bool = True


def per_token(sizes: Sizes) -> tuple[int, ...]:
    """The shape of an output with one number per token."""
    return sizes.lead


def scalar(sizes: Sizes) -> tuple[int, ...]:
    """The shape of an output that is one number."""
    return ()


def shape_of_product(sizes: Sizes) -> tuple[int, ...]:
    """The sizes of tokens, hidden states and vocabulary, which name a case of an op on a head."""
    return *sizes.lead, sizes.hidden, sizes.vocab


@dataclass(frozen=True)
class Arrangement:
    """Another call that has rows of a first call in it, and how to find these rows in the results of both calls."""

    name: str
    problem: Problem
    here: Callable[[np.ndarray], np.ndarray]
    """Gives the rows from a result of this call."""
    there: Callable[[np.ndarray], np.ndarray]
    """Gives the same rows from a result of the first call."""
    sums: bool = False
    """Whether results that are sums over all rows keep their bits too."""


@dataclass(frozen=True)
class OpSpec:
    """The facts of one op from which the checker makes every check."""

    op: str
    inputs: Callable[[Draw], dict[str, np.ndarray]]
    """Gives its positional arguments, in order."""
    gold: Callable[[Problem], tuple[Results, float]]
    """Gives all results in float64, and the largest finite |logit|."""
    outputs: tuple[Output, ...]
    gradients: tuple[str, ...]
    """The names of the inputs that are differentiated."""
    no_gradients: tuple[str, ...] = field(default=(), kw_only=True)
    """The names of inputs of real numbers whose gradients are 0 or None."""
    shape: Callable[[Sizes], tuple[int, ...]]
    """Gives the sizes that name a case in the report."""
    padding: Mapping[str, Any]
    """The names of inputs and options with a row per token, and the number that fills their rows of padding."""
    per_row: frozenset[str]
    """The names of results with a row per token that nothing but its own row decides. The other results are sums over
    rows.
    """
    sums_per_row: frozenset[str] = field(default=frozenset(), kw_only=True)
    """The names of those sums that have a row per token all the same, such as the gradient of a key."""
    modes: tuple[str, ...]
    """The input modes that the op has."""
    arrangements: "Callable[[OpSpec, Problem], Iterator[Arrangement]]" = lambda spec, problem: arrange_rows(
        spec, problem
    )
    """Gives the other calls whose rows must have the bits of the first call's."""
    forward_only: tuple[str, ...] = ("bad-ids",)
    """The modes without a check of gradients. Gradients at bad ids are left to each op's own tests."""
    lead: int = 2
    """The number of leading dimensions that count tokens."""
    large_class: str | None = None
    """The contract's class for peaked and huge logits."""
    large_is_norm: bool = False
    """Whether the tolerance of that class is a relative norm. Else it is in proportion to the largest |logit|."""
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    sizes: Callable[[Sizes], Sizes] = lambda sizes: sizes
    """Gives the sizes that the op can take from those that are asked for."""
    options: Callable[[Draw], dict[str, Any]] = lambda draw: {}
    """Gives the options of the op's call. Their names are the same for every draw."""
    unchecked: Mapping[str, Any] = field(default_factory=lambda: {"validate": False})
    """Options of rlk_jax's own op that let bad ids through to the implementation."""
    runs_on: str | None = None
    """The op on whose implementations this one runs, where it is composed of it; None where it has its own."""

    calls: str | None = None
    """The function of rlk_jax that is called, where the spec is one of several of this function; None where it has the
    spec's name.
    """

    @property
    def function(self) -> str:
        """The name of the function of rlk_jax, and of torch_bridge, that is called."""
        return self.calls or self.op

    @property
    def implementations(self) -> Sequence[Implementation]:
        """What can run the op; empty for an op that dispatch does not know."""
        return TABLE.get(self.runs_on or self.function, ())

    def problem(self, draw: Draw, grad_mode: str = "random", grad_seed: int = 123) -> Problem:
        """The problem of a draw. Upstream gradients are ones or random, or 0 for outputs without a derivative."""
        draw = replace(draw, sizes=self.sizes(draw.sizes))
        random, upstream = np.random.default_rng(grad_seed), {}
        for output in self.outputs:
            shape = output.shape(draw.sizes)
            ones = grad_mode == "ones" or not output.differentiable
            g = output.differentiable * (np.ones(shape) if ones else random.normal(size=shape))
            dtype = np.int32 if output.dtype == INTEGERS else output.dtype
            upstream[output.name] = draw.cast(g) if dtype is None else np.asarray(g, dtype)
        return Problem(self.inputs(draw), self.options(draw), upstream)

    def dtype_of(self, name: str | None) -> str:
        """The short name of a dtype, or of the op's first dtype for None. Raises `Unusable` for another dtype."""
        short = self.dtypes[0] if name is None else SHORT.get(name, name)
        if short not in self.dtypes:
            raise Unusable(f"{self.op} takes {', '.join(self.dtypes)}, not {name}")
        return short

    def modes_of(self, name: str) -> Sequence[str]:
        """The mode of this name, or all modes of the op for "all". Raises `Unusable` where the op does not have it."""
        if name not in ("all", *self.modes):
            raise Unusable(f"{self.op} has no input mode {name!r}; it has {', '.join(self.modes)}")
        return self.modes if name == "all" else [name]

    def op_class(self, mode: str) -> str:
        """The class of the contract that has the tolerances for this mode."""
        return self.large_class if self.large_class and mode in ("peaked", "huge") else self.op


_MANY_ROWS = 130
"""More rows than a tile of the kernels has (128)."""


def arrange_rows(spec: OpSpec, problem: Problem) -> Iterator[Arrangement]:
    """One row alone; all rows reversed and repeated to 130; all rows with padding before or behind them, 130 in sum."""
    rows = np.arange(len(_rows(spec, problem.inputs[next(iter(spec.padding))])))
    padding = np.full(max(5, _MANY_ROWS - len(rows)), -1)
    yield _rearranged(spec, problem, "alone", rows[len(rows) // 2 :][:1])
    yield _rearranged(spec, problem, "reversed", np.resize(rows[::-1], max(_MANY_ROWS, len(rows))))
    yield _rearranged(spec, problem, "padding before", np.concatenate([padding, rows]))
    yield _rearranged(spec, problem, "padding behind", np.concatenate([rows, padding]), sums=True)


def arrange_padding_behind(spec: OpSpec, problem: Problem) -> Iterator[Arrangement]:
    """The last of `arrange_rows` alone, for an op whose results all hold sums over rows."""
    *_, behind = arrange_rows(spec, problem)
    yield behind


def _rows(spec: OpSpec, x: np.ndarray) -> np.ndarray:
    """An array with one leading dimension for all tokens."""
    return x.reshape(-1, *x.shape[spec.lead :])


def _rearranged(spec: OpSpec, problem: Problem, name: str, index: np.ndarray, sums: bool = False) -> Arrangement:
    """The call on these rows of the problem. −1 stands for a row of padding, whose upstream gradient is 0."""
    real = index >= 0

    def arranged(x: np.ndarray, filling: Any) -> np.ndarray:
        found = _rows(spec, x)[index]
        found[~real] = filling
        return found.reshape(*[1] * (spec.lead - 1), *found.shape)

    def with_rows_arranged(arrays: dict[str, Any]) -> dict[str, Any]:
        return {n: arranged(x, spec.padding[n]) if n in spec.padding else x for n, x in arrays.items()}

    upstream = {n: arranged(g, 0) if n in spec.per_row else g for n, g in problem.upstream.items()}
    changed = Problem(with_rows_arranged(problem.inputs), with_rows_arranged(problem.options), upstream)
    return Arrangement(name, changed, lambda x: _rows(spec, x)[real], lambda x: _rows(spec, x)[index[real]], sums)


def arrange_sequences(spec: OpSpec, problem: Problem) -> Iterator[Arrangement]:
    """The batch with masked columns behind all sequences, and the batch with one more group, which is masked."""
    yield _padded(spec, problem, "padding columns", 0, 3)
    yield _padded(spec, problem, "padding sequences", problem.options["samples_per_prompt"], 0)


def _padded(spec: OpSpec, problem: Problem, name: str, sequences: int, columns: int) -> Arrangement:
    """The call with this many more sequences and columns, all of them masked."""

    def padded(x: np.ndarray, filling: Any) -> np.ndarray:
        widths = ((0, sequences), (0, columns), (0, 0))[: x.ndim]
        return np.pad(x, widths, constant_values=filling)

    batch, seq = problem.inputs["completion_mask"].shape
    inputs, options = (
        {n: padded(x, spec.padding[n]) if n in spec.padding else x for n, x in arrays.items()}
        for arrays in (problem.inputs, problem.options)
    )
    return Arrangement(
        name, replace(problem, inputs=inputs, options=options), lambda x: x[:batch, :seq], lambda x: x, sums=True
    )
