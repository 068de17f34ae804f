"""peft's adapters around a FusedLMHead: logits are those of an nn.Linear, and log-probs those of the adapted head."""

import copy
import io

import pytest

import torch_bridge
from tests.torch_bridge.tensors import assert_close, randint, randn

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


def gradients(policy, values):
    """The gradients of hidden and of the adapter's matrices, by the ends of their names."""
    hidden = HIDDEN.clone().requires_grad_()
    policy.zero_grad()
    values(policy, hidden).backward()
    named = {name.split("lora_")[-1]: x.grad for name, x in policy.named_parameters() if "lora_" in name}
    return {"hidden": hidden.grad, **named}


@pytest.mark.parametrize("scale", [4, 1])
def test_log_probs_under_an_adapter_are_those_of_the_adapted_head(scale):
    """Values and gradients are those of a linear layer under the same adapter, in float64; the base is frozen."""
    plain, fused = policies(lora_alpha=scale)
    double = copy.deepcopy(plain).double()
    expected = logps(double(HIDDEN.double()))
    for policy in (fused, copy.deepcopy(fused), saved_and_loaded(fused)):
        assert_close(policy(HIDDEN, IDS), expected, "linear_logp", "forward")
        found = gradients(policy, lambda policy, hidden: policy(hidden, IDS).sum())
        for name, gradient in gradients(double, lambda policy, hidden: logps(policy(hidden.double())).sum()).items():
            assert_close(found[name], gradient, "linear_logp", "gradient")
        assert policy.lm_head.base_layer.weight.grad is None
    torch.testing.assert_close(fused.lm_head.logits(hidden=HIDDEN), plain(HIDDEN))
    assert policies()[1].lm_head(HIDDEN, IDS, return_entropy=True).entropy.shape == IDS.shape


def test_dropout_acts_on_what_a_is_applied_to():
    _, fused = policies(lora_dropout=0.5)
    fused.eval()
    still = fused(HIDDEN, IDS)
    fused.train()
    torch.manual_seed(1)
    found = fused(HIDDEN, IDS)
    torch.manual_seed(1)
    torch.testing.assert_close(found, logps(fused(HIDDEN)))
    assert (found - still).abs().max() > 0.1


def test_what_is_more_than_a_low_rank_term_raises_by_its_name():
    """peft would add logits `[…, V]` to log-probs `[…]`, and where they broadcast, nothing would be said."""
    with pytest.raises(ValueError, match="no log-probs under adapter 'default', a DoraLinearVariant: merge it"):
        policies(use_dora=True)[1](HIDDEN, IDS)
    with pytest.raises(ValueError, match="adapter 'default', whose B has a bias: merge it"):
        policies(lora_bias=True)[1](HIDDEN, IDS)
    _, fused = policies()
    fused.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"]))
    fused.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match="one active adapter, not under default, other"):
        fused(HIDDEN, IDS)
    head = torch_bridge.FusedLMHead(D, V)
    other_tuner = peft.get_peft_model(Policy(head), peft.LoHaConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match=r"under peft\.tuners\.loha\.layer\.Linear, which adds logits to them: merge"):
        other_tuner(HIDDEN, IDS)
    # This one does not call the head, and would return logits.
    hra = peft.get_peft_model(Policy(torch_bridge.FusedLMHead(D, V)), peft.HRAConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="which adds logits to them: merge"):
        hra(HIDDEN, IDS)
    assert hra(HIDDEN).shape == (3, 5, V)
    with pytest.raises(ValueError, match="a batch whose rows have different adapters"):
        policies()[1].lm_head(HIDDEN, IDS, adapter_names=["default"] * 3)


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
    for policy in (plain, fused):
        policy.unmerge_adapter()
    torch.testing.assert_close(fused(HIDDEN, IDS), logps(plain(HIDDEN)))
    torch.testing.assert_close(fused.unload()(HIDDEN, IDS), logps(plain.unload()(HIDDEN)))


def test_a_head_that_is_trained_whole_beside_adapters_gives_log_probs():
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(D, D), "lm_head": torch_bridge.FusedLMHead(D, V)})
    config = peft.LoraConfig(r=4, target_modules=["layer"], modules_to_save=["lm_head"])
    head = peft.get_peft_model(model, config).base_model.model["lm_head"]
    torch.testing.assert_close(head(HIDDEN, IDS), logps(head(HIDDEN)))


def tiny_qwen2(head):
    """A tiny Qwen2 with LoRA on all linear layers, the head among them; `head` makes its head of the stock one."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(vocab_size=V, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    model = transformers.Qwen2ForCausalLM(config)
    model.lm_head = head(model.lm_head)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    policy = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=layers))
    generator = torch.Generator().manual_seed(1)
    for name, x in policy.named_parameters():
        if "lora_" in name:
            x.data = 0.3 * torch.randn(x.shape, generator=generator)
    return policy


def adapter_gradients(policy, loss):
    policy.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in policy.named_parameters() if "lora_" in name}


# In `make test`, the tests above have the head under an adapter; a whole model adds the layers before it.
@pytest.mark.full
def test_a_qwen2_with_adapters_on_all_layers_trains_as_it_does_without_the_bridge():
    """Logits, log-probs and gradients are torch's in float64, and ten steps of Adam on a policy loss end where a
    linear head's end.
    """
    plain, fused = tiny_qwen2(lambda x: x), tiny_qwen2(torch_bridge.FusedLMHead.of)
    tokens = randint(V, 2, 9)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def hidden(policy):
        return policy.base_model.model.model(inputs).last_hidden_state

    def stock(policy):
        logits = policy(inputs).logits
        return logits.log_softmax(-1).gather(-1, targets[..., None].long())[..., 0]

    def fused_logps(policy):
        return policy.base_model.model.lm_head(hidden(policy), targets)

    double = copy.deepcopy(plain).double()
    torch.testing.assert_close(fused(inputs).logits, plain(inputs).logits)
    assert_close(fused_logps(fused), stock(double), "trl_calls", "forward")
    expected = adapter_gradients(double, stock(double).sum())
    found = adapter_gradients(fused, fused_logps(fused).sum())
    assert any("lm_head" in name for name in expected)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, "trl_calls", "gradient")
    advantages = torch.linspace(-1, 1, 2)[:, None]
    ends = []
    for policy, logps_of in ((plain, stock), (fused, fused_logps)):
        parameters = [x for x in policy.parameters() if x.requires_grad]
        optimizer, old = torch.optim.Adam(parameters, lr=1e-3, eps=1e-4), logps_of(policy).detach()
        for _ in range(10):
            ratio = (logps_of(policy) - old).exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends.append(torch.cat([x.detach().flatten() for x in parameters]))
    assert_close(ends[1], ends[0], "trl_calls", "gradient")
