"""Rows of tensors as padded arrays: a program takes as many rows as a bucket has, so that there are few programs."""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import torch
from torch import Tensor

from rlk_jax.core.allowed import AllowedTokens, with_allowed
from rlk_jax.core.tokens import checked_tokens, counted
from torch_bridge import _exchange, _programs
from torch_bridge._programs import Arrays


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
        """x `[*lead]`, or `[*lead, C]` with `columns=1`, as an array whose rows are padded.

        Rows of padding hold `fill`, or are not initialised where it is None.
        """
        tail = x.shape[x.ndim - columns :]
        if self.padded == self.sizes:
            return _exchange.lend(x, torch.Size((*self.sizes, *tail)))
        shape = (*self.padded, *tail)
        larger = x.new_empty(shape) if fill is None else x.new_full(shape, fill)
        larger[tuple(map(slice, self.sizes))] = _exchange.materialized(x).detach().reshape(*self.sizes, *tail)
        return _exchange.lend(larger)

    def ids(self, ids: Tensor) -> jax.Array:
        """Integer ids of any dtype as a padded array, which `_exchange.ids_of` makes int32 in a program."""
        return self.rows(_int32_or_int64(ids), 0)

    def temperature(self, per_token: Tensor | None, number: float, device: torch.device) -> jax.Array:
        """The temperature as an array: a scalar, or one padded row per token."""
        if per_token is None:
            return _exchange.scalar(number, device)
        return _exchange.lend(per_token) if per_token.ndim == 0 else self.rows(per_token, 1.0)

    def allowed(self, allowed_ids: Tensor | None, allowed_mask: Tensor | None) -> Arrays:
        """The lists of ids and the words of a mask as padded arrays; rows of padding, which are ignored, may hold
        anything.

        Lists are as long as a bucket is large, so that lists whose length varies have few programs, too.
        """
        if allowed_ids is not None:
            allowed_ids = _longer(_int32_or_int64(allowed_ids), -1)
        if allowed_mask is not None:
            # Words of int32 and uint32 are the same bits, and have one program.
            allowed_mask = allowed_mask.view(torch.int32)
        return tuple([None if x is None else self.rows(x, columns=1) for x in (allowed_ids, allowed_mask)])

    def listed(self, ids: Tensor | None, logps: Tensor | None) -> Arrays:
        """Ids that a teacher lists, and their log-probs, as padded arrays whose lists are as long as a bucket is large;
        what is padding lists nothing.
        """
        if ids is None or logps is None:
            return None, None
        longer = _longer(_int32_or_int64(ids), -1), _longer(logps, -math.inf)
        return tuple([self.rows(x, fill, columns=1) for x, fill in zip(longer, (-1, -math.inf), strict=True)])

    def tokens(
        self,
        ids: Tensor,
        temperature: tuple[Tensor | None, float],
        ignore_index: int | None,
        name: Literal["target_ids", "token_ids"],
        vocab_size: int | None,
        allowed: Arrays = (),
    ) -> Arrays:
        """The padded ids and how many are real (both for the function `token_ids`), the temperature, and what tokens
        are allowed, as the method `allowed` gives it.

        The padding must be one of `flat`. Values are checked unless `vocab_size` is None.
        """
        padded_ids, count = self.ids(ids), _exchange.scalar(self.sizes[0], ids.device)
        scale = self.temperature(*temperature, ids.device)
        if vocab_size is not None:
            _exchange.wait(padded_ids.device)
            int32_ids = token_ids(padded_ids, count, ignore_index=ignore_index)
            is_counted = counted(int32_ids, ignored(ignore_index))
            check: Any = {"vocab_size": vocab_size, "validate": True}
            tokens = checked_tokens(int32_ids, scale, is_counted, name=name, **check)
            if allowed:
                with_allowed(tokens, allowed_values(*allowed), name=name, **check)
        return padded_ids, count, scale, *allowed

    def without_padding(self, x: jax.Array, shape: Sequence[int]) -> Tensor:
        """A result of a program as a tensor of this shape, without the rows of padding."""
        tensor = _exchange.to_torch(x)
        if tensor.shape == shape:
            return tensor
        # The result must not be a view: autograd would not let a user write into a custom op's view.
        return tensor[tuple(map(slice, self.sizes))].reshape(shape).contiguous().data


def _int32_or_int64(ids: Tensor) -> Tensor:
    """Integers in a dtype that `_exchange.ids_of` takes."""
    return ids if ids.dtype == torch.int32 else _exchange.as_int64(ids)


def _longer(lists: Tensor, fill: float) -> Tensor:
    """Lists `[*lead, K]`, filled up to the length of a bucket."""
    behind = _programs.bucket(max(lists.shape[-1], 1)) - lists.shape[-1]
    return torch.nn.functional.pad(lists, (0, behind), value=fill) if behind else lists


def ignored(ignore_index: int | None) -> int:
    """The ignore_index of a program, which must ignore its rows of padding even where the user ignores no id."""
    return _exchange.INT32.min if ignore_index is None else ignore_index


@functools.partial(jax.jit, static_argnames="ignore_index")
def token_ids(ids: jax.Array, count: jax.Array, *, ignore_index: int | None) -> jax.Array:
    """int32 ids `[N]` of the padded array that `RowPadding.ids` gives, of which `count` are real.

    Rows of padding hold `ignored(ignore_index)`. Ids of others that would become this mark are moved by one, so that no
    token is ignored by mistake.
    """
    n, mark, int32 = ids.shape[0], ignored(ignore_index), _exchange.INT32
    ids = _exchange.ids_of(ids, (n,), int32.min + (mark == int32.min), int32.max - (mark == int32.max))
    if ignore_index is None:
        ids = jax.numpy.maximum(ids, int32.min + 1)
    return jax.numpy.where(jax.numpy.arange(n) < count, ids, mark)


def allowed_values(allowed_ids: Any, allowed_mask: Any, *, lead: int = 1) -> AllowedTokens:
    """int32 ids `[*lead, K]` and words, of the padded arrays that `RowPadding.allowed` gives for so many lead
    dimensions of rows.
    """
    ids = None if allowed_ids is None else _exchange.ids_of(allowed_ids, allowed_ids.shape[: lead + 1])
    return AllowedTokens(ids, allowed_mask)


@functools.lru_cache(maxsize=4096)
def flat(lead: tuple[int, ...], *, skips_padding: bool = False) -> RowPadding:
    """The padding of tensors `[*lead]` whose rows a program takes in one dimension, padded to a bucket."""
    n = math.prod(lead)
    return RowPadding(tuple(lead), (n,), (_programs.bucket(n, skips_padding=skips_padding),))
