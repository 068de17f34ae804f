"""How large a tile of each product is, and in which order tiles are visited: a pure function of the problem's size.

No choice made here changes a bit: the K loop is never split and the column tile of statistics is always 256.
"""

from dataclasses import dataclass

COLUMNS = 256
"""Columns of a tile: fixed, because a softmax chunk is reduced in the order of its registers."""
DEPTH = 64
"""K of one pipeline step: 128 bytes of a 16-bit type, the widest swizzle."""

THREADS = 128
"""Of a warpgroup: kernels without a product keep one row in each."""


@dataclass(frozen=True)
class Machine:
    """Where kernels run. `interpret` is None on a GPU, or `plgpu.InterpretGPUParams` to run them on a CPU."""

    sm_count: int = 132
    interpret: object = None


@dataclass(frozen=True)
class Tile:
    """One block's share of a product: `rows` × 256 columns, split over compute warpgroups of 64 rows each."""

    rows: int = 128
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


def padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
