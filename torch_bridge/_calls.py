"""One way of calling for every op: rows padded to buckets, programs run, gradients taken, as custom ops of torch.

The forward of an op is a custom op of its own; `_pull_back` is the backward of all. Between the two stands a handle: a
tensor whose storage the residuals live as long as, so that autograd, checkpointing and torch.compile, which know
nothing but tensors, decide how long that is.
"""

import functools
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, NamedTuple, get_origin, get_type_hints

import jax
import torch
from torch import Tensor

from rlk_jax.core.tokens import checked_tokens, counted
from torch_bridge import _exchange, _inputs, _programs
from torch_bridge._programs import Arrays, Op, Options, Program


class RowPadding(NamedTuple):
    """How the rows of a call are padded to the sizes of a program."""

    lead: tuple[int, ...]
    """The lead shape of the tensors."""
    sizes: tuple[int, ...]
    """How many rows the tensors have in each dimension of the program's rows."""
    padded: tuple[int, ...]
    """How many rows the program has in each of these dimensions."""

    @property
    def is_empty(self) -> bool:
        return 0 in self.sizes

    def rows(self, x: Tensor, fill: float | None = None, *, columns: int = 0) -> jax.Array:
        """x `[*lead]`, or with columns `[*lead, C]`, followed by rows of `fill`, or of whatever memory holds."""
        tail = x.shape[x.ndim - columns :]
        if self.padded == self.sizes:
            return _exchange.lend(x, torch.Size((*self.sizes, *tail)))
        shape = (*self.padded, *tail)
        larger = x.new_empty(shape) if fill is None else x.new_full(shape, fill)
        larger[tuple(map(slice, self.sizes))] = _exchange.in_memory(x).detach().reshape(*self.sizes, *tail)
        return _exchange.lend(larger)

    def ids(self, ids: Tensor) -> jax.Array:
        """Integer ids of any dtype, as `_exchange.ids_of` takes them."""
        return self.rows(ids if ids.dtype == torch.int32 else _exchange.as_int64(ids), 0)

    def temperature(self, per_token: Tensor | None, number: float, device: torch.device) -> jax.Array:
        if per_token is None:
            return _exchange.scalar(number, device)
        return _exchange.lend(per_token) if per_token.ndim == 0 else self.rows(per_token, 1.0)

    def tokens(
        self,
        ids: Tensor,
        temperature: tuple[Tensor | None, float],
        ignore_index: int | None,
        name: Literal["target_ids", "token_ids"],
        vocab_size: int | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`ids` and how many of them are real, as `token_ids` takes them, and the temperature; for `flat` padding.

        The values are checked where there is a vocabulary to check them against.
        """
        own, count = self.ids(ids), _exchange.scalar(self.sizes[0], ids.device)
        scale = self.temperature(*temperature, ids.device)
        if vocab_size is not None:
            _exchange.wait(own.device)
            given = token_ids(own, count, ignore_index=ignore_index)
            is_counted = counted(given, ignored(ignore_index))
            checked_tokens(given, scale, is_counted, vocab_size=vocab_size, validate=True, name=name)
        return own, count, scale

    def real(self, x: jax.Array, shape: Sequence[int]) -> Tensor:
        """A result without its padding, in this shape."""
        tensor = _exchange.to_torch(x)
        if tensor.shape == shape:
            return tensor
        # A view would not do: autograd would not let a user write into it.
        return tensor[tuple(map(slice, self.sizes))].reshape(shape).contiguous().data


def ignored(ignore_index: int | None) -> int:
    """The ignore_index of a program: it has rows of padding to ignore, whether the user ignores any or not."""
    return _exchange.INT32.min if ignore_index is None else ignore_index


@functools.partial(jax.jit, static_argnames="ignore_index")
def token_ids(lent: jax.Array, count: jax.Array, *, ignore_index: int | None) -> jax.Array:
    """int32 ids `[N]`; rows of padding hold `ignored(ignore_index)`, which no id of a user may equal otherwise."""
    n, mark, int32 = lent.shape[0], ignored(ignore_index), _exchange.INT32
    ids = _exchange.ids_of(lent, (n,), int32.min + (mark == int32.min), int32.max - (mark == int32.max))
    if ignore_index is None:
        ids = jax.numpy.maximum(ids, int32.min + 1)
    return jax.numpy.where(jax.numpy.arange(n) < count, ids, mark)


def numbers(x: Tensor) -> Tensor:
    """Real numbers in a dtype that JAX computes with; integers become float32, in which the loss counts."""
    low = x.dtype != torch.float64 and x.is_floating_point()
    return x if low or x.dtype == torch.bool else x.to(torch.float32)


@functools.lru_cache(maxsize=4096)
def flat(lead: tuple[int, ...]) -> RowPadding:
    """The padding of all rows of `[*lead]`, in one dimension."""
    n = math.prod(lead)
    return RowPadding(tuple(lead), (n,), (_programs.bucket(n),))


class _Pending(NamedTuple):
    """A forward that waits for its backward; `program` is None where it had no rows."""

    call: "Call"
    program: Program | None
    residuals: list[jax.Array]


_kept: dict[int, Any] = {}
_numbers = itertools.count(1)


def keep(residuals: Any) -> Tensor:
    """A tensor for autograd to save in their place: they live as long as it does."""
    number = next(_numbers)
    handle = torch.tensor([number], device="cpu")
    _kept[number] = residuals
    weakref.finalize(handle.untyped_storage(), _kept.pop, number, None).atexit = False
    return handle


def kept(handle: Tensor) -> Any:
    """What `keep` was given."""
    if int(handle) not in _kept:
        raise RuntimeError(
            "torch_bridge: what the forward kept for this backward is gone. It lives as long as the tensor that "
            "autograd saved: hooks on saved tensors must not put a copy in its place."
        )
    return _kept[int(handle)]


def _no_handle() -> Tensor:
    """What stands for a handle where no backward follows."""
    return torch.zeros(1, dtype=torch.int64, device="cpu")


def fake(
    shapes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """What `Call.forward` returns, as far as torch.compile looks."""
    return *(torch.empty(shape, dtype=dtype, device=device) for shape in shapes), _no_handle()


class Call(NamedTuple):
    """One call of an op."""

    op: Op
    padding: RowPadding
    options: Options
    lend: tuple[Callable[[Tensor], jax.Array], ...]
    """From each of the op's differentiable tensors to an array for its program."""
    lift: Callable[[Tensor], jax.Array]
    """The same for an upstream gradient."""

    def forward(
        self,
        tensors: Sequence[Tensor | None],
        others: Callable[[], Arrays],
        needs: Sequence[bool],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, ...]:
        """Outputs of these shapes, of the differentiable tensors and other arrays, and the handle of the residuals."""
        device = next(x for x in tensors if x is not None).device
        if self.padding.is_empty:
            zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
            return *zeros, keep(_Pending(self, None, [])) if any(needs) else _no_handle()
        needed = tuple([i for i, needs_it in enumerate(needs) if needs_it])
        with _exchange.launching(tensors):
            # The tokens first: their values are checked before the rest is touched.
            checked = others()
            arrays = (*self._lent(tensors), *checked)
            program = _programs.program(self.op, arrays, self.options, needed)
            outputs, residuals = program.forward(arrays)
            # Before the arrays are let go of (`_exchange`).
            values = [
                torch.empty(shape, dtype=dtype, device=device) if 0 in shape else self.padding.real(x, shape)
                for x, shape in zip(outputs, shapes, strict=True)
            ]
        return *values, keep(_Pending(self, program, residuals)) if needed else _no_handle()

    def _lent(self, tensors: Sequence[Tensor | None]) -> Arrays:
        return tuple([None if x is None else lend(x) for lend, x in zip(self.lend, tensors, strict=True)])

    def backward(
        self,
        program: Program,
        residuals: list[jax.Array],
        tensors: Sequence[Tensor | None],
        upstream: Sequence[Tensor | None],
        shapes: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        """Gradients of these shapes, of the tensors that need one."""
        with _exchange.launching(upstream):
            lent = self._lent([x if i in program.borrows else None for i, x in enumerate(tensors)])
            # Torch sends zeros to outputs that were not asked for, too (`linear_logp.shapes`).
            lifted = tuple([None if g is None or g.shape == (0,) else self.lift(g) for g in upstream])
            gradients = program.backward(residuals, lent, lifted)
            return [self.padding.real(g, shape) for g, shape in zip(gradients, shapes, strict=True)]


def _pull_back(
    handle: Tensor, tensors: Sequence[Tensor | None], upstream: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients of those differentiable tensors that need one."""
    needed = [x for x, needs_it in zip(tensors, needs, strict=True) if needs_it and x is not None]
    call, program, residuals = kept(handle)
    if program is None:
        return [torch.zeros_like(x) for x in needed]
    return call.backward(program, residuals, tensors, upstream, [x.shape for x in needed])


class OptionFields:
    """The fields of a dataclass of options that a custom op has, each an argument of its own: torch takes no dataclass.

    Everything is derived from the dataclass, so that a new option is a new field and nothing else.
    """

    def __init__(self, kind: type[Any], without: Sequence[str] = ()) -> None:
        self._kind = kind
        hints = get_type_hints(kind)
        self._types = {x.name: _schema_type(hints[x.name]) for x in fields(kind) if x.name not in without}

    def static(self, options: Any) -> Options:
        """The options that decide a program; values are checked before it, and not by it."""
        return tuple([(name, getattr(options, name)) for name in self._types if name != "validate"])

    def spread(self, arguments: Sequence[Any]) -> list[Any]:
        """A kernel's arguments with the fields of its options, the last but one, in their place."""
        *tensors, options, needs = arguments
        return [*tensors, *[getattr(options, name) for name in self._types], needs]

    def flattened(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with a parameter for each field instead of `options`, its last parameter but one."""
        count = len(self._types)

        @functools.wraps(function)
        def flat(*arguments: Any) -> Any:
            *tensors, needs = arguments
            values = dict(zip(self._types, tensors[-count:], strict=True))
            return function(*tensors[:-count], self._kind(**values), needs)

        signature = inspect.signature(function)
        *tensors, _, needs = signature.parameters.values()
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [inspect.Parameter(name, kind, annotation=hint) for name, hint in self._types.items()]
        flat.__signature__ = signature.replace(parameters=[*tensors, *own, needs])  # type: ignore[attr-defined]
        return flat


def _schema_type(hint: Any) -> Any:
    """A field's type as torch's schemas know it: one of a few strings is a string."""
    return str if get_origin(hint) is Literal else hint


def _custom_op(name: str, kernel: Callable[..., Any]) -> Any:
    # What JAX runs is no part of a CUDA graph.
    return torch.library.custom_op(f"rlk_jax::{name}", kernel, mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])


def _checked(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` for calls whose arguments nobody has checked: a graph's."""
    names = tuple(inspect.signature(kernel).parameters)

    @functools.wraps(kernel)
    def run(*arguments: Any) -> Any:
        _inputs.check_arguments(name, dict(zip(names, arguments, strict=True)))
        return kernel(*arguments)

    return run


_pull_back_op = _custom_op("pull_back", _pull_back)


@_pull_back_op.register_fake
def _(
    handle: Tensor, tensors: Sequence[Tensor | None], upstream: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor]:
    needed = (x for x, needs_it in zip(tensors, needs, strict=True) if needs_it and x is not None)
    return [x.new_empty(x.shape) for x in needed]


def differentiable_once(gradients: Sequence[Tensor | None], *sources: Tensor | None) -> list[Tensor | None]:
    """Gradients that come of these tensors; differentiating them raises."""
    if not torch.is_grad_enabled():
        return list(gradients)
    # Under create_graph=True alone.
    return [None if g is None else _NoSecondDerivative.apply(g, *sources) for g in gradients]


class _NoSecondDerivative(torch.autograd.Function):
    """The identity on a gradient that comes of other tensors; differentiating it raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor | None) -> Tensor:
        return gradient

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("torch_bridge has no second derivatives: a gradient of its ops cannot be differentiated.")


def as_torch_op(
    name: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    positions: Sequence[int],
    *,
    options: OptionFields | None = None,
    constants: Sequence[int] = (),
    saved: Callable[[Sequence[bool]], Sequence[bool]] = lambda needs: [True] * len(needs),
) -> Callable[..., Any]:
    """`kernel` as a custom op that torch.compile takes whole, with gradients of the arguments at these positions.

    Its last argument says which of them are needed; it returns what `Call.forward` does, and `fake` what it looks like.
    With `options`, the kernel's parameter of this name is a dataclass; the custom op has an argument for each of its
    fields instead. Outputs at the positions `constants` carry no gradient. `saved` says which tensors a backward may
    read. The custom op checks its arguments by the names of its parameters, which are those of `rlk_jax.<name>`.

    Outside torch.compile the same functions run without the dispatcher, which costs as much as all else a call does,
    and the caller has checked what it gives them.
    """

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.arity, ctx.needs = len(inputs), inputs[-1]
        if not any(ctx.needs):
            return
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[output[i] for i in constants])
        tensors = [inputs[i] for i in positions]
        read = saved(ctx.needs)
        # Of one that is not read, its shape.
        kept = [x if x is None or r else x.new_empty(()).expand(x.shape) for x, r in zip(tensors, read, strict=True)]
        ctx.save_for_backward(output[-1], *kept)

    def gradients(pull_back: Callable[..., list[Tensor]], ctx: Any, upstream: Sequence[Tensor | None]) -> list[Any]:
        """Of the tensors at `positions`."""
        if all(g is None for g in upstream):
            return [None] * len(positions)
        handle, *tensors = ctx.saved_tensors
        found = iter(pull_back(handle, tensors, list(upstream[:-1]), ctx.needs))
        return differentiable_once([next(found) if needs_it else None for needs_it in ctx.needs], *tensors, *upstream)

    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        of_inputs: list[Any] = [None] * ctx.arity
        for i, g in zip(positions, gradients(_pull_back_op, ctx, upstream), strict=True):
            of_inputs[i] = g
        return tuple(of_inputs)

    flat_kernel, flat_fake = (x if options is None else options.flattened(x) for x in (kernel, fake))
    op = _custom_op(name, _checked(name, flat_kernel))
    op.register_fake(flat_fake)
    op.register_autograd(backward, setup_context=setup_context)

    # With a `setup_context` of its own, torch would look at the kernel's signature at every call; and it unpacks each
    # argument, of which a tuple is one.
    def eager_forward(ctx: Any, inputs: tuple[Any, ...], *_: Tensor | None) -> Any:
        output = kernel(*inputs)
        setup_context(ctx, inputs, output)
        return output

    def eager_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        # Compiled autograd traces this.
        pull_back = _pull_back_op if torch.compiler.is_compiling() else _pull_back
        return None, *gradients(pull_back, ctx, upstream)

    members = {"forward": staticmethod(eager_forward), "backward": staticmethod(eager_backward)}
    eager: Any = type(name, (torch.autograd.Function,), members)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return op(*inputs) if options is None else op(*options.spread(inputs))
        return eager.apply(inputs, *[inputs[i] for i in positions])

    return call
