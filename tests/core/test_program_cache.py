"""Programs on disk: found again, bounded, and never in the way."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rlk_jax.core import program_cache
from rlk_jax.core.kernel_compilation import has_namesake
from tests.support import helpers

DEVICE = jax.devices("cpu")[0]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("RLK_CACHE", str(tmp_path))
    monkeypatch.setattr(program_cache, "_has_said", set())
    return tmp_path / "programs"


def spec(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.float32)


class Maker:
    """Counts how often its program is made."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> program_cache.Made:
        self.count += 1
        return program_cache.Made(lambda x: (jnp.sin(x), x.sum()), {"sizes": [1, None]})

    def run(self, size: int = 8, key: Any = "sines") -> tuple[Any, Any]:
        """What the program gives, and its facts."""
        program, facts = program_cache.compiled(key, [spec(size)], DEVICE, self)
        return program(jnp.arange(size, dtype=jnp.float32)), facts


def test_a_program_is_made_once(folder):
    make = Maker()
    first, second = make.run(), make.run()
    helpers.assert_same_bits(first[0], second[0])
    assert make.count == 1 and first[1] == second[1] == {"sizes": [1, None]}
    assert len(list(folder.iterdir())) == 1


def test_what_a_program_is_made_for_tells_it_from_others(folder, monkeypatch):
    make = Maker()
    make.run()
    make.run(size=9)
    make.run(key="other")
    with jax.default_matmul_precision("highest"):
        make.run()
    monkeypatch.setattr(program_cache, "_environment", lambda: ("other sources",))
    make.run()
    assert make.count == len(list(folder.iterdir())) == 5


@pytest.mark.parametrize(
    ("name", "value", "matters"),
    [
        ("jax_default_prng_impl", "rbg", True),
        ("jax_random_seed_offset", 7, True),
        ("jax_threefry_partitionable", False, True),
        ("jax_high_dynamic_range_gumbel", True, True),
        ("jax_numpy_rank_promotion", "raise", True),
        ("jax_use_hlo_logistic_lowering", True, True),
        ("jax_enable_x64", True, True),
        ("jax_compilation_cache_dir", "/elsewhere", False),
        ("jax_log_compiles", True, False),
    ],
)
def test_settings_that_change_programs_tell_them_apart(monkeypatch, name, value, matters):
    before, was = program_cache._settings(), jax.config.values[name]
    jax.config.update(name, value)
    try:
        assert (program_cache._settings() != before) == matters
    finally:
        jax.config.update(name, was)
    assert program_cache._settings() == before
    monkeypatch.setenv("RLK_STRICT", "1")  # A program that was made strictly has no implementation in another's place.
    assert program_cache._settings() != before


def test_the_environment_has_versions_and_sources():
    versions = program_cache._environment()
    assert jax.__version__ in versions and len(versions[-1]) == 64


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty", "of another name"])
def test_what_is_damaged_is_made_again(folder, caplog, damage):
    make = Maker()
    expected, _ = make.run()
    (path,) = folder.iterdir()
    Maker().run(size=3)
    (other,) = set(folder.iterdir()) - {path}
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    broken = {"cut": data[: len(data) // 2], "flipped": data, "foreign": b"another's file", "empty": b""}
    path.write_bytes(other.read_bytes() if damage == "of another name" else broken[damage])
    found, _ = make.run()
    helpers.assert_same_bits(found, expected)
    assert make.count == 2 and [x.getMessage() for x in caplog.records] == [
        f"rlk_jax: a program on disk cannot be read: {path} is damaged, or was written under another name. RLK_CACHE "
        "names another folder, or is off."
    ]
    make.run()
    assert make.count == 2


def test_a_folder_that_cannot_be_is_said_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setattr(program_cache, "_has_said", set())
    monkeypatch.setenv("RLK_CACHE", str(tmp_path / "file" / "cache"))
    make = Maker()
    make.run()
    make.run(size=3)
    (message,) = [x.getMessage() for x in caplog.records]
    assert make.count == 2 and message.startswith("rlk_jax: programs are not kept on disk: [Errno 20]")


def test_a_full_disk_is_said_once_and_keeps_no_part(folder, monkeypatch, caplog):
    def write_a_part(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_a_part)
    make = Maker()
    make.run()
    make.run(size=3)
    (message,) = [x.getMessage() for x in caplog.records]
    assert make.count == 2 and "No space left on device" in message and not list(folder.iterdir())


def test_a_missing_serializer_is_said_once(folder, monkeypatch, caplog):
    """No other folder would mend it."""
    monkeypatch.delitem(sys.modules, "jax._src.export.serialization", raising=False)
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    make = Maker()
    make.run()
    make.run(size=3)
    said = "rlk_jax: programs are not kept on disk: pip install flatbuffers."
    assert make.count == 2 and [x.getMessage() for x in caplog.records] == [said]


def test_a_folder_that_others_write_is_read(folder, monkeypatch, caplog):
    Maker().run()

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "utime", refuse)
    make = Maker()
    make.run()
    assert make.count == 0 and not caplog.records


@pytest.mark.parametrize("off", ["off", " OFF ", "0", "false", "no"])
def test_off(tmp_path, monkeypatch, off):
    monkeypatch.chdir(tmp_path)  # It names no folder.
    monkeypatch.setenv("RLK_CACHE", off)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make = Maker()
    make.run()
    make.run()
    assert make.count == 2 and not list(tmp_path.iterdir())


def test_without_a_home(monkeypatch, caplog):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("RLK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(program_cache, "_has_said", set())
    Maker().run()
    assert "Could not determine home directory" in caplog.text


def test_a_folder_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RLK_CACHE", "~/cache")
    assert program_cache.folder() == tmp_path / "cache" / "programs"


def test_those_not_used_for_longest_make_room(folder, monkeypatch):
    make = Maker()
    (folder / "a user's own").mkdir(parents=True)
    for name in ("thesis.tex", "0123.new"):
        (folder / name).write_bytes(bytes(2**20))
        os.utime(folder / name, (0, 0))
    for size in (4, 5, 6):
        make.run(size)
    programs = [x for x in folder.iterdir() if len(x.name) == 64]
    monkeypatch.setattr(program_cache, "MOST_BYTES", sum(x.stat().st_size for x in programs))
    make.run(4)
    make.run(7)
    assert make.count == 4
    make.run(4)
    make.run(6)
    assert make.count == 4
    make.run(5)
    assert make.count == 5
    assert {"a user's own", "thesis.tex", "0123.new"} < {x.name for x in folder.iterdir()}


def test_several_may_write_at_once(folder):
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(Maker().run()[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(list(folder.iterdir())) == 1
    for x in found:
        helpers.assert_same_bits(x, found[0])


_MANY_TURNS = """
import sys
from tests.core import test_program_cache as tests

tests.program_cache.MOST_BYTES = 10_000  # There is room for few programs.
print("ready", flush=True)
sys.stdin.readline()
for size in (*range(3, 11), *range(3, 11)):
    (_, total), facts = tests.Maker().run(size)
    assert total == sum(range(size)) and facts == {"sizes": [1, None]}
"""


def test_two_processes_write_read_and_make_room_at_once(folder):
    """Neither has a wrong program, or anything to warn of."""
    command, pipe = [sys.executable, "-W", "error", "-c", _MANY_TURNS], subprocess.PIPE
    both = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        _, said = process.communicate(timeout=helpers.HANG_S)
        assert process.returncode == 0 and not said
    assert folder.exists()


def test_programs_with_kernels_of_libraries_are_not_kept(folder, monkeypatch):
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise ValueError("Cannot serialize code with custom calls whose targets have no compatibility guarantees: x")

    monkeypatch.setattr(jax.export, "export", lambda *arguments, **options: refuse)
    make = Maker()
    assert make.run()[0][1] == sum(range(8))
    assert not folder.exists()


@pytest.fixture
def xla_cache():
    """What JAX's own cache is set to, which is as it was afterwards."""
    before = program_cache.xla_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    program_cache.use_xla_cache(before)


GPU: Any = SimpleNamespace(platform="gpu")


def test_what_xla_compiles_for_a_gpu_is_kept_beside(folder, xla_cache):
    program_cache.share_xla_cache(DEVICE)
    assert jax.config.jax_compilation_cache_dir is None
    program_cache.share_xla_cache(GPU)
    assert jax.config.jax_compilation_cache_dir == str(folder.parent / "xla")


def test_what_xla_compiled_is_bounded_when_a_process_begins(folder, xla_cache, monkeypatch):
    """JAX's own bound stays as it was: it would delete what is in a cache that the user sets later."""
    before, where = jax.config.jax_compilation_cache_max_size, folder.parent / "xla"
    where.mkdir()
    for i, name in enumerate(("a user's own", "oldest-cache", "older-cache", "newest-atime")):
        (where / name).write_bytes(b"0" * 100)
        os.utime(where / name, (i + 1, i + 1))
    monkeypatch.setattr(program_cache, "MOST_XLA_BYTES", 200)
    program_cache.share_xla_cache(GPU)
    assert {x.name for x in where.iterdir()} == {"a user's own", "older-cache", "newest-atime"}
    assert jax.config.jax_compilation_cache_max_size == before


def test_a_cache_that_cannot_be_written_is_not_shared(folder, xla_cache, monkeypatch, caplog):
    """XLA would end the compilation of programs that it tunes there, of this project or not."""
    (folder.parent / "file").write_text("no folder")
    monkeypatch.setenv("RLK_CACHE", str(folder.parent / "file"))
    for _ in range(2):
        program_cache.share_xla_cache(GPU)
    assert jax.config.jax_compilation_cache_dir is None
    assert [x.getMessage() for x in caplog.records if "cannot be written: Not a directory" in x.getMessage()]
    assert len(caplog.records) == 1


def test_xla_writes_nothing_of_its_own_there(folder, xla_cache):
    """A full disk would end the compilation."""
    program_cache.share_xla_cache(GPU)
    assert jax.config.values["jax_persistent_cache_enable_xla_caches"] is None


def test_a_program_that_compiles_quickly_is_kept(folder, xla_cache):
    """With its kernels compiled before, a program takes less than the second that JAX asks for; the user's own cache
    has what the user asks for.
    """
    for where, count in ((folder.parent / "xla", 1), (folder.parent / "users", 0)):
        program_cache.use_xla_cache(program_cache.xla_cache()._replace(folder=str(where), least_seconds=1000.0))
        Maker().run(key=str(where))
        assert len(list(where.glob("*-cache"))) == count


def test_others_may_read_a_program(folder):
    """As the umask of the process says."""
    before = os.umask(0o022)
    try:
        Maker().run()
    finally:
        os.umask(before)
    assert [x.stat().st_mode & 0o777 for x in folder.iterdir()] == [0o644]


def test_a_cache_that_was_set_stays(folder, xla_cache):
    jax.config.update("jax_compilation_cache_dir", "/users/own")
    before = jax.config.jax_compilation_cache_max_size
    program_cache.share_xla_cache(GPU)
    assert jax.config.jax_compilation_cache_dir == "/users/own"
    assert jax.config.jax_compilation_cache_max_size == before


def test_whether_a_program_of_this_name_was_compiled(xla_cache, tmp_path):
    def namesake(x: jax.Array) -> jax.Array:
        return x + 1

    def other(x: jax.Array) -> jax.Array:
        return x + 2

    lowered = jax.jit(namesake).lower(spec(3))
    assert not has_namesake(lowered.compiler_ir()), "no cache is set"
    program_cache.use_xla_cache(program_cache.xla_cache()._replace(folder=str(tmp_path / "xla"), least_seconds=0))
    jax.jit(other).lower(spec(3)).compile()
    assert not has_namesake(lowered.compiler_ir())
    lowered.compile()
    assert has_namesake(jax.jit(namesake).lower(spec(4)).compiler_ir())
