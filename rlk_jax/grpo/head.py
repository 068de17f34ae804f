"""The LM head of a run on its mesh: how it is cut along the vocabulary, and linear_logp on it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rlk_jax import dispatch, linear_logp, logp, vocab_parallel
from rlk_jax.grpo.config import BadInput

IGNORED = -100
"""Target of a token that counts for nothing."""


@dataclass(frozen=True)
class Head:
    """A head of `vocab_size` columns on a mesh ("data", "tensor"); with one device along "tensor" it is never cut.

    The trees of its methods hold heads under the name `lm_head`: parameters, gradients, optimizer states.
    """

    mesh: Mesh
    vocab_size: int
    implementation: str | None
    dtype: DTypeLike = jnp.float32
    """That hidden states and heads are rounded to before log-probs are computed; parameters are float32."""

    @property
    def shards(self) -> int:
        return self.mesh.shape["tensor"]

    @property
    def keeps_bits(self) -> bool:
        """Whether training has the same bits with every number of shards."""
        return self.implementation == "deterministic"

    def cut[Tree](self, tree: Tree) -> Tree:
        """Heads `[D, V]` as they are stored: padded with zeros to equal shards, one on each device along "tensor"."""

        def stored(kernel: Array) -> Array:
            padded = vocab_parallel.pad_lm_head(kernel, self.shards, weight_layout="dv")
            return self._laid(self._laid(padded), None, "tensor")

        return self._on_heads(stored, tree)

    def whole[Tree](self, tree: Tree) -> Tree:
        """Heads as they were before `cut`, on every device: what computes with them is the program of one device."""
        return self._on_heads(lambda kernel: self._laid(self._laid(kernel)[:, : self.vocab_size]), tree)

    def apart[Tree](self, tree: Tree) -> Tree:
        """The same arrays. XLA fuses nothing across them, where cut heads must not change how it rounds the rest."""
        return jax.lax.optimization_barrier(tree) if self.keeps_bits else tree

    def passes_apart[T, R](self, function: Callable[[T], R]) -> Callable[[T], R]:
        """The same function, `apart` from its backward pass: XLA merges the two in other ways on several devices."""
        if not self.keeps_bits:
            return function

        def forward(argument: T) -> tuple[R, Callable[[R], tuple[T]]]:
            value, pull_back = jax.vjp(function, argument)
            return self.apart((value, pull_back))

        def backward(pull_back: Callable[[R], tuple[T]], upstream: R) -> tuple[T]:
            return pull_back(self.apart(upstream))

        with_passes = jax.custom_vjp(function)
        with_passes.defvjp(forward, backward)
        return with_passes

    def shardings(self, tree: Any) -> Any:
        """Where each array of a tree lies whose heads are `cut`: all but heads on every device."""
        everywhere = jax.tree.map(lambda _: self._sharding(), tree)
        return self._on_heads(lambda _: self._sharding(None, "tensor"), everywhere)

    def logps(
        self, hidden: Float[Array, "*lead D"], kernel: Float[Array, "D V"], target_ids: Int[Array, "*lead"]
    ) -> Float[Array, "*lead"]:
        """fp32 log-prob of every target under a `cut` head, 0 where IGNORED; the first dimension lies over "data"."""
        op: Any = linear_logp
        if self.mesh.size > 1:  # over data alone, too: inside shard_map, what the forward keeps stays where it is
            op = functools.partial(
                vocab_parallel.linear_logp,
                mesh=self.mesh,
                vocab_axis="tensor",
                token_axes="data",
                global_vocab_size=self.vocab_size,
                reduction="canonical" if self.keeps_bits else "sum",
            )
        return op(
            *self.apart((hidden.astype(self.dtype), kernel.astype(self.dtype))),
            target_ids,
            ignore_index=IGNORED,
            weight_layout="dv",
            implementation=self.implementation,
        )

    def logps_of_logits(self, logits: Float[Array, "B V"], token_ids: Int[Array, "B"]) -> Float[Array, "B"]:
        """fp32 log-prob of every token under logits of the whole head, 0 where IGNORED; rows lie over "data"."""
        implementation = self.implementation if self.keeps_bits else None
        op, rows = functools.partial(logp, ignore_index=IGNORED, implementation=implementation), PartitionSpec("data")
        if self.mesh.size > 1:
            op = jax.shard_map(op, mesh=self.mesh, in_specs=(rows, rows), out_specs=rows)
        return op(self.apart(logits), token_ids)

    def check(self, width: int) -> None:
        """Raises BadInput when linear_logp cannot run on a head of this width here."""
        rows = self.mesh.shape["data"]
        hidden, target_ids = jnp.zeros((rows, width)), jnp.zeros(rows, jnp.int32)

        def logps() -> Array:
            stored = self.cut({"lm_head": jnp.zeros((width, self.vocab_size))})
            return self.logps(hidden, stored["lm_head"], target_ids)

        try:
            jax.eval_shape(logps)
        except ValueError as error:
            raise BadInput(str(error)) from error

    def promising(self, width: int) -> "Head":
        """The same head with an implementation that promises bits. Raises BadInput when the named one does not."""
        hidden = jax.ShapeDtypeStruct((1, width), self.dtype)
        kernel = jax.ShapeDtypeStruct((width, self.vocab_size), self.dtype)
        call = hidden, kernel, jax.ShapeDtypeStruct((1,), jnp.int32)
        try:
            name = dispatch.promising("linear_logp", *call, weight_layout="dv", implementation=self.implementation)
        except ValueError as error:
            raise BadInput(f"invariant: {error}") from error
        return replace(self, implementation=name)

    def _sharding(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def _laid(self, kernel: Array, *axes: str | None) -> Array:
        return jax.lax.with_sharding_constraint(kernel, self._sharding(*axes))

    def _on_heads[Tree](self, change: Callable[[Any], Any], tree: Tree) -> Tree:
        def changed(path: tuple[Any, ...], leaf: Any) -> Any:
            return change(leaf) if "lm_head" in jax.tree_util.keystr(path) else leaf

        return tree if self.shards == 1 else jax.tree_util.tree_map_with_path(changed, tree)
