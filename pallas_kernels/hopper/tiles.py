"""How large a tile of each product is on Hopper, and in which order tiles are visited: a pure function of its size.

No choice made here changes a bit: the K loop is never split and the column tile of statistics is always 256.
"""

from dataclasses import dataclass

COLUMNS = 256
"""Columns of a softmax chunk, and so of every tile of linear_logp: it is reduced in the order of its registers."""
DEPTH = 64
"""K of one pipeline step: 128 bytes of a 16-bit type, the widest swizzle."""

THREADS = 128
"""Of a warpgroup: kernels without a product keep one row in each."""
SHARED_MEMORY = 232448
"""Bytes that a block of an H200 can have."""
_BARRIERS = 1024
"""Bytes set aside for barriers and alignment."""
_STRIP = 64 * 128
"""Bytes that a warpgroup stores together, two of which are in flight: 64 rows of 128 bytes."""
_MOST_STAGES = 16
"""Enough loads in flight to stream from memory on half of the multiprocessors."""


@dataclass(frozen=True)
class Machine:
    """Where kernels run. `interpret` is None on a GPU, or `plgpu.InterpretGPUParams` to run them on a CPU."""

    sm_count: int = 132
    interpret: object = None


@dataclass(frozen=True)
class Tile:
    """One block's share of a product: `rows` × `columns`, split over compute warpgroups of 64 rows each."""

    rows: int = 128
    columns: int = COLUMNS
    stages: int = 4
    """Pipeline steps in flight. Four of 48 KiB leave 35 KiB for what an epilogue writes."""
    cluster: int = 2
    """Neighbouring blocks, one below the other, that load each tile of columns once for both (TMA multicast)."""
    band: int = 8
    """Clusters of rows visited before the next columns: their rows stay in L2 meanwhile."""

    @property
    def warpgroups(self) -> int:
        return self.rows // 64

    @property
    def cluster_rows(self) -> int:
        return self.rows * self.cluster


def statistics_tile(rows: int) -> Tile:
    """For a product of hidden rows and the head. Few rows stream the head at memory speed: small tiles, no cluster."""
    if rows <= 64:
        return Tile(rows=64, stages=5, cluster=1)
    return Tile(cluster=1) if rows <= 128 else Tile()


def gemm_tile(rows: int) -> Tile:
    """For dH and dW: `rows` of the output."""
    return Tile(cluster=1) if rows <= 128 else Tile()


@dataclass(frozen=True)
class Plan:
    """How det_gemm multiplies `[M, K]·[K, N]`: in which tiles, of C or (`swapped`) of Cᵀ = Bᵀ·Aᵀ."""

    tile: Tile
    swapped: bool = False


_SPEED = {(128, 256): 1.0, (128, 128): 0.93, (64, 128): 0.75, (64, 64): 0.55}
"""Share of the tensor cores' speed that a tile of these rows and columns reaches."""


def gemm_plan(m: int, n: int, sm_count: int, *, a_transposed: bool, accumulates: bool) -> Plan:
    """For C `[m, n]`; A is stored `[M, K]`, or `[K, M]` if transposed; accumulates: it starts from a C.

    Up to 64 rows only the stream of B counts, in tiles of 64 or 128 rows of Cᵀ. With more rows it is the tile that does
    the fewest rounds over the machine for its speed.
    """
    if m <= 64 and not a_transposed and not accumulates:
        columns = next(x for x in (8, 16, 32, 64) if m <= x)
        rows = 64 if n <= 64 * sm_count else 128
        return Plan(_deep(rows, columns, cluster=1, strip=4 * 64 * columns), swapped=True)

    def time(tile: Tile) -> float:
        blocks = -(-m // tile.cluster_rows) * -(-n // tile.columns)
        rounds = -(-blocks // (sm_count // tile.cluster))
        return rounds * tile.rows * tile.columns / _SPEED[tile.rows, tile.columns]

    return Plan(min((_deep(r, c, cluster=2 if m > r else 1) for r, c in _SPEED), key=time))


def _deep(rows: int, columns: int, cluster: int, strip: int = _STRIP) -> Tile:
    """The tile with as many stages as its block can hold beside two strips for each warpgroup.

    A power of two: with others ptxas spills registers where it unrolls a short K.
    """
    room = SHARED_MEMORY - _BARRIERS - rows // 64 * 2 * strip
    stages = min(_MOST_STAGES, room // (2 * DEPTH * (rows + columns)))
    return Tile(rows, columns, 1 << (stages.bit_length() - 1), cluster)


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
