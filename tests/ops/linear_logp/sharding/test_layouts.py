"""Bare calls, however XLA has laid their arrays out: right where the naive loss compiles, and cached like it."""

import contextlib
import functools
import itertools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rlk_jax import linear_logp
from rlk_jax.core import dispatch
from rlk_jax.core.dispatch import log_once
from rlk_jax.core.partitioning import described
from tests.support.helpers import assert_same_bits, assert_within_contract

B, T, D, V = 8, 12, 16, 512
MESHES = {"4": ((4,), ("data",)), "2 x 4": ((2, 4), ("data", "tp")), "8": ((8,), ("data",)), "6": ((6,), ("data",))}
BATCHES = [P("data"), P(None, "data"), P(), P(("data",), None)]
HEADS = [P(), P("data"), P(None, "data"), P("tp"), P(None, "tp"), P("tp", "data")]


def micro_batches(k, loss, hidden, ids):
    return lax.map(lambda x: loss(*x), (hidden.reshape(k, B // k, T, D), ids.reshape(k, B // k, T))).sum()


def groups(k, loss, hidden, ids):
    return jax.vmap(loss)(hidden.reshape(k, B // k, T, D), ids.reshape(k, B // k, T)).sum()


def groups_by_map_and_vmap(k, loss, hidden, ids):
    return micro_batches(k, lambda h, i: jax.vmap(loss)(h, i).sum(), hidden, ids)


def a_slice(k, loss, hidden, ids):
    return loss(hidden[:k], ids[:k])


def rotated(k, loss, hidden, ids):
    return loss(*(jnp.concatenate([x[k:], x[:k]]) for x in (hidden, ids)))


def leftover(k, loss, hidden, ids):
    return loss(hidden.reshape(-1, D)[k + 1 :], ids.reshape(-1)[k + 1 :])


def columns(k, loss, hidden, ids):
    return loss(hidden[:, k:], ids[:, k:])


def accumulated(k, loss, hidden, ids):
    parts = hidden.reshape(k, B // k, T, D), ids.reshape(k, B // k, T)
    return lax.scan(lambda total, x: (total + jax.checkpoint(loss)(*x), None), jnp.float32(0), parts)[0]


VIEWS = [micro_batches, groups, groups_by_map_and_vmap, a_slice, rotated, leftover, columns, accumulated]


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def fused(weight, hidden, ids):
    return linear_logp(hidden, weight, ids).sum()


def naive(weight, hidden, ids):
    logits = jnp.matmul(hidden, weight.T, precision=lax.Precision.HIGHEST)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1).sum()


def program(loss, view, k):
    """Value, and gradients of the head and hidden states, of a loss on a view of a batch."""
    return jax.jit(
        jax.value_and_grad(lambda weight, hidden, ids: view(k, functools.partial(loss, weight), hidden, ids), (0, 1))
    )


@functools.cache
def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    weight, hidden = jax.random.normal(keys[0], (V, D)), jax.random.normal(keys[1], (B, T, D))
    return weight, hidden, jax.random.randint(keys[2], (B, T), 0, V)


KINDS = {"A": AxisType.Auto, "E": AxisType.Explicit}


def mesh_named(name, kinds="AA"):
    """`kinds` has a letter for each axis."""
    shape, names = MESHES[name]
    return jax.make_mesh(shape, names, axis_types=tuple(KINDS[kinds[i]] for i in range(len(shape))))


def fits(mesh, spec, shape):
    axes = [() if x is None else x if isinstance(x, tuple) else (x,) for x in spec]
    return all(
        set(names) <= set(mesh.axis_names) and size % np.prod([mesh.shape[n] for n in names], dtype=int) == 0
        for names, size in zip(axes, shape, strict=False)
    )


def lying_over(mesh, head, batch):
    """The head, hidden states and ids over a mesh."""
    return tuple(put(x, mesh, spec) for x, spec in zip(arrays(), (head, batch, batch), strict=True))


def check_fused(lying, view, k):
    """The fused loss and its gradients are those of the naive loss on one device."""
    expected_value, expected = program(naive, view, k)(*arrays())
    value, gradients = program(fused, view, k)(*lying)
    assert_within_contract(value, expected_value, "linear_logp", jnp.float32, "gradient")
    for actual, e in zip(gradients, expected, strict=True):
        assert_within_contract(actual, e, "linear_logp", jnp.float32, "gradient")


def check(mesh, head, batch, view, k):
    """The fused loss is right; False where naive has no program."""
    lying = lying_over(mesh, head, batch)
    try:
        program(naive, view, k).lower(*lying)
    except Exception:
        return False
    check_fused(lying, view, k)
    return True


@pytest.mark.full
@pytest.mark.parametrize(
    ("view", "k", "expected"),
    [(micro_batches, 2, -96 * np.log(512)), (a_slice, 2, -24 * np.log(512))],
    ids=["micro-batches", "a slice"],
)
def test_the_part_of_an_axis_that_users_found(view, k, expected):
    """In `make test`, test_views_of_a_sharded_batch has both views on this mesh, and its head and batch lie as here."""
    mesh = mesh_named("4")
    weight, hidden = put(jnp.ones((V, D)), mesh, P()), put(jnp.ones((B, T, D)), mesh, P("data"))
    value, _ = program(fused, view, k)(weight, hidden, put(jnp.zeros((B, T), int), mesh, P("data")))
    assert_within_contract(value, np.float32(expected), "linear_logp", jnp.float32, "gradient")


# Every view with another mesh, head and batch: the layouts that XLA gives are those of the view.
CASES = list(zip(VIEWS, itertools.cycle(["4", "2 x 4", "8"]), itertools.cycle(HEADS), strict=False))


VIEWS_OF_FULL = (groups_by_map_and_vmap, accumulated, leftover)


# In `make test`, micro_batches and groups catch what is wrong with either part of groups_by_map_and_vmap,
# test_meshes_of_both_kinds_of_axes has `accumulated`, and test_tokens_that_do_not_divide_are_said_once has `leftover`.
@pytest.mark.parametrize(
    ("view", "mesh", "head"),
    [pytest.param(*x, marks=pytest.mark.full) if x[0] in VIEWS_OF_FULL else x for x in CASES],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_views_of_a_sharded_batch(view, mesh, head):
    mesh = mesh_named(mesh)
    head = head if fits(mesh, head, (V, D)) else P()
    assert check(mesh, head, P("data"), view, 2)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(
    mesh=st.sampled_from(list(MESHES)),
    kinds=st.sampled_from(["AA", "EE", "AE", "EA"]),
    head=st.sampled_from(HEADS),
    batch=st.sampled_from(BATCHES),
    view=st.sampled_from(VIEWS),
    k=st.sampled_from([1, 2, 4, 8]),
)
def test_every_layout_that_naive_compiles_for(mesh, kinds, head, batch, view, k):
    """In `make test`, test_views_of_a_sharded_batch has each view once."""
    # JAX's vmap over a dimension that lies over an Explicit axis hides that axis from the op.
    is_known = kinds[0] == "A" or view not in (groups, groups_by_map_and_vmap)
    mesh = mesh_named(mesh, kinds)
    if is_known and fits(mesh, head, (V, D)) and fits(mesh, batch, (B, T)):
        check(mesh, head, batch, view, k)


# In `make test`, tokens over an Explicit axis and a head over an Auto one, under `jax.set_mesh`. The other way round,
# and with the mesh in the arrays' types alone, JAX does something else.
@pytest.mark.parametrize(
    ("kinds", "is_set"),
    [("EA", True), *(pytest.param(*x, marks=pytest.mark.full) for x in (("EA", False), ("AE", True), ("AE", False)))],
)
def test_meshes_of_both_kinds_of_axes(kinds, is_set):
    """The head is never gathered, and values lie as tokens do over Explicit axes."""
    mesh = mesh_named("2 x 4", kinds)
    arrays()  # Arrays that are made under a mesh have it in their types.
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        weight, hidden, ids = lying = lying_over(mesh, P("tp"), P("data"))
        check_fused(lying, accumulated, 1)
        call = jax.jit(linear_logp)
        assert jax.typeof(call(hidden, weight, ids)).sharding.spec == P("data" if kinds == "EA" else None, None)
        gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", call.lower(hidden, weight, ids).compile().as_text())
        assert all(np.prod([int(n) for n in shape.split(",") if n]) < V * D for shape in gathered)


@pytest.mark.parametrize("in_jit", [False, True])
def test_bad_ids_on_a_mesh_of_both_kinds_of_axes(in_jit):
    """They raise outside jit, are reported to checkify under it, and are NaN where nobody looks."""
    mesh = mesh_named("2 x 4", "EA")
    weight, hidden, ids = lying_over(mesh, P("tp"), P("data"))
    ids = put(np.asarray(ids).copy() + V * (np.arange(T) == 2), mesh, P("data"))
    unread = functools.partial(linear_logp, validate=False)
    found = (jax.jit(unread) if in_jit else unread)(hidden, weight, ids)
    np.testing.assert_array_equal(jnp.isnan(found), np.broadcast_to(np.arange(T) == 2, (B, T)))
    if in_jit:
        error, _ = checkify.checkify(jax.jit(linear_logp))(hidden, weight, ids)
        assert "target_ids out of range" in str(error.get())
    else:
        with pytest.raises(ValueError, match="target_ids out of range"):
            linear_logp(hidden, weight, ids)


def test_tokens_that_do_not_divide_are_said_once(caplog, compiled_anew):
    """It is said where a program is compiled, so not where one comes from the cache on disk."""
    compiled_anew()
    log_once.cache_clear()
    assert check(mesh_named("4"), P(), P("data"), leftover, 1)
    said = [x.message for x in caplog.records if "tokens of a bare linear_logp do not divide by" in x.message]
    assert said and len(set(said)) == len(said)


def test_each_implementation_has_programs_of_its_own():
    """XLA finds a program by what it depends on, and the shapes of all implementations are the same."""
    texts = [described(row.functions.on_device) for row in dispatch.TABLE["linear_logp"]]
    assert len(set(texts)) == len(texts) and not any("0x" in text for text in texts)
    weight, hidden, ids = arrays()
    mesh = mesh_named("4")
    lying = put(hidden, mesh, P("data")), put(weight, mesh, P("data")), put(ids, mesh, P("data"))
    for name in ("xla", "deterministic", "reference"):
        call = jax.jit(functools.partial(linear_logp, implementation=name))
        found, whole = call(*lying), call(hidden, weight, ids)
        if name == "deterministic":
            assert_same_bits(found, whole)
        assert_within_contract(found, whole, "linear_logp", jnp.float32, "forward")


def test_a_description_holds_what_a_function_does():
    def power(n):
        return lambda x: x**n

    texts = [described(x) for x in (power(2), power(3), functools.partial(power, 2), functools.partial(power, n=2))]
    assert len(set(texts)) == 4 and described(power(2)) == texts[0]


START = """
import json, os, sys, hashlib
import jax
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from tests.ops.linear_logp.sharding import test_layouts as tests
mesh = jax.make_mesh((int(sys.argv[1]),), ("data",), axis_types=(AxisType.Auto,))
found = {}
for name, head in (("whole", P()), ("vocabulary", P("data")), ("hidden", P(None, "data"))):
    arrays = [tests.put(x, mesh, s) for x, s in zip(tests.arrays(), (head, P("data"), P("data")))]
    value, gradients = tests.program(tests.fused, tests.a_slice, tests.B)(*arrays)
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in (value, *gradients))).hexdigest()
    found[name] = digest, len([x for x in os.listdir(sys.argv[2]) if x.endswith("-cache")])
print(json.dumps(found))
"""


# In `make test`, the case of 4 devices catches a name of a program that changes between starts: the devices are in it
# by the same code whatever their number.
@pytest.mark.parametrize(
    "devices", [4, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 8))], ids="{} devices".format
)
def test_another_start_finds_its_programs_in_the_cache(devices, tmp_path):
    """The number of entries and the bits stay what they were, for whole heads and for cut ones."""
    command = [sys.executable, "-c", START, str(devices), str(tmp_path)]
    starts = [
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        for _ in range(2)
    ]
    last = {name: (digest, starts[0]["hidden"][1]) for name, (digest, _) in starts[0].items()}
    assert {name: tuple(x) for name, x in starts[1].items()} == last
