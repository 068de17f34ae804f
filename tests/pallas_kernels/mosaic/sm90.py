"""Compiles shipped kernel configurations for an H200 without one: python -m tests.pallas_kernels.mosaic.sm90 [--all].

With --all it compiles all of them; without, as few as have every kernel with every value of each of its options, those
that add most of them first. It prints a line per configuration; the exit status is 1 where one fails to
compile, spills more than it may, or has its wgmma serialised (ptxas has several warnings for that, C7510 and C7515
among them). Then it compiles whole programs: ops in a scan, bare calls over one and two H200s, an exported one, those
that are given what a forward kept, one whose kernels come first, passes over few tokens, and a loss by blocks of
tokens; without --all, only gradients in a scan and one bare call of the first two, and not the last one. It needs
ptxas, and jax's CUDA plugins of its version in the folder of $RLK_SM90_PLUGINS. With --all it takes a process per core,
and without it one process, because `make test` keeps the other cores busy.
"""

import atexit
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
if __name__ == "__main__":  # XLA writes what it runs of the programs of `few_tokens`; processes of --all have none.
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_few_tokens.* "
        f"--xla_dump_to={tempfile.gettempdir()}/rlk_few_tokens_{os.getpid()}"
    )
sys.path.insert(0, os.environ["RLK_SM90_PLUGINS"])

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlk_jax import det_gemm, linear_grpo_loss, linear_logp
from rlk_jax.core import dispatch, overwriting
from rlk_jax.core.absent_gpus import GPUS
from rlk_jax.core.dispatch import choose
from rlk_jax.core.kernel_compilation import compile_kernels
from rlk_jax.core.rank_columns import RankColumns
from rlk_jax.core.tokens import Tokens
from rlk_jax.losses import LossOptions
from rlk_jax.ops.linear_logp.call import facts_of_call
from rlk_jax.ops.linear_logp.checks import check_call
from rlk_jax.ops.linear_logp.options import HeadInputs, HeadOptions
from rlk_jax.ops.linear_logp.sharding.ranks import RankSteps
from tests.pallas_kernels.mosaic import configurations
from tests.support import verdicts
from tests.support.verdicts import HEAD_LAYOUTS, HeadLayout, Verdict

_KERNEL_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
_reports: dict[tuple[str, ...], str] = {}
"""What ptxas said of the kernels of a program, by their hashes."""


@contextlib.contextmanager
def _captured_output(into: list[str]) -> Iterator[None]:
    """Capture what C++ prints on file descriptors 1 and 2, where ptxas writes."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            for descriptor, old in zip((1, 2), saved, strict=True):
                os.dup2(old, descriptor)
                os.close(old)
            file.seek(0)
            into.append(file.read().decode(errors="replace"))


def verdict(
    run: Callable[..., Any], arguments: dict[str, Any], sharding: Any, most_spills: int = 0
) -> tuple[bool, str]:
    """Whether a program compiles without more spills and serialised wgmma, and what ptxas says of it.

    A process compiles a kernel once, so that ptxas says nothing of one that an earlier program had: what it said then
    is remembered.
    """
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    log: list[str] = []
    try:
        with _captured_output(log):
            lowered = jax.jit(run).lower(**specs)
            lowered.compile()
    except Exception as problem:
        return False, f"{type(problem).__name__}: {str(problem)[:400]}"
    kernels = tuple(_KERNEL_HASH.findall(lowered.as_text()))
    report = _reports.setdefault(kernels, log[0])
    spills = [int(x) for x in re.findall(r"(\d+) bytes spill stores", report)]
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", report)]
    serialised = "wgmma.mma_async instructions are serialized" in report
    if not registers:
        return False, "ptxas printed no report"
    text = f"registers {registers} spills {spills}" + (" serialised wgmma" if serialised else "")
    return max(spills) <= most_spills and not serialised, text


@functools.cache
def _mesh(devices: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(GPUS["h200"].devices(devices)), ("x",))


def h200(devices: int = 1, *spec: str | None) -> jax.sharding.Sharding:
    """The sharding of an array that lies on H200s as `spec` says, over the axis "x"."""
    return jax.sharding.NamedSharding(_mesh(devices), jax.sharding.PartitionSpec(*spec))


@functools.cache
def _configurations() -> Sequence[configurations.Configuration]:
    return tuple(configurations.every())


def compile_one(index: int) -> tuple[bool, str]:
    """The verdict on configuration number `index`.

    Processes are given numbers because a configuration holds a function, which cannot be sent to another process.
    """
    configuration = _configurations()[index]
    ok, text = verdict(configuration.run, configuration.arguments, h200(), configuration.most_spills)
    return ok, f"{'ok  ' if ok else 'FAIL'} {configuration}: {text}"


def trace_for_h200() -> None:
    """Make dispatch take all arguments from now on for arrays on an H200, whatever JAX's device is."""
    dispatch.device_of = lambda arrays: dispatch.Device("gpu", "H200", "9.0")


head_gradients = jax.grad(lambda *x: linear_logp(*x, implementation="mosaic").sum(), (0, 1))
"""The gradients of hidden and weight, from hidden, weight and ids."""


def scanned(every: bool) -> Iterator[Verdict]:
    """Whether ops under lax.map write slices of stacked results in place, and linear_logp's gradients alone take kept
    exponentials. Unless every op is asked for, only gradients are compiled, which have the kernels of the values too.
    """
    trace_for_h200()
    # In bfloat16 and without a softcap exponentials are kept.
    a, b, c = ((4, 96, 512), jnp.bfloat16), ((4, 512, 4096), jnp.bfloat16), ((4, 96, 4096), jnp.bfloat16)
    ids = ((4, 96), jnp.int32)

    def gemm_gradients(x: Any) -> Any:
        return jax.vjp(functools.partial(det_gemm, implementation="mosaic"), *x[:2])[1](x[2])

    def logp(x: Any) -> Any:
        return linear_logp(*x, weight_layout="dv", implementation="mosaic")

    def most_probable(x: Any) -> Any:
        options = {"return_top_k": 20, "return_target_rank": True, "memory_budget": 2**22}
        return linear_logp(*x, weight_layout="dv", implementation="mosaic", **options)

    def logp_gradients(x: Any) -> Any:
        return jax.grad(lambda hidden, weight: logp((hidden, weight, x[2])).sum(), (0, 1))(*x[:2])

    programs: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
        "det_gemm": (lambda x: det_gemm(*x, implementation="mosaic"), (a, b)),
        "det_gemm's gradients": (gemm_gradients, (a, b, c)),
        "linear_logp": (logp, (a, b, ids)),
        "linear_logp's most probable tokens": (most_probable, (a, b, ids)),
        "linear_logp's gradients": (logp_gradients, (a, b, ids)),
    }
    for name, (op, stacked) in programs.items():
        if not every and not name.endswith("gradients"):
            continue
        arguments = tuple(jax.ShapeDtypeStruct(*x, sharding=h200()) for x in stacked)
        traced = jax.jit(functools.partial(lax.map, op)).trace(arguments)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
        keeps = "linear_logp_dlogits_from_kept_exponentials" in text
        # In such a fusion XLA forgets that the kernel writes in place, and all results are lost.
        is_ok = "dynamic-slice-fusion" not in text and keeps == (op is logp_gradients)
        yield verdicts.named(f"{name} in a scan", is_ok)


def bare(layouts: Sequence[HeadLayout]) -> Iterator[Verdict]:
    """Whether bare calls' gradients keep exponentials on one H200, and never gather a head that is spread over two."""
    trace_for_h200()
    shape = jax.ShapeDtypeStruct
    for devices, spec in layouts:
        whole = h200(devices)
        operands = (
            shape((256, 512), jnp.bfloat16, sharding=whole),
            shape((32768, 512), jnp.bfloat16, sharding=h200(devices, *spec)),
            shape((256,), jnp.int32, sharding=whole),
        )
        jax.clear_caches()
        text = jax.jit(head_gradients).trace(*operands).lower(lowering_platforms=("cuda",)).compile().as_text()
        gathers = [x for x in text.splitlines() if " all-gather(" in x or " all-gather-start(" in x]
        holds_head = any("[32768," in x.split(" all-gather")[0] for x in gathers)
        is_ok = not holds_head and (("linear_logp_dlogits_from_kept_exponentials" in text) == (devices == 1))
        yield verdicts.named(f"a bare call over {devices}, the head {spec}", is_ok)


def exported() -> Iterator[Verdict]:
    """Whether jax.export takes a program with Mosaic's kernels."""
    trace_for_h200()
    shapes = ((256, 512), jnp.bfloat16), ((4096, 512), jnp.bfloat16), ((256,), jnp.int32)
    yield verdicts.exported(head_gradients, [jax.ShapeDtypeStruct(*x) for x in shapes])


def overwritten() -> Iterator[Verdict]:
    """Whether programs that are given what a forward kept copy none of it: a backward overwrites it, and the merge of a
    rank's softmax hands it on.
    """
    trace_for_h200()
    shapes = ((256, 512), jnp.bfloat16), ((8192, 512), jnp.bfloat16), ((256,), jnp.int32)
    hidden, weight, ids = (jax.ShapeDtypeStruct(*x, sharding=h200()) for x in shapes)

    def is_well(program: Callable[..., Any], arguments: Sequence[Any], kept: int) -> bool:
        """Whether the argument at position `kept` is given to a result of the program, and copied nowhere."""
        specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=h200()) for x in arguments]
        traced = overwriting.donating(program, (kept,)).trace(*specs)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
        columns, size = specs[kept].shape[1], 2 * specs[kept].size
        is_copied = re.search(rf"bf16\[256,{columns}\]\S* copy", compiled.as_text()) is not None
        is_given = compiled.memory_analysis().alias_size_in_bytes == size >= overwriting.LEAST_BYTES
        return is_given and not is_copied

    def is_kept(x: Any) -> bool:
        return x.ndim == 2 and x.dtype == jnp.bfloat16 and x.shape not in (hidden.shape, weight.shape)

    def forward(*operands: Any) -> Any:
        return jax.vjp(lambda *x: linear_logp(*x, operands[2], implementation="mosaic"), *operands[:2])

    values, pull_back = jax.eval_shape(forward, hidden, weight, ids)
    leaves, tree = jax.tree.flatten(pull_back)
    (kept,) = (i for i, x in enumerate(leaves) if is_kept(x))

    def backward(*arguments: Any) -> Any:
        *residuals, upstream = arguments
        return overwriting.room([residuals[kept]]), jax.tree.unflatten(tree, residuals)(upstream)

    yield verdicts.named("a backward of its own", is_well(backward, [*leaves, values], kept))

    inputs, config, _ = check_call(HeadInputs(hidden, weight, ids, None, 1.0), HeadOptions())
    columns = RankColumns(((0, 8192), (8192, 16384)), 16384)
    config = columns.config(dataclasses.replace(config, keeps=True), 0)
    steps = RankSteps(choose(facts_of_call(inputs, config), "mosaic").functions.on_device, config, columns, 0)

    def partials(hidden: Any, weight: Any, ids: Any) -> Any:
        tokens = Tokens(ids, jnp.ones(256), ids >= 0)
        return steps.partials(steps.operands(hidden, weight, None), tokens)[::2]

    groups, state = jax.eval_shape(partials, hidden, weight, ids)
    groups = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, 256), x.dtype), groups)
    leaves, tree = jax.tree.flatten((groups, jax.ShapeDtypeStruct((256,), jnp.float32), state))
    (kept,) = (i for i, x in enumerate(leaves) if is_kept(x))
    merge = lambda *x: steps.merge(*jax.tree.unflatten(tree, x))  # noqa: E731
    yield verdicts.named("a rank's merge", is_well(merge, leaves, kept))


def side_by_side() -> Iterator[Verdict]:
    """Whether `compile_kernels` leaves a program none to compile, also when it is made again, and kept and recomputed
    slices share kernels of dH and dW. No other program here has kernels of this head and of so many rows.
    """
    trace_for_h200()
    shapes = ((320, 448), jnp.bfloat16), ((4096, 448), jnp.bfloat16), ((320,), jnp.int32)
    operands = [jax.ShapeDtypeStruct(*x, sharding=h200()) for x in shapes]
    in_slices = functools.partial(linear_logp, implementation="mosaic", memory_budget=2**21)
    gradients = jax.jit(jax.grad(lambda *x: in_slices(*x).sum(), (0, 1)))
    logs: list[str] = []
    for steps in (
        (lambda x: compile_kernels(x, GPUS["h200"].devices(1)[0]), jax.stages.Lowered.compile),
        (jax.stages.Lowered.compile,),
    ):
        jax.clear_caches()
        lowered = gradients.trace(*operands).lower(lowering_platforms=("cuda",))
        for step in steps:
            with _captured_output(logs):
                step(lowered)
    alone, *others = (log.count("Used ") for log in logs)
    yield verdicts.named(f"{alone} of 8 kernels side by side", alone == 8 and not any(others))


def few_tokens() -> Iterator[Verdict]:
    """Whether each pass over few tokens is one CUDA graph: its small kernels cost the host one launch."""
    trace_for_h200()
    *_, dump = re.findall(r"--xla_dump_to=(\S+)", os.environ["XLA_FLAGS"])
    atexit.register(shutil.rmtree, dump, ignore_errors=True)
    shapes = ((8, 448), jnp.bfloat16), ((8192, 448), jnp.bfloat16), ((8,), jnp.int32)
    operands = [jax.ShapeDtypeStruct(*x, sharding=h200()) for x in shapes]

    def few_tokens_forward(*operands: Any) -> Any:
        return linear_logp(*operands, implementation="mosaic")

    def few_tokens_frozen(*operands: Any) -> Any:
        return jax.grad(lambda *x: few_tokens_forward(*x).sum())(*operands)

    def few_tokens_gradients(*operands: Any) -> Any:
        return head_gradients(*operands)

    for one_pass in (few_tokens_forward, few_tokens_frozen, few_tokens_gradients):
        jax.jit(one_pass).trace(*operands).lower(lowering_platforms=("cuda",)).compile()
        (written,) = Path(dump).glob(f"*.jit_{one_pass.__name__}.thunk_sequence_after_thunk_passes.txt")
        outermost = re.findall(r"^\d+: (\w+)", written.read_text(), re.MULTILINE)
        yield verdicts.named(f"{one_pass.__name__}: {', '.join(outermost)}", outermost == ["kCommandBuffer"])


def by_blocks() -> Iterator[Verdict]:
    """Whether a loss by blocks of whole sequences holds no more than its budget and the sums of dW and dH."""
    trace_for_h200()
    lead, dim, vocab, budget = (4, 1024), 256, 16384, 5 * 2**24
    shapes = (lead, jnp.int32), *((lead, jnp.float32),) * 2, (lead[:1], jnp.float32), (lead, jnp.bool_)
    operands = ((*lead, dim), jnp.bfloat16), ((vocab, dim), jnp.bfloat16)
    arguments = [jax.ShapeDtypeStruct(*x, sharding=h200()) for x in (*operands, *shapes)]

    def loss(*arguments: Any) -> Any:
        options = LossOptions(loss_type="gspo")
        return linear_grpo_loss(*arguments, options=options, memory_budget=budget, implementation="mosaic").loss

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(*arguments)
    held = traced.lower(lowering_platforms=("cuda",)).compile().memory_analysis().temp_size_in_bytes
    allowed = budget + 4 * dim * (vocab + lead[0] * lead[1])
    yield verdicts.named(f"{held} of {allowed} bytes by blocks of tokens", held <= 1.02 * allowed)


def main() -> int:
    options, every = [configuration.options for configuration in _configurations()], "--all" in sys.argv
    numbers, compiled = verdicts.of_configurations(options, compile_one, every=every, name="kernel")
    # Without --all, one H200 is left to `scanned`, whose gradients are on one too, and the last layout to Triton's aot.
    layouts = HEAD_LAYOUTS if every else HEAD_LAYOUTS[1:2]
    programs = scanned(every), bare(layouts), exported(), overwritten(), side_by_side(), few_tokens()
    failed = verdicts.count_failed(itertools.chain(compiled, *programs, by_blocks() if every else ()))
    count = f"{len(numbers)} of {len(options)} configurations"
    print(f"{count}: {f'{failed} failed' if failed else 'no spills but those allowed, no serialised wgmma'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
