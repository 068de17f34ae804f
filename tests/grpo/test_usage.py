"""Speed and memory as a run prints them."""

import io
from types import SimpleNamespace

import jax
import pytest

from rlk_jax.core.terminal import OutputConsole
from rlk_jax.grpo.display import print_usage, progress
from rlk_jax.grpo.usage import Throughput, peak_memory, size_text

GIB = 2**30


def devices(*peaks: int | None) -> list[SimpleNamespace]:
    """Devices with these peaks; None stands for one that does not count."""
    stats = [None if peak is None else {"peak_bytes_in_use": peak} for peak in peaks]
    return [SimpleNamespace(memory_stats=lambda own=own: own) for own in stats]


def test_throughput_leaves_out_the_step_that_compiles():
    throughput = Throughput()
    throughput.add("warmup", 1000, now=100.0)
    assert throughput.per_second == {}
    throughput.add("warmup", 10, now=101.0)
    throughput.add("warmup", 20, now=103.0)
    throughput.add("grpo", 1000, now=200.0)
    assert throughput.per_second == {"warmup": 10}
    throughput.add("grpo", 5, now=202.0)
    assert throughput.per_second == {"warmup": 10, "grpo": 2.5}


def test_peak_memory_is_the_largest_of_the_devices_that_count():
    assert peak_memory(devices(3, None, 7, 5)) == 7
    assert peak_memory(devices(None, None)) is None


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.00 KiB"), (2**20 - 1, "1024.00 KiB"), (2**20, "1.00 MiB"), (3 * 2**29, "1.50 GiB"), (2**41, "2048.00 GiB")],
)
def test_a_size_has_the_unit_that_fits_it(size, text):
    assert size_text(size) == text


def shown(steps: int) -> str:
    """What a run of so many steps prints."""
    console = OutputConsole(file=io.StringIO(), width=200)
    throughput = Throughput()
    with progress(console, 0, steps, throughput) as show:
        for done in range(1, steps + 1):
            show(done, "grpo", {"tokens": 8.0, "mismatch": 0.0})
    print_usage(console, throughput)
    return console.file.getvalue()


def test_speed_and_memory_are_shown_while_it_runs_and_in_the_end(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: devices(GIB // 2, None))
    first, last, *table = shown(2).splitlines()
    assert first.endswith("mismatch 0 peak 512.00 MiB") and "tokens/s" not in first
    assert last.endswith("tokens/s peak 512.00 MiB")
    assert "tokens/s" in table[1] and table[-1] == "peak memory of a device: 512.00 MiB"


def test_nothing_is_said_that_is_not_known(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: devices(None))
    assert shown(1) == "grpo step 1/1 mismatch 0\n"


def test_a_line_shows_what_was_measured_in_one_order(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: devices(None))
    console = OutputConsole(file=io.StringIO(), width=200)
    metrics = {"mismatch": 0.0, "ratio_max": 1.25, "clip_fraction": 0.1, "kl": 0.5, "entropy": 1.5, "truncated": 0.124}
    with progress(console, 0, 1, Throughput()) as show:
        show(1, "grpo", {"tokens": 8.0, **metrics, "completion_length": 12.34, "reward": 0.75, "loss": -0.5})
    shown_metrics = "loss -0.500 reward 0.750 length 12.3 at limit 12% entropy 1.500 KL 0.500 clip 0.100 ratio 1.25"
    assert console.file.getvalue() == f"grpo step 1/1 {shown_metrics} mismatch 0\n"


def test_a_narrow_terminal_loses_no_number():
    console = OutputConsole(file=io.StringIO(), width=80, force_terminal=True)
    metrics = {"tokens": 8.0, "loss": -0.008, "reward": 0.5, "kl": 0.577, "clip_fraction": 0.1, "ratio_max": 1.25}
    with progress(console, 0, 2, Throughput()) as show:
        show(1, "grpo", {**metrics, "mismatch": 5e-6})
    text = console.file.getvalue()
    assert "1/2" in text and "…" not in text
    assert "5e-06" in text
