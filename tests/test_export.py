"""jax.export: every op is serialised, and gives the same bits in a process that only loads it."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import rlk_jax
from rlk_jax import nn
from rlk_jax.ops import OPS
from tests.support import exported, helpers

CALLS = exported.calls()


def test_every_op_has_a_call_here():
    assert set(CALLS) == set(OPS)


@pytest.fixture(scope="module")
def loaded(request, tmp_path_factory):
    """The hashes of the programs whose tests were asked for."""
    asked_for = [x.callspec.params for x in helpers.asked_for(request, "test_same_bits_in_another_process")]
    programs = [(params["op"], params["name"]) for params in asked_for]
    return exported.in_another_process(programs, tmp_path_factory.mktemp("exported"))


BY_XLA = ("logp", "grpo_loss", "linear_kl", "linear_grpo_loss")
"""The ops that `make test` exports with "xla"; the others are exported with "deterministic"."""


@helpers.cover(
    "op, name",
    exported.programs("reference", "xla", "deterministic"),
    lambda op, name: name == ("xla" if op in BY_XLA else "deterministic"),
)
def test_same_bits_in_another_process(op, name, loaded):
    """In `make test`, every op has one implementation, which catches what keeps the others from being exported: all are
    JAX's operations alone.
    """
    assert loaded[f"{op}-{name}"] == CALLS[op].hashes(name)


PUBLIC_TUPLES = [
    x for module in (rlk_jax, nn) for x in vars(module).values() if isinstance(x, type) and issubclass(x, tuple)
]


@pytest.mark.parametrize("kind", [*PUBLIC_TUPLES, rlk_jax.grpo.PolicyLoss], ids=lambda kind: kind.__name__)
def test_public_tuples_are_taken_and_returned(kind):
    given = kind(*(jnp.zeros(3) for _ in kind._fields))
    program = jax.export.deserialize(jax.export.export(jax.jit(lambda x: x))(given).serialize())
    assert isinstance(program.call(given), kind)


def test_the_gradient_of_an_exported_program_has_the_same_bits():
    call = CALLS["linear_logp"]

    def logp(h, w, b):
        return rlk_jax.linear_logp(h, w, call.arguments[3], b, implementation="deterministic")

    program = jax.export.export(jax.jit(logp))(*call.arguments[:3])
    loaded = jax.export.deserialize(program.serialize(vjp_order=1))

    def gradients(function):
        return jax.tree.leaves(jax.jit(jax.grad(lambda *x: function(*x).sum(), argnums=(0, 1, 2)))(*call.arguments[:3]))

    for found, right in zip(gradients(loaded.call), gradients(logp), strict=True):
        np.testing.assert_array_equal(found, right)


def test_an_exported_program_marks_bad_values_and_reports_none():
    ids = jnp.array([0, 99])
    function = jax.jit(lambda logits: rlk_jax.logp(logits, ids))
    program = jax.export.export(function)(jnp.zeros((2, 5)))
    assert not program.ordered_effects and not program.unordered_effects
    found = program.call(jnp.zeros((2, 5)))
    assert np.isfinite(found[0]) and np.isnan(found[1])
    error, _ = checkify.checkify(program.call)(jnp.zeros((2, 5)))
    error.throw()
    with pytest.raises(checkify.JaxRuntimeError, match="token_ids out of range"):
        checkify.checkify(function)(jnp.zeros((2, 5)))[0].throw()
