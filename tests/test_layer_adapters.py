"""Hooks, adapters and parametrizations on the parts of a block keep working under a layer."""

import hosts
import pytest
import torch
from hosts import Doubled, GatedMLP, LoRA, assert_same_block, count_calls, pair
from torch import nn
from torch.nn.utils import parametrizations, parametrize


@pytest.fixture
def x(device):
    return torch.randn(2, 5, hosts.HIDDEN, device=device)


@pytest.mark.parametrize("where", ("gate_proj", "up_proj", "down_proj", "act_fn"))
@pytest.mark.parametrize("kind", ("forward", "pre", "backward"))
def test_hooks_keep_firing(kernel, device, x, where, kind):
    host, layer = pair(kernel, GatedMLP(), device)
    counts = {}
    for name, module in (("host", host), ("layer", layer)):
        hosts.count_hook(getattr(module, where), kind, counts, name)
        module(x.clone().requires_grad_()).sum().backward()
    assert counts == {"host": 1, "layer": 1}


@pytest.mark.parametrize("where", ("gate_proj", "up_proj", "down_proj", "act_fn"))
def test_a_hook_that_changes_the_output(kernel, device, x, where):
    host = GatedMLP()
    getattr(host, where).register_forward_hook(lambda module, inputs, output: output * 3)
    host, layer = pair(kernel, host, device)
    assert_same_block(layer, host, x)


ADAPTERS = {
    "lora": LoRA,
    "weight_norm": parametrizations.weight_norm,
    "parametrize": lambda linear: (parametrize.register_parametrization(linear, "weight", Doubled()), linear)[1],
    "bias": lambda linear: nn.Linear(linear.in_features, linear.out_features, bias=True),
    "sequential": lambda linear: nn.Sequential(linear, nn.Dropout(0.0)),
}


@pytest.mark.parametrize(
    "where", (("gate_proj",), ("up_proj",), ("down_proj",), ("gate_proj", "up_proj", "down_proj"))
)
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_take_part(kernel, device, x, monkeypatch, name, where):
    host = GatedMLP()
    for projection in where:
        setattr(host, projection, ADAPTERS[name](getattr(host, projection)))
    calls = count_calls(monkeypatch, kernel)
    host, layer = pair(kernel, host, device)
    assert_same_block(layer, host, x)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in layer.parameters())
    assert calls == ["tanh"]
