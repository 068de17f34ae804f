"""det_gemm on a CPU: accuracy, raw bits, gradients, JAX's transformations, and a message for every bad input."""

import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlk_jax
from rlk_jax import det_gemm
from rlk_jax.core import dispatch
from tests.support import gemm, helpers
from tests.support.gemm import Case
from tests.support.helpers import assert_same_bits

CASES = (
    Case("plain", 70, 130, 300),
    Case("transposed", 70, 130, 300, transpose_b=True),
    Case("one of each", 1, 1, 1, integers=True),
    Case("odd", 7, 3, 5, transpose_b=True, out_dtype=jnp.float32),
    Case("lead", 5, 72, 90, lead=(2, 3), accumulates=True),
    Case("from C, rounded", 65, 64, 257, accumulates=True, out_dtype=jnp.bfloat16),
)
BITS = Case("bits", 150, 192, 260)
SUM = Case("sum", 330, 330, 40)


IN_MAKE_TEST = (("transposed", jnp.float16), ("lead", jnp.bfloat16), ("from C, rounded", jnp.bfloat16))


# Both dtypes are widened before the products; the plain cases are compared by `rlk check`.
@helpers.cover(
    "case, implementation, dtype",
    itertools.product(CASES, ["deterministic", "reference"], gemm.DTYPES),
    lambda case, implementation, dtype: (
        (case.name, dtype) in IN_MAKE_TEST and (implementation == "deterministic" or case.name == "lead")
    ),
)
def test_against_float64(case, implementation, dtype):
    case = replace(case, out_dtype=dtype) if case.out_dtype == jnp.bfloat16 else case
    gemm.check_against_gold(case, dtype, implementation, "det_gemm_float32")


# A transposed B is turned before any sum, and 65 rows catch what is wrong with a whole block of 64.
@helpers.cover(
    "dtype, transpose_b, sizes",
    [(jnp.bfloat16, False, (1, 65)), (jnp.bfloat16, False, (64,)), (jnp.float16, True, (7, 128))],
    lambda dtype, transpose_b, sizes: sizes == (1, 65),
)
def test_rows_do_not_depend_on_the_batch(dtype, transpose_b, sizes):
    gemm.check_rows(replace(BITS, transpose_b=transpose_b), dtype, None, sizes)


# Each example compiles a program. In `make test`, test_rows_do_not_depend_on_the_batch takes one row and 65 from
# anywhere; rows that come twice, and other numbers of rows, are left to `make test-full` alone.
@pytest.mark.full
@settings(max_examples=12)
@given(data=st.data())
def test_any_rows_at_any_place(data):
    case = Case("any", 90, 70, 33, accumulates=True)
    p = gemm.make(case, jnp.bfloat16)
    index = np.asarray(data.draw(st.lists(st.integers(0, 89), min_size=1, max_size=130)))
    assert_same_bits(gemm.call(case, gemm.rows_of(p, index), None), gemm.call(case, p, None)[index])


# The one with the most cuts; below, one cut from a given C.
@helpers.cover(
    "dtype, cuts, transpose_b",
    [(jnp.bfloat16, (64,), False), (jnp.bfloat16, (64, 128, 320), True), (jnp.float16, (256, 320), False)],
    lambda dtype, cuts, transpose_b: transpose_b,
)
def test_sums_in_parts(dtype, cuts, transpose_b):
    gemm.check_cuts(replace(SUM, transpose_b=transpose_b), dtype, None, cuts)


def test_sums_in_parts_from_a_given_c():
    gemm.check_cuts(replace(SUM, accumulates=True, out_dtype=jnp.bfloat16), jnp.bfloat16, None, (128,))


# In `make test`, 58 rows more end with a block of 64, and 100 more within another one. They catch the bug of one row
# more, which ends where 70 rows do, within the second block.
@helpers.cover("counts", [((58, 100),), ((1,),)], lambda counts: counts == (58, 100))
def test_zero_rows_appended_leave_the_gradient_of_b(counts):
    gemm.check_appended_zero_rows(Case("appended", 70, 40, 50), jnp.bfloat16, None, counts)


def test_run_to_run(compiled_anew):
    p = gemm.make(BITS, jnp.bfloat16)
    expected = gemm.outputs(BITS, p, None)
    compiled_anew()
    assert_same_bits(gemm.outputs(BITS, p, None), expected)


# The op itself answers where there is nothing to sum.
@helpers.cover(
    "implementation, dtype",
    itertools.product(["deterministic", "reference"], gemm.DTYPES),
    lambda *x: x == ("deterministic", jnp.bfloat16),
)
def test_nothing_to_multiply(dtype, implementation):
    gemm.check_empty(dtype, implementation)


@helpers.cover("transpose_b", [(False,), (True,)], lambda transpose_b: transpose_b)  # no rule asks for it
def test_jit_remat_scan_and_lead_dims_keep_bits(transpose_b):
    case = Case("transformed", 4, 72, 90, transpose_b, lead=(3,))
    p = gemm.make(case, jnp.bfloat16)
    expected = gemm.outputs(case, p, None)

    def f(a):
        return det_gemm(a, p.b, transpose_b=transpose_b)

    def of(function):
        return jax.jit(lambda a: jax.vjp(function, a)[1](p.g)[0])(p.a)

    flat = p.a.reshape(12, 72)
    assert_same_bits(f(flat), expected.c.reshape(12, 90))
    for function in (f, jax.jit(f), jax.checkpoint(f), jax.vmap(f), lambda a: jax.lax.map(f, a)):
        assert_same_bits(function(p.a), expected.c)
        assert_same_bits(of(function), expected.d_a)


def test_vmap_over_anything():
    case = Case("mapped", 6, 72, 90, accumulates=True)
    p = gemm.make(case, jnp.bfloat16)
    experts = jnp.stack([p.b, -p.b])

    def f(a, b, c):
        return det_gemm(a, b, accumulate_into=c)

    expected = jnp.stack([f(p.a, b, p.start) for b in experts])
    assert_same_bits(jax.vmap(f, (None, 0, None))(p.a, experts, p.start), expected)
    batch = jnp.stack([p.a, p.a[::-1]])
    actual = jax.vmap(jax.grad(lambda a, b: f(a, b, p.start).sum(), 1), (0, None))(batch, p.b)
    one = jax.grad(lambda b: f(batch[1], b, p.start).sum())(p.b)
    assert_same_bits(actual[1], one)


def test_gradients_of_gradients():
    """In the operands: dA is linear in B, and its derivative is a product too."""
    case = Case("second", 6, 40, 30)
    p = gemm.make(case, jnp.bfloat16)

    def d_a(b):
        return jax.vjp(lambda a: det_gemm(a, b), p.a)[1](p.g)[0]

    h = p.a[::-1]
    assert_same_bits(jax.vjp(d_a, p.b)[1](h)[0], jax.vjp(lambda b: det_gemm(h, b), p.b)[1](p.g)[0])


def _products(function, *arguments):
    """The forms of the products that run."""
    forms = []
    entry = next(x for x in dispatch.TABLE["det_gemm"] if x.name == "deterministic")

    def counting(form, a, b, start):
        forms.append((form.a_transposed, form.b_transposed))
        return entry.functions(form, a, b, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dispatch.TABLE, "det_gemm", (replace(entry, functions=counting),))
        jax.eval_shape(function, *arguments)
    return forms


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
def test_only_the_gradients_asked_for(wrap):
    p = gemm.make(Case("asked", 3, 8, 5), jnp.bfloat16)
    d_a, d_b, forward = (False, True), (True, False), (False, False)
    for argnums, expected in ((0, {d_a}), (1, {d_b}), ((0, 1), {d_a, d_b})):
        loss = wrap(lambda a, b: det_gemm(a, b).sum())
        assert set(_products(jax.grad(loss, argnums), p.a, p.b)) == {forward, *expected}


# Types of varying axes are checked in one program; without their check the same program runs.
@helpers.cover("check_vma", [(True,), (False,)], lambda check_vma: check_vma)
def test_shard_map_over_rows(check_vma):
    case = Case("sharded", 8, 72, 90)
    p = gemm.make(case, jnp.bfloat16)
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:4], ("data",))
    rows, whole = jax.P("data"), jax.P()
    f = jax.shard_map(det_gemm, mesh=mesh, in_specs=(rows, whole), out_specs=rows, check_vma=check_vma)
    expected = gemm.outputs(case, p, None)
    assert_same_bits(jax.jit(f)(p.a, p.b), expected.c)
    d_a, d_b = jax.jit(lambda a, b: jax.vjp(f, a, b)[1](p.g))(p.a, p.b)
    assert_same_bits(d_a, expected.d_a)
    gemm.assert_within_contract(d_b, expected.d_b, "det_gemm", jnp.bfloat16, "gradient")


def test_x64_and_strict_modes():
    p = gemm.make(BITS, jnp.bfloat16)
    expected = gemm.outputs(BITS, p, None)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert_same_bits(gemm.outputs(BITS, p, None), expected)


def test_numpy_arrays_and_strides():
    p = gemm.make(BITS, jnp.bfloat16)
    a, b = np.asarray(p.a)[::2, ::-1], np.asarray(p.b)[::-1]
    expected = det_gemm(jnp.asarray(a.copy()), jnp.asarray(b.copy()))
    assert_same_bits(det_gemm(a, b), expected)
    assert_same_bits(det_gemm(a, np.ascontiguousarray(b.T), transpose_b=True), expected)


A, B = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 5), jnp.bfloat16)
C = jnp.ones((4, 5), jnp.float32)
GOOD = {"a": A, "b": B, "accumulate_into": C}
BAD_INPUTS = {
    "1-D a": (
        {"a": A[0]},
        "det_gemm_fwd: expect 2D [M,K]@[K,N] (a may have leading dims), got shapes (8,) and (8, 5).",
    ),
    "3-D b": ({"b": B[None]}, "det_gemm_fwd: expect 2D [M,K]@[K,N] (a may have leading dims), got shapes (4, 8) and"),
    "1-D b, transposed": ({"b": B[0], "transpose_b": True}, "det_gemm_fwd: expect 2D [M,K]@[N,K]"),
    "inner": ({"a": A[:, :7]}, "det_gemm_fwd: K mismatch: a has 7, b as [K,N] has 8."),
    "inner, transposed": ({"transpose_b": True}, "det_gemm_fwd: K mismatch: a has 8, b as [N,K] has 5."),
    "float32 a": ({"a": A.astype(jnp.float32)}, "a must be bfloat16 or float16, got float32."),
    "int b": ({"b": B.astype(jnp.int8)}, "b must be bfloat16 or float16, got int8."),
    "two dtypes": ({"b": B.astype(jnp.float16)}, "a dtype bfloat16 must match b dtype float16."),
    "C's shape": ({"accumulate_into": C.T}, "accumulate_into must have C's shape (4, 5), got (5, 4)."),
    "C's dtype": ({"accumulate_into": C.astype(jnp.bfloat16)}, "accumulate_into must be float32, got bfloat16."),
    "out_dtype": ({"out_dtype": jnp.int32}, "out_dtype must be bfloat16, float16 or float32, got"),
    "no dtype": ({"out_dtype": "fast"}, "out_dtype must be bfloat16, float16 or float32, got 'fast'."),
    "transpose_b": ({"transpose_b": "yes"}, "transpose_b must be True or False, got 'yes'."),
    "a list": ({"a": [[1.0]]}, "a must be a JAX or NumPy array, got builtins.list."),
    "a shape": ({"a": jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)}, "a is a ShapeDtypeStruct: use jax.eval_shape, or"),
    "unknown name": ({"implementation": "cublas"}, "implementation must be one of"),
    "xla": ({"implementation": "xla"}, "det_gemm cannot run 'xla' here: det_gemm has no such implementation"),
    "mosaic": (
        {"implementation": "mosaic"},
        "det_gemm cannot run 'mosaic' here: needs compute capability 9.0 (Hopper)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        det_gemm(**{**GOOD, **changes})


def test_static_facts_are_checked_under_jit():
    with pytest.raises(ValueError, match="det_gemm_fwd: K mismatch"):
        jax.eval_shape(det_gemm, A[:, :7], B)


@pytest.mark.parametrize("name", ["b", "accumulate_into"])
def test_devices_must_match(name):
    first, second = jax.devices("cpu")[:2]
    arrays = {key: jax.device_put(x, first) for key, x in GOOD.items()}
    arrays[name] = jax.device_put(arrays[name], second)
    with pytest.raises(ValueError, match=f"{name} device .* must match a device .*"):
        det_gemm(**arrays)


def test_explicit_axes_are_refused():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"a is sharded as .* over Explicit mesh axes"):
        det_gemm(jax.device_put(A, jax.P("data")), B)


def test_nothing_that_promises_no_bits_is_substituted(monkeypatch):
    for device in (dispatch.Device("cpu", "cpu"), dispatch.Device("gpu", "H200", "9.0"), dispatch.Device("tpu", "v5")):
        monkeypatch.setattr(dispatch, "device_of", lambda arrays, device=device: device)
        decision = rlk_jax.explain("det_gemm", A, B)
        entry = next(x for x in dispatch.TABLE["det_gemm"] if x.name == decision.choice)
        assert entry.promises_bits
        assert decision.choice == ("mosaic" if device.kind == "H200" else "deterministic")
    assert all(x.promises_bits or x.by_name_only for x in dispatch.TABLE["det_gemm"])


def test_the_choice_never_depends_on_the_number_of_rows():
    spec = jax.ShapeDtypeStruct
    shapes = [(0, 8), (1, 8), (7, 3, 8), (10**6, 8)]
    decisions = {str(rlk_jax.explain("det_gemm", spec(shape, jnp.bfloat16), B)) for shape in shapes}
    assert len(decisions) == 1
