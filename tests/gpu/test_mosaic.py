"""What linear_logp's kernels for Hopper promise: tiles, kept exponentials, golden hashes, no copied head."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.tiles import Tile
from pallas_kernels.mosaic import hidden_gradient, statistics, weight_gradient
from rlk_jax import linear_logp
from rlk_jax.ops.linear_logp import hopper
from tests.gpu import golden
from tests.gpu.hopper import every_implementation
from tests.gpu.test_float32 import DTYPES as FLOAT32_PAIRS
from tests.gpu.test_head_kernels import BITS, DTYPES
from tests.support import helpers, mixed_dtypes
from tests.support.allowed import allowed_of, mask_of
from tests.support.helpers import Case, assert_same_bits


@pytest.fixture(scope="module")
def whole():
    problem = helpers.make(BITS, jnp.bfloat16)
    return problem, *helpers.outputs(BITS, problem, "mosaic")


KEPT = (
    Case("ragged", (1500,), 192, 1000),
    Case("large", (1500,), 192, 151936),
    Case("padded", (700,), 128, 5056, options={"global_vocab_size": 4999}),
    Case("dv, padded", (700,), 72, 4224, options={"weight_layout": "dv", "global_vocab_size": 4170}),
    Case("copied", (700,), 72, 5000),
)


@pytest.mark.parametrize("case", KEPT, ids=str)
@every_implementation
def test_kept_exponentials_change_no_bit(case, implementation):
    """Recomputed beside an entropy, whose upstream gradient is 0; kept without one, as far as a budget goes."""
    case = dataclasses.replace(case, bias=True, temperature="per token", scale=9.0)
    case = helpers.with_options(case, ignore_index=-1)
    keeping, problem = helpers.without_entropy(case, helpers.make(case, jnp.bfloat16))
    problem = problem._replace(
        target_ids=problem.target_ids.at[::7].set(-1), upstream=tuple(g.at[::5].set(0) for g in problem.upstream)
    )
    recomputed = problem.gradients(case, implementation)
    for budget in (2**23, 2**25, 4 * 2**30):
        assert_same_bits(problem.gradients(keeping, implementation, memory_budget=budget), recomputed)

    def metric(hidden):
        values = problem._replace(hidden=hidden).call(case, implementation)
        return helpers.weighted(values._replace(entropy=None), problem.upstream), values.entropy

    assert_same_bits(jax.jit(jax.grad(metric, has_aux=True))(problem.hidden)[0], recomputed[0])
    remat = jax.checkpoint(lambda h: metric(h)[0])
    assert_same_bits(jax.jit(jax.grad(remat))(problem.hidden), recomputed[0])

    def pulled_back_twice(hidden):
        """The first must leave what was kept to the second."""
        _, pull_back = jax.vjp(lambda h: metric(h)[0], hidden)
        return pull_back(1.0)[0], pull_back(2.0)[0]

    for function in (pulled_back_twice, jax.jit(pulled_back_twice)):
        assert_same_bits(function(problem.hidden), (recomputed[0], 2 * recomputed[0]))


@pytest.mark.parametrize("n", [1, 8, 9, 16, 17])
def test_a_forward_alone_has_the_bits_of_one_with_a_backward(whole, n):
    """Up to 16 rows its products come before their softmax."""
    problem, rows, _ = whole
    few = helpers.rows_of(problem, np.arange(n))
    values = few.call(BITS, "mosaic")
    assert_same_bits(tuple(values), [x[:n] for x in rows[: len(values)]])


@pytest.mark.parametrize(
    "tile",
    [
        Tile(rows=64, stages=5, cluster=1),
        Tile(rows=64, stages=3, cluster=2),
        Tile(cluster=1),
        Tile(stages=3),
        Tile(band=1),
        Tile(band=32),
    ],
    ids=str,
)
def test_every_tile(whole, tile, monkeypatch):
    problem, rows, head = whole
    tiles = {statistics: "statistics_tile", weight_gradient: "gemm_tile", hidden_gradient: "hidden_gradient_tile"}
    for module, name in tiles.items():
        monkeypatch.setattr(module, name, lambda *sizes: tile)
    jax.clear_caches()
    assert_same_bits(helpers.outputs(BITS, problem, "mosaic"), (rows, head))
    jax.clear_caches()


@every_implementation
def test_a_kernel_for_any_number_of_multiprocessors(implementation, monkeypatch):
    problem = helpers.make(BITS, jnp.bfloat16)
    expected = helpers.outputs(BITS, problem, implementation)
    machine = hopper.default_machine()
    monkeypatch.setattr(hopper, "default_machine", lambda: dataclasses.replace(machine, sm_count=6))
    jax.clear_caches()
    assert_same_bits(helpers.outputs(BITS, problem, implementation), expected)
    jax.clear_caches()


def golden_outputs(implementation):
    """Results of two cases in every dtype that the implementation takes, of all tokens and of allowed ones, by name."""
    pairs = [(dtype, dtype) for dtype in DTYPES] + (FLOAT32_PAIRS if implementation == "mosaic" else [])
    found = {}
    for pair in pairs:
        dtypes = "/".join(dict.fromkeys(np.dtype(dtype).name for dtype in pair))
        for case in (BITS, dataclasses.replace(helpers.OPTION_CASES[-1], dim=64)):
            problem = helpers.make(case, pair[0]) if pair[0] == pair[1] else mixed_dtypes.make(case, *pair)
            masks = {"": {}, " over allowed tokens": {"allowed_mask": mask_of(allowed_of(case, problem))}}
            for over, mask in masks.items():
                rows, head = helpers.outputs(case, problem, implementation, **mask)
                for name, x in zip(("logp", "lse", "entropy", "dH", "dW", "db"), (*rows, *head), strict=True):
                    found[f"{case.name}{over} {dtypes} {name}"] = x
    return found


@every_implementation
def test_golden_hashes(implementation):
    golden.check("linear_logp", lambda: golden_outputs(implementation), implementation)


@every_implementation
def test_the_head_is_never_copied(implementation):
    """Read in place: no temporary of the size of the head, in the forward or the backward."""
    shape = jax.ShapeDtypeStruct
    for layout in ("vd", "dv"):
        weight = (131072, 1024) if layout == "vd" else (1024, 131072)
        specs = (shape((64, 1024), jnp.bfloat16), shape(weight, jnp.bfloat16), shape((64,), jnp.int32))

        def loss(h, w, t, layout=layout):
            return linear_logp(h, w, t, weight_layout=layout, implementation=implementation).sum()

        for f in (loss, jax.grad(loss, (0, 1))):
            used = jax.jit(f).lower(*specs).compile().memory_analysis().temp_size_in_bytes
            assert used < 2**26


def test_doctor_names_mosaic():
    code = "import sys; from rlk_jax.cli import main; sys.exit(main(['doctor', '--json']))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(out)["ops"]["linear_logp"]["choice"] == "mosaic"
