"""Which kernels of a program are compiled alone; sm90.py compiles real ones."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from rlk_jax.core import kernel_compilation, partitioning, program_cache
from rlk_jax.core.dispatch import Device
from rlk_jax.core.kernel_compilation import compile_kernels

DEVICE = jax.devices()[0]


def in_program(*hashes: bytes) -> Callable[[jax.Array], jax.Array]:
    """A function that calls kernels of Mosaic with these hashes: the first one in a loop, the others behind it."""

    def call(x: jax.Array, name: bytes) -> jax.Array:
        kernel = jax.ffi.ffi_call("mosaic_gpu_v2", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return kernel(x, kernel_hash=name, module=b"text of " + name, skip_device_barrier=True)

    def program(x: jax.Array) -> jax.Array:
        x = jax.lax.fori_loop(0, 3, lambda _, x: call(x, hashes[0]), x)
        for name in hashes[1:]:
            x = call(x, name)
        return x

    return program


def lower(program: Callable[[jax.Array], jax.Array]) -> jax.stages.Lowered:
    given = jax.ShapeDtypeStruct((8,), jnp.float32)
    return jax.jit(program).trace(given).lower(lowering_platforms=("cuda",))


def lowered(*hashes: bytes) -> jax.stages.Lowered:
    return lower(in_program(*hashes))


@pytest.fixture
def compiled(monkeypatch) -> list[dict]:
    """The kernels that are compiled alone; none has been before."""
    found: list[dict] = []
    monkeypatch.setattr(kernel_compilation, "_compilations", {})
    monkeypatch.setattr(kernel_compilation, "_compile_alone", lambda kernel, device: found.append(kernel))
    return found


def test_each_kernel_is_compiled_once(compiled):
    """Hashes need not be text."""
    compile_kernels(lowered(b"\xff\x00", b"b", b"\xff\x00", b"c"), DEVICE)
    names = (b"\xff\x00", b"b", b"c")
    expected = [{"kernel_hash": x, "module": b"text of " + x, "skip_device_barrier": True} for x in names]
    assert sorted(compiled, key=str) == sorted(expected, key=str)


def test_a_kernel_of_two_programs_is_compiled_once(compiled):
    for names in ((b"a",), (b"a", b"b"), ()):
        compile_kernels(lowered(*names) if names else jax.jit(jnp.cos).lower(1.0), DEVICE)
    assert [x["kernel_hash"] for x in compiled] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("platform", "is_cached", "names"), [("gpu", False, {b"a", b"b"}), ("gpu", True, set()), ("cpu", False, set())]
)
def test_kernels_begin_while_their_program_is_lowered(monkeypatch, compiled, platform, is_cached, names):
    """Where it is lowered for the GPU that it was traced for, and JAX's cache has none of its name."""
    monkeypatch.setattr(partitioning, "traced_device", lambda: Device(platform, "", None))
    monkeypatch.setattr(kernel_compilation, "has_namesake", lambda _: is_cached)

    def program(x: jax.Array) -> jax.Array:
        return partitioning.partitioned_by_xla(in_program(b"a", b"b"), lambda _: "i -> i", None, (), x)

    lower(program)
    kernel_compilation._threads().shutdown()
    kernel_compilation._threads.cache_clear()
    assert {x["kernel_hash"] for x in compiled} == names


def test_a_program_is_lowered_where_no_thread_starts_any_more(monkeypatch, caplog, compiled):
    """As at the end of a process."""

    def refuse(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(kernel_compilation._threads(), "submit", refuse)
    monkeypatch.setattr(kernel_compilation, "has_namesake", lambda _: False)
    module = lowered(b"a").compiler_ir()
    kernel_compilation.begin_while_lowering(module, module, DEVICE)
    assert not compiled and "after shutdown" in caplog.text


def test_no_cache_has_a_kernel_that_was_compiled_alone(monkeypatch, tmp_path):
    """It would pass for a program of that name, whose kernels then begin late."""
    before = program_cache.xla_cache()
    monkeypatch.setattr(jax.ffi, "ffi_call", lambda *_, **__: lambda x, **kernel: x)
    program_cache.use_xla_cache(before._replace(folder=str(tmp_path), least_seconds=0))
    try:
        kernel_compilation._compile_alone({}, DEVICE)
        assert not list(tmp_path.iterdir())
        jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile()
        assert len(list(tmp_path.glob("*-cache"))) == 1
    finally:
        program_cache.use_xla_cache(before)


def test_a_kernel_that_cannot_be_compiled_alone_is_logged(monkeypatch, caplog, compiled):
    def fail(kernel: dict, device: jax.Device) -> None:
        raise RuntimeError(f"no {kernel['module'].decode()}")

    monkeypatch.setattr(kernel_compilation, "_compile_alone", fail)
    compile_kernels(lowered(b"a", b"b"), DEVICE)
    assert [x.getMessage() for x in caplog.records] == [
        "rlk_jax: kernels are compiled one after the other: no text of a"
    ]
