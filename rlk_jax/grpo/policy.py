"""A given model as the policy of a run: float32 parameters, and the model that computes from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rlk_jax import models
from rlk_jax.grpo.config import BadInput, GrpoConfig
from rlk_jax.grpo.head import MeshHead
from rlk_jax.grpo.sequences import Sequences
from rlk_jax.models.sampling import Completions, Sampling


@dataclass(frozen=True)
class Policy:
    """The model of a run. It computes from parameters that are rounded to the head's dtype."""

    graph: nnx.GraphDef[models.CausalLM]
    constants: nnx.State
    """What a model holds beside its parameters."""
    shapes: nnx.State
    """Shapes of the float32 parameters, as `load_parameters` gives them."""
    head: MeshHead
    sampling: Sampling
    stop_ids: tuple[int, ...]
    pad_id: int

    def rounded(self, params: nnx.State) -> nnx.State:
        """Parameters in the dtype that the policy computes in.

        XLA drops a conversion to a shorter dtype and back, and would then compute from other numbers in one program
        than in another; it keeps what reduces precision.
        """
        bits = jnp.finfo(self.head.dtype)

        def short(x: Array) -> Array:
            return jax.lax.reduce_precision(x, bits.nexp, bits.nmant).astype(self.head.dtype)

        return jax.tree.map(short, params)

    def model(self, params: nnx.State) -> models.CausalLM:
        """The model of stored parameters."""
        return nnx.merge(self.graph, self.rounded(self.head.unshard(params)), self.constants)

    def logps(self, params: nnx.State, sequences: Sequences) -> Float[Array, "R T"]:
        """fp32 log-prob of every target given the tokens of its sequence before it; 0 where IGNORED."""

        def decode(params: nnx.State) -> Array:
            return self.model(params)(sequences.token_ids, sequences.padding)

        hidden = self.head.with_fusion_barriers(decode)(params)[:, -sequences.target_ids.shape[1] :]
        return self.head.logps(hidden, self._weight(params), sequences.target_ids)

    def roll_out(
        self,
        params: nnx.State,
        prompt_ids: Int[Array, "B P"],
        padding: Int[Array, "B"],
        keys: PRNGKeyArray,
        *,
        max_new_tokens: int,
    ) -> Completions:
        """Completions of left-padded prompts; those of an invariant model have log-probs with the bits of `logps`."""
        model, weight = self.model(params), self._weight(params)
        multiplies_again = model.keeps_bits and not self.head.records_logits

        def score(hidden: Array, products: Array, ids: Array) -> Array:
            if multiplies_again:
                return self.head.logps(hidden, weight, ids)
            as_trained = {"as_linear_logp": True, "implementation": self.head.implementation}
            return self.head.logps_of_logits(products, ids, **(as_trained if model.keeps_bits else {}))

        how: dict[str, Any] = {"stop_ids": self.stop_ids, "pad_id": self.pad_id, "sampling": self.sampling}
        return models.sample(model, prompt_ids, padding, keys, max_new_tokens=max_new_tokens, score=score, **how)

    def _weight(self, params: nnx.State) -> Array:
        """The head as it is stored."""
        return nnx.merge(self.graph, params, self.constants).lm_head.weight[...]


def make_policy(config: GrpoConfig, mesh: Mesh, tokenizer: Any) -> Policy:
    """The policy that a configuration names. Raises BadInput for a model that is not supported, or that cannot run as
    the configuration says.
    """
    dtype = jnp.dtype(config.compute_dtype)
    kind = "invariant" if config.invariant else "stock"
    try:
        described = models.read_config(config.model or "")
        sampling = Sampling(config.temperature, config.top_k, config.top_p, config.min_p)
        model = nnx.eval_shape(
            lambda: models.CausalLM(described, dtype=dtype, kind=kind, remat=config.remat, rngs=nnx.Rngs(0))
        )
    except ValueError as error:
        raise BadInput(str(error)) from error
    if tokenizer.vocab_size > described.vocab_size:
        raise BadInput(
            f"{config.model}: its tokenizer has {tokenizer.vocab_size} tokens and the model {described.vocab_size}"
        )
    head = MeshHead(
        mesh,
        described.vocab_size,
        config.implementation,
        dtype,
        weight_layout="vd",
        name="embedding" if described.is_tied else "lm_head",
        softcap=described.final_softcap,
        temperature=sampling.scored_temperature,
    )
    head.check(described.width)
    if config.invariant:
        head = head.with_promised_bits(described.width)
    model.set_frequencies()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), nnx.state(model, nnx.Param))
    constants = nnx.state(model, nnx.Not(nnx.Param))
    return Policy(nnx.graphdef(model), constants, shapes, head, sampling, tokenizer.stop_ids, tokenizer.pad_id)


def load_parameters(directory: Path | str) -> nnx.State:
    """The float32 parameters of a checkpoint. Raises BadInput for one that does not fit its config.json."""
    try:
        return nnx.state(models.load(directory, dtype=jnp.float32), nnx.Param)
    except ValueError as error:
        raise BadInput(str(error)) from error
