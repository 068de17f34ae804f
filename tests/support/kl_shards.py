"""Shards of both heads of linear_kl without as many devices: ranks one after the other, and programs that are only
lowered.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rlk_jax import dispatch, linear_kl
from rlk_jax.core.fixed_order import ascending_sum
from rlk_jax.core.shard import Shard, real_columns_of_shard
from rlk_jax.ops.linear_kl.checks import check_call, tokens_of_call
from rlk_jax.ops.linear_kl.options import KlInputs, KlOptions, Needs, OneHead, OneHeadConfig, Operands
from tests.support.divergences import Case, Found, Problem
from tests.support.helpers import assert_same_bits


class _Missing(Exception):
    """The groups of a gather for which those of other ranks are not known yet."""

    def __init__(self, groups: Any) -> None:
        super().__init__()
        self.groups = groups


def _forwards(forward: Any, config: Any, operands: Sequence[Operands], tokens: Any) -> list[Any]:
    """What the forward gives on every rank: it begins anew for each gather, up to which all ranks' groups are known."""
    gathered: list[Any] = []
    while True:
        done, missing = [], []
        for own in operands:
            known = iter(gathered)

            def gather(groups: Any, known: Any = known) -> Any:
                found = next(known, None)
                if found is None:
                    raise _Missing(groups)
                return found

            try:
                done.append(forward(config, own, tokens, gather))
            except _Missing as found:
                missing.append(found.groups)
        if not missing:
            return done
        gathered.append(jax.tree.map(lambda *ranks: jnp.concatenate(ranks), *missing))


def one_rank_after_another(case: Case, problem: Problem, implementation: str, count: int) -> Found:
    """The divergences of every rank, which have the same bits, and gradients with dH by the canonical reduction, by an
    implementation whose gathers stand in no loop.
    """
    functions = next(x.functions for x in dispatch.TABLE["linear_kl"] if x.name == implementation)
    shard = Shard("tp", count, case.vocab // count, case.real, "canonical", reduce_hidden_grad=True)
    options = KlOptions(**case.options)
    as_stored = {"vd": lambda x: x, "dv": jnp.transpose}
    weight = as_stored[options.weight_layout](problem.weight)
    teacher_weight = as_stored[options.teacher_weight_layout](problem.teacher_weight)
    heads = problem.hidden, weight, problem.teacher_hidden, teacher_weight, problem.bias, problem.teacher_bias
    rows = problem.completion_mask, problem.temperature, case.teacher_temperature, None, None
    inputs, config, _ = check_call(KlInputs(*heads, *rows), options)
    tokens = tokens_of_call(inputs, config, None)

    def rank(number: int) -> Operands:
        start = number * shard.columns

        def cut(config: OneHeadConfig, hidden: Any, weight: Any, bias: Any) -> OneHead:
            own = jax.lax.slice_in_dim(weight, start, start + shard.columns, axis=config.vocab_axis)
            own_bias = None if bias is None else bias[start : start + shard.columns]
            return OneHead(hidden.reshape(-1, hidden.shape[-1]), own, own_bias)

        student = cut(config.student, inputs.hidden, inputs.lm_head_weight, inputs.bias)
        teacher = cut(config.teacher, inputs.teacher_hidden, inputs.teacher_weight, inputs.teacher_bias)
        return Operands(student, teacher, real_columns_of_shard(shard, jnp.int32(start)))

    @jax.jit
    def run(operands: Sequence[Operands], tokens: Any, upstream: Any) -> tuple[Any, Any]:
        own, needs = config.of_shard(shard), Needs(True, True, problem.bias is not None)
        forwards = _forwards(functions.forward, own, operands, tokens)
        gradients = [
            functions.gradients(own, needs, mine, tokens, residual, upstream)
            for mine, (_, residual) in zip(operands, forwards, strict=True)
        ]
        return [jnp.where(tokens.active, values, 0) for values, _ in forwards], gradients

    values, gradients = run([rank(i) for i in range(count)], tokens, problem.upstream.reshape(-1))
    for x in values:
        assert_same_bits(x, values[0])
    d_hidden = ascending_sum(jnp.concatenate([x.hidden for x in gradients])).astype(problem.hidden.dtype)
    return Found(
        values[0].reshape(case.lead),
        d_hidden.reshape(problem.hidden.shape),
        as_stored[options.weight_layout](jnp.concatenate([x.weight for x in gradients], config.student.vocab_axis)),
        None if problem.bias is None else jnp.concatenate([x.bias for x in gradients]),
    )


def lowered(
    kind: str, vocab: int, *, check_vma: bool, reduction: Any, tokens: int = 300, implementation: str = "mosaic"
) -> str:
    """The program of gradients on two ranks by an implementation's kernels, for CUDA, in several slices of padded
    heads.
    """
    real = {"global_vocab_size": vocab - 3, "teacher_global_vocab_size": vocab - 3}
    options = {"kind": kind, "reduction": reduction, "implementation": implementation, "memory_budget": 2**20, **real}
    on_rank = functools.partial(linear_kl, axis_name="tp", **options)
    specs = (P(), P("tp"), P(), P("tp"), P("tp"))
    mesh = Mesh(jax.devices()[:2], ("tp",))
    call = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    shapes = ((tokens, 1024), (vocab, 1024), (tokens, 512), (vocab, 512), (vocab,))
    gradients = jax.jit(jax.grad(lambda *arrays: call(*arrays).sum(), (0, 1, 4)))
    arrays = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return gradients.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
