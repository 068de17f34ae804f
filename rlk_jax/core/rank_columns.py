"""A head whose vocabulary is shared by processes, cut at any columns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlk_jax.core.checks import check_vocabulary_options, require
from rlk_jax.core.fixed_order import GROUPS, ColumnGroups, column_groups
from rlk_jax.core.head import HeadConfig


@dataclass(frozen=True)
class RankColumns:
    """Which columns `[start, end)` each rank holds, by rank. Columns from `vocab_size` on are padding."""

    ranges: tuple[tuple[int, int], ...]
    vocab_size: int

    def __str__(self) -> str:
        return f"shards of {', '.join(str(end - start) for start, end in self.ranges)} columns"

    @property
    def order(self) -> list[int]:
        """The ranks in the order of their columns."""
        return sorted(range(len(self.ranges)), key=lambda rank: self.ranges[rank])

    @property
    def on_group_edges(self) -> bool:
        """Whether every rank owns whole groups of the unsharded head's softmax: then the cut changes no bits."""
        width = column_groups(self.vocab_size).width
        ends = [0, *(self.ranges[rank][1] for rank in self.order)]
        return all(end % width == 0 for end in ends[:-1]) and ends[-2] < GROUPS * width

    def groups(self, rank: int) -> ColumnGroups:
        """The groups that a rank owns; where the cut is not on group edges, eight groups of its own columns."""
        start, end = self.ranges[rank]
        if not self.on_group_edges:
            return column_groups(end - start)
        width = column_groups(self.vocab_size).width
        last = GROUPS if rank == self.order[-1] else end // width
        return ColumnGroups(last - start // width, width)

    def real_columns(self, rank: int) -> int:
        """How many columns of a rank are no padding."""
        start, end = self.ranges[rank]
        return min(max(self.vocab_size - start, 0), end - start)

    def config(self, whole: HeadConfig, rank: int) -> HeadConfig:
        """What an implementation is compiled for on a rank's shard, from the config of the whole head."""
        start, end = self.ranges[rank]
        return replace(
            whole,
            vocab_size=end - start,
            real_vocab_size=self.real_columns(rank),
            groups=self.groups(rank),
            is_shard=True,
        )


def checked_rank_columns(
    ranges: Sequence[tuple[int, int]], given: Sequence[int | None], ignore_index: int | None
) -> RankColumns:
    """How ranks that hold columns `[start, end)`, in any order, share a vocabulary.

    `given` is each rank's global_vocab_size. Every rank sees the same arguments, so that all of them raise together.
    """
    for start, end in ranges:
        require(0 <= start < end, f"invalid TP vocab shard range [{start}, {end}).")
    covered, in_order = max(end for _, end in ranges), sorted(ranges)
    starts = [0, *(end for _, end in in_order)]
    require(
        [start for start, _ in in_order] == starts[:-1],
        f"TP vocab shards must form a contiguous [0, {covered}) partition; got ranges={in_order}.",
    )
    sizes = {covered if size is None else size for size in given}
    require(
        len(sizes) == 1 and max(sizes) <= covered,
        f"global_vocab_size must match the TP vocab partition size: got {', '.join(map(str, sorted(sizes)))}, "
        f"covered {covered}.",
    )
    vocab_size = sizes.pop()
    check_vocabulary_options(covered, None, ignore_index, vocab_size)
    return RankColumns(tuple(ranges), vocab_size)
