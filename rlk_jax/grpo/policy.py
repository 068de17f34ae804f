"""A given model as the policy of a run: float32 parameters, and the model that computes from them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rlk_jax import models
from rlk_jax.core.allowed import AllowedTokens
from rlk_jax.core.tokens import LinearLogp
from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.run_config import BadField, BadInput, RunConfig, with_marks
from rlk_jax.grpo.sequences import Sequences
from rlk_jax.models import placement
from rlk_jax.models.sampling import Completions, Sampling


@dataclass(frozen=True)
class Policy:
    """The model of a run. It computes from parameters that are rounded to the head's dtype."""

    graph: nnx.GraphDef[models.CausalLM]
    constants: nnx.State
    """What a model holds beside its parameters."""
    shapes: nnx.State
    """Shapes of the stored parameters: float32, but for those that are frozen beside low-rank terms."""
    low_rank: Callable[[], nnx.State] | None
    """Draws the first low-rank terms of a run that trains nothing else."""
    head: MeshHead
    fetch: placement.Fetch
    sampling: Sampling
    stop_ids: tuple[int, ...]
    pad_id: int
    described: models.ModelConfig
    """The model, as its config.json has it."""

    def model(self, params: nnx.State) -> models.CausalLM:
        """The model of stored parameters, to be written."""
        model = nnx.merge(self.graph, self.rounded(self.head.unshard(params)), self.constants)
        model.merge_low_rank()
        return model

    @property
    def given_shapes(self) -> nnx.State:
        """Shapes of the parameters that a checkpoint has."""
        return self.split(self.shapes)[1] if self.low_rank else self.shapes

    @property
    def given_dtype(self) -> DTypeLike:
        """The dtype that these are stored in: that of the computation, where they are not trained."""
        return self.head.dtype if self.low_rank else jnp.float32

    def begun(self, given: nnx.State) -> nnx.State:
        """The parameters that a run begins with."""
        return nnx.merge_state(self.low_rank(), given) if self.low_rank else given

    def split(self, params: nnx.State) -> tuple[nnx.State, nnx.State]:
        """What a run trains, and what it does not. `nnx.merge_state` is the inverse."""
        trained, frozen = nnx.split_state(params, nnx.LoRAParam if self.low_rank else nnx.Param, ...)
        return trained, frozen

    def reference(self, params: nnx.State) -> nnx.State:
        """What the reference has in the place of what is trained, when it is the policy of these parameters."""
        trained, _ = self.split(params)
        # Without low-rank terms, a model is as it was.
        return jax.tree.map(jnp.zeros_like, trained) if self.low_rank else self.rounded(trained)

    def rounded(self, params: nnx.State) -> nnx.State:
        """Parameters in the dtype that the policy computes in."""
        return jax.tree.map(lambda x: placement.rounded(x, self.head.dtype), params)

    def values(self, params: nnx.State, sequences: Sequences, *, entropy: bool = False) -> LinearLogp:
        """fp32 log-prob of every target among what it allows, given the tokens of its sequence before it, and the
        entropy where it is asked for; 0 where IGNORED.
        """
        return self.over_rows(functools.partial(self._own_values, entropy=entropy))(params, sequences)

    def losses(
        self, params: nnx.State, sequences: Sequences, *, z_loss: float = 0.0, label_smoothing: float = 0.0
    ) -> Float[Array, "R T"]:
        """fp32 cross-entropy of every target given the tokens of its sequence before it, as `linear_cross_entropy` has
        it; 0 where IGNORED.
        """

        def own_losses(params: nnx.State, sequences: Sequences) -> Float[Array, "R T"]:
            hidden, (weight,), term = self.own_hidden(params, sequences)
            how = {"z_loss": z_loss, "label_smoothing": label_smoothing}
            return self.head.own_losses(hidden, weight, sequences.target_ids, term, **how)

        return self.over_rows(own_losses)(params, sequences)

    def roll_out(
        self,
        params: nnx.State,
        prompt_ids: Int[Array, "B P"],
        padding: Int[Array, "B"],
        keys: PRNGKeyArray,
        *,
        max_new_tokens: int,
    ) -> Completions:
        """Completions of left-padded prompts; those of an invariant model have log-probs with the bits of `values`."""
        own = functools.partial(self._own_roll_out, max_new_tokens=max_new_tokens)
        return self.over_rows(own)(params, (prompt_ids, padding, keys))

    def specs(self, tree: Any) -> Any:
        """How arrays lie on the mesh: parameters, their gradients, or states of an optimizer."""

        def spec(path: tuple[Any, ...], x: Any) -> PartitionSpec:
            name = jax.tree_util.keystr(path)
            if "embedding" not in name and "lm_head" not in name:
                return placement.spec_of(x.shape, self.head.mesh, over_vocab=False)
            over_vocab = placement.spec_of(x.shape, self.head.mesh, over_vocab=True)
            is_cut = self.head.name in name and self.head.shard_count > 1
            return over_vocab if is_cut else PartitionSpec(None, *over_vocab[1:])

        return jax.tree_util.tree_map_with_path(spec, tree)

    def shardings(self, tree: Any) -> Any:
        """The same as shardings."""
        return jax.tree.map(functools.partial(NamedSharding, self.head.mesh), self.specs(tree))

    def over_rows[Rows, Result](
        self,
        function: Callable[[nnx.State, Rows], Result],
        specs_of: Callable[[nnx.State], Any] | None = None,
    ) -> Callable[[nnx.State, Rows], Result]:
        """A function of parts of parameters and of a device's own rows, as one of whole arrays. `specs_of` says how
        parameters lie that are not this model's alone.
        """
        if self.head.mesh.size == 1:
            return function
        rows = PartitionSpec("data")

        def of_whole_arrays(params: nnx.State, given: Rows) -> Result:
            specs = ((specs_of or self.specs)(params), rows)
            return jax.shard_map(function, mesh=self.head.mesh, in_specs=specs, out_specs=rows)(params, given)

        return of_whole_arrays

    def _own_values(self, params: nnx.State, sequences: Sequences, *, entropy: bool) -> LinearLogp:
        hidden, (weight,), term = self.own_hidden(params, sequences)
        told = sequences.target_ids, term, sequences.allowed
        return self.head.own_values(hidden, weight, *told, entropy=entropy)

    def own_hidden(
        self, params: nnx.State, sequences: Sequences, *, heads: int = 1
    ) -> tuple[Array, Sequence[Array], tuple[Array, Array] | None]:
        """The hidden states of a device's own rows that predict the targets, inside shard_map, the head as this device
        has it, once for each of so many uses, and the head's low-rank term.
        """
        model, weights = self._with_ends(params, heads)
        model.fetch = self.fetch
        graph, *states = nnx.split(model, nnx.PathContains("lm_head"), nnx.Param, ...)
        head, rest, constants = states

        def decode(rest: nnx.State) -> Array:
            return nnx.merge(graph, head, rest, constants)(sequences.token_ids, sequences.padding)

        hidden = self.head.with_fusion_barriers(decode)(rest)[:, -sequences.target_ids.shape[1] :]
        return hidden, weights, _term(model)

    def own_head(self, params: nnx.State) -> Array:
        """The head alone, without a low-rank term, as this device has it inside shard_map."""
        (table,) = jax.tree.leaves(params[self.head.name])
        return self.fetch.copies(table, 1, 1)[0]

    def _own_roll_out(
        self, params: nnx.State, prompts: tuple[Array, Array, PRNGKeyArray], *, max_new_tokens: int
    ) -> Completions:
        # A token is decoded in less time than its layers are fetched in: they are fetched before.
        model, (weight,) = self._with_ends(nnx.State({**params, "blocks": self.fetch(params["blocks"])}))
        recorded = self.head.records_logits and model.lm_head.low_rank is None

        def score(hidden: Array, products: Array, ids: Array, allowed: AllowedTokens) -> Array:
            if model.keeps_bits and not recorded:
                return self.head.own_values(hidden, weight, ids, _term(model), allowed).logp
            as_trained = {"as_linear_logp": True, "implementation": self.head.implementation}
            how = {**allowed._asdict(), **(as_trained if model.keeps_bits else {})}
            return self.head.own_logps_of_logits(products, ids, **how)

        how: dict[str, Any] = {"stop_ids": self.stop_ids, "pad_id": self.pad_id, "sampling": self.sampling}
        return models.sample(model, *prompts, max_new_tokens=max_new_tokens, score=score, **how)

    def _with_ends(self, params: nnx.State, heads: int = 1) -> tuple[models.CausalLM, Sequence[Array]]:
        """The model with its embedding, last norm and head whole, and the head as this device has it for `own_values`,
        once for each of so many uses. A head that is tied has one more. Gradients of all uses are added before those of
        devices are.
        """
        named = {name: params[name] for name in ("embedding", "lm_head") if name in params}
        ends = jax.tree.map(lambda x: self.fetch.copies(x, 1, 1)[0], named)
        if self.head.name == "embedding":
            (table,) = jax.tree.leaves(params["embedding"])
            lookup, *weights = self.fetch.copies(table, 1, 1 + heads)
            ends["embedding"] = jax.tree.map(lambda _: self._joined(lookup), params["embedding"])
        else:
            (table,) = jax.tree.leaves(params["lm_head"]["weight"])
            weights = list(self.fetch.copies(table, 1, heads))
            ends["lm_head"] = jax.tree.map(self._joined, ends["lm_head"])
        state = nnx.State({**params, **ends, "norm": self.fetch(params["norm"])})
        return nnx.merge(self.graph, state, self.constants), weights

    def _joined(self, weight: Float[Array, "W D"]) -> Float[Array, "V D"]:
        """The whole of a head that is cut along the vocabulary."""
        if self.head.shard_count == 1:
            return weight
        return jax.lax.all_gather(weight, "tensor", tiled=True, to="invarying")[: self.head.vocab_size]


def _term(model: models.CausalLM) -> tuple[Array, Array] | None:
    """The low-rank term of the head, if there is one."""
    return None if model.lm_head.low_rank is None else model.lm_head.low_rank.operands


def make_policy(config: RunConfig, mesh: Mesh, tokenizer: Any) -> Policy:
    """The policy that a configuration names. Raises BadInput for a model that is not supported, or that cannot run as
    the configuration says.
    """
    dtype = jnp.dtype(config.compute_dtype)
    kind = "invariant" if config.invariant else "stock"
    try:
        sampling = Sampling(*config.sampled_with)
    except ValueError as error:
        raise BadField(with_marks(str(error), [x.name for x in fields(Sampling)])) from error
    try:
        described = models.read_config(config.model or "")

        def new() -> models.CausalLM:
            rngs = nnx.Rngs(config.seed)
            model = models.CausalLM(described, dtype=dtype, kind=kind, remat=config.remat, rngs=rngs)
            if config.lora_rank is not None:
                model.add_low_rank(config.lora_rank, rngs=rngs)
            return model

        model = nnx.eval_shape(new)
    except ValueError as error:
        raise BadInput(str(error)) from error
    head = MeshHead(
        mesh,
        described.vocab_size,
        config.implementation,
        dtype,
        weight_layout="vd",
        name="embedding" if described.is_tied else "lm_head",
        softcap=described.final_softcap,
        temperature=sampling.scored_temperature,
        restricts=sampling.truncates(described.vocab_size),
        smooths=config.smooths_labels,
    )
    head.check(described.width)
    if config.invariant:
        head = head.with_promised_bits(described.width)
    model.set_frequencies()
    shapes, low_rank = _float32_shapes(nnx.state(model, nnx.Param)), None
    if config.lora_rank is not None:
        terms, frozen = nnx.split_state(nnx.state(model, nnx.Param), nnx.LoRAParam, ...)
        shapes = nnx.merge_state(_float32_shapes(terms), frozen)

        def low_rank() -> nnx.State:
            return jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(new(), nnx.LoRAParam))

    constants = nnx.state(model, nnx.Not(nnx.Param))
    fetch = placement.Fetch(dtype, mesh.shape["data"])
    ends = tokenizer.stop_ids, tokenizer.pad_id
    policy = Policy(nnx.graphdef(model), constants, shapes, low_rank, head, fetch, sampling, *ends, described)
    _check_cuts(policy, mesh)
    return policy


def _float32_shapes(shapes: nnx.State) -> nnx.State:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), shapes)


def _check_cuts(policy: Policy, mesh: Mesh) -> None:
    """All parameters are cut into equal parts over "data"."""
    leaves = jax.tree_util.tree_leaves_with_path(policy.shapes)
    for (path, shape), spec in zip(leaves, jax.tree.leaves(policy.specs(policy.shapes)), strict=True):
        if "data" not in spec:
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            parts = f"data={mesh.shape['data']} equal parts"
            raise BadField(f"`mesh`: {name} {list(shape.shape)} cannot be cut into {parts}")


def load_parameters(directory: Path | str, mesh: Mesh | None = None, dtype: DTypeLike = jnp.float32) -> nnx.State:
    """The parameters of a checkpoint. Raises BadInput for one that does not fit its config.json."""
    try:
        return nnx.state(models.load(directory, dtype=dtype, mesh=mesh), nnx.Param)
    except ValueError as error:
        raise BadInput(str(error)) from error
