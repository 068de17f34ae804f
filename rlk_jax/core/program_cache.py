"""Programs on disk, so that a process need not trace, lower and compile what another has: JAX's own cache spares it
compiling alone.

A program is kept as `jax.export` writes it, under a digest of what it was made for and of the sources that made it.
RLK_CACHE is the folder, or "off"; else it is the user's cache folder. What cannot be read or written is said once, and
the program is made as if there were no disk.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.export
from jax._src import config as jax_config
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels.cuda.build import cache_folder, is_cache_off, why_unwritable
from rlk_jax.core import overwriting
from rlk_jax.core.dispatch import log
from rlk_jax.core.kernel_compilation import compile_kernels

MOST_BYTES = 256 * 2**20
"""All programs together; those that were not used for the longest time are deleted."""
MOST_XLA_BYTES = 2 * 2**30
"""All that XLA compiled from them, when a process begins to use it."""
_OUR_NAMES = re.compile(r"[0-9a-f]{64}|[0-9a-f]{32}\.new")
"""What programs are called, and files that are to become one."""
_XLA_NAMES = re.compile(r".+-(cache|atime)")
"""What JAX's cache calls its files."""
_FIRST_LINE = b"rlk_jax program 2\n"
_PACKAGES = ("rlk_jax", "pallas_kernels", "torch_bridge")
_NOT_KEPT = "programs are not kept on disk"
_SERIALIZER = "flatbuffers"
"""What `jax.export` writes and reads programs with."""
_ELSEWHERE = "RLK_CACHE names another folder, or is off"
_MOSAIC = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
"""The kernels whose programs are kept. Those of `triton` and `cuda` need a library that the program does not name."""


class Made(NamedTuple):
    """A function to compile, and what else is known of it, as JSON has it."""

    function: Callable[..., Any]
    facts: Any


def compiled(
    key: Hashable, specs: Sequence[Any], device: jax.Device, make: Callable[[], Made], donated: Sequence[int] = ()
) -> tuple[jax.stages.Compiled, Any]:
    """The function that `make` gives, compiled for a device and arguments of these shapes, and its facts.

    `key` and the shapes say what the program is, and the key's `repr` is the same in every process. Where the disk has
    the program, nothing is made. Bits are those of the function: what is compiled is the same. Arguments at the
    positions `donated` are donated, which programs on disk do not say of themselves.
    """
    share_xla_cache(device)
    with jax.default_device(device):
        found, is_new = kept(key, specs, device, make)
        lowered = overwriting.lowered(found.function, donated, specs)
        if is_new:  # XLA's own cache has what was compiled for a program on disk.
            compile_kernels(lowered, device)
        with _keeping_what_is_quick():
            return lowered.compile(), found.facts


def kept(
    key: Hashable, specs: Sequence[Any], device: jax.Device, make: Callable[[], Made], *, always_exports: bool = False
) -> tuple[Made, bool]:
    """The function that `make` gives, with its facts, as the disk has it or will have it; and whether it is new there.

    XLA's own cache knows a function that was exported by another name than the function itself. Where both must be one
    program, `always_exports` has the function exported although there is no disk.
    """
    name = _name(key, specs, device)
    if (found := _load(name)) is not None:
        return found, False
    made = make()
    function = jax.jit(made.function)  # A program that cannot be exported is not traced again for that.
    exported = _exported(function, specs, device) if always_exports or folder() is not None else None
    if exported is None:
        return Made(function, made.facts), True
    _store(name, made.facts, exported)
    return Made(exported.call, made.facts), True


def folder() -> Path | None:
    """Where programs are kept; None where they are not, or JAX keeps none either."""
    if is_cache_off() or not jax.config.jax_enable_compilation_cache:
        return None
    try:
        return cache_folder() / "programs"
    except RuntimeError as error:  # There is no home.
        _warn_once(_NOT_KEPT, f"{error}. {_ELSEWHERE}")
        return None


def share_xla_cache(device: jax.Device) -> None:
    """Keep what XLA compiles for a GPU in the same folder, unless a cache has been set or there was one before.

    The folder is bounded here, and not by JAX: its bound would stay for a cache that the user sets later.
    """
    shared = _shared_xla_folder()
    if device.platform != "gpu" or jax.config.jax_compilation_cache_dir is not None or shared is None:
        return
    with _never_an_error("what XLA compiles is not kept on disk"):
        if (why := why_unwritable(Path(shared))) is not None:
            raise OSError(f"{shared} cannot be written: {why}")
        Path(shared).mkdir(parents=True, exist_ok=True)
        _make_room(Path(shared), MOST_XLA_BYTES, _XLA_NAMES)
        use_xla_cache(xla_cache()._replace(folder=shared, of_xla=None))


class XlaCache(NamedTuple):
    """Where JAX keeps what takes at least so long to compile, None for nowhere, and how many bytes, −1 for any."""

    folder: str | None
    least_seconds: float
    most_bytes: int
    of_xla: str | None
    """What XLA itself writes there, by its name in JAX's settings. Where a disk is full, that ends the compilation."""


def xla_cache() -> XlaCache:
    """The cache that JAX uses now."""
    values = jax.config.values
    return XlaCache(
        values["jax_compilation_cache_dir"],
        values["jax_persistent_cache_min_compile_time_secs"],
        values["jax_compilation_cache_max_size"],
        values["jax_persistent_cache_enable_xla_caches"],
    )


def is_users(cache: XlaCache) -> bool:
    """Whether the user has set this cache, and not `share_xla_cache`."""
    return cache.folder is not None and cache.folder != _shared_xla_folder()


def _shared_xla_folder() -> str | None:
    """Where `share_xla_cache` keeps what XLA compiles; None where nothing is kept."""
    return None if folder() is None else str(cache_folder() / "xla")


def use_xla_cache(cache: XlaCache) -> None:
    """Have JAX use this cache from now on."""
    jax.config.update("jax_compilation_cache_dir", cache.folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", cache.least_seconds)
    jax.config.update("jax_compilation_cache_max_size", cache.most_bytes)
    jax.config.update("jax_persistent_cache_enable_xla_caches", cache.of_xla)
    compilation_cache.reset_cache()  # JAX would otherwise keep using the folder that it used first.


@contextmanager
def _keeping_what_is_quick() -> Iterator[None]:
    """A context in which JAX keeps all that it compiles, unless the cache is the user's. With its kernels compiled
    before, a program takes less time than JAX asks for by itself.
    """
    least = jax_config.persistent_cache_min_compile_time_secs
    with nullcontext() if is_users(xla_cache()) else least(0):
        yield


def _exported(function: Any, specs: Sequence[Any], device: jax.Device) -> jax.export.Exported | None:
    """The jitted function as `jax.export` has it; None where it has kernels that are not kept."""
    platforms = ["cuda" if device.platform == "gpu" else device.platform]
    try:
        return jax.export.export(function, platforms=platforms, disabled_checks=[_MOSAIC])(*specs)
    except ValueError as error:
        if "custom call" not in str(error):
            raise
        return None


def _name(key: Hashable, specs: Sequence[Any], device: jax.Device) -> str:
    leaves, tree = jax.tree.flatten(specs)
    shapes = [(x.shape, str(x.dtype)) for x in leaves]
    facts = key, shapes, str(tree), device.platform, device.device_kind, _environment(), _settings()
    return hashlib.sha256(repr(facts).encode()).hexdigest()


@functools.cache
def _environment() -> tuple[str, ...]:
    """What else a program depends on, and no process changes: versions, and the sources of the project."""
    sources = hashlib.sha256()
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            for path in sorted(Path(root).rglob("*.py")):
                sources.update(repr((path.relative_to(root).as_posix(), path.read_bytes())).encode())
    return *map(_version, ("jax", "jaxlib", "flax", "optax", "jax_triton")), sources.hexdigest()


def _version(package: str) -> str:
    """The version of a package; nothing where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


_PARTS_OF_OTHER_SETTINGS = ("cache", "device", "dump", "_log_", "logging", "platform", "traceback", "transfer")
"""Parts of the names of JAX's settings that say where and how loudly it works, and not what a program is."""


def _settings() -> tuple[Any, ...]:
    """What a process may set, and a program may depend on: random numbers, precision and checks among it."""
    settings = jax.config.values
    named = [x for x in sorted(settings) if not any(part in x for part in _PARTS_OF_OTHER_SETTINGS)]
    return os.environ.get("RLK_STRICT"), *((name, settings[name]) for name in named)


def _load(name: str) -> Made | None:
    """The program of this name, if there is one that is whole."""
    with _never_an_error("a program on disk cannot be read"):
        if (path := _path(name)) is None:
            return None
        try:
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):  # Nobody has kept it, or another process has just deleted it.
            return None
        head = len(_FIRST_LINE) + 32
        if not data.startswith(_FIRST_LINE) or _checksum(name, data[head:]) != data[len(_FIRST_LINE) : head]:
            raise ValueError(f"{path} is damaged, or was written under another name")
        facts, _, program = data[head:].partition(b"\n")
        if b"mosaic_gpu" in program:
            # The import tells XLA where the runtime of these kernels is.
            importlib.import_module("jax.experimental.mosaic.gpu")
        with suppress(OSError):  # It was used, though the folder may be one that only others write.
            os.utime(path)
        return Made(jax.export.deserialize(bytearray(program)).call, json.loads(facts))
    return None


def _store(name: str, facts: Any, exported: jax.export.Exported) -> None:
    """Write the program whole or not at all, and make room for it."""
    with _never_an_error(_NOT_KEPT):
        if (path := _path(name)) is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(facts).encode() + b"\n" + bytes(exported.serialize())
        new = path.with_name(f"{uuid.uuid4().hex}.new")
        try:  # Others may read it as the process's umask says.
            new.write_bytes(_FIRST_LINE + _checksum(name, data) + data)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
        _make_room(path.parent, MOST_BYTES, _OUR_NAMES)


def _checksum(name: str, data: bytes) -> bytes:
    """32 bytes that fit this program under this name alone: another's must not run in its place."""
    return hashlib.sha256(name.encode() + data).digest()


def _path(name: str) -> Path | None:
    where = folder()
    return None if where is None else where / name


def _make_room(where: Path, most_bytes: int, names: re.Pattern[str]) -> None:
    """Delete files of these names, those used last at the end, until the others have no more bytes than that.

    The folder may be any that the user has, with other files in it.
    """
    sizes = {}
    for path in (x for x in where.iterdir() if names.fullmatch(x.name) and x.is_file()):
        try:
            sizes[path] = path.stat()
        except FileNotFoundError:  # Another process was here.
            continue
    total = sum(x.st_size for x in sizes.values())
    for path, stat in sorted(sizes.items(), key=lambda item: max(item[1].st_atime, item[1].st_mtime)):
        if total <= most_bytes:
            return
        path.unlink(missing_ok=True)
        total -= stat.st_size


@contextmanager
def _never_an_error(what: str) -> Iterator[None]:
    """A context that ends where anything goes wrong in it, and says so."""
    try:
        yield
    except Exception as error:  # Disks and what stands on them fail in many ways, of which none may end a call.
        lacks_package = importlib.util.find_spec(_SERIALIZER) is None
        _warn_once(what, f"pip install {_SERIALIZER}" if lacks_package else f"{error}. {_ELSEWHERE}")


_has_said: set[str] = set()


def _warn_once(what: str, why: str) -> None:
    """Warn of it once."""
    if what not in _has_said:
        _has_said.add(what)
        log.warning("rlk_jax: %s: %s.", what, why)
