"""Memory: what a run needs is known before its first step, and running out of it is one line and status 2."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from rlk_jax.grpo import memory
from rlk_jax.grpo.memory import check_memory, free_memory
from rlk_jax.grpo.run_folder import RunFolder
from rlk_jax.grpo.steps import TrainingSteps, TrainState, make_mesh
from rlk_jax.grpo.stopping import StopRequest
from rlk_jax.grpo.tasks import load_task
from tests.grpo import tiny

GIB = 2**30
STATES = 100
ADVICE = (
    "; the longest prompt has 4 tokens ('2+3='), the longest completion 1; --max-prompt-tokens (of a prompts file), "
    "--micro-batches, --rollout-buckets and --prompts-per-step make a step smaller, --vocab-size, --width and --layers "
    "the policy\n"
)
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes."


def accelerator(limit: int | None, used: int = 0) -> SimpleNamespace:
    """A device with so much memory; None stands for one that does not count."""
    stats = None if limit is None else {"bytes_limit": limit, "bytes_in_use": used}
    return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


CPU = SimpleNamespace(platform="cpu")


def test_an_accelerator_has_what_its_fullest_device_has_free():
    assert free_memory([accelerator(10, 1), accelerator(9, 3), accelerator(10)]) == 6
    assert free_memory([accelerator(10), accelerator(None)]) is None


def test_devices_of_a_cpu_share_its_free_ram(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    assert free_memory([CPU]) is None
    lines = ("MemTotal:       24684084 kB", "MemAvailable:   8000 kB", "HugePages_Total:       0")
    (tmp_path / "meminfo").write_text("".join(line + "\n" for line in lines))
    assert free_memory([CPU]) == 8000 * 1024
    assert free_memory([CPU, CPU]) == 4000 * 1024
    (tmp_path / "meminfo").write_text(lines[0] + "\n")
    assert free_memory([CPU]) is None


def program(*, arguments: int = 0, results: int = 0, aliased: int = 0, temporary: int = 0, code: int = 0) -> Any:
    """A program without kernels that needs so many bytes, and an initial state that lies on one device."""
    sizes = SimpleNamespace(
        argument_size_in_bytes=arguments,
        output_size_in_bytes=results,
        alias_size_in_bytes=aliased,
        temp_size_in_bytes=temporary,
        generated_code_size_in_bytes=code,
    )
    lies = SimpleNamespace(device_set=[accelerator(1)], shard_shape=lambda shape: shape)
    state = TrainState(SimpleNamespace(sharding=lies, shape=(STATES,), dtype=np.dtype("int8")), None, None)
    compiled = SimpleNamespace(memory_analysis=lambda: sizes)
    name = SimpleNamespace(value="jit_stand_in")
    module = SimpleNamespace(operation=SimpleNamespace(regions=[], attributes={"sym_name": name}))
    lowered = SimpleNamespace(compile=lambda: compiled, compiler_ir=lambda: module, out_info=state)
    return SimpleNamespace(lower=lambda *_: lowered)


SMALL = TrainingSteps(program(results=STATES), program(), program(), program(), program())


@pytest.mark.parametrize(
    ("changed", "done", "need", "name"),
    [
        ({"initial_state": program(arguments=9, results=STATES)}, 0, 109, "the policy with its optimizer"),
        ({"warmup_step": program(results=99, aliased=90, temporary=7, code=4)}, 2, 120, "a warm-up step"),
        ({"start_grpo": program(results=STATES)}, 3, 200, "the start of GRPO"),
        ({"grpo_step": program(results=99, aliased=90, temporary=7, code=4)}, 4, 120, "a GRPO step"),
        ({"grpo_step": program(arguments=STATES + 6, results=STATES, aliased=STATES)}, 4, 106, "a GRPO step"),
        ({"heldout_rewards": program(arguments=STATES - 9, results=8, temporary=7)}, 5, 115, "the evaluation"),
    ],
)
def test_each_program_that_is_still_to_be_called_must_fit(monkeypatch, changed, done, need, name):
    """All states are kept, whether or not a program reads them. The warm start has 3 steps and GRPO has 2."""
    steps = replace(SMALL, **changed)

    def check(free: int, done: int) -> None:
        monkeypatch.setattr(memory, "free_memory", lambda _: free)
        check_memory(tiny.config(), steps, done, StopRequest())

    check(need, done)
    said = rf"^{name} needs about 0\.[12]\d KiB on a device, and 0\.[012]\d KiB are free$"
    with pytest.raises(MemoryError, match=said):
        check(need - 1, done)
    if name not in ("the policy with its optimizer", "the evaluation"):  # Those are ahead of every run.
        check(need - 1, done + 1)


@pytest.mark.parametrize("is_cold", [True, False])
def test_kernels_of_a_program_are_compiled_before_it(monkeypatch, is_cold):
    """Not where such a program has been compiled before, as in a run that is resumed."""
    ready: list[Any] = []
    monkeypatch.setattr(memory, "compile_kernels", lambda lowered, _: ready.append(lowered))
    monkeypatch.setattr(memory, "has_namesake", lambda _: not is_cold)
    monkeypatch.setattr(memory, "free_memory", lambda _: STATES)
    check_memory(tiny.config(), SMALL, 0, StopRequest())
    called = (SMALL.warmup_step, SMALL.start_grpo, SMALL.grpo_step, SMALL.heldout_rewards)
    assert ready == ([x.lower() for x in called] if is_cold else [])


def test_nothing_more_is_compiled_for_a_run_that_is_asked_to_stop(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda _: STATES)
    steps = TrainingSteps(program(results=STATES), *(SimpleNamespace() for _ in range(4)))
    check_memory(tiny.config(), steps, 0, StopRequest(signal=2))
    with pytest.raises(AttributeError, match="lower"):
        check_memory(tiny.config(), steps, 0, StopRequest())


@pytest.mark.parametrize("is_analysed", [False, True])
def test_what_is_unknown_is_said_once_and_not_checked(monkeypatch, capsys, is_analysed):
    monkeypatch.setattr(memory, "free_memory", lambda _: None if is_analysed else 0)
    unknown = SimpleNamespace(memory_analysis=lambda: None)
    lowered = SimpleNamespace(compile=lambda: unknown, out_info=program().lower().out_info)
    steps = SMALL if is_analysed else replace(SMALL, initial_state=SimpleNamespace(lower=lambda: lowered))
    check_memory(tiny.config(), steps, 0, StopRequest())
    assert capsys.readouterr().err == "rlk grpo: warning: it is unknown here whether the run fits into memory\n"


@pytest.mark.parametrize("build", [tiny.stand_in_steps, pytest.param(tiny.build_steps, marks=pytest.mark.full)])
def test_a_run_compiles_nothing_again(caplog, monkeypatch, compiled_anew, build):
    """The state lies on four devices. Its head is cut in `make test-full` only; `make test` has small programs."""
    monkeypatch.setattr(memory, "free_memory", lambda _: 1024 * GIB)
    compiled_anew()
    config = tiny.config(**tiny.RICH)
    steps = build(config, load_task(config), make_mesh(config))
    with jax.log_compiles():
        check_memory(config, steps, 0, StopRequest())
        names = ("initial_state", "warmup_step", "start_grpo", "grpo_step", "heldout_rewards")
        assert all(caplog.text.count(f"Compiling jit({name})") == 1 for name in names)
        caplog.clear()
        state, _ = steps.warmup_step(steps.initial_state(), 0)
        state, _ = steps.grpo_step(steps.start_grpo(state), 1)
        steps.heldout_rewards(state.params)
        assert not any(f"Compiling jit({name})" in caplog.text for name in names)


def test_one_long_prompt_among_short_ones_is_one_line_before_the_first_step(tmp_path, capsys, monkeypatch):
    """What the device has is made up; a step on these prompts would need gigabytes."""
    file, out = tmp_path / "long.jsonl", RunFolder(tmp_path / "out")
    pairs = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)] + [{"prompt": "a\nb" * 1000, "answer": "c"}]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    monkeypatch.setattr(memory, "free_memory", lambda _: GIB // 4)
    command = [*tiny.options(prompts=str(file)), "--out", out.path]
    assert tiny.run_here(*command, build=tiny.build_steps) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlk grpo: error: out of memory: a warm-up step needs about ")
    assert " GiB on a device, and 256.00 MiB are free; the longest prompt has 3000 tokens ('a\\nba\\nb" in error
    assert all(option in error for option in ("--max-prompt-tokens", "--micro-batches", "--rollout-buckets"))
    assert error.count("\n") == 1
    assert not out.metrics.exists()
    again = [*command, "--max-prompt-tokens=9", "--overwrite"]
    assert tiny.run_here(*again, build=tiny.stand_in_steps) == 0
    assert capsys.readouterr().out.startswith("left out prompts of more than 9 tokens: 1\n")


def test_a_policy_that_does_not_fit_is_one_line(tmp_path, capsys, monkeypatch):
    """Nothing of its size is allocated."""
    monkeypatch.setattr(memory, "free_memory", lambda _: GIB)
    command = tiny.options(vocab_size=2**31 - 1, width=64)
    assert tiny.run_here(*command, "--out", tmp_path / "out", build=tiny.build_steps) == 2
    error = capsys.readouterr().err
    assert error.startswith("rlk grpo: error: out of memory: the policy with its optimizer needs about ")
    assert "--vocab-size, --width and --layers the policy" in error and error.count("\n") == 1


def failing(field: str, message: str, *, compiles: bool = True):
    """A function like `tiny.stand_in_steps` of whose programs one fails when it is called, or when it is compiled."""

    def fail(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError(message)

    def build(*arguments: Any) -> TrainingSteps:
        steps = tiny.stand_in_steps(*arguments)
        lower = getattr(steps, field).lower if compiles else fail
        failure = type("Failure", (), {"__call__": fail, "lower": staticmethod(lower)})()
        return replace(steps, **{field: failure})

    return build


FIELDS = ("initial_state", "warmup_step", "start_grpo", "grpo_step", "heldout_rewards")


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("field", FIELDS)
def test_running_out_of_memory_is_one_line_and_status_2(tmp_path, capsys, field, compiles):
    out, command = tmp_path / "out", tiny.options(max_operand=4)
    build = failing(field, EXHAUSTED + "\nTraceback of XLA", compiles=compiles)
    assert tiny.run_here(*command, "--out", out, build=build) == 2
    assert capsys.readouterr().err == f"rlk grpo: error: out of memory: {EXHAUSTED}{ADVICE}"


def test_prompts_that_do_not_fit_on_a_device_are_one_line(tmp_path, capsys):
    def build(*_: Any) -> TrainingSteps:
        raise jax.errors.JaxRuntimeError(EXHAUSTED)

    assert tiny.run_here(*tiny.options(), "--out", tmp_path / "out", build=build) == 2
    assert capsys.readouterr().err == f"rlk grpo: error: out of memory: {EXHAUSTED}{ADVICE}"
    assert not (tmp_path / "out").exists()


def test_a_run_whose_evaluation_ran_out_of_memory_resumes(tmp_path):
    out, command = RunFolder(tmp_path / "out"), [*tiny.options(), "--out", tmp_path / "out"]
    assert tiny.run_here(*command, build=failing("heldout_rewards", EXHAUSTED)) == 2
    assert tiny.run_here(*command, "--resume", build=tiny.stand_in_steps) == 0
    assert out.summary.exists()


def test_other_errors_of_xla_are_not_called_a_want_of_memory(tmp_path):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: broken"):
        tiny.run_here(*tiny.options(), "--out", tmp_path / "out", build=failing("grpo_step", "INTERNAL: broken"))


def test_the_folder_keeps_the_number_of_tokens(tmp_path):
    """A run that was started when the option had a number as its default resumes."""
    out, command = RunFolder(tmp_path / "out"), [*tiny.options(), "--out", tmp_path / "out"]
    assert tiny.run_here(*command, build=tiny.stand_in_steps) == 0
    assert json.loads(out.config.read_text())["vocab_size"] == 97
    assert tiny.run_here(*command, "--resume", build=tiny.stand_in_steps) == 0


def test_a_run_of_an_older_version_resumes_and_may_begin_to_skip(tmp_path):
    out, command = RunFolder(tmp_path / "out"), [*tiny.options(), "--out", tmp_path / "out"]
    assert tiny.run_here(*command, build=tiny.stand_in_steps) == 0
    written = json.loads(out.config.read_text())
    out.config.write_text(json.dumps({name: x for name, x in written.items() if name != "log_ratio_bound"}))
    assert tiny.run_here(*command, "--resume", "--skip-nonfinite", build=tiny.stand_in_steps) == 0
    assert tiny.run_here(*command, "--resume", "--log-ratio-bound=3", build=tiny.stand_in_steps) == 2
