"""Options that are True or False, and those that do not exist, of every op for arrays and for tensors: one check, one
message.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_bridge
from rlk_jax import explain, vocab_parallel
from rlk_jax.ops import OPS

FLAGS = (bool, bool | None)
ROWS, HEAD, LOGITS, PER_TOKEN = (np.ones(shape, np.float32) for shape in ((2, 3, 8), (20, 8), (2, 3, 20), (2, 3)))
IDS = PER_TOKEN.astype(np.int32)
ARGUMENTS = {
    "linear_logp": (ROWS, HEAD, IDS),
    "linear_cross_entropy": (ROWS, HEAD, IDS),
    "linear_grpo_loss": (ROWS, HEAD, IDS, PER_TOKEN, None, PER_TOKEN[:, 0], PER_TOKEN),
    "linear_kl": (ROWS, HEAD, ROWS, HEAD),
    "logp": (LOGITS, IDS),
    "ratio_kl": (LOGITS, LOGITS, IDS, PER_TOKEN, PER_TOKEN),
    "grpo_loss": (LOGITS, LOGITS, IDS, PER_TOKEN, None, PER_TOKEN),
    "det_gemm": (ROWS, HEAD.T),
    "attention": (ROWS[:, :, None], ROWS[:, :, None], ROWS[:, :, None]),
}
"""What each op takes first."""
SIXTEEN_BITS = ("det_gemm", "attention")


def flags_of(function):
    """The names of a function's parameters that are flags."""
    return [x.name for x in inspect.signature(function).parameters.values() if x.annotation in FLAGS]


OF_ARRAYS = [(name, option) for name, op in OPS.items() for option in flags_of(op.function)]
OF_TENSORS = [
    (name, option) for name in OPS if hasattr(torch_bridge, name) for option in flags_of(getattr(torch_bridge, name))
]
PASSED_ON = [("linear_cross_entropy", "reduce_hidden_grad"), ("linear_grpo_loss", "validate")]
"""Options of linear_logp that go through another op."""


def assert_refused(call, option, *values):
    for value in values:
        with pytest.raises(ValueError) as error:
            call(**{option: value})
        may_be_none = "None, " if option == "validate" else ""
        assert str(error.value) == f"{option} must be {may_be_none}True or False, got {value!r}."


@pytest.mark.parametrize(("op", "option"), OF_ARRAYS + PASSED_ON)
def test_of_arrays(op, option):
    dtype = jnp.bfloat16 if op in SIXTEEN_BITS else None
    arguments = [x if x is None else jnp.asarray(x, dtype) for x in ARGUMENTS[op]]
    more = {"advantages": jnp.ones(2)} if op == "grpo_loss" else {}
    assert_refused(lambda **flag: OPS[op].function(*arguments, **more, **flag), option, "yes", 1, np.True_)


@pytest.mark.parametrize(("op", "option"), OF_TENSORS + PASSED_ON[:1])
def test_of_tensors(op, option):
    dtype = torch.bfloat16 if op in SIXTEEN_BITS else None
    arguments = [x if x is None else torch.from_numpy(x.copy()).to(dtype) for x in ARGUMENTS[op]]
    more = {"advantages": torch.ones(2)} if op == "grpo_loss" else {}
    assert_refused(lambda **flag: getattr(torch_bridge, op)(*arguments, **more, **flag), option, "yes", 1)


@pytest.mark.parametrize("option", ["return_lse", "return_target_rank", "validate"])
def test_over_a_mesh(option):
    mesh = {"mesh": jax.make_mesh((1,), ("v",)), "vocab_axis": "v"}
    assert_refused(lambda **flag: vocab_parallel.linear_logp(*ARGUMENTS["linear_logp"], **mesh, **flag), option, "yes")


@pytest.mark.parametrize("op", OPS)
def test_an_option_that_does_not_exist(op):
    """The error names the op that was called, whatever this is made of."""
    tensors = [x if x is None else torch.from_numpy(x.copy()) for x in ARGUMENTS[op]]
    calls = [(OPS[op].function, ARGUMENTS[op]), (functools.partial(explain, op), ARGUMENTS[op])]
    calls += [(getattr(torch_bridge, op), tensors)] if hasattr(torch_bridge, op) else []
    for call, arguments in calls:
        with pytest.raises(TypeError, match=rf"^{op}\(\) got an unexpected keyword argument 'no_such_option'"):
            call(*arguments, no_such_option=1)
    with pytest.raises(TypeError, match=rf"^{op}\(\) missing a required argument: "):
        explain(op)


def test_every_op_has_been_asked():
    """A signature whose annotations were texts would have no flags here."""
    assert {name for name, _ in OF_ARRAYS} == set(OPS)
    assert {name for name, _ in OF_TENSORS} == {name for name in OPS if hasattr(torch_bridge, name)}
