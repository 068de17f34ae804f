"""A frozen model that a run's policy learns from: its hidden states, and the divergence of the policy from it."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from rlk_jax import dispatch
from rlk_jax.core.tokens import LinearLogp
from rlk_jax.grpo.config import GrpoConfig
from rlk_jax.grpo.policy import Policy, load_parameters, make_policy
from rlk_jax.grpo.run_config import BadField
from rlk_jax.grpo.sequences import Sequences
from rlk_jax.grpo.text_task import given_tokenizer
from rlk_jax.models import Tokenizer
from rlk_jax.ops.linear_kl.options import DivergenceKind


@dataclass(frozen=True)
class Teacher:
    """The teacher of a policy. Its parameters are stored in the dtype that it computes in, and get no gradient."""

    directory: str
    policy: Policy
    """Who learns."""
    model: Policy
    """Who teaches."""
    kind: DivergenceKind
    beta: float
    """The teacher's share of the mixture of "jsd"."""
    implementation: str | None
    """That of linear_kl; None for the fastest."""

    @property
    def key(self) -> Hashable:
        """What programs with the teacher in them are made from, beside the configuration and the policy."""
        return self.model.described, self.implementation

    @property
    def shapes(self) -> nnx.State:
        """Shapes of the parameters, as they lie on the mesh."""
        stored, dtype = jax.eval_shape(self.model.head.shard, self.model.shapes), self.model.head.dtype
        return jax.tree.map(
            lambda x, lies: jax.ShapeDtypeStruct(x.shape, dtype, sharding=lies), stored, self.model.shardings(stored)
        )

    def load(self) -> nnx.State:
        """The parameters on the mesh. Raises BadInput for a checkpoint that does not fit its config.json."""
        head = self.model.head
        stored = head.shard(load_parameters(self.directory, head.mesh, head.dtype))
        return jax.device_put(stored, self.model.shardings(stored))

    def hidden(self, params: nnx.State, sequences: Sequences) -> Float[Array, "R T Dt"]:
        """The teacher's hidden states that predict the targets."""

        def own(params: nnx.State, rows: Sequences) -> Array:
            return self.model.own_hidden(params, rows)[0]

        return self.model.over_rows(own)(params, sequences)

    def values(
        self, params: nnx.State, teacher_params: nnx.State, sequences: Sequences, *, entropy: bool
    ) -> tuple[LinearLogp, Float[Array, "R T"]]:
        """The policy's `values`, and its divergence from the teacher at every target, both from one forward of it. What
        a target was drawn among restricts its log-prob alone.
        """
        name = self.model.head.name
        given: nnx.State = nnx.State({"policy": params, "teacher": nnx.State({name: teacher_params[name]})})

        def own(given: nnx.State, rows: Sequences) -> tuple[LinearLogp, Array]:
            hidden, (weight, taught), term = self.policy.own_hidden(given["policy"], rows, heads=2)
            told = rows.target_ids, term, rows.allowed
            values = self.policy.head.own_values(hidden, weight, *told, entropy=entropy)
            theirs: Any = self.model.head, rows.teacher_hidden, self.model.own_head(given["teacher"])
            how: Any = {"kind": self.kind, "beta": self.beta, "implementation": self.implementation}
            divergence = self.policy.head.own_divergences(hidden, taught, *theirs, completion_mask=rows.mask, **how)
            return values, divergence

        def specs(given: nnx.State) -> nnx.State:
            both = self.policy.specs(given["policy"]), self.model.specs(given["teacher"])
            return nnx.State({"policy": both[0], "teacher": both[1]})

        return self.policy.over_rows(own, specs)(given, sequences)


def make_teacher(config: GrpoConfig, policy: Policy, tokenizer: Tokenizer, mesh: Mesh) -> Teacher | None:
    """The teacher that a configuration names, if it names one. Raises BadInput for a model that is not supported, or
    that the policy cannot learn from.
    """
    if config.teacher is None:
        return None
    theirs = given_tokenizer(Path(config.teacher))
    _check_tokenizers(theirs, tokenizer)
    # `implementation` is that of linear_logp, which takes no head of a teacher.
    alone = replace(config, model=config.teacher, remat=False, implementation=None)
    try:
        model = make_policy(alone, mesh, theirs)
    except BadField as error:
        raise BadField(f"`teacher`: {error.marked}") from error
    sizes = model.head.vocab_size, policy.head.vocab_size
    if sizes[0] < sizes[1]:
        raise BadField(f"`teacher` has {sizes[0]} tokens, and the policy may draw any of its {sizes[1]}")
    implementation = _promising(policy, model) if config.invariant or policy.head.keeps_bits else None
    # Heads that are cut alike have the same tokens: the teacher's others are padding.
    model = replace(model, head=replace(model.head, vocab_size=policy.head.vocab_size))
    kind: Any = config.teacher_kind
    return Teacher(config.teacher, policy, model, kind, config.teacher_beta, implementation)


def _check_tokenizers(theirs: Tokenizer, ours: Tokenizer) -> None:
    """Both tokenizers have the same tokens by the same ids."""
    texts = [
        {number: text for text, number in x.backend.get_vocab(with_added_tokens=True).items()} for x in (theirs, ours)
    ]
    for number in range(max(theirs.vocab_size, ours.vocab_size)):
        found, wanted = (x.get(number) for x in texts)
        if found != wanted:
            raise BadField(f"`teacher` has another tokenizer: token {number} is {found!r}, not {wanted!r}")


def _promising(policy: Policy, model: Policy) -> str:
    """The implementation of linear_kl that promises bits here."""
    student, teacher = (
        [jax.ShapeDtypeStruct(shape, x.head.dtype) for shape in ((1, width), (x.head.vocab_size, width))]
        for x in (policy, model)
        for width in [x.described.width]
    )
    return dispatch.promising("linear_kl", *student, *teacher, teacher_global_vocab_size=policy.head.vocab_size)
