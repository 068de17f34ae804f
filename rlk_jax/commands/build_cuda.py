"""`rlk build-cuda`: compile the CUDA kernels before their first use, and print what each kernel needs."""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

import jaxlib

from pallas_kernels.cuda import build


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `build-cuda`."""
    description = "Compile the CUDA kernels with nvcc, where this has not been done yet."
    parser = subparsers.add_parser("build-cuda", help=description, description=description)
    parser.set_defaults(run=lambda _: run())


def run() -> int:
    """Build the library and print its kernels. The exit status is 1 where the library cannot be built."""
    from rich.progress import Progress
    from rich.table import Table

    from rlk_jax.core.terminal import OutputConsole

    start = time.perf_counter()
    try:
        with Progress(console=OutputConsole(stderr=True), transient=True) as progress:
            task = progress.add_task("waiting for another build", total=None)
            library = build.library(
                lambda step, done, total: progress.update(task, description=step, completed=done, total=total)
            )
    except (RuntimeError, OSError) as problem:
        print(f"rlk build-cuda: {problem}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - start
    print(f"{library}\n{seconds:.1f} s, nvcc {build.nvcc_version(library)}, jaxlib {jaxlib.__version__}")
    table = Table("kernel", "registers", "spill bytes")
    kernels = build.kernels(library)
    for name, kernel in zip(_readable([k.name for k in kernels]), kernels, strict=True):
        table.add_row(name, str(kernel.registers or ""), str(kernel.spill_bytes))
    OutputConsole().print(table)
    return 0


def _readable(names: Sequence[str]) -> Sequence[str]:
    """The C++ names of kernels, demangled where this machine has c++filt."""
    if not shutil.which("c++filt"):
        return names
    done = subprocess.run(
        ["c++filt", "--no-params"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()
