"""A layer never computes something other than its host does, whatever the host does with the same parts."""

import hosts
import pytest
import reference
import torch
from hosts import GatedMLP, assert_same_block, pair
from torch import nn


@pytest.fixture
def x(device):
    return torch.randn(2, 5, hosts.HIDDEN, device=device)


def test_projection_in_another_dtype(kernel, device, x):
    """What the projections hand over decides: float32 gate, bfloat16 up under torch's promotion, as eager has it."""

    class ToBFloat16(nn.Linear):
        def forward(self, x):
            return super().forward(x).bfloat16()

    host = GatedMLP()
    host.up_proj = ToBFloat16(hosts.HIDDEN, hosts.INTERMEDIATE, bias=False)
    host, layer = pair(kernel, host, device)
    assert layer(x).dtype == host(x).dtype == torch.float32
    torch.testing.assert_close(layer(x), host(x))


def forward_of(source, module=__name__):
    """A block of the Gemma parts whose forward returns the given expression."""
    scope = {"torch": torch, "__name__": module}
    exec(f"def forward(self, x):\n    return {source}", scope)
    return type("Other", (GatedMLP,), {"forward": scope["forward"]})()


# Blocks that have the same four parts and compute something else with them.
OTHER_BLOCKS = {
    "scaled": "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2.0)",
    "scaled_by_int": "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2",
    "residual": "x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
    "sum": "self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))",
    "difference": "self.down_proj(self.act_fn(self.gate_proj(x)) - self.up_proj(x))",
    "negated": "self.down_proj(-self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
    "other_gate": "self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))",
    "activated_product": "self.down_proj(self.act_fn(self.gate_proj(x) * self.up_proj(x)))",
    "activated_twice": "self.down_proj(self.act_fn(self.act_fn(self.gate_proj(x))) * self.up_proj(x))",
    "activated_down": "self.act_fn(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))",
    "both_activated": "self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))",
    "no_activation": "self.down_proj(self.gate_proj(x) * self.up_proj(x))",
    "squared_gate": "self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.gate_proj(x)))",
    "clamped": "self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=0.1) * self.up_proj(x))",
    "float_product": "self.down_proj((self.act_fn(self.gate_proj(x)).double() * self.up_proj(x)).to(x.dtype) + 1)",
    "input_squared": "self.down_proj(self.act_fn(self.gate_proj(x * x)) * self.up_proj(x))",
}


@pytest.mark.parametrize("name", OTHER_BLOCKS)
def test_blocks_that_compute_something_else(kernel, device, x, name):
    host, layer = pair(kernel, forward_of(OTHER_BLOCKS[name]), device)
    torch.testing.assert_close(layer(x), type(host).forward(host, x))


class OptionalScale(GatedMLP):
    """Looks for a part that most instances do not have."""

    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        scale = getattr(self, "scale", None)
        return self.down_proj(hidden if scale is None else hidden * scale)


class AskedForPart(GatedMLP):
    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(self.norm(hidden) if hasattr(self, "norm") else hidden)


class TensorOnly(GatedMLP):
    """Does more when it is given what every caller gives it."""

    def forward(self, x):
        if isinstance(x, torch.Tensor):
            x = x * 2
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Switched(GatedMLP):
    """A class attribute that is set after the class was first seen."""

    scale = None

    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden if self.scale is None else hidden * self.scale)


@pytest.mark.parametrize("kind", (OptionalScale, AskedForPart, TensorOnly, Switched))
def test_blocks_that_look_before_they_compute(kernel, device, x, kind):
    """Without the extra part such a block is the plain one; with it, it is another one of the same class."""
    host, layer = pair(kernel, kind(), device)
    torch.testing.assert_close(layer(x), type(host).forward(host, x))
    for module in (host, layer):
        module.scale, module.norm = 3.0, nn.LayerNorm(hosts.INTERMEDIATE).to(device)
    torch.testing.assert_close(layer(x), type(host).forward(host, x))


def test_generated_forward_without_a_module(kernel, device, x):
    """What torch.fx and others generate has no __module__."""
    host, layer = pair(kernel, forward_of("self.down_proj(self.gate_proj(x))", module=None), device)
    assert type(host).forward.__module__ is None
    torch.testing.assert_close(layer(x), type(host).forward(host, x))


def test_same_block_in_other_words(kernel, device, x):
    """Equal results are all that is asked for; whether such a block is fused is the layer's affair."""
    for source in (
        "self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))",
        "self.down_proj(torch.mul(self.act_fn(self.gate_proj(x)), self.up_proj(x)))",
    ):
        host, layer = pair(kernel, forward_of(source), device)
        assert_same_block(layer, host, x)


@pytest.mark.parametrize("sparsity", (0.0, 0.6))
def test_gemma3n_activation_sparsity(kernel, device, x, sparsity):
    """Gemma3n zeroes most of the gate before the activation; a block with the same parts must not skip that."""
    from transformers import Gemma3nTextConfig
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

    config = Gemma3nTextConfig(
        hidden_size=hosts.HIDDEN,
        intermediate_size=[hosts.INTERMEDIATE],
        num_hidden_layers=1,
        activation_sparsity_pattern=[sparsity],
        num_kv_shared_layers=0,
        layer_types=["full_attention"],
    )
    host, layer = pair(kernel, Gemma3nTextMLP(config), device)
    torch.testing.assert_close(layer(x), host(x))


def test_dropout_of_the_host_stays(kernel, device, x):
    class Dropped(GatedMLP):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))

    host, layer = pair(kernel, Dropped(), device)
    for training in (True, False):
        host.train(training), layer.train(training)
        torch.manual_seed(3)
        expected = host(x)
        torch.manual_seed(3)
        torch.testing.assert_close(layer(x), expected)


def test_layer_used_as_a_module(kernel, device):
    x = torch.randn(3, 34, device=device)
    gate, up = reference.split(x)
    reference.assert_accurate(kernel.layers.GeluAndMul()(x), gate, up, "none")
    reference.assert_accurate(kernel.layers.GeluTanhAndMul()(x), gate, up, "tanh")
    layer = kernel.layers.GeGLUMLP()
    for name, module in GatedMLP(nn.GELU()).to(device).named_children():
        setattr(layer, name, module)
    inputs = torch.randn(3, hosts.HIDDEN, device=device)
    torch.testing.assert_close(layer(inputs), GatedMLP.forward(layer, inputs))
