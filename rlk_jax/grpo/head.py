"""The LM head of a run on its mesh: how it is sharded along the vocabulary, and linear_logp on it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rlk_jax import dispatch, explain, linear_cross_entropy, linear_kl, linear_logp, logp, vocab_parallel
from rlk_jax.core.allowed import EVERY_TOKEN, AllowedTokens, words_of
from rlk_jax.core.tokens import IGNORED, LinearLogp
from rlk_jax.grpo.run_config import BadField, with_marks
from rlk_jax.ops.linear_logp.options import WeightLayout


@dataclass(frozen=True)
class MeshHead:
    """A head of `vocab_size` tokens on a mesh ("data", "tensor"); it stays whole where "tensor" has one device.

    Methods that take a tree (parameters, gradients, optimizer states) change the arrays of that `name` in it.
    """

    mesh: Mesh
    vocab_size: int
    implementation: str | None
    dtype: DTypeLike = jnp.float32
    """Hidden states and head are rounded to this dtype before log-probs are computed; parameters are float32."""
    weight_layout: WeightLayout = "dv"
    name: str = "lm_head"
    """What the paths of its arrays have in them: that of the embedding, where the head is tied to it."""
    softcap: float | None = None
    temperature: float = 1.0
    """The temperature that completions are sampled at, which log-probs are of."""
    restricts: bool = False
    """Whether completions are sampled from some tokens alone, which log-probs are of then."""
    smooths: bool = False
    """Whether a loss has smoothed labels, which not every implementation takes."""

    @property
    def shard_count(self) -> int:
        return self.mesh.shape["tensor"]

    @property
    def keeps_bits(self) -> bool:
        """Whether training has the same bits with every number of shards."""
        return self.implementation == "deterministic"

    def shard[Tree](self, tree: Tree) -> Tree:
        """The tree with its heads as they are stored: without tokens behind the vocabulary, padded with zeros and cut
        along it into equal shards, one on each device along "tensor".
        """

        def stored(kernel: Array) -> Array:
            real = self._without_padding(kernel)
            padded = vocab_parallel.pad_lm_head(real, self.shard_count, weight_layout=self.weight_layout)
            return self._constrain(self._constrain(padded), *self._cut)

        return self._map_heads(stored, tree)

    def unshard[Tree](self, tree: Tree) -> Tree:
        """The inverse of `shard`: heads without padding, on every device, for code written for one device."""

        def whole(kernel: Array) -> Array:
            return self._constrain(self._without_padding(self._constrain(kernel)))

        return self._map_heads(whole, tree)

    def fusion_barrier[Tree](self, tree: Tree) -> Tree:
        """The same arrays. Where training keeps its bits, XLA fuses nothing across this point, so a sharded head does
        not change how the rest is rounded.
        """
        return jax.lax.optimization_barrier(tree) if self.keeps_bits else tree

    def with_fusion_barriers[T, R](self, function: Callable[[T], R]) -> Callable[[T], R]:
        """The same function with a `fusion_barrier` between its forward and backward pass. Without it, XLA fuses the
        two differently on several devices than on one.
        """
        if not self.keeps_bits:
            return function

        def function_fwd(argument: T) -> tuple[R, Callable[[R], tuple[T]]]:
            value, vjp = jax.vjp(function, argument)
            return self.fusion_barrier((value, vjp))

        def function_bwd(vjp: Callable[[R], tuple[T]], upstream: R) -> tuple[T]:
            return vjp(self.fusion_barrier(upstream))

        with_barriers = jax.custom_vjp(function)
        with_barriers.defvjp(function_fwd, function_bwd)
        return with_barriers

    def shardings(self, tree: Any) -> Any:
        """The sharding of each array of a tree that `shard` returned: all arrays but heads lie on every device."""
        replicated = jax.tree.map(lambda _: self._sharding(), tree)
        return self._map_heads(lambda _: self._sharding(*self._cut), replicated)

    def logps(
        self, hidden: Float[Array, "*lead D"], kernel: Float[Array, "D V"] | Float[Array, "V D"], target_ids: Array
    ) -> Float[Array, "*lead"]:
        """The log-probs of `values`."""
        return self.values(hidden, kernel, target_ids).logp

    def values(
        self,
        hidden: Float[Array, "*lead D"],
        kernel: Float[Array, "D V"] | Float[Array, "V D"],
        target_ids: Array,
        allowed: AllowedTokens = EVERY_TOKEN,
        *,
        entropy: bool = False,
    ) -> LinearLogp:
        """fp32 log-prob of every target among the tokens that it allows, under a head that `shard` returned, and the
        entropy if it is asked for, 0 where IGNORED; the first dimension is sharded over "data".
        """
        op: Any = linear_logp
        if self.mesh.size > 1:
            # A mesh that spreads "data" alone needs shard_map too: it keeps the forward's residuals where they are.
            op = functools.partial(
                vocab_parallel.linear_logp,
                mesh=self.mesh,
                vocab_axis="tensor",
                token_axes="data",
                **self._cut_options,
            )
        options = {"return_entropy": entropy, **self._options, **allowed._asdict()}
        found = op(*self._rounded(hidden, kernel), target_ids, **options)
        return _values_of(found)

    def own_values(
        self,
        hidden: Float[Array, "*lead D"],
        kernel: Float[Array, "D W"] | Float[Array, "W D"],
        target_ids: Array,
        low_rank: tuple[Array, Array] | None = None,
        allowed: AllowedTokens = EVERY_TOKEN,
        *,
        entropy: bool = False,
    ) -> LinearLogp:
        """`values` of a device's own rows, inside shard_map, where `kernel` is its part of the head. A low-rank term is
        of a whole head.
        """
        options = {**self._own_options(low_rank), **allowed._asdict()}
        found: Any = linear_logp(*self._rounded(hidden, kernel), target_ids, return_entropy=entropy, **options)
        return _values_of(found)

    def own_losses(
        self,
        hidden: Float[Array, "*lead D"],
        kernel: Float[Array, "D W"] | Float[Array, "W D"],
        target_ids: Array,
        low_rank: tuple[Array, Array] | None = None,
        *,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> Float[Array, "*lead"]:
        """The cross-entropy of every target where `own_values` has its log-prob."""
        options = self._own_options(low_rank)
        options["hidden_grad_reduction"] = options.pop("reduction", "sum")
        how: dict[str, Any] = {"reduction": "none", "z_loss": z_loss, "label_smoothing": label_smoothing, **options}
        return linear_cross_entropy(*self._rounded(hidden, kernel), target_ids, **how)

    def own_divergences(
        self,
        hidden: Float[Array, "*lead D"],
        kernel: Float[Array, "D W"] | Float[Array, "W D"],
        teacher: "MeshHead",
        teacher_hidden: Float[Array, "*lead Dt"],
        teacher_kernel: Float[Array, "Dt Wt"] | Float[Array, "Wt Dt"],
        **options: Any,
    ) -> Float[Array, "*lead"]:
        """fp32 divergence of a device's own rows from those of a teacher, inside shard_map, over this head's tokens and
        at its temperature. The kernels are its parts of both heads. The options are those of `linear_kl`.
        """
        options |= self._own_cut_options
        return linear_kl(
            *self._rounded(hidden, kernel),
            *teacher._rounded(teacher_hidden, teacher_kernel),
            temperature=self.temperature,
            logit_softcap=self.softcap,
            teacher_logit_softcap=teacher.softcap,
            weight_layout=self.weight_layout,
            teacher_weight_layout=teacher.weight_layout,
            teacher_global_vocab_size=self.vocab_size,
            **options,
        )

    def logps_of_logits(
        self, logits: Float[Array, "B V"], token_ids: Int[Array, "B"], **options: Any
    ) -> Float[Array, "B"]:
        """fp32 log-prob of every token under logits of the whole vocabulary, in front of their softcap, 0 where
        IGNORED; rows are sharded over "data". The options are those of `logp`.
        """
        op: Any = functools.partial(self.own_logps_of_logits, **options)
        rows = PartitionSpec("data")
        if self.mesh.size > 1:
            op = jax.shard_map(op, mesh=self.mesh, in_specs=(rows, rows), out_specs=rows)
        return op(logits, token_ids)

    def own_logps_of_logits(
        self, logits: Float[Array, "B V"], token_ids: Int[Array, "B"], **options: Any
    ) -> Float[Array, "B"]:
        """`logps_of_logits` of a device's own rows, inside shard_map."""
        options = {"implementation": self.implementation if self.keeps_bits else None, **self._scaling, **options}
        return logp(self.fusion_barrier(logits), token_ids, ignore_index=IGNORED, **options)

    @property
    def records_logits(self) -> bool:
        """Whether log-probs of logits can have the bits of `logps`: those of a whole head, by some implementations."""
        logits = jax.ShapeDtypeStruct((1, self.vocab_size), jnp.float32)
        ids, how = jax.ShapeDtypeStruct((1,), jnp.int32), {"as_linear_logp": True, **self._scaling}
        try:
            dispatch.promising("logp", logits, ids, implementation=self.implementation, **how)
        except ValueError:
            return False
        return self.shard_count == 1

    def check(self, width: int) -> None:
        """Raises BadInput when linear_logp cannot run here on a head of this width."""
        rows = self.mesh.shape["data"]
        hidden, target_ids = jnp.zeros((rows, width)), jnp.zeros(rows, jnp.int32)

        def logps() -> Array:
            stored = self.shard({self.name: jnp.zeros(self._shape(width))})
            return self.values(hidden, stored[self.name], target_ids, self._some_allowed(rows)).logp

        try:
            jax.eval_shape(logps)
            if self.smooths:
                explain("linear_cross_entropy", *self._one_token(width), **self._smoothed, **self._options)
        except ValueError as error:
            raise BadField(with_marks(str(error), ["implementation"])) from error

    def with_promised_bits(self, width: int) -> "MeshHead":
        """The same head with an implementation that promises bits. Raises BadInput when the named one does not."""
        options: dict[str, Any] = {"weight_layout": self.weight_layout, **self._scaling}
        options |= self._smoothed if self.smooths else self._some_allowed(1)._asdict()
        op, call = "linear_cross_entropy" if self.smooths else "linear_logp", self._one_token(width)
        try:
            name = dispatch.promising(op, *call, implementation=self.implementation, **options)
        except ValueError as error:
            raise BadField(with_marks(f"`invariant`: {error}", ["implementation"])) from error
        return replace(self, implementation=name)

    def _one_token(self, width: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The operands of a call for one token, to ask what runs."""
        shapes = ((1, width), self.dtype), (self._shape(width), self.dtype), ((1,), jnp.int32)
        return tuple(jax.ShapeDtypeStruct(*x) for x in shapes)

    @property
    def _smoothed(self) -> dict[str, float]:
        """Some smoothing of labels, to ask what runs: an implementation takes any or none."""
        return {"label_smoothing": 0.5}

    def _some_allowed(self, count: int) -> AllowedTokens:
        """What so many tokens of a run may allow, to ask what runs: an implementation takes both forms or none."""
        words = jnp.zeros((count, words_of(self.vocab_size)), jnp.uint32)
        return AllowedTokens(allowed_mask=words) if self.restricts else EVERY_TOKEN

    @property
    def _cut(self) -> tuple[str | None, str | None]:
        """The axes of the mesh that rows and columns of the weight lie over."""
        return (None, "tensor") if self.weight_layout == "dv" else ("tensor", None)

    @property
    def _options(self) -> dict[str, Any]:
        """How linear_logp is called."""
        how = {"weight_layout": self.weight_layout, "implementation": self.implementation}
        return {"ignore_index": IGNORED, **how, **self._scaling}

    def _own_options(self, low_rank: tuple[Array, Array] | None) -> dict[str, Any]:
        """The same inside shard_map, where a device has its part of the head."""
        return {"low_rank": low_rank, **self._options, **self._own_cut_options}

    @property
    def _own_cut_options(self) -> dict[str, Any]:
        """What an op is told inside shard_map about a head that is cut; nothing about a whole one."""
        return {"axis_name": "tensor", **self._cut_options} if self.shard_count > 1 else {}

    @property
    def _cut_options(self) -> dict[str, Any]:
        """The same for a head that is cut."""
        reduction = "canonical" if self.keeps_bits else "sum"
        return {"global_vocab_size": self.vocab_size, "reduction": reduction}

    def _without_padding(self, kernel: Array) -> Array:
        """A head of the tokens of the vocabulary alone."""
        return jax.lax.slice_in_dim(kernel, 0, self.vocab_size, axis=self._cut.index("tensor"))

    def _rounded(self, hidden: Array, kernel: Array) -> tuple[Array, Array]:
        return self.fusion_barrier((hidden.astype(self.dtype), kernel.astype(self.dtype)))

    @property
    def _scaling(self) -> dict[str, Any]:
        """What becomes of products with the head before their softmax."""
        return {"logit_softcap": self.softcap, "temperature": self.temperature}

    def _shape(self, width: int) -> tuple[int, int]:
        return (width, self.vocab_size) if self.weight_layout == "dv" else (self.vocab_size, width)

    def replicated(self, x: Array) -> Array:
        """The whole array on every device."""
        return self._constrain(x)

    def _sharding(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def _constrain(self, kernel: Array, *axes: str | None) -> Array:
        return jax.lax.with_sharding_constraint(kernel, self._sharding(*axes))

    def _map_heads[Tree](self, change: Callable[[Any], Any], tree: Tree) -> Tree:
        """The tree with its heads changed, or the tree itself where heads are not sharded."""

        def changed(path: tuple[Any, ...], leaf: Any) -> Any:
            return change(leaf) if self.name in jax.tree_util.keystr(path) else leaf

        return tree if self.shard_count == 1 else jax.tree_util.tree_map_with_path(changed, tree)


def _values_of(found: Array | LinearLogp) -> LinearLogp:
    """What linear_logp returned, which is an array where nothing but log-probs was asked for."""
    return found if isinstance(found, LinearLogp) else LinearLogp(found, None, None)
