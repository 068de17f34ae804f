"""Wrong arguments: rlk_jax's own words for what it checks, clear ones for what only torch can get wrong."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import rlk_jax
import torch_bridge
from tests.torch_bridge import forked
from tests.torch_bridge.tensors import array, head, policies, randint, randn
from torch_bridge import _exchange, _memory, _padding

WRONG = {
    "shape": {"target_ids": torch.zeros(2, 3, dtype=torch.int64)},
    "dim": {"lm_head_weight": randn(70, 8)},
    "ids": {"target_ids": torch.zeros(4)},
    "dtype": {"hidden": randn(4, 16, dtype=torch.float64)},
    "bias": {"bias": randn(3)},
    "temperature": {"temperature": -1.0},
    "temperatures": {"temperature": torch.tensor([1.0, 2.0])},
    "softcap": {"logit_softcap": 0.0},
    "ignore": {"ignore_index": 5},
    "ignore type": {"ignore_index": 1.5},
    "vocabulary": {"global_vocab_size": 71},
    "layout": {"weight_layout": "xy"},
    "budget": {"memory_budget": 0},
    "validate": {"validate": "yes"},
    "implementation": {"implementation": "magic"},
    "cannot run": {"implementation": "mosaic"},
    "list": {"implementation": ["xla"]},
    "allowed twice": {
        "allowed_ids": torch.zeros(4, 2, dtype=torch.int32),
        "allowed_mask": torch.zeros(4, 3, dtype=torch.int32),
    },
    "allowed shape": {"allowed_ids": torch.zeros(4, dtype=torch.int32)},
    "allowed dtype": {"allowed_ids": torch.zeros(4, 2)},
    "words": {"allowed_mask": torch.zeros(4, 4, dtype=torch.int32)},
    "dtype of words": {"allowed_mask": torch.zeros(4, 3, dtype=torch.int16)},
    "bad allowed id": {"allowed_ids": torch.tensor([[70, -1, 2**40]]).expand(4, 3).to(torch.uint8)},
    "nothing allowed": {"allowed_ids": torch.zeros(4, 0, dtype=torch.int32)},
    "target not allowed": {"allowed_mask": torch.tensor([[0, 0, 1 << 6]] * 4, dtype=torch.int32)},
    "bad id": {"target_ids": torch.tensor([0, 70, -3, 1])},
    "bad temperature": {"temperature": torch.tensor([1.0, 0.0, 1.0, 1.0])},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_linear_logp_raises_what_rlk_jax_does(wrong):
    hidden, weight, ids, bias = head((4,))
    given = {"hidden": hidden, "lm_head_weight": weight, "target_ids": ids, "bias": bias} | wrong
    arrays = {k: array(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    if given["hidden"].dtype == torch.float64:
        arrays["hidden"] = given["hidden"].detach().numpy()
    with pytest.raises(ValueError) as expected:
        rlk_jax.linear_logp(**arrays)
    with pytest.raises(ValueError) as found:
        torch_bridge.linear_logp(**given)
    assert str(found.value) == str(expected.value)


def test_the_other_ops_raise_what_rlk_jax_does():
    policy, ref, ids, mask, old = policies((2, 3))
    with pytest.raises(ValueError, match="token_ids out of range"):
        torch_bridge.logp(policy, ids + 70)
    with pytest.raises(ValueError, match="must match token_ids shape"):
        torch_bridge.logp(policy, ids.t())
    with pytest.raises(ValueError, match=r"row_indices contains an out-of-range row: expected \[0, 5\], got \[7, 7\]"):
        torch_bridge.logp(policy, ids, row_indices=torch.tensor([7]))
    with pytest.raises(ValueError, match="action_ids at active"):
        torch_bridge.ratio_kl(policy, ref, ids - 70, mask, old)
    forbidden = torch.zeros(2, 3, 3, dtype=torch.int32)
    forbidden[..., 2] = 1 << 5
    mask[0, 0], ids[0, 0] = 1, 3
    for op, arguments in (
        (torch_bridge.ratio_kl, (ids, mask, old)),
        (torch_bridge.grpo_loss, (ids, old, old[:, 0], mask)),
    ):
        groups = {"samples_per_prompt": 2} if op is torch_bridge.grpo_loss else {}
        with pytest.raises(ValueError, match="action_ids"):
            op(policy, ref, *arguments, allowed_mask=forbidden, **groups)
    with pytest.raises(ValueError, match="token_ids"):
        torch_bridge.logp(policy, ids, allowed_mask=forbidden)
    with pytest.raises(ValueError, match="ref_logits shape"):
        torch_bridge.ratio_kl(policy, ref[:1], ids, mask, old)
    with pytest.raises(ValueError, match="exactly one of rewards or advantages"):
        torch_bridge.grpo_loss(policy, ref, ids, old, None, mask)
    with pytest.raises(ValueError, match="clip_eps"):
        torch_bridge.grpo_loss(policy, ref, ids, old, None, mask, advantages=old, clip_eps=-1.0)
    with pytest.raises(ValueError, match="group_boundaries must be integers, got float64"):
        torch_bridge.grpo_loss(policy, ref, ids, old, torch.ones(2), mask, group_boundaries=[0, 1.5, 2])
    torch_bridge.grpo_loss(policy, ref, ids, old, torch.ones(2), mask, group_boundaries=[0, 1, 2])
    with pytest.raises(ValueError, match="group_boundaries must be integers, got float64"):  # which are equal to those
        torch_bridge.grpo_loss(policy, ref, ids, old, torch.ones(2), mask, group_boundaries=[0.0, 1, 2])
    with pytest.raises(ValueError, match="group_boundaries must be a 1D tensor"):
        torch_bridge.grpo_loss(policy, ref, ids, old, torch.ones(2), mask, group_boundaries=torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match="K mismatch"):
        torch_bridge.det_gemm(randn(2, 3, dtype=torch.bfloat16), randn(4, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="out_dtype"):
        a = randn(2, 2, dtype=torch.bfloat16)
        torch_bridge.det_gemm(a, a, out_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"out_dtype must be a torch\.dtype or None, got 'float32'"):
        torch_bridge.det_gemm(a, a, out_dtype="float32")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: None, "hidden must be a torch.Tensor, got builtins.NoneType"),
        (lambda x: x.numpy(), "hidden must be a torch.Tensor, got numpy.ndarray"),
        (lambda x: x.to_sparse(), "hidden must be a dense tensor"),
        (lambda x: torch.nested.as_nested_tensor([x]), "hidden must be a dense tensor, got a nested one"),
        (lambda x: x.to(torch.complex64), "hidden has dtype torch.complex64"),
        (lambda x: x.to(torch.float8_e4m3fn), "hidden has dtype torch.float8_e4m3fn"),
        (lambda x: x.to("meta"), "hidden must be on a CPU or a CUDA device, got meta"),
    ],
)
def test_what_only_torch_can_get_wrong(change, message):
    hidden, weight, ids, _ = head((4,))
    with pytest.raises(ValueError, match=message):
        torch_bridge.linear_logp(change(hidden.detach()), weight, ids)


def test_constants_that_require_a_gradient():
    hidden, weight, ids, _ = head((4,))
    with pytest.raises(ValueError, match=r"temperature requires a gradient.*pass temperature.detach\(\)"):
        torch_bridge.linear_logp(hidden, weight, ids, temperature=torch.ones(4, requires_grad=True))
    policy, ref, ids, mask, old = policies((2, 3))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(ValueError, match="temperature requires a gradient"):
            torch_bridge.linear_logp(hidden, weight, ids, temperature=dual)
    with pytest.raises(ValueError, match="ref_logits requires a gradient"):
        torch_bridge.ratio_kl(policy, ref.requires_grad_(), ids, mask, old)
    with torch.no_grad():
        torch_bridge.ratio_kl(policy, ref, ids, mask, old)


def test_a_head_of_another_layer():
    with pytest.raises(ValueError, match=r"FusedLMHead\.of takes an nn\.Linear, got torch\.nn\.modules\.conv\.Conv1d"):
        torch_bridge.FusedLMHead.of(torch.nn.Conv1d(2, 2, 1))

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(ValueError, match=r"would leave out what the forward of this tests\..*\.Scaled does"):
        torch_bridge.FusedLMHead.of(Scaled(2, 3))
    patched = torch.nn.Linear(2, 3)
    patched.forward = lambda x: x
    with pytest.raises(ValueError, match=r"would leave out what the forward of this torch\..*\.Linear does"):
        torch_bridge.FusedLMHead.of(patched)
    with pytest.raises(ValueError, match=r"this torch\..*\.LazyLinear has none of its own"):
        torch_bridge.FusedLMHead.of(torch.nn.LazyLinear(3))


def test_a_head_without_ids_takes_no_options():
    lm_head = torch_bridge.FusedLMHead(8, 16)
    with pytest.raises(ValueError, match=r"gives logits without target_ids, which have no temperature, return_lse\."):
        lm_head(randn(2, 8), temperature=2.0, return_lse=True)


def test_a_temperature_that_is_no_number():
    hidden, weight, ids, _ = head((4,))
    with pytest.raises(ValueError, match=r"temperature must be a number or a torch.Tensor, got str"):
        torch_bridge.linear_logp(hidden, weight, ids, temperature="hot")
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        torch_bridge.linear_logp(hidden, weight, ids, temperature=10**400)


def test_an_option_is_refused_after_one_that_equals_it():
    hidden, weight, ids, _ = head((4,))
    torch_bridge.linear_logp(hidden, weight, ids, ignore_index=-100)
    with pytest.raises(ValueError, match="ignore_index"):
        torch_bridge.linear_logp(hidden, weight, ids, ignore_index=-100.0)


def test_out():
    logits, ids = randn(2, 3, 9), randint(9, 2, 3)
    out = torch.full((2, 3), 5.0)
    expected = torch_bridge.logp(logits, ids)
    assert torch_bridge.logp(logits, ids, out=out) is out and torch.equal(out, expected)
    out.fill_(5.0)
    torch_bridge.logp(logits, ids, row_indices=torch.tensor([4, 1]), out=out)
    assert [i for i in range(6) if out.view(-1)[i] != 5] == [1, 4] and torch.equal(out[0, 1], expected[0, 1])
    with pytest.raises(ValueError, match="out must be float32"):
        torch_bridge.logp(logits, ids, out=torch.zeros(6))
    with pytest.raises(ValueError, match="out= carries no gradient"):
        torch_bridge.logp(logits.requires_grad_(), ids, out=out)


def test_a_list_of_ids_that_is_no_tensor():
    hidden, weight, ids, _ = head((4,))
    with pytest.raises(ValueError, match=r"allowed_ids must be a torch\.Tensor, got builtins\.list"):
        torch_bridge.linear_logp(hidden, weight, ids, allowed_ids=[[0], [1], [2], [3]])


LOW_RANK = torch.ones(3, 16), torch.ones(70, 3)


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ([*LOW_RANK, 1.0], r"low_rank must be \(A, B, scale\) or \(A, B, scale, inputs\), got list"),
        ((*LOW_RANK, torch.ones(())), "low_rank's scale must be a number, got Tensor"),
        ((*LOW_RANK, float("inf")), "low_rank's scale must be finite as float32, got inf"),
        ((*LOW_RANK[::-1], 1.0), r"low_rank's A and B must be \[r, D\] and \[V, r\]"),
        ((LOW_RANK[0], None, 1.0), "low_rank_b must be a torch.Tensor, got builtins.NoneType"),
        ((LOW_RANK[0].double(), LOW_RANK[1], 1.0), "low_rank_a must be bfloat16, float16 or float32, got float64"),
        ((*LOW_RANK, 1.0, torch.ones(4, 16)), r"low_rank's inputs must have hidden's shape \(5, 16\), got \(4, 16\)"),
    ],
)
def test_low_rank_terms_that_do_not_fit(term, message):
    hidden, weight, ids, _ = head((5,))
    with pytest.raises(ValueError, match=message):
        torch_bridge.linear_logp(hidden, weight, ids, low_rank=term)


@pytest.mark.parametrize("bad", [-(2**31), -(2**40), 70, 2**40])
def test_a_bad_id_is_never_ignored(bad):
    """Neither the sentinel of padding nor what becomes of it in 32 bits."""
    hidden, weight, ids, _ = head((5,))
    ids[2] = bad
    found = torch_bridge.linear_logp(hidden, weight, ids, validate=False)
    assert found.isnan().tolist() == [False, False, True, False, False]
    with pytest.raises(ValueError, match="target_ids out of range"):
        torch_bridge.linear_logp(hidden, weight, ids)


@pytest.mark.parametrize("bad", [-2, 70, 2**31, 2**40, -(2**40)])
def test_a_bad_allowed_id_is_never_padding(bad):
    """Neither −1 nor what becomes of it in 32 bits is."""
    hidden, weight, ids, _ = head((5,))
    allowed = ids[:, None].repeat(1, 2)
    allowed[2, 1] = bad
    found = torch_bridge.linear_logp(hidden, weight, ids, allowed_ids=allowed, validate=False)
    assert found.isnan().tolist() == [False, False, True, False, False]
    with pytest.raises(ValueError, match=r"allowed_ids out of range: expected \[0, 69\], or -1 as padding"):
        torch_bridge.linear_logp(hidden, weight, ids, allowed_ids=allowed)


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    given = {**os.environ, "JAX_PLATFORMS": "cpu"}
    # What importing torch_bridge has set here.
    given.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    given |= environment
    return subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=False)


def test_without_torch():
    found = run("import sys; sys.modules['torch'] = None; import torch_bridge")
    assert found.stderr.strip().endswith(
        'ImportError: torch_bridge needs PyTorch, of rlk-jax\'s extra `torch`: pip install "rlk-jax[torch]"'
    )


@pytest.fixture(scope="module")
def lines_of_forks():
    """What forked.py prints in a process of its own that has imported JAX before."""
    found = run("import jax; from tests.torch_bridge import forked; forked.main()")
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def test_a_fork_of_a_process_in_which_jax_runs_raises_at_once(lines_of_forks):
    """A fork made before JAX starts may start it."""
    _, first, *others = lines_of_forks
    assert first == "before logp ran"
    assert [line.split()[1] for line in others] == [*forked.OPS, "backward"]
    for line in others:
        assert " RuntimeError: torch_bridge: this process was forked after JAX had started" in line
        assert "'spawn' or 'forkserver'" in line


def test_an_import_sets_what_jax_has_not_read_yet(lines_of_forks):
    assert lines_of_forks[0] == "false"


IMPORT_FIRST = "import {}, torch_bridge, os; print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])"


@pytest.mark.full
@pytest.mark.parametrize("first", ["jax", "torch", "rlk_jax", "torch_bridge"])
def test_import_order_does_not_matter(first):
    """In `make test`, test_an_import_sets_what_jax_has_not_read_yet catches an import that is late or sets nothing, and
    test_what_an_import_sets_and_warns_of one that overrules the user.
    """
    code = IMPORT_FIRST.format(first)
    assert run(code).stdout.strip() == "false"
    assert run(code, XLA_PYTHON_CLIENT_PREALLOCATE="true").stdout.strip() == "true"


@pytest.mark.parametrize(
    ("backend", "setting", "allocator", "left", "warns"),
    [
        (None, None, None, "false", False),
        (None, "true", None, "true", False),
        ("gpu", None, None, None, True),
        ("gpu", "true", "BFC", "true", True),
        ("gpu", "false", None, "false", False),
        ("gpu", None, "platform", None, False),
        ("cpu", None, None, None, False),
    ],
)
def test_what_an_import_sets_and_warns_of(backend, setting, allocator, left, warns, monkeypatch):
    """After JAX has started a backend, or none; the setting is left as it was, or becomes "false"."""
    name, given = "XLA_PYTHON_CLIENT_PREALLOCATE", {"XLA_PYTHON_CLIENT_ALLOCATOR": allocator}
    for variable, value in (given | {name: setting}).items():
        monkeypatch.setenv(variable, value or "")
        if value is None:
            monkeypatch.delenv(variable)
    monkeypatch.setattr(_memory.xla_bridge, "backends_are_initialized", lambda: backend is not None)
    monkeypatch.setattr(_memory.jax, "default_backend", lambda: backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _memory.share_gpu_memory()
    assert os.environ.get(name) == left
    assert [("holds most of its memory" in str(x.message)) for x in caught] == [True] * warns


@pytest.mark.full
@pytest.mark.parametrize("platform, warns", [("gpu", True), ("cpu", False)])
def test_a_jax_that_has_taken_the_gpu_is_warned_of(platform, warns):
    """In `make test`, test_what_an_import_sets_and_warns_of catches a wrong warning, without a process of its own."""
    code = (
        "import os, jax; jax.devices(); jax.default_backend = lambda: {!r}; import torch_bridge;"
        "print('XLA_PYTHON_CLIENT_PREALLOCATE' in os.environ)"
    )
    found = run(code.format(platform))
    assert found.stdout.strip() == "False" and ("holds most of its memory" in found.stderr) == warns


@pytest.mark.parametrize("offset", [0, 64])
def test_a_weight_whose_memory_is_freed(offset):
    """As FSDP's and ZeRO's, outside their gathering."""
    hidden, _, ids, _ = head((4,))
    base = randn(offset + 70 * 16)
    weight = base[offset:].view(70, 16)
    rows = weight[:5]
    base.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"a tensor of shape \(70, 16\) has no memory: its storage has been freed\."):
        torch_bridge.linear_logp(hidden, weight, ids)
    with pytest.raises(ValueError, match=r"\(5, 16\) has no memory: its storage has been freed\."):
        # Five rows are no bucket: a copy into one would read them.
        torch_bridge.linear_logp(rows, hidden.detach(), ids.new_zeros(5))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("n", [4, 5])
@pytest.mark.parametrize(
    "wrap",
    [lambda x: TwoTensor(x, x), FakeTensorMode().from_tensor, lambda x: TwoTensor(x, x)[1:]],
    ids=["wrapper", "fake", "view"],
)
def test_a_tensor_that_stands_for_others(n, wrap):
    hidden, weight, ids, _ = head((n,))
    wrapped = wrap(hidden.detach())
    message = rf"a {type(wrapped).__name__} of shape \({len(wrapped)}, 16\) has no memory: pass a tensor that holds"
    with pytest.raises(ValueError, match=message):
        torch_bridge.linear_logp(wrapped, weight, ids[: len(wrapped)])


def test_values_are_checked_behind_what_torch_has_to_do(monkeypatch):
    """What is lent is not in stream order: nothing may read it before the wait."""
    calls, counted = [], _padding.counted
    monkeypatch.setattr(_exchange, "wait", lambda device: calls.append("wait"))
    monkeypatch.setattr(_padding, "counted", lambda *given: calls.append("counted") or counted(*given))
    hidden, weight, ids, _ = head((4,))
    torch_bridge.linear_logp(hidden, weight, ids)  # Compiles.
    calls.clear()
    torch_bridge.linear_logp(hidden, weight, ids, ignore_index=-100, validate=True)
    assert calls[:2] == ["wait", "counted"]
