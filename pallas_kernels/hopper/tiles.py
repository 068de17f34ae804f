"""The tile of each product on Hopper, and the order in which tiles are visited, as pure functions of the size.

No choice made here changes a bit: the K loop is never split, and tiles of logits always have 256 columns, or 128 where
an operand is in two parts (parts.py).
"""

from dataclasses import dataclass, replace

from pallas_kernels.products import padded

COLUMNS = 256
"""Columns of a softmax chunk and of every tile of logits: a chunk is reduced in the order of its registers."""
DEPTH = 64
"""K of one pipeline step, unless a tile says otherwise: 128 bytes of a 16-bit type, as wide as the widest swizzle."""

THREADS = 128
"""Threads of a warpgroup. Kernels without a product that fold partials keep one row in each thread."""
SHARED_MEMORY = 232448
"""Bytes of shared memory that a block of an H200 can have."""
_BARRIERS = 1024
"""Bytes of shared memory set aside for barriers and alignment."""
SUM_STEPS = 4
"""Steps that tensor cores sum up where an operand is in two parts, before float32 registers take their sum.

Tensor cores cut off digits with every addition: errors of long sums would be larger than those of float32.
"""
_STRIP = 64 * 128
"""Bytes of a strip, which a warpgroup stores together: 64 rows of 128 bytes. Two strips are in flight."""
_MOST_STAGES = 16
"""Stages of DEPTH beyond these gain nothing: so many loads in flight stream from memory on half of the multiprocessors.
"""
_ENOUGH_BLOCKS = 96
"""Blocks with which the multiprocessors of a Hopper GPU read at nearly the speed of memory."""


@dataclass(frozen=True)
class Machine:
    """The machine that kernels run on. interpret: None on a GPU, `plgpu.InterpretGPUParams` to run them on a CPU."""

    sm_count: int = 132
    interpret: object = None


@dataclass(frozen=True)
class Tile:
    """One block's part of a product, `rows` × `columns`, split over compute warpgroups of 64 rows each."""

    rows: int = 128
    columns: int = COLUMNS
    stages: int = 4
    """Pipeline steps in flight. Four steps of 48 KiB leave 35 KiB for what an epilogue writes."""
    cluster: int = 2
    """Blocks of a cluster, one below the other, which load each tile of columns once for all (TMA multicast)."""
    band: int = 8
    """Clusters of rows that are visited before the next columns. Their rows stay in the L2 cache meanwhile."""
    depth: int = DEPTH
    """K of one pipeline step."""

    @property
    def warpgroups(self) -> int:
        return self.rows // 64

    @property
    def cluster_rows(self) -> int:
        return self.rows * self.cluster


def statistics_tile(rows: int) -> Tile:
    """The tile for a product of hidden rows and the head.

    With few rows the head is streamed at the speed of memory, which takes small tiles and no cluster.
    """
    if rows <= 64:
        return Tile(rows=64, stages=5, cluster=1)
    return Tile(cluster=1) if rows <= 128 else Tile()


def gemm_tile(rows: int, columns: int = COLUMNS) -> Tile:
    """The tile for the products that give dH, dW and the gradients of a low-rank term, whose result has `rows` rows and
    `columns` columns.

    With up to 128 columns the time is that of reading the gradients of logits, for which many loads are in flight. With
    more columns, tiles are of the width that leaves the last one fullest.
    """
    if rows <= 64:
        return Tile(rows=64, cluster=1)
    cluster = 1 if rows <= 128 else 2
    if columns <= 128:
        return _deep(128, padded(columns, 64), cluster)
    return Tile(cluster=cluster, columns=min((COLUMNS, 192), key=lambda width: padded(columns, width)))


def hidden_gradient_tile(rows: int, columns: int, sums: int) -> Tile:
    """The tile for `sums` sums of dH `[rows, columns]` in one launch: narrow where wide ones leave the machine idle."""
    tile = gemm_tile(rows, columns)
    for width in (128, 64):
        if tile.columns > width and sums * -(-rows // tile.rows) * -(-columns // tile.columns) < _ENOUGH_BLOCKS:
            tile = _deep(tile.rows, width, tile.cluster)
    return tile


def of_parts(tile: Tile, a_parts: int, b_parts: int) -> Tile:
    """The tile where A and B are in so many parts, of which a stage holds all: with two of either, the sums are held
    twice, which leaves registers for 128 columns.
    """
    if a_parts == b_parts == 1:
        return tile
    columns = min(tile.columns, 128)
    room = SHARED_MEMORY - _BARRIERS - tile.warpgroups * 2 * _STRIP
    stages = room // (2 * tile.depth * (a_parts * tile.rows + b_parts * columns))
    return replace(tile, columns=columns, stages=min(stages, _MOST_STAGES))


@dataclass(frozen=True)
class GemmPlan:
    """How det_gemm multiplies C = `[M, K]·[K, N]`: in tiles of C or, if `swapped`, of Cᵀ = Bᵀ·Aᵀ."""

    tile: Tile
    swapped: bool = False


_SPEED = {(128, 256): 1.0, (128, 128): 0.93, (64, 128): 0.75, (64, 64): 0.55}
"""The share of the tensor cores' speed that a tile reaches, by its rows and columns."""


def gemm_plan(m: int, n: int, sm_count: int, *, a_transposed: bool, accumulates: bool) -> GemmPlan:
    """The plan for a C `[m, n]`. A is stored `[M, K]`, or `[K, M]` if transposed; accumulates: the sums start from a C.

    With up to 64 rows the time is that of streaming B in tiles of 64 rows of Cᵀ or, where there are few tiles, that of
    the steps of one along K. With more rows the chosen tile is the one whose rounds over the machine take the least
    time at its speed.
    """
    if m <= 64 and not a_transposed and not accumulates:
        columns = next(x for x in (8, 16, 32, 64) if m <= x)
        if 2 * -(-n // 64) <= sm_count:
            # Tiles of half as many columns run beside each other, and each has less to do in a step.
            columns = min(columns, 32)
        # Steps are as deep as leaves the ring enough of them.
        depth = 2 * DEPTH if columns <= 32 else DEPTH
        return GemmPlan(_deep(64, columns, cluster=1, strip=4 * 64 * columns, depth=depth), swapped=True)

    def time(tile: Tile) -> float:
        blocks = -(-m // tile.cluster_rows) * -(-n // tile.columns)
        rounds = -(-blocks // (sm_count // tile.cluster))
        return rounds * tile.rows * tile.columns / _SPEED[tile.rows, tile.columns]

    return GemmPlan(min((_deep(r, c, cluster=2 if m > r else 1) for r, c in _SPEED), key=time))


def _deep(rows: int, columns: int, cluster: int, strip: int = _STRIP, depth: int = DEPTH) -> Tile:
    """The tile with as many stages as its block can hold beside two strips for each warpgroup.

    The number of stages is a power of two: with others ptxas spills registers where it unrolls a short K.
    """
    room = SHARED_MEMORY - _BARRIERS - rows // 64 * 2 * strip
    stages = min(_MOST_STAGES * DEPTH // depth, room // (2 * depth * (rows + columns)))
    return Tile(rows, columns, 1 << (stages.bit_length() - 1), cluster, depth=depth)
