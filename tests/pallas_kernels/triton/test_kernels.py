"""The Triton kernels over materialised logits in Triton's interpreter, at tiny odd shapes, against float64 NumPy."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.logits import RowConfig
from pallas_kernels.triton import rows
from rlk_jax import dispatch
from tests.pallas_kernels.triton import interpreted
from tests.support import logits as ops
from tests.support.allowed import allowed_beside, mask_of
from tests.support.helpers import assert_error, assert_within_contract


@dataclasses.dataclass(frozen=True)
class Logits:
    """Materialised logits of five rows: row 0 begins with −inf, 2 has no target, 3 is inactive, and 4 is all −inf."""

    row_length: int
    config: RowConfig
    mask: bool = False
    """Whether rows are allowed some columns only: each its target, and other rows half of them."""

    def __str__(self) -> str:
        return f"{self.row_length} {self.config} {self.mask}"

    @property
    def allowed(self):
        """Which of the columns that are no padding each row is allowed."""
        if not self.mask:
            return np.ones((5, self.config.columns), bool)
        return allowed_beside(np.minimum(self.target_ids, self.config.columns - 1), self.config.columns)

    @property
    def target_ids(self):
        target_ids = np.random.default_rng(1).integers(0, self.config.columns, 5)
        target_ids[0], target_ids[2] = self.config.columns - 1, self.row_length + 3
        return target_ids

    def arrays(self, dtype):
        import torch

        rng = np.random.default_rng(0)
        n, columns = 5, self.config.columns
        logits = torch.tensor(4 * rng.normal(size=(n, self.row_length))).to(getattr(torch, dtype))
        logits[0, : columns // 2] = -math.inf
        logits[3] = math.nan
        logits[4] = -math.inf
        logits[:, :columns][torch.tensor(~self.allowed)] = math.nan
        active = torch.tensor([1, 1, 1, 0, 1], dtype=torch.int32)
        words = torch.tensor(np.array(mask_of(self.allowed, np.int32)))
        return {
            "logits": logits,
            "target_ids": torch.tensor(self.target_ids, dtype=torch.int32),
            "temperature": torch.tensor(rng.uniform(0.5, 2, n), dtype=torch.float32),
            "active": active,
            "allowed": words if self.mask else active,
        }

    @property
    def constants(self):
        words = -(-self.config.columns // 32) if self.mask else 0
        shared = {"columns": self.config.columns, "softcap": self.config.softcap}
        return {"row_length": self.row_length, "words": words, **shared}

    def values(self, logits):
        """The softcapped logits of the columns that are not padding, float64; −inf where they are not allowed."""
        x, cap = _float64(logits)[:, : self.config.columns], self.config.softcap
        return np.where(self.allowed, x if cap is None else cap * np.tanh(x / cap), -np.inf)


LOGITS = (
    Logits(37, RowConfig(37, None, True)),
    Logits(1300, RowConfig(1200, 2.0, True)),
    Logits(9001, RowConfig(9001, None, False)),
    Logits(64, RowConfig(64, 30.0, True)),
    Logits(1, RowConfig(1, None, True)),
    Logits(1300, RowConfig(1200, 2.0, True), mask=True),
    Logits(9001, RowConfig(9001, None, False), mask=True),
)
every_logits = pytest.mark.parametrize("problem", LOGITS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
rounded_dtype = pytest.mark.parametrize("dtype", ["float16", "float32"])
"""The dtypes whose rounded results can be compared: the interpreter truncates to bfloat16 where a GPU rounds."""


@pytest.fixture
def triton_runs(monkeypatch):
    """Make `triton` run logp in the interpreter."""
    runs = [dataclasses.replace(x, obstacles=lambda facts: []) for x in dispatch.TABLE["logp"] if x.name == "triton"]
    monkeypatch.setitem(dispatch.TABLE, "logp", tuple(runs))
    monkeypatch.setattr(rows, "launch", interpreted.launch)


def test_logp_over_allowed_tokens(triton_runs):
    """The op hands the words to both kernels; other paths have the tests of the kernels alone."""
    case = ops.Case("allowed", (6,), 1101, {"logit_softcap": 3.0, "global_vocab_size": 1100}, "per token")
    ops.check_allowed(case, jnp.float32, "triton")
    ops.check_everything_allowed(case, jnp.float32, "triton")


def _float64(x):
    return x.double().numpy()


def _new(*shape):
    import torch

    return torch.full(shape, math.nan)


@every_dtype
@every_logits
def test_statistics(problem, dtype):
    from pallas_kernels.triton import row_kernels

    a = problem.arrays(dtype)
    out = [_new(5) for _ in range(4)]
    constants = {**problem.constants, "with_gap": problem.config.entropy, **rows.block(problem.config.columns)}
    row_kernels.statistics[(5,)](*a.values(), *out, **constants)
    maximum, total, target, gap = map(_float64, out)
    counts = [0, 1, 2]
    lowest = -math.inf if problem.config.softcap is None else -problem.config.softcap
    assert (maximum[3], total[3], target[3]) == (0, 1, 0)
    assert maximum[4] == lowest and total[4] == (0 if lowest == -math.inf else problem.allowed[4].sum())
    temperature = _float64(a["temperature"])[counts, None]
    z = problem.values(a["logits"])[counts] / temperature
    lse = np.log(np.exp(z - z.max(axis=1, keepdims=True)).sum(axis=1)) + z.max(axis=1)
    ids = a["target_ids"].numpy()[counts]
    is_here = ids < problem.config.columns
    logp = np.where(is_here, z[np.arange(3), np.where(is_here, ids, 0)], 0) - lse
    found = (target - maximum)[counts] / temperature[:, 0] - np.log(total[counts])
    assert_within_contract(found, logp, "linear_logp", np.float32, "forward")
    if problem.config.entropy:
        p = np.exp(z - lse[:, None])
        entropy = lse - (p * np.where(p > 0, z, 0)).sum(axis=1)
        found = np.log(total[counts]) + math.log(2) * gap[counts] / total[counts]
        error = np.abs(found - entropy).max() / np.abs(z[np.isfinite(z)]).max()
        assert_error(error, "linear_logp_peaked", np.float32, "forward")
        assert gap[3] == 0


@pytest.mark.parametrize("in_place", [False, True])
@rounded_dtype
@every_logits
def test_gradients(problem, dtype, in_place):
    import torch

    from pallas_kernels.triton import row_kernels

    a = problem.arrays(dtype)
    logits = a["logits"]
    x = problem.values(logits)
    rng = np.random.default_rng(1)
    scale = (math.log2(math.e) / a["temperature"]).float()
    maximum = torch.tensor(np.maximum(np.nan_to_num(x.max(axis=1)), -1e4), dtype=torch.float32)
    log2_total, constant, slope, at_target = (torch.tensor(rng.uniform(1, 2, 5), dtype=torch.float32) for _ in range(4))
    out = torch.full_like(logits, math.nan)
    vectors = (a["target_ids"], a["active"], a["allowed"], scale, maximum, log2_total, constant, slope, at_target)
    width = rows.gradient_width(problem.row_length)
    constants = {**problem.constants, "with_slope": problem.config.entropy, "width": width}
    grid = (5 * -(-problem.row_length // width),)
    row_kernels.gradients[grid](logits, *vectors, None if in_place else out, **constants)
    found = _float64(logits if in_place else out)
    y, m, log_total, factor, slope, own = (_float64(v)[:, None] for v in vectors[3:])
    exponent = (x - m) * y - log_total
    p = np.exp2(exponent)
    expected = np.zeros_like(found)
    logs = np.where(p > 0, exponent, 0) if problem.config.entropy else 0
    gradient = p * (factor + slope * logs)
    is_target = np.arange(problem.config.columns) == a["target_ids"].numpy()[:, None]
    gradient = np.where(is_target, own, gradient)
    if problem.config.softcap is not None:
        gradient *= 1 - (np.where(problem.allowed, x, 0) / problem.config.softcap) ** 2
    expected[:, : problem.config.columns] = np.where(problem.allowed, gradient, 0)
    expected[3] = 0
    assert not found[3].any() and not found[:, problem.config.columns :].any()
    assert_within_contract(found, expected, "linear_logp", np.dtype(dtype), "gradient")
