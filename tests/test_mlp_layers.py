"""Gated layers without gradients: the whole block as one call if all of it is plain, else as the host has it."""

import importlib

import hosts
import pytest
import torch
from hosts import GatedMLP, pair
from reference import FORMS
from test_layer_adapters import ADAPTERS
from test_linear_layers import ADAPTERS as LINEAR_ADAPTERS
from torch import nn

PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")
PROJECTIONS = PARTS[:3]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def x(device):
    return torch.randn(2, 5, hosts.HIDDEN, device=device)


@pytest.fixture
def calls(kernel, monkeypatch):
    """The forms of the whole blocks that layers compute in one call."""
    blocks = importlib.import_module(kernel.layers.gated_mlp.__module__)
    seen = []
    real = blocks.block_without_gradients

    def spy(x, parameters, approximate):
        out = real(x, parameters, approximate)
        if out is not None:
            seen.append(approximate)
        return out

    monkeypatch.setattr(blocks, "block_without_gradients", spy)
    return seen


def replaced(module, name, make):
    """The module with make(part) in the place of a part."""
    part = make(getattr(module, name))
    delattr(module, name)
    setattr(module, name, part)
    return module


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("layer_name", ("GeGLUMLP", "LigerGEGLUMLP", "LigerTiledGEGLUMLP"))
def test_a_plain_block_is_one_call(kernel, device, x, calls, approximate, layer_name):
    host, layer = pair(kernel, GatedMLP(nn.GELU(approximate=approximate)), device, layer_name)
    torch.testing.assert_close(layer(x), host(x))
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), host(x))
    assert calls == [approximate] * 2
    with torch.enable_grad():
        torch.testing.assert_close(layer(x), host(x))
    assert len(calls) == 2


def test_liger_s_own_block_is_the_tanh_form(kernel, device, x, calls):
    class LigerGEGLUMLP(GatedMLP):
        def __init__(self):
            super().__init__()
            del self.act_fn

    layer = hosts.stand_in(LigerGEGLUMLP().to(device), kernel.layers.LigerGEGLUMLP)
    plain = GatedMLP().to(device)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), plain(x))
    assert calls == ["tanh"]


@pytest.mark.parametrize("where", [*[(name,) for name in PROJECTIONS], PROJECTIONS], ids="+".join)
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_take_part(kernel, device, x, calls, name, where):
    host = GatedMLP()
    for projection in where:
        replaced(host, projection, ADAPTERS[name])
    host, layer = pair(kernel, host, device)
    torch.testing.assert_close(layer(x), host(x))
    # A bias is part of a plain projection.
    assert calls == (["tanh"] if name == "bias" else [])


@pytest.mark.parametrize("where", PROJECTIONS[:2])
@pytest.mark.parametrize("name", ("subclass", "instance_forward", "tensor_subclass"))
def test_other_kinds_of_projections_take_part(kernel, device, x, calls, name, where):
    host, layer = pair(kernel, GatedMLP(), device)
    torch.manual_seed(3)
    replaced(host, where, LINEAR_ADAPTERS[name]).to(device)
    torch.manual_seed(3)
    replaced(layer, where, LINEAR_ADAPTERS[name]).to(device)
    torch.testing.assert_close(torch.Tensor(layer(x)), torch.Tensor(host(x)))
    assert calls == []


@pytest.mark.parametrize("where", PARTS)
@pytest.mark.parametrize("kind", ("register_forward_hook", "register_forward_pre_hook"))
def test_hooks_come_and_go(kernel, device, x, calls, where, kind):
    """Whether a part has hooks is asked at every call."""
    host, layer = pair(kernel, GatedMLP(), device)
    plain = layer(x)
    seen = []
    handle = getattr(getattr(layer, where), kind)(lambda *_: seen.append(where))
    torch.testing.assert_close(layer(x), host(x))
    assert seen == [where] and len(calls) == 1
    handle.remove()
    assert torch.equal(layer(x), plain)
    assert seen == [where] and len(calls) == 2


def test_global_hooks_keep_firing(kernel, device, x, calls):
    host, layer = pair(kernel, GatedMLP(), device)
    seen = {}
    for module in (host, layer):
        kinds = seen[module] = []
        handle = nn.modules.module.register_module_forward_hook(lambda m, *_, kinds=kinds: kinds.append(type(m)))
        try:
            module(x)
        finally:
            handle.remove()
    assert seen[host] == seen[layer] and calls == []


def plain_tensor(linear):
    weight = linear.weight.detach() * 2
    del linear.weight
    linear.weight = weight
    return linear


def new_parameter(linear):
    linear.weight = nn.Parameter(linear.weight * 2)
    return linear


def written_in_place(linear):
    linear.weight.mul_(2)
    return linear


def plain_bias(linear):
    del linear.bias
    linear.bias = torch.linspace(-1, 1, linear.out_features, device=linear.weight.device)
    return linear


@pytest.mark.parametrize(
    "change", (plain_tensor, new_parameter, written_in_place, plain_bias), ids=lambda f: f.__name__
)
@pytest.mark.parametrize("where", PROJECTIONS)
def test_live_parameters_count(kernel, device, x, calls, change, where):
    host, layer = pair(kernel, GatedMLP(), device)
    before = layer(x)
    for module in (host, layer):
        change(getattr(module, where))
    torch.testing.assert_close(layer(x), host(x))
    assert not torch.allclose(layer(x), before) and len(calls) == 3


def test_parameters_handed_in_from_outside(kernel, device, x, calls):
    host, layer = pair(kernel, GatedMLP(), device)
    others = {name: 2 * parameter for name, parameter in host.named_parameters()}
    ours, theirs = (torch.func.functional_call(module, others, (x,)) for module in (layer, host))
    torch.testing.assert_close(ours, theirs)
    assert calls == ["tanh"]


def test_the_activation_counts_as_it_is_now(kernel, device, x, calls):
    host, layer = pair(kernel, GatedMLP(), device)
    for activation in (nn.GELU(), nn.SiLU(), nn.functional.gelu, nn.GELU(approximate="tanh")):
        for module in (host, layer):
            replaced(module, "act_fn", lambda _, activation=activation: activation)
        torch.testing.assert_close(layer(x), host(x))
    assert calls == ["none", "none", "tanh"]


@pytest.mark.parametrize("where", PARTS)
def test_an_attribute_of_the_class_hides_a_submodule(kernel, device, x, calls, where):
    """Python looks there first: the host's own forward knows what it gets."""

    class Shadowing(GatedMLP):
        pass

    hidden = GatedMLP(nn.SiLU()).to(device)
    setattr(Shadowing, where, property(lambda self: getattr(hidden, where)))
    host, layer = pair(kernel, Shadowing(), device)
    torch.testing.assert_close(layer(x), host(x))
    assert calls == []


def test_transforms_and_meta_tensors(kernel, device, x):
    """Forward mode and vmap pass through the one call; a tensor without memory does not reach it."""
    host, layer = pair(kernel, GatedMLP(), device)
    tangent = torch.randn_like(x)
    for ours, theirs in zip(*(torch.func.jvp(f, (x,), (tangent,)) for f in (layer, host)), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.func.vmap(layer)(x), torch.func.vmap(host)(x))
    assert layer.to("meta")(x.to("meta")).shape == x.shape


def test_autocast(kernel, device, x, calls):
    host, layer = pair(kernel, GatedMLP(), device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        ours, theirs = layer(x), host(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16 and calls == ["tanh"]
    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


class Marked(torch.Tensor):
    """A subclass of tensors that may compute anything."""


NOT_FUSED = {
    "a_subclass": lambda x: x.as_subclass(Marked),
    "another_dtype": lambda x: x.half(),
    "a_number": lambda x: x.sum(),
    "sparse": lambda x: x[0].to_sparse(),
    "meta": lambda x: x.to("meta"),
    "a_list": lambda x: x.tolist(),
}


def outcome(function, x):
    try:
        return function(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", NOT_FUSED)
def test_what_the_block_does_not_take_is_the_hosts_affair(kernel, device, x, name):
    """Its result if it has one, else its own error."""
    host, layer = pair(kernel, GatedMLP(), device)
    ours, theirs = (outcome(module, NOT_FUSED[name](x)) for module in (layer, host))
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs)
    else:
        assert ours == theirs


REFUSED = {
    "another_dtype": lambda weight: weight.double(),
    "integers": lambda weight: (8 * weight).int(),
    "sparse": lambda weight: weight.to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("where", PROJECTIONS)
@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_the_block_does_not_take_are_the_hosts_affair(kernel, device, x, calls, name, where):
    host, layer = pair(kernel, GatedMLP(), device)
    for module in (host, layer):
        projection = getattr(module, where)
        projection.weight = nn.Parameter(REFUSED[name](projection.weight), requires_grad=False)
    ours, theirs = outcome(layer, x), outcome(host, x)
    assert type(ours) is type(theirs) and calls == []
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs)
    else:
        assert ours == theirs


def test_rows_of_another_width(kernel, device, x):
    """What the block does take, it explains itself."""
    _, layer = pair(kernel, GatedMLP(), device)
    with pytest.raises(RuntimeError, match=r"\bgate_weight must have shape \[\w+, 128\]"):
        layer(torch.cat((x, x), -1))


def test_weights_on_two_devices(kernel, device, x, calls):
    """torch makes of that what it may."""
    _, layer = pair(kernel, GatedMLP(), device)
    layer.up_proj.to("meta")
    outcome(layer, x)
    assert calls == []
