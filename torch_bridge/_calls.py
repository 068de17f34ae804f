"""How every op is called: custom ops of torch pad the rows to buckets, run compiled programs and give gradients.

Each op's forward is a custom op of its own; one custom op, `_call_bwd`, is the backward of them all. The forward passes
its residuals to the backward by a handle, a small tensor: the residuals live as long as the handle's storage. Autograd,
checkpointing and torch.compile know nothing but tensors, and so they decide how long that is.
"""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch
from torch import Tensor

from rlk_jax.core import overwriting
from torch_bridge import _exchange, _flops, _inputs, _programs
from torch_bridge._options import OptionFields
from torch_bridge._padding import RowPadding
from torch_bridge._programs import Arrays, Op, Options, Program


def as_jax_floats(x: Tensor) -> Tensor:
    """Real numbers in a dtype that JAX computes with: float64 and integers become float32, the dtype of the loss."""
    is_kept = x.dtype != torch.float64 and x.is_floating_point()
    return x if is_kept or x.dtype == torch.bool else x.to(torch.float32)


class _Pending(NamedTuple):
    """A forward that waits for its backward; `program` is None where the call had no rows."""

    call: "Call"
    program: Program | None
    residuals: list[jax.Array]


_kept: dict[int, Any] = {}
_numbers = itertools.count(1)


def keep(residuals: Any) -> Tensor:
    """The handle of residuals: a tensor that autograd saves in their place, and that keeps them alive."""
    number = next(_numbers)
    handle = torch.tensor([number], device="cpu")
    _kept[number] = residuals
    weakref.finalize(handle.untyped_storage(), _kept.pop, number, None).atexit = False
    return handle


def kept(handle: Tensor, *, is_last: bool) -> Any:
    """The residuals that `keep` gave this handle for; they are forgotten where this is the last time they are used."""
    if int(handle) not in _kept:
        raise RuntimeError(
            "torch_bridge: what the forward kept for this backward is gone. It lives as long as the tensor that "
            "autograd saved: hooks on saved tensors must not put a copy in its place."
        )
    return _kept.pop(int(handle)) if is_last else _kept[int(handle)]


def is_last_backward() -> bool:
    """Whether torch frees the graph of the backward that is running: then none of its nodes runs again."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def _no_handle() -> Tensor:
    """A tensor in the place of a handle, for calls without a backward."""
    return torch.zeros(1, dtype=torch.int64, device="cpu")


class Output(NamedTuple):
    """An output of a custom op. One that the user did not ask for has the shape (0,)."""

    shape: Sequence[int]
    dtype: torch.dtype = torch.float32


def fake(outputs: Sequence[Output], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of the shapes, device and dtypes that `Call.forward` returns, for torch.compile to trace."""
    return *(torch.empty(x.shape, dtype=x.dtype, device=device) for x in outputs), _no_handle()


class Call(NamedTuple):
    """One call of an op."""

    op: Op
    padding: RowPadding
    options: Options
    lend: tuple[Callable[[Tensor], jax.Array], ...]
    """One function for each of the op's differentiable tensors, which lends the tensor to the program as an array."""
    lend_upstream: Callable[[Tensor], jax.Array]
    """A function that lends an upstream gradient to the program as an array."""

    def forward(
        self,
        tensors: Sequence[Tensor | None],
        other_inputs: Callable[[], Arrays],
        needs: Sequence[bool],
        wanted: Sequence[Output],
    ) -> tuple[Tensor, ...]:
        """The op's outputs, as these are wanted, and the handle of the residuals.

        The program's inputs are the differentiable tensors followed by the arrays that `other_inputs` lends.
        """
        device = next(x for x in tensors if x is not None).device
        if self.padding.is_empty:
            zeros = [torch.zeros(x.shape, dtype=x.dtype, device=device) for x in wanted]
            return *zeros, keep(_Pending(self, None, [])) if any(needs) else _no_handle()
        needed = tuple([i for i, needs_it in enumerate(needs) if needs_it])
        with _exchange.launching(tensors):
            # `other_inputs` comes first, because it checks the tokens' values before the other tensors are read.
            checked = other_inputs()
            arrays = (*self._lend_all(tensors), *checked)
            program = _programs.program(self.op, arrays, self.options, needed)
            outputs, residuals = program.forward(arrays)
            # Results are exported while `arrays` are alive, so that torch waits for the program's reads (`_exchange`).
            values = [
                torch.empty(shape, dtype=dtype, device=device) if 0 in shape else self.padding.without_padding(x, shape)
                for x, (shape, dtype) in zip(outputs, wanted, strict=True)
            ]
        return *values, keep(_Pending(self, program, residuals)) if needed else _no_handle()

    def _lend_all(self, tensors: Sequence[Tensor | None]) -> Arrays:
        return tuple([None if x is None else lend(x) for lend, x in zip(self.lend, tensors, strict=True)])

    def backward(
        self,
        program: Program,
        residuals: list[jax.Array],
        tensors: Sequence[Tensor | None],
        upstream: Sequence[Tensor | None],
        shapes: Sequence[Sequence[int]],
    ) -> list[Tensor]:
        """Gradients, in these shapes, of the tensors that need one. The residuals are used up."""
        with _exchange.launching(upstream):
            lent_tensors = self._lend_all([x if i in program.borrows else None for i, x in enumerate(tensors)])
            # Torch may send gradients of outputs that were not asked for, too.
            lent_upstream = tuple([None if g is None or g.shape == (0,) else self.lend_upstream(g) for g in upstream])
            gradients = program.backward(residuals, lent_tensors, lent_upstream)
            return [self.padding.without_padding(g, shape) for g, shape in zip(gradients, shapes, strict=True)]


def _call_bwd(
    handle: Tensor, tensors: Sequence[Tensor | None], upstream: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor]:
    """The backward of every op: gradients of those differentiable tensors that need one.

    It leaves the residuals whole. A compiled graph may call it twice with one handle: torch makes equal calls one.
    """
    return _gradients(handle, tensors, upstream, needs, is_last=False)


def _node_bwd(*arguments: Any) -> list[Tensor]:
    """The same for the one node of autograd's graph that has saved the handle."""
    return _gradients(*arguments, is_last=is_last_backward())


def _gradients(
    handle: Tensor,
    tensors: Sequence[Tensor | None],
    upstream: Sequence[Tensor | None],
    needs: Sequence[bool],
    *,
    is_last: bool,
) -> list[Tensor]:
    needed = [x for x, needs_it in zip(tensors, needs, strict=True) if needs_it and x is not None]
    call, program, residuals = kept(handle, is_last=is_last)
    if program is None:
        return [torch.zeros_like(x) for x in needed]
    residuals = residuals if is_last else overwriting.spared(residuals)
    return call.backward(program, residuals, tensors, upstream, [x.shape for x in needed])


def _custom_op(name: str, kernel: Callable[..., Any]) -> Any:
    """`kernel` as the custom op `rlk_jax::<name>` of torch. A CUDA graph cannot capture what JAX runs."""
    return torch.library.custom_op(f"rlk_jax::{name}", kernel, mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])


def _checked(name: str, kernel: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """`kernel` with checks of its arguments, for calls from a compiled graph, which nobody has checked."""
    names = tuple(inspect.signature(kernel).parameters)

    @functools.wraps(kernel)
    def run(*arguments: Any) -> Any:
        check(name, dict(zip(names, arguments, strict=True)))
        return kernel(*arguments)

    return run


def _is_watched() -> bool:
    """Whether torch traces this call, or a dispatch mode such as FlopCounterMode sees it: both need the custom op."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


_call_bwd_op = _custom_op("call_bwd", _call_bwd)
_flops.register("call_bwd", _flops.gradient_flops, of_shapes=False)


@_call_bwd_op.register_fake
def _(
    handle: Tensor, tensors: Sequence[Tensor | None], upstream: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor]:
    needed = (x for x, needs_it in zip(tensors, needs, strict=True) if needs_it and x is not None)
    return [x.new_empty(x.shape) for x in needed]


def differentiable_once(gradients: Sequence[Tensor | None], *sources: Tensor | None) -> list[Tensor | None]:
    """The gradients, which were computed from `sources`; differentiating them once more raises."""
    if not torch.is_grad_enabled():
        return list(gradients)
    # Gradients are enabled in a backward under create_graph=True only.
    return [None if g is None else _NoSecondDerivative.apply(g, *sources) for g in gradients]


class _NoSecondDerivative(torch.autograd.Function):
    """The identity on a gradient that was computed from `sources`; differentiating it raises."""

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
    flops: Callable[..., int] = lambda *_, **__: 0,
    check: Callable[[str, dict[str, Any]], None] = _inputs.check_arguments,
) -> Callable[..., Any]:
    """`kernel` as a custom op that torch.compile takes whole, with gradients of the arguments at these positions.

    The kernel's last argument says which of these gradients are needed. The kernel returns what `Call.forward` returns,
    and `fake` returns tensors of the same shapes. With `options`, the kernel's parameter of this name is a dataclass;
    the custom op has an argument for each of its fields instead. Outputs at the positions `constants` carry no
    gradient. `saved` says which tensors a backward may read, given which gradients are needed. `flops` counts the
    operations of a forward by its arguments' shapes, for FlopCounterMode. The custom op checks its arguments by
    the names of its parameters, which are those of `rlk_jax.<name>` unless `check` is another one.

    Where nothing watches the call (`_is_watched`) the same functions run without torch's dispatcher, which costs as
    much as all else that a call does, and without these checks: the caller has made them.
    """

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.arity, ctx.needs = len(inputs), inputs[-1]
        if not any(ctx.needs):
            return
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[output[i] for i in constants])
        tensors = [inputs[i] for i in positions]
        read = saved(ctx.needs)
        # A backward needs the shape of a tensor that it does not read, which an expanded scalar has, too.
        to_save = [x if x is None or r else x.new_empty(()).expand(x.shape) for x, r in zip(tensors, read, strict=True)]
        ctx.save_for_backward(output[-1], *to_save)

    def gradients(call_bwd: Callable[..., list[Tensor]], ctx: Any, upstream: Sequence[Tensor | None]) -> list[Any]:
        """Gradients of the tensors at `positions`; None for those that need none."""
        if all(g is None for g in upstream):
            return [None] * len(positions)
        handle, *tensors = ctx.saved_tensors
        found = iter(call_bwd(handle, tensors, list(upstream[:-1]), ctx.needs))
        return differentiable_once([next(found) if needs_it else None for needs_it in ctx.needs], *tensors, *upstream)

    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        input_gradients: list[Any] = [None] * ctx.arity
        for i, g in zip(positions, gradients(_call_bwd_op, ctx, upstream), strict=True):
            input_gradients[i] = g
        return tuple(input_gradients)

    flat_kernel, flat_fake = (x if options is None else options.flattened(x) for x in (kernel, fake))
    op = _custom_op(name, _checked(name, flat_kernel, check))
    _flops.register(name, flops)
    op.register_fake(flat_fake)
    op.register_autograd(backward, setup_context=setup_context)

    # This forward calls `setup_context` itself: as a method of the class, it would have torch read the kernel's
    # signature at every call. `inputs` is one tuple, because torch unpacks each argument of `apply`; the differentiable
    # tensors follow it, so that autograd sees them.
    def eager_forward(ctx: Any, inputs: tuple[Any, ...], *_: Tensor | None) -> Any:
        output = kernel(*inputs)
        setup_context(ctx, inputs, output)
        return output

    def eager_backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        call_bwd = _call_bwd_op if _is_watched() else _node_bwd
        return None, *gradients(call_bwd, ctx, upstream)

    members = {"forward": staticmethod(eager_forward), "backward": staticmethod(eager_backward)}
    eager: Any = type(name, (torch.autograd.Function,), members)

    def call(*inputs: Any) -> Any:
        if _is_watched():
            return op(*inputs) if options is None else op(*options.spread(inputs))
        return eager.apply(inputs, *[inputs[i] for i in positions])

    return call
