"""Programs over Auto mesh axes that XLA partitions: a function that is told how XLA has laid its arguments out.

JAX's own `custom_partitioning` names its callback by an address in this process, so that a program with one never has
the same text twice: the compilation cache misses at every start. It also knows no layout over a part of a mesh axis,
which slices and reshapes of a sharded batch have. Both are mended here, on JAX's lowering.
"""

import dataclasses
import functools
import hashlib
import math
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import custom_partitioning as jax_partitioning
from jax._src import dispatch as jax_dispatch
from jax._src import sharding_impls
from jax._src.core import Primitive, jaxpr_as_fun  # jax.extend, which is public, imports all of Pallas.
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rlk_jax.core.dispatch import log_once, traced_device
from rlk_jax.core.kernel_compilation import begin_while_lowering
from rlk_jax.core.transforms import with_new_type

Rule = Callable[[Any], str]
"""From the results as ShapeDtypeStructs, Shardy's sharding rule of all arrays in arguments and results."""
Partition = Callable[[Mesh, Any, Any], tuple[Mesh, Callable[..., Any], Any, Any]]
"""From a mesh, arguments as ShapeDtypeStructs that lie over it, and results as ShapeDtypeStructs, the mesh, what each
device runs, and the shardings of results and arguments.
"""


def partitioned_by_xla(
    function: Callable[..., Any], rule: Rule, partition: Partition, depends_on: Any, *arguments: Any
) -> Any:
    """`function(*arguments)`, which XLA partitions over the devices of a program.

    `depends_on` holds all that `partition` depends on beside shapes and layouts: functions of modules, partial
    applications of them, and static values.
    """
    leaves, arguments_tree = jax.tree.flatten(arguments)
    of_leaves = lambda *flat: function(*jax.tree.unflatten(arguments_tree, flat))  # noqa: E731
    call, results = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
    found = _partitioned.bind(
        *leaves,
        call=call,
        partition=functools.partial(_with_named_axes, partition),
        rule=rule(results),
        depends_on=described(depends_on),
        arguments_tree=arguments_tree,
        results_tree=jax.tree.structure(results),
    )
    return jax.tree.unflatten(jax.tree.structure(results), found)


def chosen_by_devices(alone: Callable[..., Any], spread: Callable[..., Any], *arguments: Any) -> Any:
    """`alone(*arguments)` in a program of one device, and `spread(*arguments)` in one of several, over which XLA
    partitions it. Both return the same tree.

    Whether a program that is traced will run on several devices is known only when it is lowered.
    """
    if jax.device_count() == 1:
        return alone(*arguments)
    leaves, tree = jax.tree.flatten(arguments)
    calls = [
        jax.make_jaxpr(lambda *flat, f=function: f(*jax.tree.unflatten(tree, flat)), return_shape=True)(*leaves)
        for function in (alone, spread)
    ]
    found = _chosen.bind(*leaves, alone=calls[0][0], spread=calls[1][0])
    return jax.tree.unflatten(jax.tree.structure(calls[0][1]), found)


def named_dimensions(array: str, ndim: int, *, is_rows: bool = False) -> str:
    """The dimensions of an array as a sharding rule names them. Each name is this array's alone, but for `i`: it stands
    for the tokens, and is the first dimension of every array of rows.
    """
    names = [f"{array}d{axis}" for axis in range(ndim)]
    return " ".join(["i", *names[1:]] if is_rows else names)


def without_effects(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the references inside it hidden: XLA's partitioning callback takes no program with effects."""
    call = custom_partitioning(function)
    call.def_partition(None)
    return call


def _with_named_axes(partition: Partition, mesh: Mesh, arguments: Any, results: Any) -> Any:
    """`partition` of arguments whose layouts are named by axes of the mesh, or by parts of these axes."""
    leaves, tree = jax.tree.flatten(arguments)
    for candidate in (mesh, _of_prime_axes(mesh)):
        specs = [_spec(x.sharding, candidate) for x in leaves]
        if None not in specs:
            break
    else:
        log_once(f"XLA lays arrays of a call out as no axes of {dict(mesh.shape)} do: they are gathered.")
    named = (
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(candidate, spec or PartitionSpec()))
        for x, spec in zip(leaves, specs, strict=True)
    )
    chosen, of_device, *shardings = partition(candidate, jax.tree.unflatten(tree, named), results)
    return chosen, _under_no_mesh(of_device), *shardings


def _under_no_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of one device's arrays, traced under no mesh.

    XLA may call back while the mesh of the whole program is set (`jax.set_mesh`). JAX then writes the Explicit axes of
    that mesh into the types of values, and XLA cannot read the program that is lowered from them.
    """

    def apart(*arguments: Any) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return function(*jax.tree.map(with_new_type, arguments))

    return apart


def _of_prime_axes(mesh: Mesh) -> Mesh:
    """The mesh with each axis cut into axes of prime sizes, the most significant first: XLA may use a part of one."""
    cut = {name: list(_primes(size)) for name, size in mesh.shape.items()}
    names = [f"{name}:{i}" if len(primes) > 1 else name for name, primes in cut.items() for i in range(len(primes))]
    return Mesh(mesh.devices.reshape([p for primes in cut.values() for p in primes]), names)


def _primes(n: int) -> Iterator[int]:
    """The prime factors of n; 1 for 1."""
    for p in range(2, math.isqrt(n) + 1):
        if n % p == 0:
            yield p
            yield from _primes(n // p)
            return
    yield n


def _spec(sharding: Any, mesh: Mesh) -> PartitionSpec | None:
    """How an array lies over the mesh, with an entry for each of its axes; None where XLA's layout is none over it."""
    if sharding is None:
        return PartitionSpec()
    layout = sharding._to_xla_hlo_sharding(0)
    try:
        return sharding_impls.parse_flatten_op_sharding(layout, mesh)[0]
    except (AssertionError, KeyError, NotImplementedError, StopIteration, ValueError):
        return None


_partitioned = Primitive("partitioned_by_xla")
_partitioned.multiple_results = True
# JAX would otherwise not tell the lowering which devices the program runs on.
jax_dispatch.prim_requires_devices_during_lowering.add(_partitioned)


@_partitioned.def_abstract_eval
def _result_types(*_: Any, call: Any, **__: Any) -> Any:
    return call.out_avals


@_partitioned.def_impl
def _run_whole(*arguments: Any, call: Any, **_: Any) -> Any:
    return jaxpr_as_fun(call)(*arguments)


_chosen = Primitive("chosen_by_devices")
_chosen.multiple_results = True
jax_dispatch.prim_requires_devices_during_lowering.add(_chosen)


@_chosen.def_abstract_eval
def _types_of_alone(*_: Any, alone: Any, spread: Any) -> Any:
    return alone.out_avals


@_chosen.def_impl
def _run_alone(*arguments: Any, alone: Any, spread: Any) -> Any:
    return jaxpr_as_fun(alone)(*arguments)


def _lowering_of_chosen(context: Any, *values: Any, alone: Any, spread: Any) -> Any:
    is_alone = context.module_context.axis_context.num_devices == 1
    return mlir.lower_fun(jaxpr_as_fun(alone if is_alone else spread), multiple_results=True)(context, *values)


mlir.register_lowering(_chosen, _lowering_of_chosen)


_callbacks: dict[bytes, Any] = {}
"""What XLA calls back for each program, by content: as many as there are programs, and kept as their jaxprs are."""


def _lowering(
    context: Any,
    *values: Any,
    call: Any,
    partition: Any,
    rule: str,
    depends_on: str,
    arguments_tree: Any,
    results_tree: Any,
) -> Any:
    """JAX's lowering, with the callback under a name that depends on nothing but what it does.

    On one device all kernels of the function are lowered then. They are compiled while the rest of the program is.
    """
    kept = context.module_context.keepalives
    before = len(kept)
    results = jax_partitioning._custom_partitioning_lowering_rule(
        context,
        *values,
        call=call,
        in_tree=arguments_tree,
        out_tree=results_tree,
        propagate_user_sharding=None,
        partition=partition,
        infer_sharding_from_operands=None,
        decode_shardings=False,
        sharding_rule=jax_partitioning.str_to_sdy_sharding_rule(rule),
        static_args=(),
    )
    if len(kept) == before:  # On one device nothing is partitioned.
        if "cuda" in context.module_context.platforms and traced_device().platform == "gpu":
            begin_while_lowering(context.module_context.module, ir.InsertionPoint.current.block.owner, traced_device())
        return results
    info = kept.pop()
    info.module_context = types.SimpleNamespace(
        platforms=info.module_context.platforms, backend=info.module_context.backend
    )
    key = _content(depends_on, info.mesh, call, rule)
    jax_partitioning._sharding_callbacks[key] = _callbacks.setdefault(key, info)
    results[0].owner.attributes["backend_config"] = ir.StringAttr.get(key.decode())
    return results


mlir.register_lowering(_partitioned, _lowering)


def _content(depends_on: str, mesh: Mesh, call: Any, rule: str) -> bytes:
    """A name of a callback that is the same in every process in which it does the same, and nowhere else."""
    settings = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision, jax.config.jax_numpy_dtype_promotion
    devices = [(x.id, x.device_kind) for x in np.ravel(mesh.devices)]
    facts = (_source(), depends_on, tuple(mesh.shape.items()), devices, rule, settings, str(call))
    return f"rlk_jax {hashlib.sha256(_without_addresses(repr(facts)).encode()).hexdigest()}".encode()


def described(x: Any) -> str:
    """A text of a function or a static value that is the same in every process, and differs where the value does."""
    if isinstance(x, functools.partial):
        return f"{described(x.func)} of {described(x.args)} {described(sorted(x.keywords.items()))}"
    if isinstance(x, types.FunctionType):
        holds = [*(cell.cell_contents for cell in x.__closure__ or ()), x.__defaults__, x.__kwdefaults__]
        return f"{x.__module__}.{x.__qualname__} of {described(holds)}"
    if hasattr(x, "__wrapped__"):  # What jax.jit gives does not say the module of its function.
        return f"{type(x).__qualname__} of {described(x.__wrapped__)}"
    if isinstance(x, types.MethodType):
        return f"{described(x.__func__)} of {described(x.__self__)}"
    if isinstance(x, tuple | list):
        return f"{type(x).__qualname__}({', '.join(map(described, x))})"
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = ((field.name, getattr(x, field.name)) for field in dataclasses.fields(x))
        return f"{type(x).__module__}.{type(x).__qualname__}{described(list(fields))}"
    return _without_addresses(repr(x))


def _without_addresses(text: str) -> str:
    return re.sub(" at 0x[0-9a-f]+", "", text)


@functools.cache
def _source() -> str:
    """A hash of this library's sources, which say what a callback does."""
    folder, digest = Path(__file__).parents[1], hashlib.sha256()
    for package in (folder, folder.with_name("pallas_kernels")):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
