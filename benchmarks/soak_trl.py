"""Many steps of TRL's GRPOTrainer, with torch_bridge in it or without, on completions of ever new lengths."""

import importlib
import itertools
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarks.trl_steps import (
    BRIDGE,
    TINY,
    TWO_LAYERS,
    Case,
    device_bytes,
    installed,
    options,
    replaced_heads,
    replaying_grpo,
)
from rlk_jax import explain
from rlk_jax.core import program_cache
from rlk_jax.core.dispatch import TABLE

FORWARD_AND_BACKWARD = 2
KEPT_WHEN_LIMITED = 2
"""How many programs the bridge may keep in a run that is to reach its limits."""


@dataclass(frozen=True)
class Job:
    """A run of the trainer. Each third of its steps has completions of the same spread of lengths."""

    model: str
    sequences: int
    shortest: int
    longest: int
    steps: int


SOAK = Job(TWO_LAYERS, 8, 16, 512, 300)
LIMITED = Job(TWO_LAYERS, 8, 16, 512, 90)
SMOKE = Job(TINY, 4, 1, 60, 9)


class Recorder:
    """What is held after each step, as curves by name and unit."""

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._before = device_bytes(self._torch)
        self.curves: dict[str, list[float]] = defaultdict(list)

    def note(self, step_ms: float) -> None:
        """Read what is held now, after a step that took so long and has been waited for."""
        bridge: Any = importlib.import_module("torch_bridge")
        info = bridge.cache_info()
        found = {"step ms": step_ms, "host MiB": resident_mib(os.getpid())}
        found |= {"programs": info.forward + info.backward, "kept programs": info.size}
        found |= {f"{name} on disk MiB": size / 2**20 for name, size in bytes_on_disk().items()}
        if self._torch.cuda.is_available():
            of_jax = jax.devices()[0].memory_stats()
            held = {
                "torch": self._torch.cuda.memory_allocated(),
                "torch's pool": self._torch.cuda.memory_reserved(),
                "JAX": of_jax["bytes_in_use"],
                "JAX peak": of_jax["peak_bytes_in_use"],
                "device": device_bytes(self._torch) - self._before,
            }
            found |= {f"{name} MiB": size / 2**20 for name, size in held.items()}
        for name, figure in found.items():
            self.curves[name].append(round(figure, 3))


def resident_mib(process: int) -> float:
    """The memory of the host that a process holds."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def bytes_on_disk() -> dict[str, int]:
    """What lies in the bounded caches of `program_cache`."""
    programs = program_cache.folder()
    if programs is None:
        return {}
    files = {"programs": programs.glob("*"), "XLA": (programs.parent / "xla").glob("*-cache")}
    return {name: sum(x.stat().st_size for x in found if x.is_file()) for name, found in files.items()}


def batches(job: Job) -> Iterator[list[list[int]]]:
    """Completions for each step. The longest of a step has the same lengths in each third of the steps, in another
    order, since it decides the shape of the batch, by which torch makes plans of its own. All else is drawn anew.
    """
    draw = np.random.default_rng(0)
    caps = np.geomspace(job.shortest, job.longest, job.steps // 3).round().astype(int)
    for cap in itertools.chain.from_iterable(draw.permutation(caps) for _ in itertools.count()):
        lengths = [int(cap), *draw.integers(job.shortest, cap, job.sequences - 1, endpoint=True)]
        yield [draw.integers(2, 258, length).tolist() for length in lengths]


class _Counted:
    """A fused head that notes the shapes of its calls: rows, columns of hidden, and vocabulary."""

    def __init__(self, original: Any, shapes: set[tuple[int, int, int]]) -> None:
        self._original, self._shapes = original, shapes

    def apply(self, hidden: Any, weight: Any, *arguments: Any, **options: Any) -> Any:
        self._shapes.add((*hidden.shape, weight.shape[0]))
        return self._original.apply(hidden, weight, *arguments, **options)


def capacities(shapes: set[tuple[int, int, int]]) -> list[int]:
    """The numbers of rows of the programs for heads of these shapes, by the rule of docs/torch_bridge.md."""
    programs: Any = importlib.import_module("torch_bridge._programs")
    found = set()
    for rows, columns, vocab in shapes:
        bfloat16 = (jax.ShapeDtypeStruct((n, columns), jax.numpy.bfloat16) for n in (rows, vocab))
        choice = explain("linear_logp", *bfloat16, jax.ShapeDtypeStruct((rows,), jax.numpy.int32)).choice
        skips = next(x.skips_padding for x in TABLE["linear_logp"] if x.name == choice)
        found.add(programs.bucket(rows, skips_padding=skips))
    return sorted(found)


def soak(job: Job, candidate: str) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The curves of a run, and their bounds."""
    with _caches_of_its_own():
        curves, shapes = _train(job, candidate)
    return curves, {"programs": len(capacities(shapes)) * FORWARD_AND_BACKWARD}


def soak_at_limits(job: Job) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The curves of a run whose caches have room for few programs, and their bounds: on disk, for those that the
    first step has made.
    """
    with (
        _caches_of_its_own(),
        mock.patch("torch_bridge._programs._MAX_SIZE", KEPT_WHEN_LIMITED),
        mock.patch.object(program_cache, "MOST_BYTES", program_cache.MOST_BYTES),  # `_limit_disk` sets it.
    ):
        curves, _ = _train(job, BRIDGE, is_limited=True)
    bounds = {name: sizes[0] for name, sizes in curves.items() if "on disk" in name}
    return curves, {"kept programs": KEPT_WHEN_LIMITED, **bounds}


@contextmanager
def _caches_of_its_own() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"RLK_CACHE": folder}):
        yield


def _train(
    job: Job, candidate: str, *, is_limited: bool = False
) -> tuple[dict[str, list[float]], set[tuple[int, int, int]]]:
    """The curves, and the shapes of the head's calls."""
    transformers: Any = importlib.import_module("transformers")
    recorder, shapes = Recorder(), set[tuple[int, int, int]]()
    case = Case("grpo", job.model, job.sequences, job.longest)

    class Note(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.note(trainer.step_ms[-1])
            if is_limited and len(trainer.step_ms) == 1:
                _limit_disk()

    with (
        tempfile.TemporaryDirectory() as folder,
        installed(candidate),
        replaced_heads(lambda original: _Counted(original, shapes)),
    ):
        arguments = options(case, candidate, folder, job.steps) | {"logging_steps": job.steps}
        trainer = replaying_grpo(importlib.import_module("trl"), case, arguments, batches(job))
        trainer.add_callback(Note())
        trainer.train()
    return dict(recorder.curves), shapes


def _limit_disk() -> None:
    """Let the caches on disk grow no further."""
    sizes = bytes_on_disk()
    program_cache.MOST_BYTES = sizes["programs"]
    if sizes["XLA"]:
        program_cache.use_xla_cache(program_cache.xla_cache()._replace(most_bytes=sizes["XLA"]))
