"""Compiles the CUDA sources beside this file into a library, and registers its handlers with XLA.

Nothing is compiled at `pip install`: `rlk build-cuda` compiles the library, or else its first use does. The library is
kept in a folder of its own for each version of the sources, processor, jaxlib and CUDA, below $RLK_CACHE,
$XDG_CACHE_HOME/rlk_jax or ~/.cache/rlk_jax.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jaxlib

TARGETS = (
    *("rlk_statistics", "rlk_fold_chunks", "rlk_fold_groups"),
    *("rlk_coefficients", "rlk_dlogits", "rlk_dlogits_from_kept_exponentials"),
    *("rlk_hidden_gradient", "rlk_weight_gradient", "rlk_column_sums"),
    *("rlk_products", "rlk_statistics_of_products", "rlk_add_largest"),
    "rlk_gemm",
)
"""The names of the library's FFI handlers, which are also the names of their targets."""
FLAGS = (
    *("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC"),
    *("-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v,-warn-spills"),
)
FLAGS_OF = dict.fromkeys(("dlogits_softcap.cu", "statistics_softcap.cu"), ("-Xptxas", "-O1"))
"""More flags for some sources, which follow FLAGS; the source says why."""
OLDEST = (12, 5)
"""The first CUDA with cudaGetDriverEntryPointByVersion, which finds the driver's functions without linking libcuda."""
_FLAGS_FROM_OUTSIDE = ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")
"""Variables whose flags nvcc would add. They are removed, since no environment variable may change bits."""
SOURCES = Path(__file__).parent
_LIBRARY = "librlk_cuda.so"
_PTXAS = "ptxas.txt"
_PROPERTIES = re.compile(
    r"Function properties for (\S+)\n"
    r".* (\d+) bytes spill stores, (\d+) bytes spill loads(?:\n.*: Used (\d+) registers)?"
)
_LAST_LINES = 20
Report = Callable[[str, int, int], None]
"""A callback of the build, called with the name of the step just done, the number of steps done, and of all steps."""

log = logging.getLogger(__name__)


class Nvcc(NamedTuple):
    """A compiler that is new enough."""

    path: str
    version: str


class Kernel(NamedTuple):
    """What ptxas says of one kernel. The name is mangled. A device function has no registers of its own: None."""

    name: str
    registers: int | None
    spill_bytes: int


def find_nvcc() -> Nvcc:
    """The nvcc of $CUDA_HOME where that is set, else the one on PATH, else the one in /usr/local/cuda.

    Raises RuntimeError, which says what was found instead, where there is none that is new enough.
    """
    needed = f"the CUDA kernels need nvcc of CUDA {OLDEST[0]}.{OLDEST[1]} or later"
    home = os.environ.get("CUDA_HOME")
    if home:
        folders, where = f"{home}/bin", f"in $CUDA_HOME/bin ({home}/bin)"
    else:
        folders = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"))
        where = "on PATH nor in /usr/local/cuda/bin, and CUDA_HOME is not set"
    path = shutil.which("nvcc", path=folders)
    if path is None:
        raise RuntimeError(f"{needed}; there is none {where}")
    version = re.search(r"\bV(\d+)\.(\d+)[.\d]*", _output(path, "--version").stdout)
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        raise RuntimeError(f"{needed}; {path} is {version[0][1:] if version else 'of an unknown version'}")
    return Nvcc(path, version[0][1:])


def _check_host_compiler(nvcc: Nvcc) -> None:
    done = _output(nvcc.path, "-E", "-x", "cu", os.devnull)
    if done.returncode:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise RuntimeError(f"the CUDA kernels need nvcc, and a C++ compiler that it can use; {nvcc.path} says: {last}")


def _output(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose result only its arguments and the machine may influence, and return its output."""
    environment = {name: value for name, value in os.environ.items() if name not in _FLAGS_FROM_OUTSIDE}
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=environment
        )
    except OSError as problem:
        raise RuntimeError(f"{command[0]} does not run: {problem}") from problem


def cache_folder() -> Path:
    """The folder that holds a folder for each library; it need not exist. RLK_CACHE=off, which turns other caches off,
    means the user's own folder here: a library has to lie somewhere.
    """
    chosen = os.environ.get("RLK_CACHE", "").strip()
    if chosen and not is_cache_off():
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlk_jax"


def is_cache_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether RLK_CACHE turns caches off: by "off", or by another word that can mean no folder."""
    return environment.get("RLK_CACHE", "").strip().lower() in ("off", "0", "false", "no")


def _folder_name(nvcc_version: str) -> str:
    digest = hashlib.sha256(repr((FLAGS, FLAGS_OF)).encode())
    for source in sorted((*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh"))):
        digest.update(repr((source.name, source.read_bytes())).encode())
    return f"{digest.hexdigest()[:16]}-{platform.machine()}-jaxlib{jaxlib.__version__}-cuda{nvcc_version}"


def _place() -> tuple[Path, Nvcc | None]:
    """The library's folder, which may not exist yet, and its compiler.

    Where this machine has no compiler, these are the folder of a library that another machine has built, and None.
    Raises RuntimeError where there is no such library either.
    """
    try:
        nvcc = find_nvcc()
    except RuntimeError:
        built = max(cache_folder().glob(_folder_name("[0-9]*[0-9]")), default=None)
        if built is None:
            raise
        return built, None
    return cache_folder() / _folder_name(nvcc.version), nvcc


def why_unwritable(folder: Path) -> str | None:
    """Why nothing can be written to a folder, which need not exist yet; None where it can.

    A file is written to it, or to the nearest folder above that exists, and is gone afterwards.
    """
    there = next(x for x in (folder, *folder.absolute().parents) if os.path.lexists(x))
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"1")
    except OSError as problem:
        return problem.strerror or str(problem)
    return None


def _check_writable(folder: Path) -> None:
    if why := why_unwritable(folder):
        raise RuntimeError(f"cannot write the CUDA kernels to {folder}: {why} (RLK_CACHE names another folder)")


@functools.cache
def why_missing() -> str | None:
    """Why there is no library here and none can be built; None where there is one or one can be built.

    It compiles nothing.
    """
    try:
        folder, nvcc = _place()
        if nvcc is not None and not folder.exists():
            _check_writable(folder.parent)
            _check_host_compiler(nvcc)
    except (RuntimeError, OSError) as problem:
        return str(problem)
    return None


@functools.cache
def driver_too_old() -> str | None:
    """Why this machine's driver cannot run the library, which need not be built yet; None where it can.

    A driver runs what any CUDA of its major version has built. Call this only where `why_missing()` is None.
    """
    folder, _ = _place()
    built_by, driver = nvcc_version(folder / _LIBRARY), _driver_version()
    if driver // 1000 >= int(built_by.split(".")[0]):
        return None
    return f"the driver is of CUDA {driver // 1000}, older than nvcc {built_by}; CUDA_HOME may name another nvcc"


def _driver_version() -> int:
    """The CUDA version that the driver is made for, 1000 · major + 10 · minor; 0 where there is none."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def state() -> str:
    """Whether the library is built, and by which nvcc. Call this only where `why_missing()` is None."""
    folder, _ = _place()
    version = nvcc_version(folder / _LIBRARY)
    return f"built with nvcc {version}" if folder.exists() else f"nvcc {version}, not built yet"


def nvcc_version(library: Path) -> str:
    """The version of the nvcc that built a library."""
    return library.parent.name.rpartition("-cuda")[2]


def kernels(library: Path) -> tuple[Kernel, ...]:
    """What ptxas said of each kernel when it was built, and of each device function that was not inlined."""
    return tuple(
        Kernel(name, int(registers) if registers else None, int(stores) + int(loads))
        for name, stores, loads, registers in _PROPERTIES.findall(ptxas_report(library))
    )


def ptxas_report(library: Path) -> str:
    """All that nvcc said when it built the library."""
    return library.with_name(_PTXAS).read_text()


def library(report: Report | None = None) -> Path:
    """The library's path. It is built where it is missing; RuntimeError is raised where it cannot be built.

    Where several processes call this at once, one builds the library and the others wait for it.
    """
    folder, nvcc = _place()
    if nvcc is not None and not folder.exists():
        _check_writable(folder.parent)
        if report is None:
            log.warning("compiling the CUDA kernels into %s, once; `rlk build-cuda` does so ahead of time", folder)
        _build(folder, nvcc.path, report or (lambda *_: None))
    return folder / _LIBRARY


def _build(folder: Path, nvcc: str, report: Report) -> None:
    """Build the library in a temporary folder and rename that to `folder`, so that `folder` never exists incomplete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if folder.exists():
            return
        # These are left of builds that were killed. An nvcc that outlived its build may still write into its folder,
        # which is why no two builds use the same name.
        for left in folder.parent.glob(f"{folder.name}.*.part"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(".part", f"{folder.name}.", folder.parent) as temporary:
            done = Path(temporary) / "done"
            done.mkdir()
            said = _compile(nvcc, Path(temporary), done / _LIBRARY, report)
            (done / _PTXAS).write_text(said)
            done.rename(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, which only one thread of one process can do at a time.

    Threads exclude each other too, because a lock belongs to the file that each of them opens here.
    """
    import fcntl  # not on Windows, where nothing is built

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(nvcc: str, objects: Path, library: Path, report: Report) -> str:
    """Compiles and links; returns what nvcc said of each source."""
    sources = sorted(SOURCES.glob("*.cu"))
    total = len(sources) + 1
    report("compiling", 0, total)
    headers = jax.ffi.include_dir()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:

        def submit(source: Path) -> concurrent.futures.Future[str]:
            output = ("-c", str(source), "-o", str(objects / f"{source.stem}.o"))
            # XLA's headers count as system headers, so that nvcc shows no warnings from them.
            return pool.submit(
                _run, (nvcc, *FLAGS, *FLAGS_OF.get(source.name, ()), "-isystem", headers, *output), source.name
            )

        jobs = {submit(source): source.name for source in sources}
        try:
            for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
                job.result()
                report(jobs[job], done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    found = (str(objects / f"{source.stem}.o") for source in sources)
    _run((nvcc, "-shared", "-cudart", "static", "-o", str(library), *found), library.name)
    report(library.name, total, total)
    return "".join(f"== {name}\n{job.result()}" for job, name in jobs.items())


def _run(command: Sequence[str], makes: str) -> str:
    """Run a command that makes the file `makes`, and return what it printed; raises RuntimeError where it fails."""
    done = _output(*command)
    said = done.stdout + done.stderr
    if done.returncode:
        last = "\n".join(said.splitlines()[-_LAST_LINES:])
        raise RuntimeError(f"{command[0]} fails at {makes} with exit status {done.returncode}:\n{last}")
    return said


def _header_version() -> int:
    """The version of XLA's FFI in the running jaxlib, as the number that the library's rlk_ffi_api_version returns."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{x} (\d+)", text) for x in ("MAJOR", "MINOR"))
    assert major and minor
    return int(major[1]) * 1000 + int(minor[1])


_registering = threading.Lock()


def register() -> None:
    """Register every target with XLA, once per process; the library is built where it is missing.

    Where the library is for another version of XLA's FFI, this raises RuntimeError before it registers anything: with
    such a target registered, JAX could no longer start its CUDA backend in this process.
    """
    with _registering:
        _register()


@functools.cache
def _register() -> ctypes.CDLL:
    path = library()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as problem:
        raise RuntimeError(f"{problem}; remove {path.parent} and run `rlk build-cuda`") from problem
    versions = tuple(f"{x // 1000}.{x % 1000}" for x in (loaded.rlk_ffi_api_version(), _header_version()))
    if versions[0] != versions[1]:
        raise RuntimeError(
            f"{path} is for version {versions[0]} of XLA's FFI, and jaxlib {jaxlib.__version__} has {versions[1]}; "
            f"remove {path.parent} and run `rlk build-cuda`"
        )
    capsules = {name: jax.ffi.pycapsule(getattr(loaded, name)) for name in TARGETS}
    for name, capsule in capsules.items():
        jax.ffi.register_ffi_target(name, capsule, platform="CUDA")
    return loaded
