"""Gradients of linear: values, what is asked for, what is kept, layouts, second derivatives, transforms."""

import itertools

import pytest
import reference
import torch
from reference import ACTIVATIONS, DTYPES

ACTIVATION_CASES = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
DTYPE_CASES = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NEEDS = list(itertools.product((False, True), repeat=3))
NAMES = ("grad_x", "grad_weight", "grad_bias")


def problem(lead, n, k, dtype, device, with_bias=True):
    """(grad_out, (x, weight, bias)) with pre-activations spread over both tails of GELU."""
    x, weight = torch.randn(*lead, k, device=device), 1.5 * torch.randn(n, k, device=device) / max(k, 1) ** 0.5
    bias = torch.randn(n, device=device).to(dtype) if with_bias else None
    return torch.randn(*lead, n, device=device).to(dtype), (x.to(dtype), weight.to(dtype), bias)


def grads_of(function, inputs, grad):
    leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in inputs if t is not None]
    return torch.autograd.grad(function(*leaves), leaves, grad)


@pytest.mark.parametrize("shape", [((513,), 320, 192), ((3, 129), 64, 1024), ((1,), 512, 512)], ids=str)
@pytest.mark.parametrize("with_bias", (True, False), ids=("bias", "no_bias"))
@DTYPE_CASES
@ACTIVATION_CASES
@pytest.mark.capability
def test_no_less_accurate_than_eager(kernel, device, activation, dtype, with_bias, shape):
    grad, inputs = problem(*shape, dtype, device, with_bias)
    ours = grads_of(lambda *leaves: kernel.linear(*leaves, activation=activation), inputs, grad)
    eager = reference.eager_linear_grads(grad, *inputs, activation)
    exact = reference.linear_grads(grad, *inputs, activation)
    perfect = reference.perfect_linear_grads(grad, *inputs, activation)
    for name, mine, theirs, best, truth in zip(NAMES, ours, eager, perfect, exact, strict=False):
        what = f"{name} {activation} {dtype} {shape}"
        reference.assert_linear_is_no_worse_than_eager(what, mine, theirs, best, truth)


@DTYPE_CASES
def test_bias_gradient_is_summed_in_float32(kernel, device, dtype):
    """Ones over many rows: a running sum in bfloat16 stops at 256, one in float16 at 2048."""
    rows = 4099
    x, weight = torch.zeros(rows, 8, device=device, dtype=dtype), torch.zeros(6, 8, device=device, dtype=dtype)
    for activation, slope in ((None, 1.0), ("gelu", 0.5), ("gelu_tanh", 0.5)):
        bias = torch.zeros(6, device=device, dtype=dtype, requires_grad=True)
        out = kernel.linear(x, weight, bias, activation=activation)
        (grad,) = torch.autograd.grad(out, bias, torch.ones_like(out))
        assert grad.shape == (6,) and torch.equal(grad, torch.full_like(grad, rows * slope))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
@ACTIVATION_CASES
def test_gradcheck(kernel, device, lead, activation):
    _, inputs = problem(lead, 4, 5, torch.float64, device)
    for arguments in (inputs, inputs[:2]):
        for needs in itertools.product((False, True), repeat=len(arguments)):
            if any(needs):
                leaves = [t.clone().requires_grad_(need) for t, need in zip(arguments, needs, strict=True)]
                assert torch.autograd.gradcheck(lambda *t: kernel.linear(*t, activation=activation), leaves)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
@ACTIVATION_CASES
def test_gradgradcheck(kernel, device, lead, activation):
    _, inputs = problem(lead, 4, 5, torch.float64, device)
    for arguments in (inputs, inputs[:2]):
        for needs in itertools.product((False, True), repeat=len(arguments)):
            if any(needs):
                leaves = [t.clone().requires_grad_(need) for t, need in zip(arguments, needs, strict=True)]
                assert torch.autograd.gradgradcheck(lambda *t: kernel.linear(*t, activation=activation), leaves)


@ACTIVATION_CASES
def test_third_derivative(kernel, device, activation):
    """Through the plain operations of the second, against the same of eager torch in float64."""
    _, inputs = problem((3,), 4, 5, torch.float64, device)

    def third(function):
        leaves = [t.clone().requires_grad_() for t in inputs]
        value = function(*leaves, activation).pow(3).sum()
        for _ in range(2):
            value = sum(g.square().sum() for g in torch.autograd.grad(value, leaves, create_graph=True))
        return torch.autograd.grad(value, leaves)

    ours = third(lambda x, w, b, activation: kernel.linear(x, w, b, activation=activation))
    torch.testing.assert_close(ours, third(reference.eager_linear), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("needs", NEEDS[1:], ids=str)
@DTYPE_CASES
@ACTIVATION_CASES
def test_only_what_is_asked_for(kernel, ops, device, activation, dtype, needs):
    grad, inputs = problem((7,), 24, 16, dtype, device)
    leaves = [t.clone().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
    kernel.linear(*leaves, activation=activation).backward(grad)
    everything = grads_of(lambda *t: kernel.linear(*t, activation=activation), inputs, grad)
    for leaf, need, expected in zip(leaves, needs, everything, strict=True):
        assert (leaf.grad is not None) == need
        if need:
            assert leaf.grad.shape == leaf.shape
            tolerance = 4 * torch.finfo(dtype).eps * expected.abs().max().item()
            torch.testing.assert_close(leaf.grad, expected, rtol=0, atol=tolerance)
    # The operator itself hands out nothing for what is not asked for, and takes nothing for it.
    x, weight, _ = inputs
    pre = None if activation is None else reference.preactivation(*inputs).to(dtype)
    found = ops.linear_backward(
        grad,
        x if needs[1] else None,
        weight if needs[0] else None,
        pre,
        ACTIVATIONS.index(activation),
        False,
        *needs,
    )
    for result, need, tensor in zip(found, needs, inputs, strict=True):
        assert result.shape == (tensor.shape if need else (0,)) and result.dtype == dtype


def saved_by(call):
    """Storages that autograd keeps for one call."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    return kept, out


@pytest.mark.parametrize("needs", NEEDS[1:], ids=str)
@ACTIVATION_CASES
def test_what_is_kept_for_backward(kernel, device, activation, needs):
    """x only for the weight's gradient, the weight only for x's, the pre-activation only for an activation's."""
    _, inputs = problem((7,), 24, 16, torch.float32, device)
    x, weight, bias = (t.clone().requires_grad_(need) for t, need in zip(inputs, needs, strict=True))
    kept, out = saved_by(lambda: kernel.linear(x, weight, bias, activation=activation))
    expected = 0
    for tensor, wanted in ((x, needs[1]), (weight, needs[0])):
        assert (tensor.data_ptr() in kept) == wanted
        expected += wanted
    others = [tensor for place, tensor in kept.items() if place not in (x.data_ptr(), weight.data_ptr())]
    assert len(others) == (activation is not None)
    for pre in others:
        torch.testing.assert_close(pre, reference.preactivation(*inputs).float(), rtol=1e-5, atol=1e-5)
        assert pre.data_ptr() != out.data_ptr()


def test_without_gradients_no_preactivation_is_made(kernel, ops, device, monkeypatch):
    """Also where a tensor requires a gradient but gradients are off."""
    _, (x, weight, bias) = problem((7,), 24, 16, torch.float32, device)
    kept, out = saved_by(lambda: kernel.linear(x, weight, bias, activation="gelu"))
    assert not kept and out.grad_fn is None
    with torch.no_grad():
        kept, out = saved_by(lambda: kernel.linear(x, weight.requires_grad_(), bias, activation="gelu"))
    assert not kept and out.grad_fn is None


INCOMING = {
    "dense": lambda grad: grad,
    "permuted": lambda grad: grad.permute(1, 0, 2).contiguous().permute(1, 0, 2),
    "column_major": lambda grad: grad.mT.contiguous().mT,
    "every_other_column": lambda grad: torch.stack((grad, torch.full_like(grad, float("nan"))), -1).flatten(-2)[
        ..., ::2
    ],
    "padded": lambda grad: torch.nn.functional.pad(grad, (0, 3), value=float("nan"))[..., : grad.shape[-1]],
    "offset": lambda grad: torch.cat((grad.flatten()[:1], grad.flatten()))[1:].view(grad.shape),
    "negative_bit": lambda grad: torch._neg_view(-grad),
}


@pytest.mark.parametrize("name", INCOMING)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@ACTIVATION_CASES
def test_incoming_gradient_layouts(kernel, device, activation, dtype, name):
    grad, inputs = problem((3, 8), 24, 16, dtype, device)
    strided = INCOMING[name](grad)
    assert torch.equal(strided, grad)
    ours = grads_of(lambda *t: kernel.linear(*t, activation=activation), inputs, strided)
    for mine, truth in zip(ours, reference.linear_grads(grad, *inputs, activation), strict=True):
        # Stored pre-activation, its gradient and the result, of sums of up to 24 terms.
        assert (mine.double() - truth).abs().max() <= 8 * torch.finfo(dtype).eps * truth.abs().max()


@ACTIVATION_CASES
def test_stride_zero_incoming_gradient(kernel, device, activation):
    _, inputs = problem((6,), 21, 9, torch.float32, device)
    leaves = [t.clone().requires_grad_() for t in inputs]
    kernel.linear(*leaves, activation=activation).sum().backward()
    expected = reference.linear_grads(torch.ones(6, 21, device=device), *inputs, activation)
    for leaf, truth in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad.double(), truth, rtol=1e-4, atol=1e-5)


LAYOUTS = {
    "transposed_weight": lambda x, weight, bias: (x, weight.t().contiguous().t(), bias),
    "padded_weight": lambda x, weight, bias: (x, torch.nn.functional.pad(weight, (0, 3))[:, :-3], bias),
    "transposed_x": lambda x, weight, bias: (x.mT.contiguous().mT, weight, bias),
    "swapped_x": lambda x, weight, bias: (x.transpose(0, 1).contiguous().transpose(0, 1), weight, bias),
    "expanded_bias": lambda x, weight, bias: (x, weight, bias[:1].expand(bias.shape)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@ACTIVATION_CASES
def test_input_layouts(kernel, device, activation, dtype, name):
    grad, inputs = problem((3, 8), 24, 16, dtype, device)
    inputs = LAYOUTS[name](*inputs)
    leaves = [t.detach().requires_grad_() for t in inputs]
    ours = torch.autograd.grad(kernel.linear(*leaves, activation=activation), leaves, grad)
    for mine, truth in zip(ours, reference.linear_grads(grad, *inputs, activation), strict=True):
        assert (mine.double() - truth).abs().max() <= 8 * torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("shape", [((0,), 3, 4), ((2, 0), 3, 4), ((5,), 0, 4), ((5,), 3, 0), ((0,), 0, 0)], ids=str)
@DTYPE_CASES
@ACTIVATION_CASES
def test_empty(kernel, device, activation, dtype, shape):
    """No rows: zero gradients of the parameters. No products: the bias alone has a gradient."""
    grad, inputs = problem(*shape, dtype, device)
    ours = grads_of(lambda *t: kernel.linear(*t, activation=activation), inputs, grad)
    for mine, tensor, truth in zip(ours, inputs, reference.linear_grads(grad, *inputs, activation), strict=True):
        assert mine.shape == tensor.shape and mine.dtype == dtype
        torch.testing.assert_close(mine.double(), truth, rtol=4 * torch.finfo(dtype).eps, atol=1e-2)
        assert truth.any() or not mine.any()


@DTYPE_CASES
@ACTIVATION_CASES
def test_backward_leaves_everything_alone_and_runs_twice(kernel, device, activation, dtype):
    grad, inputs = problem((5,), 33, 17, dtype, device)
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = kernel.linear(*leaves, activation=activation)
    kept = out.detach().clone()
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    again = torch.autograd.grad(out, leaves, grad)
    for mine, theirs in zip(first, again, strict=True):
        reference.assert_same_bits(mine, theirs)
    assert torch.equal(out, kept)
    assert all(torch.equal(leaf, tensor) for leaf, tensor in zip(leaves, inputs, strict=True))


@ACTIVATION_CASES
def test_training_forward_equals_inference_forward(kernel, device, activation):
    for dtype in DTYPES:
        _, inputs = problem((64,), 96, 48, dtype, device)
        leaves = [t.clone().requires_grad_() for t in inputs]
        with torch.no_grad():
            bare = kernel.linear(*leaves, activation=activation)
        tracked = kernel.linear(*leaves, activation=activation)
        assert tracked.requires_grad
        for result in (bare, tracked.detach()):
            reference.assert_linear_is_accurate(result, *inputs, activation)


def test_an_overwritten_weight_is_noticed(kernel, device):
    _, (x, weight, bias) = problem((5,), 6, 7, torch.float32, device)
    out = kernel.linear(x.requires_grad_(), weight, bias, activation="gelu")
    weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
