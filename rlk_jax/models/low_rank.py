"""A low-rank term beside a weight that is frozen (LoRA, arXiv 2106.09685)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from rlk_jax.models.kinds import LayerKind


class LowRankTerm(nnx.Module):
    """`B·A·x` beside `W·x`, with A `[rank, in]` and B `[out, rank]`. B begins at 0, so a model begins as it was."""

    def __init__(self, weight: nnx.Param, rank: int, kind: LayerKind, dtype: DTypeLike, *, rngs: nnx.Rngs) -> None:
        (outputs, inputs), self.kind = weight.shape, kind
        self.a = nnx.LoRAParam(jax.random.normal(rngs.params(), (rank, inputs), dtype) * inputs**-0.5)
        self.b = nnx.LoRAParam(jnp.zeros((outputs, rank), dtype))

    def __call__(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        return self.kind.dense(self._reduced(x), self.b[...], None)

    def products(self, x: Float[Array, "*lead in"]) -> Float32[Array, "*lead out"]:
        """The same in float32, as logits are."""
        return self.kind.logits(self._reduced(x), self.b[...])

    @property
    def operands(self) -> tuple[Array, Array]:
        """What `rlk_jax.linear_logp` takes as `low_rank`."""
        return self.a[...], self.b[...]

    def added_to(self, weight: Float[Array, "out in"]) -> Float[Array, "out in"]:
        """W + B·A, computed in float32 and rounded to W's dtype."""
        a, b = (x.astype(jnp.float32) for x in self.operands)
        return (weight + jnp.matmul(b, a, precision=jax.lax.Precision.HIGHEST)).astype(weight.dtype)

    def _reduced(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead rank"]:
        return self.kind.dense(x, self.a[...], None)
