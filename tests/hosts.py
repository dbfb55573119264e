"""Modules that a layer may be asked to stand in for: small gated blocks, and transformers' own with tiny sizes."""

import copy
import importlib

import torch
from torch import nn

HIDDEN, INTERMEDIATE = 64, 96

SIZES = {
    "vocab_size": 128,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


class GatedMLP(nn.Module):
    """The block of the Gemma family, with an activation of choice."""

    def __init__(self, act_fn=None, hidden=HIDDEN, intermediate=INTERMEDIATE):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.act_fn = nn.GELU(approximate="tanh") if act_fn is None else act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def stand_in(module, layer):
    """Puts the layer's forward into the module, as `kernelize` does."""
    module.forward = layer.forward.__get__(module)
    return module


def gemma():
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**SIZES, hidden_act="gelu_pytorch_tanh"))


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES))


def gemma3():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES))


def gemma4():
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    per_layer = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
    return Gemma4ForCausalLM(Gemma4TextConfig(**SIZES, **per_layer))


def mlp_classes():
    """{model: (the class of its block, the config field that names the activation)}."""
    from transformers.models.gemma.modeling_gemma import GemmaMLP
    from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextMLP

    return {"gemma": GemmaMLP, "gemma2": Gemma2MLP, "gemma3": Gemma3MLP, "gemma4": Gemma4TextMLP}


MODELS = {"gemma": gemma, "gemma2": gemma2, "gemma3": gemma3, "gemma4": gemma4}


def build(name, device, dtype=torch.float32):
    """A randomly initialised model in eval mode with a spread of activations: small weights would hide the GELU."""
    model = MODELS[name]().to(device, dtype).eval()
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "gate_proj"):
                module.gate_proj.weight.mul_(20)
    return model


def pair(kernel, host, device, layer_name="GeGLUMLP"):
    """(the host, a copy of it with the layer's forward)."""
    host = host.to(device)
    return host, stand_in(copy.deepcopy(host), getattr(kernel.layers, layer_name))


def assert_same_block(layer, host, x):
    """Outputs and all gradients, against eager's own distance from the same block in float64."""
    results = []
    for module, inputs in ((layer, x), (host, x), (copy.deepcopy(host).double(), x.double())):
        leaf = inputs.clone().requires_grad_()
        module.zero_grad()
        out = module(leaf)
        out.square().sum().backward()
        results.append([out.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    for mine, theirs, truth in zip(*results, strict=True):
        assert mine is not None and mine.dtype == theirs.dtype
        # Ours no worse than eager: at most twice eager's error apart. And an eps of the largest for each of the up to
        # eight stored tensors of the chain, where eager happens to be lucky.
        allowed = 2 * (theirs - truth).abs().max() + 8 * torch.finfo(theirs.dtype).eps * truth.abs().max()
        assert (mine - theirs).abs().max() <= allowed


class LoRA(nn.Module):
    """A linear layer with a low-rank adapter beside it, wrapped as PEFT does; B is not zero."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        # transformers' Conv1D has no such names, and keeps its weight as (in, out).
        inputs, outputs = (
            (base.in_features, base.out_features) if isinstance(base, nn.Linear) else tuple(base.weight.shape)
        )
        self.lora_A = nn.Linear(inputs, 4, bias=False)
        self.lora_B = nn.Linear(4, outputs, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def count_calls(monkeypatch, kernel):
    """Counts what reaches the fused function from the layers' module."""
    blocks = importlib.import_module(kernel.layers.gated_mlp.__module__)
    calls = []
    real = blocks.geglu

    def spy(gate, up, *, approximate):
        calls.append(approximate)
        return real(gate, up, approximate=approximate)

    monkeypatch.setattr(blocks, "geglu", spy)
    return calls


def count_hook(part: nn.Module, kind: str, counts: dict[str, int], who: str) -> None:
    """Counts in counts[who] how often a hook of this kind ("forward", "pre" or "backward") fires on a module."""

    def hook(*_):
        counts[who] = counts.get(who, 0) + 1

    register = {
        "forward": part.register_forward_hook,
        "pre": part.register_forward_pre_hook,
        "backward": part.register_full_backward_hook,
    }
    register[kind](hook)
