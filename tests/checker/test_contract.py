"""The tolerance contract: every entry can be read, a missing entry raises, and the error is what the contract says."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlk_jax.checker import contract, relative_norm, tolerance


def test_every_entry_is_a_positive_number_and_its_class_says_how_it_is_measured():
    accuracy = contract._contract()["accuracy"]
    assert set(accuracy) == set(contract._contract()["measure"])
    for op_class, by_dtype in accuracy.items():
        for dtype, kinds in by_dtype.items():
            for kind in kinds:
                assert 0 < tolerance(op_class, dtype, kind) < 0.1


def test_the_bars_of_the_design_are_kept():
    assert tolerance("linear_logp", jnp.float32, "forward") <= 1e-5
    assert tolerance("linear_logp", jnp.float32, "gradient") <= 1e-5
    assert tolerance("linear_logp", jnp.bfloat16, "forward") <= 1e-6
    assert tolerance("linear_logp", jnp.bfloat16, "gradient") <= 3e-3


@pytest.mark.parametrize(
    "entry",
    [("no_such_op", "float32", "forward"), ("linear_logp", "int8", "forward"), ("linear_logp", "float32", "up")],
)
def test_a_missing_entry_raises(entry):
    with pytest.raises(KeyError, match=f"the contract has no entry for {' / '.join(entry)}"):
        tolerance(*entry)


def test_relative_norm():
    assert relative_norm([3.0, 4.0], [3.0, 4.0]) == 0
    assert relative_norm([3.0, 4.5], [3.0, 4.0]) == pytest.approx(0.1)
    assert relative_norm(np.ones(2), np.zeros(2)) == np.inf
    assert relative_norm(np.zeros((0, 3)), np.zeros((0, 3))) == 0
    assert np.isnan(relative_norm([np.nan], [1.0]))
    with pytest.raises(ValueError, match=r"shapes differ: \(2,\) and \(1, 2\)"):
        relative_norm(np.ones(2), np.ones((1, 2)))
