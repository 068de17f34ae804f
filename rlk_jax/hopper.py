"""The ops on Hopper. linear_logp: which rows and columns the kernels see, and in which slices.

The forward is one pass over the head that keeps a partial softmax per row and chunk of 256 columns. The backward cuts
the vocabulary into slices whose gradients of logits fit the memory budget; for each it recomputes the logits, writes
their gradients in 16 bits, adds dlogits·W to dH (one float32 chain over all slices) and stores dW and db complete.

A forward whose backward will run keeps the exponentials of the first chunks in bfloat16, as many as the budget holds
(`kept_chunks`). The backward makes their gradients in their place, and recomputes the rest in the same memory: three
products and a share of the fourth, and the same bits, since recomputed exponentials are rounded alike.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.arrays import (
    Coefficients,
    GradientRows,
    HiddenGradient,
    KeptExponentials,
    KeptRowMap,
    LogitsConfig,
    Partials,
    Softmax,
    VocabSlice,
)
from pallas_kernels.hopper.tiles import COLUMNS, DEPTH, THREADS, Machine, padded, statistics_tile
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from rlk_jax import _head_kernels
from rlk_jax._gemm import Form, Gemm
from rlk_jax._head_kernels import memory_budget
from rlk_jax._problem import (
    Array,
    Gradients,
    LinearLogp,
    LinearLogpFunctions,
    Needs,
    Operands,
    Options,
    Tokens,
    gradient_bound,
    lifting_power,
    real_columns,
)
from rlk_jax._rows import Compacted, compact
from rlk_jax._transforms import apart, as_replicated, varying_like

if TYPE_CHECKING:
    from rlk_jax.dispatch import Problem


@dataclass(frozen=True)
class Kernels:
    """One set of kernels: functions that take and give what those of these names in `pallas_kernels.mosaic` do."""

    partials: Callable[..., None]
    fold_chunks: Callable[..., Partials]
    fold_groups: Callable[..., Softmax]
    coefficients: Callable[..., Coefficients]
    dlogits: Callable[..., None]
    dlogits_from_kept_exponentials: Callable[..., None]
    add_hidden_gradient: Callable[..., None]
    store_weight_gradient: Callable[..., None]
    column_sums: Callable[..., Array]
    gemm: Callable[..., Array]


def needs_hopper(problem: "Problem") -> list[str]:
    """The reason why no kernel runs on this device."""
    found = problem.device.compute_capability
    return [] if found == "9.0" else [f"needs compute capability 9.0 (Hopper), not {found or problem.device.kind}"]


def why_not(problem: "Problem") -> list[str]:
    """Reasons why linear_logp's kernels cannot run this problem."""
    return needs_hopper(problem) + _head_kernels.why_not(problem)


@dataclass(frozen=True)
class Run:
    """Chunks first … end − 1 of the vocabulary, in slices of `width` chunks that read the head in place or copy it."""

    first: int
    end: int
    width: int
    copied: bool
    chain: range
    """The chunks that dH sums up in one chain; those of this run are among them."""
    is_kept: bool = False
    """The forward kept their exponentials."""

    @property
    def slices(self) -> int:
        return -(-(self.end - self.first) // self.width)


@dataclass(frozen=True)
class Plan:
    """The static facts of one pass: how many rows the kernels see, and the vocabulary in runs of slices."""

    options: Options
    dim: int
    tokens: int
    runs: tuple[Run, ...]

    @property
    def slices(self) -> int:
        return sum(run.slices for run in self.runs)

    @property
    def matrix_rows(self) -> int:
        """Rows of hidden and of dlogits: whole tiles."""
        return padded(self.tokens, statistics_tile(self.tokens).cluster_rows)

    @property
    def rows(self) -> int:
        """Rows of what is kept per token: a row for each thread, too."""
        return padded(self.matrix_rows, THREADS)


def _vocabulary(options: Options) -> Vocabulary:
    return Vocabulary(options.real_vocab_size, options.tree.groups, options.tree.width)


def reads_in_place(options: Options, dim: int) -> bool:
    """Whether TMA can read the head where it is: its strides and every chunk's first column suit TMA's tiles."""
    if options.weight_layout == "vd":
        return dim % DEPTH == 0 and options.vocab_size % 8 == 0
    return options.vocab_size % 64 == 0 and options.tree.width % 64 == 0


def chunks_in_place(options: Options, dim: int) -> int:
    """Chunks from the first on whose K steps of 64 columns read no padding row: 0·NaN must not reach dH."""
    vocabulary = _vocabulary(options)
    if not reads_in_place(options, dim):
        return 0
    if options.real_vocab_size == options.vocab_size:
        return vocabulary.chunks
    return vocabulary.chunk_of(max(0, options.real_vocab_size - DEPTH))


@dataclass(frozen=True)
class _Bytes:
    """What a pass holds: for a chunk of its slice, for a copy of the head's chunk beside that, in any case, and beside
    slices of kept chunks.
    """

    chunk: int
    copy: int
    fixed: int = 0
    exponentials: int = 0


def _kept_bytes(tokens: int) -> int:
    """Of one chunk's exponentials and their integers."""
    rows = padded(tokens, statistics_tile(tokens).cluster_rows)
    return 2 * COLUMNS * rows + 4 * padded(rows, THREADS)


def kept_chunks(options: Options, dim: int, tokens: int, dtype: Any) -> int:
    """Chunks from the first on whose exponentials the forward keeps: all that the budget holds beside hidden. Where
    their gradients are not made in their place (`replaces_kept`), half of that, and slices of dlogits take the rest.

    float16 gradients are not rounded through exponentials, and those of a softcap need the logits themselves. Up to 64
    tokens, whose backward reads the head and little else, it would spill registers beside an entropy.
    """
    if not options.keeps or dtype != jnp.bfloat16 or options.logit_softcap is not None or tokens <= 64:
        return 0
    held = _held(dim, tokens, Needs(True, True, True), dtype)
    room, block = memory_budget(options, dim, tokens) - held.fixed, held.chunk + held.copy
    if room < block:
        return 0
    if replaces_kept(options, dim):
        return min(chunks_in_place(options, dim), room // _kept_bytes(tokens))
    return min(_vocabulary(options).chunks, (room - block) // 2 // _kept_bytes(tokens))


def replaces_kept(options: Options, dim: int) -> bool:
    """Whether the products can take the gradients of all kept chunks at once: one chain of dH, and no copied head."""
    return _chains(options) == 1 and chunks_in_place(options, dim) > 0


def _chains(options: Options) -> int:
    """In how many float32 chains dH is summed up."""
    return options.tree.groups if options.hidden_gradient == "groups" else 1


def _plan(options: Options, dim: int, tokens: int, in_place: int, kept: int, held: _Bytes) -> Plan:
    """Slices as wide as the budget holds, at least one chunk, and all of a run of about the same width."""
    chunks = _vocabulary(options).chunks
    budget = memory_budget(options, dim, tokens)

    def width(count: int, fixed: int, per_chunk: int) -> int:
        affordable = max(1, (budget - fixed) // per_chunk) if per_chunk else count
        return -(-count // -(-count // affordable))

    def run(chain: range, first: int, end: int) -> Run:
        copied, is_kept = first >= in_place, first < kept
        if is_kept and replaces_kept(options, dim):
            return Run(first, end, end - first, copied, chain, is_kept)
        per_chunk = held.chunk + (held.copy if copied else 0)
        fixed = held.fixed + (held.exponentials if is_kept else 0)
        return Run(first, end, width(end - first, fixed, per_chunk), copied, chain, is_kept)

    each = chunks // _chains(options)
    runs = []
    for start in range(0, chunks, each):
        chain = range(start, start + each)
        bounds = sorted({chain.start, chain.stop, *(x for x in (in_place, kept) if x in chain)})
        runs += [run(chain, *ends) for ends in itertools.pairwise(bounds)]
    return Plan(options, dim, tokens, tuple(runs))


def forward_plan(options: Options, dim: int, tokens: int, kept: int = 0) -> Plan:
    """One slice where the head is read in place; else slices whose copies fit the budget beside what is kept."""
    in_place = _vocabulary(options).chunks if reads_in_place(options, dim) else 0
    return _plan(options, dim, tokens, in_place, 0, _Bytes(0, _head_chunk_bytes(dim), kept * _kept_bytes(tokens)))


def backward_plan(options: Options, dim: int, tokens: int, *, needs: Needs, dtype: Any, kept: int = 0) -> Plan:
    """Slices whose dlogits, and copies of the head where it needs them, fit the budget beside the compacted rows and
    the exponentials of `kept` chunks until their gradients are made.

    Of a padded head that is read in place, only the chunks that end within 64 columns of the padding are copied.
    """
    held = replace(_held(dim, tokens, needs, dtype), exponentials=kept * _kept_bytes(tokens))
    return _plan(options, dim, tokens, chunks_in_place(options, dim), kept, held)


def _held(dim: int, tokens: int, needs: Needs, dtype: Any) -> _Bytes:
    """Of a backward that was kept nothing for; in float16 dW has rescaled rows of hidden of its own."""
    rows = padded(tokens, statistics_tile(tokens).cluster_rows)
    hidden_copies = 2 if dtype == jnp.float16 and needs.weight else 1
    copies = _head_chunk_bytes(dim) * (2 if needs.weight else 1)
    return _Bytes(2 * COLUMNS * rows, copies, 2 * rows * padded(dim, DEPTH) * hidden_copies)


def _head_chunk_bytes(dim: int) -> int:
    """Of one chunk of a copied head, and of the gather that makes it."""
    return 2 * 2 * COLUMNS * padded(dim, DEPTH)


@dataclass(frozen=True)
class _SliceOfHead:
    """One slice of the vocabulary: what the kernels read of the head there, and where its columns belong."""

    where: VocabSlice
    head: HeadAccess
    weight: Array
    bias: Array | None
    columns: Array
    """Column of each place `[slice's chunks · 256]`; V where a place holds none."""


def _slice(plan: Plan, run: Run, index: Any, operands: Operands, rows: Compacted) -> _SliceOfHead:
    options, vocabulary = plan.options, _vocabulary(plan.options)
    real = real_columns(options, operands)
    first = run.first + jnp.asarray(index, jnp.int32) * run.width
    count = jnp.minimum(run.width, run.end - first)
    chunk = (first + jnp.arange(run.width, dtype=jnp.int32))[:, None]
    place = jnp.arange(COLUMNS, dtype=jnp.int32)
    holds = (place < vocabulary.width(chunk, real)) & (chunk < run.end)
    columns = jnp.where(holds, vocabulary.start(chunk) + place, options.vocab_size).reshape(-1)
    there = jnp.minimum(columns, jnp.maximum(real - 1, 0))
    weight, bias = operands.weight, None
    if run.copied:
        taken = weight[there] if options.weight_layout == "vd" else weight[:, there].T
        taken = jnp.where(holds.reshape(-1, 1), taken, 0)
        weight = jnp.pad(taken, ((0, 0), (0, -plan.dim % DEPTH)))
    if operands.bias is not None:
        bias = jnp.where(holds.reshape(-1), operands.bias[there].astype(jnp.float32), 0)
    known = operands.real_columns
    where = VocabSlice(rows.count, first.reshape(1), count.reshape(1), None if known is None else known.reshape(1))
    head = HeadAccess(vocabulary, "vd" if run.copied else options.weight_layout, run.copied)
    return _SliceOfHead(where, head, weight, bias, columns)


def _over_slices(plan: Plan, step: Callable[[Run, Any], None]) -> None:
    """`step(run, slice of the run)` for all slices in ascending order."""
    for run in plan.runs:
        if run.slices == 1:
            step(run, 0)
        else:
            lax.fori_loop(0, run.slices, lambda i, _, run=run: step(run, i), None)


def _matrix(plan: Plan, rows: Compacted, hidden: Array) -> Array:
    """The compacted hidden rows, zeros behind them and up to a hidden dim that is a multiple of 64."""
    return apart(jnp.pad(rows.take(hidden)[: plan.matrix_rows], ((0, 0), (0, -plan.dim % DEPTH))))


def _holds_target(plan: Plan, target_ids: Array) -> Array | None:
    """Where 64 rows have a target in a chunk, `[rows / 64, chunks]`. For few rows it costs more than it saves."""
    if plan.tokens <= 128:
        return None
    vocabulary = _vocabulary(plan.options)
    block = jnp.arange(plan.rows, dtype=jnp.int32) // 64
    # Of a shard, most targets lie elsewhere.
    is_here = (target_ids >= 0) & (target_ids < plan.options.vocab_size)
    chunk = jnp.where(is_here, vocabulary.chunk_of(target_ids), vocabulary.chunks)
    return jnp.zeros((plan.rows // 64, vocabulary.chunks), jnp.int32).at[block, chunk].set(1, mode="drop")


def default_machine() -> Machine:
    """The GPU that programs are traced for; an H200 where there is none (compiling ahead of time)."""
    return Machine(getattr(jax.devices()[0], "core_count", None) or Machine().sm_count)


class _Kept(NamedTuple):
    """What a forward keeps for the backward of the same tokens: exponentials, and in which row of them a token is."""

    exponentials: KeptExponentials
    place: Array


def _partials(
    kernels: Callable[[], Kernels], machine: Machine | None, options: Options, operands: Operands, tokens: Tokens
) -> tuple[Partials, tuple[Compacted, _Kept | None]]:
    """By row of the kernels; which token is in which, and the exponentials that are kept."""
    use, machine = kernels(), machine or default_machine()
    n, dim = operands.hidden.shape
    typed = operands.hidden
    operands, tokens = apart(as_replicated((operands, tokens)))
    keeping = kept_chunks(options, dim, n, operands.hidden.dtype)
    plan, vocabulary = forward_plan(options, dim, n, keeping), _vocabulary(options)
    rows = compact(tokens.active, plan.rows, all_active=not options.may_ignore)
    hidden = _matrix(plan, rows, operands.hidden)
    target_ids, temperature = rows.take(tokens.target_ids), rows.take(tokens.temperature, 1)

    holds_target = _holds_target(plan, target_ids)

    def new() -> Any:
        return jax.new_ref(lax.empty((vocabulary.chunks, plan.rows), jnp.float32))

    out = Partials(new(), new(), new(), new() if options.return_entropy else None)
    powers = jax.new_ref(lax.empty((plan.matrix_rows, keeping * COLUMNS), hidden.dtype)) if keeping else None

    def step(run: Run, index: Any) -> None:
        part = _slice(plan, run, index, operands, rows)
        logits = LogitsConfig(part.head, options.logit_softcap)
        per_token = (target_ids, holds_target, temperature)
        use.partials(logits, machine, part.where, hidden, part.weight, part.bias, *per_token, out, powers)

    _over_slices(plan, step)
    of_chunks = jax.tree.map(jax.freeze, out)
    groups = use.fold_chunks(of_chunks, options.tree.groups, rows.count, machine)
    kept = None
    if powers is not None:
        place = jnp.arange(n, dtype=jnp.int32) if rows.place is None else rows.place
        kept = _Kept(KeptExponentials(jax.freeze(powers), of_chunks.shift[:keeping]), place)
    return varying_like((groups, (rows, kept)), typed)


def _merge(
    kernels: Callable[[], Kernels],
    machine: Machine | None,
    options: Options,
    groups: Partials,
    state: tuple[Compacted, _Kept | None],
) -> tuple[LinearLogp, Softmax, _Kept | None]:
    groups, (rows, kept) = as_replicated((groups, state))
    softmax = jax.tree.map(rows.spread, kernels().fold_groups(groups, rows.count, machine or default_machine()))
    softmax, kept = apart((softmax, kept))
    return LinearLogp(softmax.logp, softmax.lse if options.return_lse else None, softmax.entropy), softmax, kept


def _gradients(
    kernels: Callable[[], Kernels],
    machine: Machine | None,
    options: Options,
    needs: Needs,
    operands: Operands,
    tokens: Tokens,
    softmax: Softmax,
    kept: _Kept | None,
    upstream: LinearLogp,
) -> Gradients:
    use, machine = kernels(), machine or default_machine()
    n, dim = operands.hidden.shape
    dtype = operands.hidden.dtype
    if upstream.entropy is not None:
        # It needs more of a logit than the exponential that was rounded.
        kept = None
    operands, tokens, softmax, kept, upstream = apart(as_replicated((operands, tokens, softmax, kept, upstream)))
    is_rounded = options.hidden_gradient == "rounded"
    keeping = 0 if kept is None else kept.exponentials.exponentials.shape[1] // COLUMNS
    plan = backward_plan(options, dim, n, needs=needs, dtype=dtype, kept=keeping)
    rows = compact(tokens.active, plan.rows)
    stored = None if kept is None else (kept.exponentials, _source(plan, rows, kept.place))
    hidden = _matrix(plan, rows, operands.hidden)
    lifts = dtype == jnp.float16
    scale = lifting_power(gradient_bound(tokens.temperature, upstream)) if lifts else None
    # Behind the rows that count, values whose exponentials and gradients are 0 whatever the bias.
    row_facts = GradientRows(
        target_ids=rows.take(tokens.target_ids),
        temperature=rows.take(tokens.temperature, 1),
        logp=rows.take(softmax.logp),
        shift=rows.take(softmax.shift, jnp.inf),
        total=rows.take(softmax.total, 1),
        gap=None if upstream.entropy is None else rows.take(softmax.gap),
        g_logp=rows.take(upstream.logp),
        g_lse=None if upstream.lse is None else rows.take(upstream.lse),
        g_entropy=None if upstream.entropy is None else rows.take(upstream.entropy),
        scale=None if scale is None else rows.take(scale, 1),
    )
    row_coefficients = use.coefficients(row_facts, machine)
    common, weight_hidden, row_unscale = None, hidden, None
    if row_facts.scale is not None:
        row_unscale = 1 / row_facts.scale
        # dW sums rows of different scales: hidden makes up for it, the smallest scale (the largest row) exactly.
        common = jnp.min(jnp.where(jnp.arange(plan.rows) < rows.count, row_facts.scale, jnp.inf))
        factor = (common / row_facts.scale)[: plan.matrix_rows, None]
        weight_hidden = (hidden * factor).astype(dtype)

    d_weight = d_bias = None
    d_hidden = []
    if needs.hidden:
        shape = (plan.rows, padded(dim, COLUMNS))
        rounded = jax.new_ref(lax.empty(shape, dtype)) if is_rounded else None
        chains = range(_chains(options))
        d_hidden = [HiddenGradient(jax.new_ref(lax.empty(shape, jnp.float32)), rounded) for _ in chains]
    if needs.weight:
        is_padded = options.real_vocab_size < options.vocab_size
        d_weight = jax.new_ref((jnp.zeros if is_padded else lax.empty)(operands.weight.shape, dtype))
    if needs.bias:
        d_bias = jax.new_ref(jnp.zeros(options.vocab_size, jnp.float32))

    def step(run: Run, index: Any) -> None:
        part = _slice(plan, run, index, operands, rows)
        logits = LogitsConfig(part.head, options.logit_softcap)
        written = lax.empty((plan.matrix_rows, run.width * COLUMNS), dtype)
        if run.is_kept and stored is not None:
            kept_exponentials, row_map = stored
            if replaces_kept(options, dim):
                written, kept_exponentials = (
                    kept_exponentials.exponentials,
                    kept_exponentials._replace(exponentials=None),
                )
            buffer = jax.new_ref(written)
            use.dlogits_from_kept_exponentials(
                part.head.vocabulary, machine, part.where, kept_exponentials, row_map, row_coefficients, buffer
            )
        else:
            buffer = jax.new_ref(written)
            use.dlogits(logits, machine, part.where, hidden, part.weight, part.bias, row_coefficients, buffer)
        slice_dlogits = jax.freeze(buffer)
        if d_hidden:
            out = d_hidden[run.chain.start // len(run.chain)]
            use.add_hidden_gradient(
                part.head, machine, part.where, slice_dlogits, part.weight, row_unscale, run.chain, out
            )
        if d_weight is not None:
            unscale = None if common is None else (1 / common).reshape(1)
            store = functools.partial(
                use.store_weight_gradient, part.head, machine, part.where, slice_dlogits, weight_hidden, unscale
            )
            if run.copied:
                rows_of_slice = jax.new_ref(lax.empty(part.weight.shape, dtype))
                store(rows_of_slice)
                d_weight[...] = _stored(d_weight[...], jax.freeze(rows_of_slice)[:, :dim], part.columns, options)
            else:
                store(d_weight)
        if d_bias is not None:
            sums = use.column_sums(part.where, slice_dlogits, row_unscale, machine)
            d_bias[...] = d_bias[...].at[part.columns].set(sums, mode="drop")

    _over_slices(plan, step)
    complete = [x.chain if x.rounded is None else x.rounded for x in d_hidden], d_weight, d_bias
    # Then hidden, which dW is made from, is held no more while dH's rows are spread.
    sums, *of_head = apart(jax.tree.map(jax.freeze, complete))
    sums = [rows.spread(x[:, :dim]) for x in sums]
    hidden_gradient = (sums[0] if is_rounded else jnp.stack(sums)) if needs.hidden else None
    return apart(Gradients(hidden_gradient, *of_head).like(options, operands))


def _source(plan: Plan, rows: Compacted, place: Array) -> KeptRowMap:
    """Where the backward's rows are among the forward's, which may be more: those whose upstream gradients are 0."""
    own = jnp.arange(plan.rows, dtype=jnp.int32)
    row = jnp.where(own < rows.count, rows.take(place), own)
    return KeptRowMap(row, jnp.any(row != own, keepdims=True).astype(jnp.int32))


def _stored(d_weight: Array, rows_of_slice: Array, columns: Array, options: Options) -> Array:
    """`d_weight` with the rows of one slice `[places, D]` where their columns are."""
    if options.weight_layout == "vd":
        return d_weight.at[columns].set(rows_of_slice, mode="drop")
    return d_weight.at[:, columns].set(rows_of_slice.T, mode="drop")


def linear_logp(kernels: Callable[[], Kernels], machine: Machine | None = None) -> LinearLogpFunctions:
    """The implementation on `kernels()`, which may import what only it needs, for one machine; None for the GPU that
    JAX sees.
    """
    return LinearLogpFunctions(
        functools.partial(_partials, kernels, machine),
        functools.partial(_merge, kernels, machine),
        functools.partial(_gradients, kernels, machine),
    )


def _gemm(
    kernels: Callable[[], Kernels], machine: Machine | None, form: Form, a: Array, b: Array, start: Array | None
) -> Array:
    product = kernels().gemm(
        *apart(as_replicated((a, b, start))),
        a_transposed=form.a_transposed,
        b_transposed=form.b_transposed,
        out_dtype=form.out_dtype,
        machine=machine or default_machine(),
    )
    return apart(product)


def det_gemm(kernels: Callable[[], Kernels], machine: Machine | None = None) -> Gemm:
    """As `linear_logp`."""
    return functools.partial(_gemm, kernels, machine)
