"""peft's adapters around a FusedLMHead: logits are those of an nn.Linear, and log-probs are never what they are not."""

import copy
import io

import pytest

import torch_bridge
from tests.torch_bridge.tensors import randint, randn

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

D, V = 16, 70
HIDDEN, IDS = randn(3, 5, D), randint(V, 3, 5)


class Policy(torch.nn.Module):
    """A model that is its head."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.lm_head = head

    def forward(self, *arguments):
        return self.lm_head(*arguments)


def policies(**options):
    """The same adapter, with weights that are not 0, around an nn.Linear and a head that shares its weights."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(D, V)
    plain, fused = (
        peft.get_peft_model(Policy(head), peft.LoraConfig(r=4, target_modules=["lm_head"], **options))
        for head in (linear, torch_bridge.FusedLMHead.of(linear))
    )
    adapted = {name: torch.randn_like(x) for name, x in plain.state_dict().items() if "lora_" in name}
    for policy in (plain, fused):
        policy.load_state_dict(adapted, strict=False)
    return plain, fused


def logps(logits):
    return logits.log_softmax(-1).gather(-1, IDS[..., None].long())[..., 0]


def test_logits_are_those_of_a_linear_layer_under_the_same_adapter():
    plain, fused = policies()
    torch.testing.assert_close(fused(HIDDEN), plain(HIDDEN))
    assert (fused(HIDDEN) - fused.lm_head.base_layer(HIDDEN)).abs().max() > 0.1


@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_target_ids_under_an_adapter_raise_by_its_name(options):
    """peft would add logits `[…, V]` to log-probs `[…]`, and where they broadcast, nothing would be said."""
    _, fused = policies(**options)
    with pytest.raises(ValueError, match=r"under peft\.tuners\.lora\.layer\.Linear, which adds logits to them: merge"):
        fused(HIDDEN, IDS)
    for same in (copy.deepcopy(fused), saved_and_loaded(fused)):
        with pytest.raises(ValueError, match="merge the adapter"):
            same(HIDDEN, IDS)


def test_a_head_that_is_held_elsewhere_too_still_raises():
    """Another module may hold the base layer, and a wrapper may take its place."""
    _, fused = policies()
    base = fused.lm_head.base_layer
    holders = torch.nn.ModuleList([base]), torch.nn.Sequential(base)
    fused.lm_head.base_layer = Policy(base)
    assert len(holders) == 2
    with pytest.raises(ValueError, match="merge the adapter"):
        fused(HIDDEN, IDS)


def test_an_adapter_that_has_nothing_on_the_head_gives_log_probs():
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(D, D), "lm_head": torch_bridge.FusedLMHead(D, V)})
    policy = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["lm_head"]))
    policy.add_adapter("other", peft.LoraConfig(r=4, target_modules=["layer"]))
    policy.set_adapter("other")
    head = policy.base_model.model["lm_head"]
    torch.testing.assert_close(head(HIDDEN, IDS), logps(head(HIDDEN)))


def saved_and_loaded(policy):
    file = io.BytesIO()
    torch.save(policy, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_merged_and_a_disabled_adapter_give_log_probs():
    plain, fused = policies()
    with fused.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(fused(HIDDEN, IDS), logps(plain(HIDDEN)))
    for policy in (plain, fused):
        policy.merge_adapter()
    torch.testing.assert_close(fused(HIDDEN, IDS), logps(plain(HIDDEN)))
    fused.unmerge_adapter()
    with pytest.raises(ValueError, match="merge the adapter"):
        fused(HIDDEN, IDS)
    torch.testing.assert_close(fused.unload()(HIDDEN, IDS), logps(plain.unload()(HIDDEN)))


def test_a_head_that_is_trained_whole_beside_adapters_gives_log_probs():
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(D, D), "lm_head": torch_bridge.FusedLMHead(D, V)})
    config = peft.LoraConfig(r=4, target_modules=["layer"], modules_to_save=["lm_head"])
    head = peft.get_peft_model(model, config).base_model.model["lm_head"]
    torch.testing.assert_close(head(HIDDEN, IDS), logps(head(HIDDEN)))
