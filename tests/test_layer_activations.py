"""Which activation a layer takes from the live module, and that anything but GELU stays the host's affair."""

import copy

import hosts
import pytest
import torch
from hosts import GatedMLP, assert_same_block, count_calls, pair, stand_in
from torch import nn

LAYERS = pytest.mark.parametrize("layer_name", ("GeGLUMLP", "LigerGEGLUMLP", "LigerTiledGEGLUMLP"))


@pytest.fixture
def x(device):
    return torch.randn(2, 5, hosts.HIDDEN, device=device)


# transformers' names -> the form that is fused, None where the host's own arithmetic must run. gelu_new and gelu_fast
# write the tanh form out in single operations; fusing them is allowed, not required.
ACTIVATIONS = {
    "silu": None,
    "relu": None,
    "quick_gelu": None,
    "gelu_10": None,
    "mish": None,
    "linear": None,
    "gelu": "none",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "either",
    "gelu_fast": "either",
    "gelu_python": "either",
    "gelu_accurate": "either",
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("model", ("gemma", "gemma3", "gemma4"))
def test_activation_table(kernel, device, x, monkeypatch, model, name):
    """The live act_fn decides, whatever the config says elsewhere."""
    config = type(hosts.MODELS[model]().config)(**hosts.SIZES, hidden_activation=name, hidden_act=name)
    mlp = hosts.mlp_classes()[model]
    host = mlp(config, layer_idx=0) if model == "gemma4" else mlp(config)
    if name == "gelu_10":
        # Its forward calls a module-level gelu with transformers' exact form; large gates show the clip.
        host.gate_proj.weight.data.mul_(60)
    calls = count_calls(monkeypatch, kernel)
    host, layer = pair(kernel, host, device)
    assert_same_block(layer, host, x)
    expected = ACTIVATIONS[name]
    if (model, name) == ("gemma", "gelu"):
        # In a Gemma config a legacy spelling of the tanh form, which newer releases of transformers build.
        expected = "tanh" if type(host.act_fn).__name__ == "GELUTanh" else "none"
    if expected is None:
        assert calls == []
    elif expected != "either":
        assert calls == [expected]


@pytest.mark.parametrize(
    ("act_fn", "form"),
    [
        (nn.GELU(), "none"),
        (nn.GELU(approximate="tanh"), "tanh"),
        (nn.functional.gelu, "none"),
        (nn.SiLU(), None),
        (torch.tanh, None),
        (lambda t: nn.functional.gelu(t) + 1, None),
        # A subclass may do anything.
        (type("Shifted", (nn.GELU,), {"forward": lambda self, t: nn.functional.gelu(t) + 1})(), None),
        (nn.Sequential(nn.GELU(), nn.Dropout(0.0)), None),
    ],
    ids=("gelu", "gelu_tanh", "function", "silu", "tanh", "lambda", "subclass", "sequential"),
)
@LAYERS
def test_plain_activations(kernel, device, x, monkeypatch, layer_name, act_fn, form):
    calls = count_calls(monkeypatch, kernel)
    host, layer = pair(kernel, GatedMLP(act_fn), device, layer_name)
    assert_same_block(layer, host, x)
    assert calls == ([] if form is None else [form])


def test_form_follows_the_module_at_run_time(kernel, device, x):
    host, layer = pair(kernel, GatedMLP(nn.GELU()), device)
    for act_fn in (nn.GELU(approximate="tanh"), nn.SiLU(), nn.GELU()):
        host.act_fn = layer.act_fn = act_fn
        assert_same_block(layer, host, x)


def test_patched_instance_activation_is_not_fused(kernel, device, x):
    """Somebody replaced the activation's forward on the instance, as quantizers and tracers do."""
    act_fn = nn.GELU(approximate="tanh")
    act_fn.forward = lambda t: torch.zeros_like(t)
    layer = stand_in(GatedMLP(act_fn).to(device), kernel.layers.GeGLUMLP)
    assert (layer(x) == 0).all()


@LAYERS
def test_liger_block_has_no_act_fn_and_is_tanh(kernel, device, x, monkeypatch, layer_name):
    """liger-kernel's own class, by name; its forward calls a fused function instead of an act_fn."""

    def forward(self, x):
        activated = nn.functional.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(activated * self.up_proj(x))

    liger_name = "LigerGEGLUMLP" if layer_name == "GeGLUMLP" else layer_name
    host = type(liger_name, (GatedMLP,), {"forward": forward})()
    del host.act_fn
    calls = count_calls(monkeypatch, kernel)
    host.to(device)
    layer = stand_in(copy.copy(host), getattr(kernel.layers, layer_name))
    torch.testing.assert_close(layer(x), type(host).forward(host, x))
    assert calls == ["tanh"]


def test_the_reason_is_logged_once_for_a_class_and_activation(kernel, device, x, caplog):
    class Block(GatedMLP):
        """A class that no other test has made the package report."""

    blocks = [Block(activation).to(device) for activation in (nn.SiLU(), nn.SiLU(), nn.Mish())]
    with caplog.at_level("INFO", logger="geglu"):
        for block in blocks:
            torch.testing.assert_close(kernel.layers.GeGLUMLP.forward(block, x), block(x))
    assert [record.getMessage().split(": ")[1] for record in caplog.records if record.name == "geglu"] == [
        "its activation SiLU() is not plain GELU",
        "its activation Mish() is not plain GELU",
    ]
