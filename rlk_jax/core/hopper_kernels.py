"""What is asked of a set of a head's kernels for Hopper, whichever language they are written in."""

from typing import Any, Protocol

import jax

from pallas_kernels.hopper.arrays import (
    Coefficients,
    GradientRows,
    GroupRange,
    HiddenGradient,
    KeptExponentials,
    KeptRowMap,
    LargestProducts,
    LogitsConfig,
    Partials,
    SliceProducts,
    Softmax,
    VocabSlice,
)
from pallas_kernels.hopper.parts import Matrix
from pallas_kernels.hopper.tiles import Machine
from pallas_kernels.hopper.vocabulary import HeadAccess, Vocabulary
from pallas_kernels.products import LowRankTerm
from rlk_jax.core.gemm import GemmKernel

Array = jax.Array
Ref = Any


class HeadKernels(Protocol):
    """The kernels of a head for Hopper, as `pallas_kernels.mosaic.head_kernels` and `pallas_kernels.cuda.kernels`
    have them; their docstrings say what each computes.
    """

    @property
    def gemm(self) -> GemmKernel: ...

    def partials(
        self,
        logits: LogitsConfig,
        machine: Machine,
        where: VocabSlice,
        hidden: Matrix,
        weight: Matrix,
        bias: Array | None,
        target_ids: Array,
        holds_target: Array | None,
        temperature: Array,
        out: Partials,
        kept: Any = None,
        low_rank: LowRankTerm | None = None,
        products: SliceProducts | None = None,
        /,
    ) -> None: ...

    def add_largest(
        self,
        vocabulary: Vocabulary,
        machine: Machine,
        where: VocabSlice,
        products: SliceProducts,
        count: int,
        best: LargestProducts,
        /,
    ) -> None: ...

    def partials_of_logits(
        self,
        logits: LogitsConfig,
        machine: Machine,
        where: VocabSlice,
        products: Array,
        bias: Array | None,
        target_ids: Array,
        temperature: Array,
        out: Partials,
        /,
    ) -> None: ...

    def fold_chunks(self, partials: Partials, groups: int, active: Array, machine: Machine, /) -> Partials: ...

    def fold_groups(self, partials: Partials, active: Array, machine: Machine, /) -> Softmax: ...

    def coefficients(self, rows: GradientRows, machine: Machine, /) -> Coefficients: ...

    def dlogits(
        self,
        logits: LogitsConfig,
        machine: Machine,
        where: VocabSlice,
        hidden: Matrix,
        weight: Matrix,
        bias: Array | None,
        rows: Coefficients,
        out: Ref,
        low_rank: LowRankTerm | None = None,
        /,
    ) -> None: ...

    def dlogits_from_kept_exponentials(
        self,
        vocabulary: Vocabulary,
        machine: Machine,
        where: VocabSlice,
        kept: KeptExponentials,
        row_map: KeptRowMap,
        rows: Coefficients,
        out: Ref,
        /,
    ) -> None: ...

    def folds_groups(self, machine: Machine, /) -> bool: ...

    def add_hidden_gradient(
        self,
        head: HeadAccess,
        machine: Machine,
        where: VocabSlice,
        dlogits: Matrix,
        weight: Matrix,
        unscale: Array | None,
        groups: GroupRange,
        out: HiddenGradient,
    ) -> None: ...

    def store_weight_gradient(
        self,
        head: HeadAccess,
        machine: Machine,
        where: VocabSlice,
        dlogits: Matrix,
        hidden: Matrix,
        unscale: Array | None,
        out: Ref,
        /,
    ) -> None: ...

    def column_sums(
        self, where: VocabSlice, dlogits: Matrix, row_unscale: Array | None, machine: Machine, /
    ) -> Array: ...


class BlockKernels(HeadKernels, Protocol):
    """The kernels that work on blocks of tokens need too; `pallas_kernels.mosaic.head_kernels` has them."""

    def add_weight_gradient(
        self, machine: Machine, where: VocabSlice, dlogits: Array, hidden: Array, out: Ref, /
    ) -> None: ...

    def column_sums(
        self,
        where: VocabSlice,
        dlogits: Matrix,
        row_unscale: Array | None,
        machine: Machine,
        so_far: Array | None = None,
        /,
    ) -> Array: ...


def cuda_kernels() -> HeadKernels:
    """The kernels in CUDA C++, which are imported when one of them is traced."""
    from pallas_kernels.cuda import kernels

    return kernels
