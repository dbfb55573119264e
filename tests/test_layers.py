"""kernelize on whole models: the block is really replaced, the numbers stay, and so does everything around it."""

import copy
import pickle

import hosts
import package
import pytest
import reference
import torch
from calls import Calls
from hosts import MODELS
from kernels import (
    KernelizeFallback,
    LocalLayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import nn

LAYERS = ("GeGLUMLP", "LigerGEGLUMLP", "LigerTiledGEGLUMLP")
LINEAR_LAYERS = ("GELUMLP", "GELUIntermediate", "GELUConv1DMLP")
MODES = (
    Mode.INFERENCE,
    Mode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE,
)
# Only the layers without any mapping (norms, activations, rotary embeddings) may keep their own forward.
STRICT = KernelizeFallback.NO_LAYER


@pytest.fixture
def attach(monkeypatch):
    """attach(cls, layer_name): makes a class known to kernelize for this test only, validated anew."""
    monkeypatch.setattr("kernels.layer.layer._CACHED_LAYER", {})

    def attach(cls, layer_name):
        for attribute in ("kernel_layer_name", "kernel_condition"):
            monkeypatch.setattr(cls, attribute, None, raising=False)
        replace_kernel_forward_from_hub(cls, layer_name)

    return attach


def apply(model, device, mode=Mode.INFERENCE, layer_name="GeGLUMLP", fallback=STRICT):
    repository = LocalLayerRepository(package.repository(), layer_name=layer_name)
    with use_kernel_mapping({layer_name: {device.type: repository}}, inherit_mapping=False):
        return kernelize(model, mode=mode, device=device, use_fallback=fallback)


def replaced(kernel, model):
    """How many modules run a forward that this package defines."""
    functions = [getattr(module.forward, "__func__", None) for module in model.modules()]
    return sum(getattr(f, "__module__", None) == f"{kernel.__name__}.layers" for f in functions)


def kernel_calls(kernel, run):
    """How many of this build's operators a function calls: a replaced forward may still run the host's arithmetic."""
    with Calls() as calls:
        run()
    return sum(func.namespace == kernel.__name__ for func in calls.seen)


def tokens(device):
    return torch.randint(0, hosts.SIZES["vocab_size"], (2, 12), device=device)


@pytest.mark.parametrize("name", MODELS)
def test_model(kernel, device, attach, name):
    attach(hosts.mlp_classes()[name], "GeGLUMLP")
    model, inputs = hosts.build(name, device), tokens(device)
    with torch.no_grad():
        eager = model(inputs).logits
        exact = copy.deepcopy(model).double()(inputs).logits
        assert replaced(kernel, model) == 0
        model = apply(model, device)
        assert replaced(kernel, model) == hosts.SIZES["num_hidden_layers"]
        ours = model(inputs).logits
        assert kernel_calls(kernel, lambda: model(inputs)) == hosts.SIZES["num_hidden_layers"]
    # If our error is no larger than eager's, the two are at most twice that apart.
    assert (ours - eager).abs().max() <= 2 * (eager - exact).abs().max()
    # The form matters at this spread of activations: the other one would not pass.
    for module in model.modules():
        if hasattr(module, "gate_proj"):
            module.act_fn = nn.GELU()
    with torch.no_grad():
        other = model(inputs).logits
    assert (other - exact).abs().max() > 10 * (eager - exact).abs().max()


@pytest.mark.parametrize("dtype", reference.HALVES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_model_in_half_precision_keeps_its_bits(kernel, device, attach, name, dtype):
    """Where gradients are asked for, and so every projection is rounded as in eager."""
    attach(hosts.mlp_classes()[name], "GeGLUMLP")
    model, inputs = hosts.build(name, device, dtype), tokens(device)
    eager = model(inputs).logits
    ours = apply(model, device)(inputs).logits
    assert ours.dtype == eager.dtype
    # Nearly all activations have eager's bits; one that differs moves few logits by a few steps.
    scale = eager.double().abs().max()
    assert (ours.double() - eager.double()).abs().max() <= 4 * torch.finfo(dtype).eps * scale
    assert torch.equal(ours.argmax(-1), eager.argmax(-1))


@pytest.mark.parametrize("dtype", reference.HALVES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_model_in_half_precision_is_as_accurate(kernel, device, attach, name, dtype):
    """Without gradients the whole block is one call, which rounds less often than eager does."""
    attach(hosts.mlp_classes()[name], "GeGLUMLP")
    model, inputs = hosts.build(name, device, dtype), tokens(device)
    with torch.no_grad():
        eager = model(inputs).logits
        exact = copy.deepcopy(model).double()(inputs).logits
        ours = apply(model, device)(inputs).logits
    # The rest of the model makes most of the error, by chance a little more or less than eager's.
    assert (ours - exact).square().mean().sqrt() <= 1.25 * (eager - exact).square().mean().sqrt()


@pytest.mark.parametrize("name", ("gemma", "gemma3"))
def test_every_weight_gets_eagers_gradient(kernel, device, attach, name):
    attach(hosts.mlp_classes()[name], "GeGLUMLP")
    model, inputs = hosts.build(name, device).train(), tokens(device)
    exact = copy.deepcopy(model).double()
    eager = copy.deepcopy(model)
    ours = apply(model, device, Mode.TRAINING)
    assert replaced(kernel, ours) == 2
    for candidate in (exact, eager, ours):
        candidate(inputs, labels=inputs).loss.backward()
    for (parameter, mine), theirs, truth in zip(
        ours.named_parameters(), eager.parameters(), exact.parameters(), strict=True
    ):
        assert mine.grad is not None and mine.grad.abs().max() > 0, parameter
        # Ours within eager's error, so at most twice that apart; plus one eps where eager happens to be exact.
        allowed = 2 * (theirs.grad - truth.grad).abs().max() + 1e-6 * truth.grad.abs().max()
        assert (mine.grad - theirs.grad).abs().max() <= allowed, parameter


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("layer_name", LAYERS)
def test_every_mode_without_any_fallback(kernel, device, attach, layer_name, mode):
    """kernels' own validation of purity, signature, backward and compile support, with nothing to fall back to."""

    class Host(hosts.GatedMLP):
        pass

    Host.forward = hosts.GatedMLP.forward
    attach(Host, layer_name)
    model = nn.Sequential(Host(), Host()).to(device)
    x = torch.randn(3, hosts.HIDDEN, device=device)
    eager = model(x)
    model = apply(model, device, mode, layer_name, KernelizeFallback.NONE)
    assert replaced(kernel, model) == 2
    torch.testing.assert_close(model(x), eager)


@pytest.mark.parametrize("layer_name", ("GeluAndMul", "GeluTanhAndMul"))
def test_packed_activation_layers(kernel, device, attach, layer_name):
    approximate = "none" if layer_name == "GeluAndMul" else "tanh"

    class Activation(nn.Module):
        def forward(self, x):
            gate, up = x.chunk(2, dim=-1)
            return nn.functional.gelu(gate, approximate=approximate) * up

    attach(Activation, layer_name)
    for mode in MODES:
        model = apply(nn.Sequential(Activation()), device, mode, layer_name, KernelizeFallback.NONE)
        assert replaced(kernel, model) == 1
        x = torch.randn(3, 4, 34, dtype=torch.float64, device=device, requires_grad=True)
        torch.testing.assert_close(model(x), Activation()(x))
        (grad,) = torch.autograd.grad(model(x).sum(), x)
        torch.testing.assert_close(grad, torch.autograd.grad(Activation()(x).sum(), x)[0])


def test_layer_classes_are_pure(kernel):
    classes = {name: cls for name, cls in vars(kernel.layers).items() if isinstance(cls, type)}
    own = {name for name, cls in classes.items() if cls.__module__ == kernel.layers.__name__}
    assert own == {*LAYERS, *LINEAR_LAYERS, "GeluAndMul", "GeluTanhAndMul"}
    for name in own:
        added = set(vars(classes[name])) - set(vars(nn.Module)) - {"__firstlineno__", "__static_attributes__"}
        assert added == {"has_backward", "can_torch_compile"}, name
        assert classes[name].has_backward is True and classes[name].can_torch_compile is True


def test_train_eval_and_kernelizing_again(kernel, device, attach):
    attach(hosts.mlp_classes()["gemma3"], "GeGLUMLP")
    model, inputs = hosts.build("gemma3", device), tokens(device)
    with torch.no_grad():
        eager = model(inputs).logits
        for mode in (Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.INFERENCE):
            model.train(Mode.TRAINING in mode)
            model = apply(model, device, mode)
            assert replaced(kernel, model) == 2
            torch.testing.assert_close(model.eval()(inputs).logits, eager)


def test_transformers_own_switch(kernel, device, attach, monkeypatch):
    """`model.use_kernels = True` picks the registered mapping; train() and eval() kernelize for their mode."""
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip("this transformers goes with another release of kernels")
    # Its own mapping, which it adds, has other layers of the model for a GPU: on the Hub.
    monkeypatch.setattr("transformers.integrations.hub_kernels._KERNEL_MAPPING_CACHE", {})
    attach(hosts.mlp_classes()["gemma3"], "GeGLUMLP")
    model = hosts.build("gemma3", device)
    repository = LocalLayerRepository(package.repository(), layer_name="GeGLUMLP")
    with use_kernel_mapping({"GeGLUMLP": {device.type: repository}}, inherit_mapping=False):
        model.use_kernels = True
        assert replaced(kernel, model) == 2
        model.train()
        assert replaced(kernel, model) == 2
        model.eval()
        assert replaced(kernel, model) == 2


def test_state_copies_and_pickles_are_unchanged(kernel, device, attach):
    class_ = hosts.mlp_classes()["gemma3"]
    attach(class_, "GeGLUMLP")
    model, inputs = hosts.build("gemma3", device), tokens(device)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = apply(model, device)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        expected = model(inputs).logits
        clone = copy.deepcopy(model)
        # The copy stands on its own weights.
        model.model.layers[0].mlp.down_proj.weight.zero_()
        torch.testing.assert_close(clone(inputs).logits, expected)
        assert not torch.allclose(model(inputs).logits, expected)
        # The whole model does not pickle, with or without us; its block does.
        block = clone.model.layers[0].mlp
        x = torch.randn(2, hosts.HIDDEN, device=device)
        torch.testing.assert_close(pickle.loads(pickle.dumps(block))(x), block(x))


def test_copy_runs_on_its_own_weights(kernel, device):
    """A bound forward would drag the first module's weights into the copy."""
    first = hosts.stand_in(hosts.GatedMLP().to(device), kernel.layers.GeGLUMLP)
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.down_proj.weight.zero_()
    x = torch.randn(2, hosts.HIDDEN, device=device)
    assert (second(x) == 0).all() and (first(x) != 0).any()


def test_generation_is_the_same(kernel, device, attach):
    attach(hosts.mlp_classes()["gemma3"], "GeGLUMLP")
    model, inputs = hosts.build("gemma3", device), tokens(device)
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    eager = model.generate(inputs, **arguments)
    model = apply(model, device)
    assert replaced(kernel, model) == 2
    assert torch.equal(model.generate(inputs, **arguments), eager)
