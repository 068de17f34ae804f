"""Which implementation runs, what is said about the others, and what strict mode refuses."""

import dataclasses
import inspect
import logging
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlk_jax
from pallas_kernels.cuda import build
from pallas_kernels.triton import call
from rlk_jax import linear_logp
from rlk_jax.core import dispatch
from rlk_jax.ops import OPS, promising
from rlk_jax.ops.attention.options import AttentionInputs, AttentionOptions
from rlk_jax.ops.linear_logp.options import HeadInputs, HeadOptions
from rlk_jax.ops.logits.options import LogitsOptions, LogpInputs

ARGUMENTS = (jnp.ones((4, 8)), jnp.ones((20, 8)), jnp.arange(4))
XLA = next(x for x in dispatch.TABLE["linear_logp"] if x.name == "xla")


def described(op: str, *args) -> dispatch.CallFacts:
    return OPS[op].describe(dispatch.bound_arguments(op, OPS[op].function, *args))[0]


def refuses(name: str, reason: str, platform: str = "cpu") -> dispatch.Implementation:
    return dataclasses.replace(
        XLA, name=name, obstacles=lambda facts: [reason], meant_for=lambda device: device.platform == platform
    )


@pytest.fixture
def with_entry(monkeypatch):
    """Adds an implementation in front of the table of linear_logp, as a kernel would join."""

    def add(entry: dispatch.Implementation) -> None:
        others = [x for x in dispatch.TABLE["linear_logp"] if x.name != entry.name]
        monkeypatch.setitem(dispatch.TABLE, "linear_logp", (entry, *others))
        dispatch.log_once.cache_clear()

    return add


def test_xla_is_the_choice_here_and_every_other_name_has_a_reason():
    decision = rlk_jax.explain("linear_logp", *ARGUMENTS)
    assert decision.choice == "xla"
    assert set(decision.reasons) == set(dispatch.IMPLEMENTATIONS) - {"xla"}
    assert all(decision.reasons.values())
    assert decision.by_name == ("deterministic", "reference")
    assert decision.device.platform == "cpu"
    assert decision.numerics_version == rlk_jax.numerics_version["linear_logp"]
    assert "runs xla" in str(decision) and "not mosaic" in str(decision)


def test_explain_takes_shapes_and_options_and_runs_nothing():
    spec = jax.ShapeDtypeStruct
    shapes = (spec((10**6, 4096), jnp.bfloat16), spec((151936, 4096), jnp.bfloat16), spec((10**6,), jnp.int32))
    assert rlk_jax.explain("linear_logp", *shapes, implementation="deterministic").choice == "deterministic"


def test_explain_raises_as_the_op_does():
    with pytest.raises(ValueError, match=re.escape(f"unknown op 'conv'; the ops are {tuple(OPS)}")):
        rlk_jax.explain("conv", *ARGUMENTS)
    with pytest.raises(ValueError, match="must match lm_head_weight dim"):
        rlk_jax.explain("linear_logp", jnp.ones((4, 7)), *ARGUMENTS[1:])
    with pytest.raises(TypeError, match="colour"):
        rlk_jax.explain("linear_logp", *ARGUMENTS, colour="red")


@pytest.mark.parametrize(
    ("name", "dtype", "refused"),
    [
        ("mosaic", jnp.float16, "needs hidden and .* not float16 and bfloat16; .* not 7"),
        ("mosaic", jnp.float32, ".* not 7; takes a low_rank term beside bfloat16 or float16 operands only"),
        ("cuda", jnp.float32, "needs hidden and .* not float32 and bfloat16; .* not 7"),
    ],
)
def test_hoppers_kernels_say_everything_that_they_lack(name, dtype, refused):
    reasons = f"needs compute capability 9.0 .Hopper., not cpu; {refused}"
    arguments = (jnp.ones((4, 7), dtype), jnp.ones((20, 7), jnp.bfloat16), jnp.arange(4))
    with pytest.raises(ValueError, match=f"linear_logp cannot run '{name}' here: {reasons}"):
        linear_logp(*arguments, implementation=name, low_rank=(jnp.ones((2, 7)), jnp.ones((20, 2)), 1.0))


@pytest.mark.parametrize("missing", [None, "needs a compiler"])
def test_cuda_runs_by_name_only_and_is_no_fallback(missing, monkeypatch):
    monkeypatch.setattr(build, "why_missing", lambda: missing)
    monkeypatch.setattr(build, "driver_too_old", lambda: None)
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "H200", "9.0"))
    monkeypatch.setenv("RLK_STRICT", "1")
    hidden, weight, ids = (*(x.astype(jnp.bfloat16) for x in ARGUMENTS[:2]), ARGUMENTS[2])
    for op, arguments in {"linear_logp": (hidden, weight, ids), "det_gemm": (hidden, weight.T)}.items():
        decision = rlk_jax.explain(op, *arguments)
        assert decision.choice == "mosaic" and ("cuda" in decision.by_name) == (missing is None)
        assert decision.reasons["cuda"] == [missing or "mosaic is as fast and needs no compiler"]


def test_no_compiler_is_looked_for_unless_it_is_asked_for(monkeypatch):
    def why_missing():
        raise AssertionError("looked for nvcc")

    monkeypatch.setattr(build, "why_missing", why_missing)
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "H200", "9.0"))
    facts = described("det_gemm", *(jnp.ones((8, 8), jnp.bfloat16),) * 2)
    assert dispatch.choose(facts, None).name == "mosaic"
    with pytest.raises(AssertionError, match="looked for nvcc"):
        dispatch.choose(facts, "cuda")
    # Neither `mosaic` nor `cuda` takes both of these.
    hidden, weight, ids = ARGUMENTS
    assert promising("linear_logp", hidden.astype(jnp.float16), weight.astype(jnp.bfloat16), ids) == "deterministic"


def test_an_old_driver_is_a_reason(monkeypatch):
    monkeypatch.setattr(build, "why_missing", lambda: None)
    monkeypatch.setattr(build, "driver_too_old", lambda: "the driver is old")
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "H200", "9.0"))
    half = jnp.ones((8, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="det_gemm cannot run 'cuda' here: the driver is old"):
        rlk_jax.det_gemm(half, half, implementation="cuda")


@pytest.mark.parametrize("kind", ["7.5", "gfx942", None])
def test_no_kernel_is_missed_on_other_gpus(kind, monkeypatch, caplog):
    """Strict mode too: there is nothing faster that was meant for them."""
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "some GPU", kind))
    monkeypatch.setenv("RLK_STRICT", "1")
    linear_logp(*ARGUMENTS)
    assert not caplog.records


@pytest.mark.parametrize("name", ["cublas", ["xla"], np.array(["xla", "triton"])], ids=str)
def test_what_is_no_name_of_an_implementation_is_refused(name):
    with pytest.raises(ValueError, match="implementation must be one of"):
        linear_logp(*ARGUMENTS, implementation=name)


def test_a_named_implementation_that_does_not_exist_says_so():
    with pytest.raises(ValueError, match="logp cannot run 'cuda' here: logp has no such implementation"):
        rlk_jax.logp(ARGUMENTS[1], jnp.zeros(20, jnp.int32), implementation="cuda")


def test_triton_says_everything_that_it_lacks(monkeypatch):
    monkeypatch.setattr(call, "why_missing", lambda: "needs a pair")
    reasons = "needs an NVIDIA GPU of .* 8.0 or later, not cpu; needs a pair; needs hidden and .*float32; .* not 7"
    arguments = (jnp.ones((4, 7)), jnp.ones((20, 7)), jnp.arange(4))
    with pytest.raises(ValueError, match=f"linear_logp cannot run 'triton' here: {reasons}"):
        linear_logp(*arguments, implementation="triton")


@pytest.mark.parametrize(("kind", "choice"), [("8.0", "triton"), ("9.0", "mosaic"), ("12.0", "triton"), ("7.5", "xla")])
def test_triton_is_chosen_from_ampere_on_but_not_before_mosaic(kind, choice, monkeypatch):
    monkeypatch.setattr(call, "why_missing", lambda: None)
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: dispatch.Device("gpu", "some GPU", kind))
    half = [x.astype(jnp.bfloat16) for x in ARGUMENTS[:2]]
    assert rlk_jax.explain("linear_logp", *half, ARGUMENTS[2]).choice == choice


@pytest.mark.parametrize(
    ("installed", "runs"),
    [
        ({}, False),
        ({"triton": "3.6.0"}, False),
        ({"jax-triton": "0.3.1", "triton": "3.6.0"}, True),
        ({"jax-triton": "0.3.1", "triton": "3.5.1"}, False),
        ({"jax-triton": "0.4.1", "triton": "3.6.0"}, False),
        ({"jax-triton": "0.4.1", "triton": "3.10.0+git1"}, True),
    ],
)
def test_which_pairs_of_triton_and_its_bridge_run(installed, runs, monkeypatch):
    monkeypatch.setattr(call, "_version", installed.get)
    call.why_missing.cache_clear()
    reason = call.why_missing()
    call.why_missing.cache_clear()
    assert (reason is None) == runs
    assert reason is None or all(name in reason for name in ("0.3.1 with triton 3.6", *installed.values()))
    assert reason is None or ': pip install "rlk-jax[triton]" "jax-triton' in reason


def test_the_choice_never_depends_on_the_number_of_tokens():
    spec = jax.ShapeDtypeStruct
    found = set()
    for lead in [(), (0,), (1,), (7, 3), (10**6,)]:
        hidden, ids = spec((*lead, 8), jnp.float32), spec(lead, jnp.int32)
        found.add(described("linear_logp", hidden, ARGUMENTS[1], ids))
    assert len(found) == 1


def test_a_new_entry_is_chosen_and_reported(with_entry):
    with_entry(dataclasses.replace(XLA, name="cuda"))
    decision = rlk_jax.explain("linear_logp", *ARGUMENTS)
    assert decision.choice == "cuda" and decision.reasons["xla"] == ["cuda was chosen"]
    linear_logp(*ARGUMENTS)


def test_a_fallback_is_logged_once_per_reason(with_entry, caplog):
    with_entry(refuses("cuda", "float32 inputs"))
    with caplog.at_level(logging.WARNING, logger="rlk_jax"):
        linear_logp(*ARGUMENTS)
        linear_logp(*ARGUMENTS)
    assert [r.message for r in caplog.records] == ["linear_logp runs xla instead of cuda: float32 inputs"]


def test_no_fallback_is_logged_where_the_faster_one_does_not_belong(with_entry, caplog):
    with_entry(refuses("cuda", "needs a Hopper GPU", platform="gpu"))
    linear_logp(*ARGUMENTS)
    assert not caplog.records


def test_strict_mode_refuses_a_fallback_on_a_gpu(with_entry, monkeypatch):
    with_entry(refuses("cuda", "float32 inputs", platform="gpu"))
    gpu = dispatch.Device("gpu", "NVIDIA A100", "8.0")
    monkeypatch.setattr(dispatch, "device_of", lambda arrays: gpu)
    linear_logp(*ARGUMENTS)
    monkeypatch.setenv("RLK_STRICT", "1")
    with pytest.raises(ValueError, match="RLK_STRICT=1: linear_logp runs xla instead of cuda: float32 inputs"):
        linear_logp(*ARGUMENTS)
    linear_logp(*ARGUMENTS, implementation="xla")


def test_nothing_runs_where_nothing_can(monkeypatch):
    monkeypatch.setitem(dispatch.TABLE, "linear_logp", (refuses("xla", "no"),))
    with pytest.raises(ValueError, match=r"linear_logp has no implementation for these arguments: .*xla: no"):
        linear_logp(*ARGUMENTS)


def test_the_device_is_where_the_arguments_live():
    third = jax.devices("cpu")[2]
    assert dispatch.device_of([jax.device_put(ARGUMENTS[0], third)]).kind == third.device_kind
    with jax.default_device(third):
        assert dispatch.device_of(ARGUMENTS).platform == "cpu"


def test_programs_are_traced_for_a_device_that_is_not_here():
    """Where arguments lie still counts first."""
    absent: Any = SimpleNamespace(platform="gpu", device_kind="H200", compute_capability="9.0")
    half = [jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)] * 2
    with dispatch.compiling_for(absent):
        assert rlk_jax.explain("det_gemm", *half).choice == "mosaic"
        assert dispatch.device_of([jax.device_put(ARGUMENTS[0], jax.devices()[0])]).platform == "cpu"
    assert rlk_jax.explain("det_gemm", *half).choice != "mosaic"


@pytest.mark.parametrize(
    ("op", "options", "arrays"),
    [
        ("linear_logp", HeadOptions, HeadInputs),
        ("logp", LogitsOptions, LogpInputs),
        ("attention", AttentionOptions, AttentionInputs),
    ],
)
def test_options_are_those_of_the_op(op, options, arrays):
    """A low-rank term is one keyword, and several arrays. Labels are smoothed by linear_cross_entropy alone."""
    keywords = {p.name for p in inspect.signature(OPS[op].function).parameters.values()} - {"low_rank"}
    defaults = {x.name: x.default for x in dataclasses.fields(options)}
    assert defaults.pop("label_smoothing", 0.0) == 0.0
    assert defaults.keys() == keywords - set(arrays._fields) - {"vocab_start_index"}
    assert defaults == {name: inspect.signature(OPS[op].function).parameters[name].default for name in defaults}
