"""Layers for the plain GELU blocks: fused where the host has plain parts, the host's own arithmetic elsewhere."""

import copy
import functools
import importlib

import hosts
import package
import pytest
import torch
from hosts import Doubled, LoRA, assert_same_block, stand_in
from kernels import (
    KernelizeFallback,
    LocalLayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

HIDDEN, INTERMEDIATE = hosts.HIDDEN, hosts.INTERMEDIATE
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": 4}


def siglip(act):
    from transformers import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipMLP

    return SiglipMLP(SiglipVisionConfig(**SIZES, hidden_act=act))


def clip(act):
    from transformers import CLIPVisionConfig
    from transformers.models.clip.modeling_clip import CLIPMLP

    return CLIPMLP(CLIPVisionConfig(**SIZES, hidden_act=act))


def vit(act):
    from transformers import ViTConfig
    from transformers.models.vit.modeling_vit import ViTMLP

    return ViTMLP(ViTConfig(**SIZES, hidden_act=act))


def bert(act):
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertIntermediate

    return BertIntermediate(BertConfig(**SIZES, hidden_act=act))


def gpt2(act):
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    config = GPT2Config(n_embd=HIDDEN, n_inner=INTERMEDIATE, activation_function=act, resid_pdrop=0.0)
    host = GPT2MLP(INTERMEDIATE, config)
    nn.init.normal_(host.c_fc.bias)
    return host


# name -> (how the host is made, the layer, the part that is fused, the activation's name)
HOSTS = {
    "siglip": (siglip, "GELUMLP", "fc1", "activation_fn"),
    "clip": (clip, "GELUMLP", "fc1", "activation_fn"),
    "vit": (vit, "GELUMLP", "fc1", "activation_fn"),
    "bert": (bert, "GELUIntermediate", "dense", "intermediate_act_fn"),
    "gpt2": (gpt2, "GELUConv1DMLP", "c_fc", "act"),
}
HOST_CASES = pytest.mark.parametrize("name", HOSTS)


@pytest.fixture
def x(device):
    return torch.randn(2, 5, HIDDEN, device=device)


@pytest.fixture
def calls(kernel, monkeypatch):
    """The activations of the calls that reach the fused function from the layers."""
    blocks = importlib.import_module(kernel.layers.gelu_mlp.__module__)
    seen = []
    real = blocks.linear

    def spy(x, weight, bias=None, *, activation=None):
        seen.append(activation)
        return real(x, weight, bias, activation=activation)

    monkeypatch.setattr(blocks, "linear", spy)
    return seen


def pair(kernel, name, device, act="gelu", change=None):
    """(the host, a copy of it with the layer's forward); weights large enough for both tails of GELU."""
    make, layer, projection, _ = HOSTS[name]
    host = make(act)
    with torch.no_grad():
        getattr(host, projection).weight.mul_(8)
    other = copy.deepcopy(host)
    for module in (host, other):
        if change is not None:
            torch.manual_seed(11)
            change(module)
    return host.to(device), stand_in(other.to(device), getattr(kernel.layers, layer))


# transformers' names -> the activation that is fused, None where the host's own arithmetic must run.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "quick_gelu": None,
    "gelu_10": None,
    "relu": None,
    "silu": None,
    "linear": None,
}


@pytest.mark.parametrize("act", ACTIVATIONS)
@HOST_CASES
def test_activation_table(kernel, device, x, calls, name, act):
    host, layer = pair(kernel, name, device, act)
    assert_same_block(layer, host, x)
    expected = ACTIVATIONS[act]
    assert calls == ([] if expected is None else [expected])


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16, torch.bfloat16), ids=str)
@HOST_CASES
def test_dtypes(kernel, device, x, calls, name, dtype):
    host, layer = pair(kernel, name, device)
    host, layer = host.to(dtype), layer.to(dtype)
    out, expected = layer(x.to(dtype)), host(x.to(dtype))
    assert out.dtype == dtype and calls == ["gelu"]
    exact = copy.deepcopy(host).double()(x.to(dtype).double())
    allowed = 2 * (expected - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert (out - expected).abs().max() <= allowed


@HOST_CASES
def test_form_follows_the_module_at_run_time(kernel, device, x, calls, name):
    host, layer = pair(kernel, name, device)
    for act_fn in (nn.GELU(approximate="tanh"), nn.SiLU(), nn.GELU(), nn.functional.gelu):
        for module in (host, layer):
            # A function cannot take the place of a submodule.
            delattr(module, HOSTS[name][3])
            setattr(module, HOSTS[name][3], act_fn)
        assert_same_block(layer, host, x)
    assert calls == ["gelu_tanh", "gelu", "gelu"]


@HOST_CASES
@pytest.mark.parametrize("where", ("projection", "activation"))
@pytest.mark.parametrize("kind", ("forward", "pre", "backward"))
def test_hooks_keep_firing(kernel, device, x, calls, name, where, kind):
    host, layer = pair(kernel, name, device)
    counts = {}
    for who, module in (("host", host), ("layer", layer)):
        hosts.count_hook(getattr(module, HOSTS[name][2 if where == "projection" else 3]), kind, counts, who)
        module(x.clone().requires_grad_()).sum().backward()
    assert counts == {"host": 1, "layer": 1} and calls == []


@HOST_CASES
def test_global_hooks_keep_firing(kernel, device, x, calls, name):
    host, layer = pair(kernel, name, device)
    seen = {"host": [], "layer": []}
    for who, module in (("host", host), ("layer", layer)):
        handle = nn.modules.module.register_module_forward_hook(lambda m, *_, who=who: seen[who].append(type(m)))
        try:
            module(x)
        finally:
            handle.remove()
    assert seen["host"] == seen["layer"] and calls == []


class Subclass(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class Marked(torch.Tensor):
    """Stands for a quantized or sharded weight: a subclass that may compute anything."""


def instance_forward(linear):
    original = linear.forward
    linear.forward = lambda x: original(x) * 3
    return linear


def marked_weight(linear):
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Marked))
    return linear


ADAPTERS = {
    "lora": LoRA,
    "weight_norm": parametrizations.weight_norm,
    "parametrize": lambda linear: (parametrize.register_parametrization(linear, "weight", Doubled()), linear)[1],
    "subclass": lambda linear: Subclass(HIDDEN, INTERMEDIATE),
    "instance_forward": instance_forward,
    "sequential": lambda linear: nn.Sequential(linear, nn.Dropout(0.0)),
    "tensor_subclass": marked_weight,
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@HOST_CASES
def test_adapters_take_part(kernel, device, x, calls, name, adapter):
    def change(host):
        projection = HOSTS[name][2]
        setattr(host, projection, ADAPTERS[adapter](getattr(host, projection)))

    host, layer = pair(kernel, name, device, change=change)
    torch.testing.assert_close(layer(x).as_subclass(torch.Tensor), host(x).as_subclass(torch.Tensor))
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert calls == []


@HOST_CASES
def test_without_a_bias(kernel, device, x, calls, name):
    if name == "gpt2":
        pytest.skip("Conv1D always has one")

    def change(host):
        setattr(host, HOSTS[name][2], nn.Linear(HIDDEN, INTERMEDIATE, bias=False))

    host, layer = pair(kernel, name, device, change=change)
    assert_same_block(layer, host, x)
    assert calls == ["gelu"]


@HOST_CASES
def test_mixed_dtypes_are_the_hosts_affair(kernel, device, x, calls, name):
    """The host's own error outside autocast, and under autocast its own result."""
    host, layer = pair(kernel, name, device)
    host, layer = host.bfloat16(), layer.bfloat16()
    with pytest.raises(RuntimeError) as expected:
        host(x)
    with pytest.raises(RuntimeError) as found:
        layer(x)
    assert str(found.value) == str(expected.value) and calls == []
    with torch.autocast(device.type, dtype=torch.bfloat16):
        torch.testing.assert_close(layer(x), host(x), rtol=2e-2, atol=2e-2)
    assert calls == ["gelu"]


def test_conv1d_weight_is_not_copied(kernel, device, x, calls, monkeypatch):
    """The (in, out) weight reaches the operator as a view."""
    _, layer = pair(kernel, "gpt2", device)
    blocks = importlib.import_module(kernel.layers.gelu_mlp.__module__)
    spied, seen = blocks.linear, []

    def spy(x, weight, bias=None, *, activation=None):
        seen.append(weight)
        return spied(x, weight, bias, activation=activation)

    monkeypatch.setattr(blocks, "linear", spy)
    layer(x)
    (weight,) = seen
    assert weight.data_ptr() == layer.c_fc.weight.data_ptr() and weight.shape == (INTERMEDIATE, HIDDEN)


def test_gpt2_dropout_stays(kernel, device, x):
    host, layer = pair(kernel, "gpt2", device, change=lambda host: setattr(host, "dropout", nn.Dropout(0.5)))
    for training in (True, False):
        results = []
        for module in (host.train(training), layer.train(training)):
            torch.manual_seed(3)
            results.append(module(x))
        torch.testing.assert_close(*results)


# Blocks with the same parts that compute something else with them.
OTHER = {
    "residual": "x + self.fc2(self.activation_fn(self.fc1(x)))",
    "doubled": "self.fc2(self.activation_fn(self.fc1(x)) * 2)",
    "clamped": "self.fc2(self.activation_fn(self.fc1(x)).clamp(max=0.1))",
    "activated_last": "self.activation_fn(self.fc2(self.fc1(x)))",
    "activated_twice": "self.fc2(self.activation_fn(self.activation_fn(self.fc1(x))))",
    "activated_first": "self.fc2(self.fc1(self.activation_fn(x)))",
    "no_activation": "self.fc2(self.fc1(x))",
    "squared": "self.fc2(self.activation_fn(self.fc1(x)) * self.activation_fn(self.fc1(x)))",
    "self_gated": "self.fc2(self.activation_fn(self.fc1(x)) * self.fc1(x))",
}


@pytest.mark.parametrize("name", OTHER)
def test_blocks_that_compute_something_else(kernel, device, x, calls, name):
    scope = {}
    exec(f"def forward(self, x):\n    return {OTHER[name]}", scope)
    host = siglip("gelu")
    host.__class__ = type("Other", (type(host),), {"forward": scope["forward"]})
    host = host.to(device)
    layer = stand_in(copy.deepcopy(host), kernel.layers.GELUMLP)
    torch.testing.assert_close(layer(x), type(host).forward(host, x))
    assert calls == []


@HOST_CASES
def test_a_layer_on_another_kind_of_host_is_that_host(kernel, device, x, calls, name):
    """Mapped to the wrong class, every layer leaves it as it is."""
    host, _ = pair(kernel, name, device)
    for layer in {layer for _, layer, _, _ in HOSTS.values()} - {HOSTS[name][1]}:
        other = stand_in(copy.deepcopy(host), getattr(kernel.layers, layer))
        torch.testing.assert_close(other(x), host(x))
    assert calls == []


@HOST_CASES
def test_layer_used_as_a_module(kernel, device, x, calls, name):
    host, _ = pair(kernel, name, device)
    layer = getattr(kernel.layers, HOSTS[name][1])()
    for part, module in host.named_children():
        setattr(layer, part, module)
    torch.testing.assert_close(layer(x), host(x))
    assert calls == ["gelu"]


@HOST_CASES
def test_compiled(kernel, device, x, name):
    host, layer = pair(kernel, name, device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (5, 9, 17):
        inputs = torch.randn(2, rows, HIDDEN, device=device)
        torch.testing.assert_close(compiled(inputs), host(inputs), rtol=1e-4, atol=1e-4)
    compiled(x).square().sum().backward()
    host(x).square().sum().backward()
    for mine, theirs in zip(layer.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)
    torch._dynamo.reset()


# ---- whole models ----


def vision(kind):
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES, num_hidden_layers=2, image_size=16, patch_size=8)
    return getattr(transformers, f"{kind}Model")(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def text(kind):
    import transformers

    if kind == "GPT2":
        config = transformers.GPT2Config(n_embd=HIDDEN, n_layer=2, n_head=4, vocab_size=128, n_positions=32)
    else:
        config = transformers.BertConfig(**SIZES, num_hidden_layers=2, vocab_size=128)
    return getattr(transformers, f"{kind}Model")(config), {"input_ids": torch.randint(0, 128, (2, 12))}


MODELS = {
    "siglip": functools.partial(vision, "SiglipVision"),
    "clip": functools.partial(vision, "CLIPVision"),
    "vit": functools.partial(vision, "ViT"),
    "bert": functools.partial(text, "Bert"),
    "gpt2": functools.partial(text, "GPT2"),
}


@pytest.mark.parametrize("mode", (Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(kernel, device, monkeypatch, name, mode):
    make, layer, _, _ = HOSTS[name]
    kind = type(make("gelu"))
    monkeypatch.setattr("kernels.layer.layer._CACHED_LAYER", {})
    for attribute in ("kernel_layer_name", "kernel_condition"):
        monkeypatch.setattr(kind, attribute, None, raising=False)
    replace_kernel_forward_from_hub(kind, layer)
    model, inputs = MODELS[name]()
    model = model.to(device).eval()
    inputs = {key: value.to(device) for key, value in inputs.items()}
    eager = model(**inputs).last_hidden_state
    exact = (
        copy.deepcopy(model)
        .double()(**{key: value.double() if value.is_floating_point() else value for key, value in inputs.items()})
        .last_hidden_state
    )
    repository = LocalLayerRepository(package.repository(), layer_name=layer)
    with use_kernel_mapping({layer: {device.type: repository}}, inherit_mapping=False):
        model = kernelize(model, mode=mode, device=device, use_fallback=KernelizeFallback.NO_LAYER)
    ours = model.eval()(**inputs).last_hidden_state
    # Loaded anew, so by its module's name. CLIP's default is quick_gelu: the layer runs, and keeps the host's own.
    functions = [getattr(module.forward, "__func__", None) for module in model.modules()]
    replaced = sum(getattr(f, "__module__", None) == f"{kernel.__name__}.layers" for f in functions)
    assert replaced == sum(type(module) is kind for module in model.modules()) >= 2
    allowed = 2 * (eager - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (ours - eager).abs().max() <= allowed


def test_the_table_knows_transformers_names():
    assert set(ACTIVATIONS) <= set(ACT2FN)
    assert isinstance(gpt2("gelu").c_fc, Conv1D)
