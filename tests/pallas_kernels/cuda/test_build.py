"""The build of the CUDA library: its cache, under a compiler that only pretends, and libraries that nvcc builds."""

import ctypes
import pathlib
import subprocess
import sys
import time

import jax
import jaxlib
import pytest

from pallas_kernels.cuda import build
from rlk_jax import cli
from tests.pallas_kernels.cuda.conftest import AS_SHIPPED, REAL, built_library

HERE = pathlib.Path(__file__).parent
PRETENDS = """#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release {version}, V{version}.88" && exit
[ "$1" = -E ] && {{ {preprocess}; exit; }}
while [ "$1" != -o ]; do shift; done
echo "$2" >> {log}
{body}
echo compiled > "$2"
"""
IN_ANOTHER_PROCESS = (
    "import pathlib; from pallas_kernels.cuda import build; build.SOURCES = pathlib.Path({!r}); print(build.library())"
)
SPILLS = """\
ptxas warning : Registers are spilled to local memory in function '_Z1fPf', 344 bytes spill stores, 344 bytes \
spill loads
ptxas info    : Compiling entry function '_Z5cleanPf' for 'sm_90a'
ptxas info    : Function properties for _Z5cleanPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compiling entry function '_Z1fPf' for 'sm_90a'
ptxas info    : Function properties for _Z1fPf
    600 bytes stack frame, 344 bytes spill stores, 344 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 600 bytes cumulative stack size
ptxas info    : Compile time = 46.333 ms
ptxas info    : Function properties for _Z1gPff
    0 bytes stack frame, 384 bytes spill stores, 404 bytes spill loads
"""
COMMAND_BUFFER_COMPATIBLE = 1


@pytest.fixture(autouse=True)
def fresh():
    """Forget what another test has cached."""
    caches = build.why_missing, build.driver_too_old, build._register
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


class Toolkit:
    """A CUDA_HOME whose nvcc logs what it is to make, runs the shell commands `body`, and writes that file."""

    def __init__(self, home: pathlib.Path):
        self.log = home / "log"
        self.nvcc = home / "bin/nvcc"
        self.nvcc.parent.mkdir(parents=True)
        self.be()

    def be(self, version: str = "13.0", body: str = "", preprocess: str = ":") -> None:
        self.nvcc.write_text(PRETENDS.format(version=version, log=self.log, body=body, preprocess=preprocess))
        self.nvcc.chmod(0o755)

    @property
    def made(self) -> list[str]:
        lines = self.log.read_text().split() if self.log.exists() else []
        return sorted(pathlib.Path(line).name for line in lines)


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A toolkit that is the only compiler, with two sources, a header and an empty cache."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("a.cu", "b.cu", "c.cuh"):
        (sources / name).write_text(name)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("RLK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return Toolkit(tmp_path / "cuda")


ALL = ["a.o", "b.o", "librlk_cuda.so"]


def test_a_second_call_compiles_nothing(toolkit):
    steps = []
    library = build.library(lambda *step: steps.append(step))
    assert library.exists() and toolkit.made == ALL
    assert steps[0] == ("compiling", 0, 3) and steps[-1] == ("librlk_cuda.so", 3, 3) and len(steps) == 4
    assert build.library() == library and toolkit.made == ALL
    assert sorted(x.name for x in library.parent.iterdir()) == ["librlk_cuda.so", "ptxas.txt"]


@pytest.mark.parametrize("change", ["source", "header", "flags", "jaxlib", "nvcc"])
def test_what_the_library_depends_on_is_built_again(change, toolkit, monkeypatch):
    before = build.library()
    match change:
        case "source":
            (build.SOURCES / "b.cu").write_text("other")
        case "header":
            (build.SOURCES / "c.cuh").write_text("other")
        case "flags":
            monkeypatch.setattr(build, "FLAGS", ("-O1",))
        case "jaxlib":
            monkeypatch.setattr(jaxlib, "__version__", "0.99.0")
        case "nvcc":
            toolkit.be(version="13.1")
    after = build.library()
    assert after != before and before.exists() and after.exists() and toolkit.made == sorted(2 * ALL)


def other_process() -> subprocess.Popen[str]:
    code = IN_ANOTHER_PROCESS.format(str(build.SOURCES))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.full
def test_two_processes_build_once(toolkit):
    """In make test `test_a_killed_build_leaves_nothing_broken` has the lock, and a build that another one overtakes."""
    toolkit.be(body="sleep 0.5")
    both = [other_process() for _ in range(2)]
    printed = [process.communicate()[0].strip() for process in both]
    assert printed == [str(build.library())] * 2 and toolkit.made == ALL


def test_a_killed_build_leaves_nothing_broken(toolkit):
    toolkit.be(body="sleep 3")
    process = other_process()
    while not toolkit.made:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert build.state().endswith("not built yet")
    toolkit.be()
    library = build.library()
    # The nvcc of the killed build still runs; what it writes must not spoil the new library.
    time.sleep(3)
    assert library.read_text() == "compiled\n"
    assert {x.name for x in build.cache_folder().iterdir()} == {library.parent.name, f"{library.parent.name}.lock"}


def test_a_failing_compile_leaves_no_library(toolkit, capfd):
    toolkit.be(body='case "$2" in *b.o) echo "b.cu(7): error: no such luck" >&2; exit 3;; esac')
    with pytest.raises(RuntimeError, match=r"nvcc fails at b.cu with exit status 3:\nb.cu\(7\): error: no such luck"):
        build.library()
    assert "librlk_cuda.so" not in toolkit.made and [x.suffix for x in build.cache_folder().iterdir()] == [".lock"]
    assert cli.main(["build-cuda"]) == 1
    assert "rlk build-cuda: " in capfd.readouterr().err


def test_no_nvcc(toolkit, monkeypatch, capfd):
    toolkit.nvcc.unlink()
    missing = build.why_missing()
    assert missing == (
        f"the CUDA kernels need nvcc of CUDA 12.5 or later; there is none in $CUDA_HOME/bin ({toolkit.nvcc.parent})"
    )
    with pytest.raises(RuntimeError, match="there is none"):
        build.library()
    assert cli.main(["build-cuda"]) == 1
    assert capfd.readouterr().err.strip() == f"rlk build-cuda: {missing}"


def test_nvcc_is_found_on_the_path(toolkit, monkeypatch):
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(toolkit.nvcc.parent))
    assert build.find_nvcc() == (str(toolkit.nvcc), "13.0.88")


@pytest.mark.parametrize("version", ["12.4", "9.9"])
def test_nvcc_is_too_old(version, toolkit):
    toolkit.be(version=version)
    assert build.why_missing().endswith(f"nvcc of CUDA 12.5 or later; {toolkit.nvcc} is {version}.88")


def test_nvcc_says_no_version(toolkit):
    toolkit.nvcc.write_text("#!/bin/sh\nexit 1\n")
    assert build.why_missing().endswith(f"{toolkit.nvcc} is of an unknown version")


def test_nvcc_does_not_run(toolkit):
    toolkit.nvcc.write_bytes(b"\x7fELF")
    assert build.why_missing().startswith(f"{toolkit.nvcc} does not run: ")


def test_nvcc_finds_no_other_compiler(toolkit):
    toolkit.be(preprocess="echo gcc: No such file or directory >&2; exit 1")
    assert build.why_missing().endswith(
        f"and a C++ compiler that it can use; {toolkit.nvcc} says: gcc: No such file or directory"
    )


def test_no_flags_from_outside(toolkit, monkeypatch):
    for name in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"):
        monkeypatch.setenv(name, "-use_fast_math")
    toolkit.be(body='[ -z "$NVCC_APPEND_FLAGS$NVCC_PREPEND_FLAGS" ] || exit 1')
    assert build.library().exists()


@pytest.mark.parametrize(("driver", "reason"), [(13000, None), (12080, "the driver is of CUDA 12, older than nvcc")])
def test_a_driver_runs_what_its_major_version_has_built(driver, reason, toolkit, monkeypatch):
    monkeypatch.setattr(build, "_driver_version", lambda: driver)
    found = build.driver_too_old()
    assert found is None if reason is None else found.startswith(f"{reason} 13.0.88")


def test_a_cache_that_cannot_be_written(toolkit, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLK_CACHE", str(tmp_path / "file/cache"))
    assert build.why_missing() == (
        f"cannot write the CUDA kernels to {tmp_path}/file/cache: Not a directory (RLK_CACHE names another folder)"
    )


def test_whether_a_folder_can_be_written(tmp_path):
    """/proc says that its owner may write to it, and takes no file. Nothing is left where a folder was tried."""
    assert build.why_unwritable(tmp_path) is None and build.why_unwritable(tmp_path / "a" / "b") is None
    assert not list(tmp_path.iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for folder in (tmp_path / "link", pathlib.Path("/proc/nothing")):
        assert build.why_unwritable(folder) == "No such file or directory"


def test_a_cache_that_cannot_be_searched(toolkit, monkeypatch):
    def exists(path):
        raise PermissionError(f"no way into {path.parent}")

    monkeypatch.setattr(pathlib.Path, "exists", exists)
    assert build.why_missing() == f"no way into {build.cache_folder()}"


def test_a_library_built_elsewhere_needs_no_nvcc(toolkit):
    assert (build.why_missing(), build.state()) == (None, "nvcc 13.0.88, not built yet")
    library = build.library()
    toolkit.nvcc.unlink()
    build.why_missing.cache_clear()
    assert (build.why_missing(), build.state()) == (None, "built with nvcc 13.0.88")
    assert build.library() == library


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RLK_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/rlk_jax"),
        ({"HOME": "/c"}, "/c/.cache/rlk_jax"),
    ],
)
def test_cache_folder(variables, expected, monkeypatch):
    for name in ("RLK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(build.cache_folder()) == expected


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The library of tiny.cu."""
    return built_library(tmp_path_factory.mktemp("tiny"), HERE)


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """A function that returns the FFI version and the traits of a handler, which it asks for as XLA does."""
    nvcc, library = build.find_nvcc().path, tmp_path_factory.mktemp("metadata") / "metadata.so"
    make = (nvcc, "-shared", "-Xcompiler", "-fPIC", "-isystem", jax.ffi.include_dir(), "-o", library)
    subprocess.run([*make, HERE / "metadata.cc"], check=True)
    ask = ctypes.CDLL(str(library)).metadata

    def of(handler: ctypes._CFuncPtr) -> tuple[int, int]:
        version, traits = ctypes.c_int(), ctypes.c_uint()
        assert ask(handler, ctypes.byref(version), ctypes.byref(traits)) == 0
        return version.value, traits.value

    return of


def assert_well_built(library: pathlib.Path, targets: tuple[str, ...], metadata) -> None:
    loaded, version = ctypes.CDLL(str(library)), build._header_version()
    assert loaded.rlk_ffi_api_version() == version
    for name in targets:
        assert metadata(getattr(loaded, name)) == (version, COMMAND_BUFFER_COMPATIBLE), name
    kernels = build.kernels(library)
    assert kernels and not [kernel for kernel in kernels if kernel.spill_bytes]
    report = build.ptxas_report(library)
    # ptxas gives some of its reasons for serialising wgmma not as warnings but as information.
    assert "warning" not in report.lower() and "wgmma.mma_async instructions are serialized" not in report


@pytest.mark.full
def test_a_tiny_library(tiny, metadata):
    """In make test, test_the_shipped_sources (here) makes the same checks of a library with the same parts."""
    assert_well_built(tiny, ("rlk_tiny",), metadata)


def test_the_shipped_sources(quick, metadata):
    """Every source compiles and links, and every handler is there; the kernels of `AS_SHIPPED` do not spill."""
    assert_well_built(quick, build.TARGETS, metadata)
    report = build.ptxas_report(quick)
    assert all(f"== {name}\nptxas info" in report for name in AS_SHIPPED)


@pytest.mark.full
def test_the_shipped_library(shipped, metadata):
    """In make test, test_the_shipped_sources (here) catches what is wrong with a source, with a handler, and with the
    registers of two sources; in the other sources ptxas's spills and warnings are seen here alone.
    """
    assert_well_built(shipped, build.TARGETS, metadata)


def test_spills_are_read(tmp_path):
    (tmp_path / "ptxas.txt").write_text(SPILLS)
    assert build.kernels(tmp_path / "lib.so") == (("_Z5cleanPf", 8, 0), ("_Z1fPf", 32, 688), ("_Z1gPff", None, 788))


@pytest.fixture
def registered(quick, monkeypatch):
    """The list of targets that register() hands to JAX."""
    found = []
    monkeypatch.setattr(build, "library", lambda: quick)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *a, **options: found.append((a[0], options)))
    return found


def test_targets_are_registered_once(registered):
    build.register()
    build.register()
    assert registered == [(name, {"platform": "CUDA"}) for name in build.TARGETS]


def test_another_ffi_version_is_refused_before_registration(registered, monkeypatch):
    version = build._header_version()
    monkeypatch.setattr(build, "_header_version", lambda: version + 1)
    minors = (version % 1000, version % 1000 + 1)
    message = rf"is for version 0.{minors[0]} of XLA's FFI, and jaxlib {jaxlib.__version__} has 0.{minors[1]}; remove"
    with pytest.raises(RuntimeError, match=message):
        build.register()
    assert not registered


def test_a_library_that_cannot_be_loaded(registered, tmp_path, monkeypatch):
    broken = tmp_path / "librlk_cuda.so"
    broken.write_text("no library")
    monkeypatch.setattr(build, "library", lambda: broken)
    with pytest.raises(RuntimeError, match=f"; remove {tmp_path} and run `rlk build-cuda`"):
        build.register()
    assert not registered


def test_the_command_says_where_and_what(quick, registered, capfd, monkeypatch):
    monkeypatch.setattr(build, "library", lambda report: quick)
    monkeypatch.setenv("COLUMNS", "2000")  # The names of kernels are long, and would be wrapped.
    assert cli.main(["build-cuda"]) == 0
    where, how, *table = capfd.readouterr().out.splitlines()
    assert where == str(quick) and f"nvcc {build.nvcc_version(quick)}, jaxlib {jaxlib.__version__}" in how
    assert any("column_sums" in line and " 0 " in line for line in table)


def test_a_wheel_holds_the_sources():
    """hatchling leaves out of a wheel what git ignores, and nothing else: git must not ignore the sources."""
    names = [str(REAL / name) for name in ("ffi.cu", "main_loop.cuh")]
    assert subprocess.run(["git", "check-ignore", *names], cwd=REAL, check=False).returncode == 1
