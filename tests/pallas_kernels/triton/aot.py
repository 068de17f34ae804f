"""Compiles every Triton kernel in its shipped configurations for an A100 and an H200 without either:
python -m tests.pallas_kernels.triton.aot [--all].

With --all it compiles all of them for both; without, as few as have every pair of options that any of them has, where
the GPU is an option too. The programs are those that users run, lowered with the compute capability of the GPU; what
Triton makes of their kernels goes through ptxas. It prints a line per program; the exit status is 1 where one fails to
compile, spills registers or takes more shared memory than an A100 has. Then XLA compiles whole programs for H200s;
without --all only the one of linear_logp that needs most memory. It needs jax-triton and jax's CUDA plugins but no
torch. With --all it takes a process per core, and without it one process, because `make test` keeps the other cores
busy.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
import triton
from jax_triton import triton_lib

from pallas_kernels.logits import RowCoefficients, RowConfig
from pallas_kernels.triton import call, linear_logp, rows
from rlk_jax import linear_kl
from rlk_jax import linear_logp as linear_logp_op
from rlk_jax.core import dispatch
from rlk_jax.core.absent_gpus import GPUS
from rlk_jax.ops.linear_logp.api import smoothed_linear_logp
from tests.support import kl_shards, shards, verdicts
from tests.support.verdicts import HEAD_LAYOUTS, HeadLayout, Verdict

TARGETS = (80, 90)
SHARED_MEMORY = 163 * 1024
"""Bytes of shared memory that one program can have on an A100."""
PTXAS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
shape = jax.ShapeDtypeStruct
jax.config.update("jax_num_cpu_devices", 2)  # for `sharded`


class Program(NamedTuple):
    """A program for a GPU of one compute capability, with its options and the operands to lower it with."""

    options: dict[str, Any]
    """Among them the kind of program, and the compute capability as "target"."""
    run: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.options.items() if value not in (None, False))


def head_program(
    target: int,
    layout: str,
    dtype: Any,
    options: dict[str, Any],
    bias: bool,
    vocab: int,
    dim: int = 512,
    rank: int = 0,
    masked: bool = False,
    smoothing: float = 0.0,
) -> Program:
    """linear_logp's forward and backward, with a low-rank term where the rank is not 0, over all or allowed tokens, for
    targets that may be smoothed.
    """

    def loss(head: dict[str, Any], tokens: dict[str, Any]) -> Any:
        how = {"weight_layout": layout, "implementation": "triton", "label_smoothing": smoothing, **options}
        values = smoothed_linear_logp(**head, **tokens, **how)
        # What is ranked has no gradient, and ids none that could be summed.
        return sum(x.sum().astype(jnp.float32) for x in jax.tree.leaves(values))

    def stored(*sizes: int) -> Any:
        return shape(sizes if layout == "vd" else sizes[::-1], dtype)

    head = {"hidden": shape((300, dim), dtype), "lm_head_weight": stored(vocab, dim)}
    head |= {"bias": shape((vocab,), dtype)} if bias else {}
    head |= {"low_rank": (stored(rank, dim), stored(vocab, rank))} if rank else {}
    tokens = {"target_ids": shape((300,), jnp.int32)}
    tokens |= {"allowed_mask": shape((300, -(-vocab // 32)), jnp.int32)} if masked else {}
    shown = {"target": target, "program": "linear_logp", "layout": layout, "dtype": jnp.dtype(dtype).name}
    changed = {"logit_softcap": None, "return_entropy": False, "ignore_index": None} | options
    return Program(
        shown
        | {"dim": dim, "vocab": vocab, "rank": rank, "bias": bias, "masked": masked, "smoothing": smoothing, **changed},
        jax.value_and_grad(loss),
        (head, tokens),
    )


def kl_program(
    target: int, layout: str, dtype: Any, options: dict[str, Any], bias: bool, vocab: int, dim: int, listed: int = 0
) -> Program:
    """linear_kl's forward and backward, from a teacher of another width and layout, or from so many listed tokens."""
    other = "dv" if layout == "vd" else "vd"

    def loss(student: dict[str, Any], teacher: dict[str, Any]) -> Any:
        layouts = {"weight_layout": layout} | ({} if listed else {"teacher_weight_layout": other})
        return linear_kl(**student, **teacher, **layouts, **options, implementation="triton").sum()

    def head(columns: int, stored: str) -> tuple[Any, Any]:
        return shape((300, columns), dtype), shape((vocab, columns) if stored == "vd" else (columns, vocab), dtype)

    student = dict(zip(("hidden", "lm_head_weight"), head(dim, layout), strict=True))
    student |= {"bias": shape((vocab,), dtype)} if bias else {}
    if listed:
        teacher = {"teacher_ids": shape((300, listed), jnp.int32), "teacher_logps": shape((300, listed), jnp.float32)}
    else:
        teacher = dict(zip(("teacher_hidden", "teacher_weight"), head(dim // 2 + 1, other), strict=True))
    shown = {"target": target, "program": "linear_kl", "layout": layout, "dtype": jnp.dtype(dtype).name}
    shown |= {"dim": dim, "vocab": vocab, "bias": bias, "listed": listed, "logit_softcap": None} | options
    return Program(shown, jax.value_and_grad(loss), (student, teacher))


def row_programs(target: int, config: RowConfig, row_length: int, dtype: Any, mask: bool = False) -> Iterator[Program]:
    logits, row, ids = shape((64, row_length), dtype), shape((64,), jnp.float32), shape((64,), jnp.int32)
    options = {"row_length": row_length, "dtype": jnp.dtype(dtype).name, "mask": mask, **asdict(config)}
    allowed = shape((64, -(-row_length // 32)), jnp.uint32) if mask else None
    statistics = {"target": target, "program": "rows' statistics", **options}
    yield Program(statistics, functools.partial(rows.statistics, config), (logits, ids, row, ids, allowed))
    slope = row if config.entropy else None
    for in_place in (False, True):
        gradients = functools.partial(rows.gradients, config, in_place=in_place)
        coefficients = RowCoefficients(row, row, row, row, slope, row)
        changed = {"target": target, "program": "rows' gradients", **options, "in_place": in_place}
        yield Program(changed, gradients, (logits, ids, ids, allowed, coefficients))


def programs() -> Iterator[Program]:
    """Programs with every set of options that reaches a kernel, and with whole tiles and tails, for both GPUs."""
    both = (False, True)
    softcap, entropy = {"logit_softcap": 30.0}, {"return_lse": True, "return_entropy": True}
    for layout, target in itertools.product(("vd", "dv"), TARGETS):
        program = functools.partial(head_program, target, layout)
        for options, bias in itertools.product(({}, softcap, entropy, softcap | entropy), both):
            yield program(jnp.bfloat16, options, bias, 151936)
        yield program(jnp.float16, {}, False, 151936)
        yield program(jnp.float16, softcap | entropy, True, 151936)
        yield program(jnp.bfloat16, {}, False, 50257, dim=72)
        yield program(jnp.bfloat16, {"ignore_index": -1, "global_vocab_size": 130000}, True, 131072)
        yield program(jnp.bfloat16, softcap | entropy, True, 151936, rank=16)
        yield program(jnp.float16, {}, False, 50257, dim=72, rank=5)
        yield program(jnp.bfloat16, {}, False, 151936, rank=300)
        for options, bias in (({}, False), (softcap | entropy, True)):
            yield program(jnp.bfloat16, options, bias, 151936, masked=True)
            yield program(jnp.float16, options, bias, 50257, masked=True)
        yield program(jnp.bfloat16, softcap | entropy, True, 151936, rank=16, masked=True)
        ranked = {"return_top_k": 20, "return_target_rank": True}
        yield program(jnp.bfloat16, ranked, False, 151936, masked=True)
        yield program(jnp.float16, softcap | ranked, True, 50257, rank=16)
        yield program(jnp.bfloat16, {}, False, 151936, smoothing=0.1)
        yield program(jnp.float16, softcap | {"return_lse": True}, True, 50257, rank=16, smoothing=0.1)
        for kl_options, listed in (({"kind": "jsd"}, 0), ({"kind": "forward"}, 20)):
            yield kl_program(target, layout, jnp.bfloat16, kl_options, False, 151936, 512, listed)
        yield kl_program(target, layout, jnp.float16, softcap | {"kind": "reverse"}, True, 50257, 72)
    for dtype, row_length, cap, gap, target in itertools.product(
        (jnp.bfloat16, jnp.float16, jnp.float32), (131072, 50257), (None, 30.0), both, TARGETS
    ):
        yield from row_programs(target, RowConfig(row_length, cap, gap), row_length, dtype)
    for target in TARGETS:
        yield from row_programs(target, RowConfig(31, None, True), 33, jnp.bfloat16)
        yield from row_programs(target, RowConfig(50257, 30.0, True), 50257, jnp.bfloat16, mask=True)


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel."""

    name: str
    shared: int
    registers: int
    spills: int

    @property
    def ok(self) -> bool:
        return self.spills == 0 and self.shared <= SHARED_MEMORY

    def __str__(self) -> str:
        return f"{self.name} shared {self.shared} registers {self.registers} spills {self.spills}"


def kernel_of(ptx: pathlib.Path) -> Kernel:
    shared = re.search(r"shared_mem_bytes: (\d+)", ptx.with_suffix(".compile_info").read_text())
    architecture = re.search(r"\.target (\w+)", ptx.read_text())
    assert shared and architecture
    command = [PTXAS, "-v", f"-arch={architecture[1]}", ptx, "-o", os.devnull]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    assert registers, report
    spills = sum(int(x) for x in re.findall(r"(\d+) bytes spill stores", report))
    return Kernel(ptx.stem, int(shared[1]), int(registers[1]), spills)


@contextlib.contextmanager
def programs_for(target: int) -> Iterator[None]:
    """Make programs that are traced and lowered in this context be for a GPU of this compute capability."""
    before = jax_triton.triton_call
    device = dispatch.Device("gpu", "a GPU", f"{target // 10}.{target % 10}")
    dispatch.device_of = lambda arrays: device
    jax_triton.triton_call = functools.partial(before, compute_capability=target)
    jax.clear_caches()
    try:
        yield
    finally:
        jax_triton.triton_call = before


def lower(run: Callable[..., Any], arguments: tuple[Any, ...], target: int) -> list[Kernel]:
    """The kernels of a program that no program before it had."""
    with tempfile.TemporaryDirectory() as folder, programs_for(target):
        triton_lib._JAX_TRITON_DUMP_DIR = folder
        jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
        triton_lib._JAX_TRITON_DUMP_DIR = None
        return [kernel_of(ptx) for ptx in sorted(pathlib.Path(folder).glob("*/*.ptx"))]


def compile_one(index: int) -> tuple[bool, str]:
    """The verdict on program number `index`.

    Processes are given numbers because a program holds a function, which cannot be sent to another process.
    """
    program = next(itertools.islice(programs(), index, None))
    try:
        kernels = lower(program.run, program.arguments, program.options["target"])
    except Exception as problem:
        return False, f"FAIL {program}: {type(problem).__name__}: {str(problem)[:400]}"
    is_ok = all(kernel.ok for kernel in kernels)
    return is_ok, f"{'ok  ' if is_ok else 'FAIL'} {program}: {'; '.join(map(str, kernels)) or 'as before'}"


def bare(layouts: Sequence[HeadLayout]) -> Iterator[Verdict]:
    """Compile bare calls for one and two H200s: temporary memory is bounded, and a head over two is never gathered."""
    n, dim, vocab = 4096, 2048, 131072
    loss = jax.value_and_grad(lambda *x: linear_logp_op(*x, implementation="triton").sum(), (0, 1))
    for devices, spec in layouts:
        mesh = jax.sharding.Mesh(np.array(GPUS["h200"].devices(devices)), ("x",))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        operands = (
            shape((n, dim), jnp.bfloat16, sharding=whole),
            shape((vocab, dim), jnp.bfloat16, sharding=cut),
            shape((n,), jnp.int32, sharding=whole),
        )
        with programs_for(90):
            compiled = jax.jit(loss).trace(*operands).lower(lowering_platforms=("cuda",)).compile()
        gathers = [x for x in compiled.as_text().splitlines() if " all-gather(" in x or " all-gather-start(" in x]
        holds_head = any(f"[{vocab}," in x.split(" all-gather")[0] for x in gathers)
        temporary = compiled.memory_analysis().temp_size_in_bytes
        allowed = 512 * 2**20 + 4 * n * dim + n * vocab * 4 * 2 // 100
        name = f"a bare call over {devices}, the head {spec}: {temporary / 2**20:.0f} MiB of {allowed / 2**20:.0f}"
        yield verdicts.named(name, not holds_head and temporary <= allowed)


def two_heads() -> Iterator[Verdict]:
    """Compile linear_kl for an H200: temporary memory is bounded by the default budget and the float32 sum of dH."""
    tokens, dim, vocab = 4096, 2048, 131072
    loss = jax.value_and_grad(lambda *x: linear_kl(*x, kind="jsd", implementation="triton").sum(), (0, 1))
    on_device = jax.sharding.SingleDeviceSharding(GPUS["h200"].devices(1)[0])
    operands = [shape((n, dim), jnp.bfloat16, sharding=on_device) for n in (tokens, vocab) * 2]
    with programs_for(90):
        compiled = jax.jit(loss).trace(*operands).lower(lowering_platforms=("cuda",)).compile()
    temporary, allowed = compiled.memory_analysis().temp_size_in_bytes, 512 * 2**20 + 4 * tokens * dim
    name = f"linear_kl: {temporary / 2**20:.0f} MiB of {allowed / 2**20:.0f}"
    yield verdicts.named(name, temporary <= allowed)


def sharded() -> Iterator[Verdict]:
    """Lower programs inside shard_map, where the types of what kernels write have to agree."""
    for check_vma, reduction in itertools.product((True, False), ("sum", "canonical")):
        with programs_for(90):
            program = shards.lowered("triton", 16384, check_vma=check_vma, reduction=reduction, tokens=300)
        yield verdicts.named(f"shard_map check_vma={check_vma} reduction={reduction}", "triton_kernel_call" in program)
    with programs_for(90):
        program = kl_shards.lowered("jsd", 16384, check_vma=True, reduction="canonical", implementation="triton")
    yield verdicts.named("linear_kl in shard_map", "triton_kernel_call" in program)


def exported() -> Iterator[Verdict]:
    """Whether jax.export takes a program with Triton's kernels."""
    loss = jax.grad(lambda *x: linear_logp_op(*x, implementation="triton").sum(), (0, 1))
    operands = shape((256, 512), jnp.bfloat16), shape((4096, 512), jnp.bfloat16), shape((256,), jnp.int32)
    with programs_for(90):
        yield verdicts.exported(loss, operands)


def main() -> int:
    began = time.monotonic()
    print(
        f"{call.pair()}; tile {linear_logp.TILE_ROWS} x {linear_logp.TILE_COLUMNS} x {linear_logp.TILE_DEPTH}",
        flush=True,
    )
    options, every = [program.options for program in programs()], "--all" in sys.argv
    numbers, compiled = verdicts.of_configurations(options, compile_one, every=every)
    # Without --all, the last layout alone is compiled, whose memory is nearest to what is allowed. In `make test`,
    # Mosaic's sm90 compiles a head that lies as the second says.
    layouts = HEAD_LAYOUTS if every else HEAD_LAYOUTS[2:]
    whole = itertools.chain(sharded(), bare(layouts), two_heads() if every else (), exported())
    failed = verdicts.count_failed(itertools.chain(compiled, whole))
    verdict = f"{failed} failed" if failed else "no spills, at most 163 KiB of shared memory"
    count = f"{len(numbers)} of {len(options)} programs"
    print(f"{count} for sm_80 or sm_90 in {time.monotonic() - began:.0f} s: {verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
