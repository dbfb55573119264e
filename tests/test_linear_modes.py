"""Gradients of linear under checkpointing, autocast, vmap, functional transforms and forward mode."""

import pytest
import reference
import torch
from test_linear_backward import ACTIVATION_CASES, grads_of, problem
from torch.utils.checkpoint import checkpoint


@ACTIVATION_CASES
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing(kernel, device, activation, reentrant):
    grad, inputs = problem((5,), 6, 7, torch.float32, device)

    def plain(*leaves):
        return kernel.linear(*leaves, activation=activation)

    def checkpointed(*leaves):
        return checkpoint(plain, *leaves, use_reentrant=reentrant)

    leaves = [t.clone().requires_grad_() for t in inputs]
    checkpointed(*leaves).backward(grad)
    for leaf, theirs in zip(leaves, grads_of(plain, inputs, grad), strict=True):
        reference.assert_same_bits(leaf.grad, theirs)


@ACTIVATION_CASES
def test_backward_inside_autocast(kernel, device, activation):
    """Gradients of a float32 forward stay float32 when backward runs where autocast is on."""
    grad, inputs = problem((5,), 6, 7, torch.float32, device)
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = kernel.linear(*leaves, activation=activation)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        ours = torch.autograd.grad(out, leaves, grad)
    for mine, truth in zip(ours, reference.linear_grads(grad, *inputs, activation), strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=1e-4, atol=1e-5)


@ACTIVATION_CASES
def test_training_step_under_autocast(kernel, device, activation):
    """float32 parameters, bfloat16 products: values and types of the composition under the same autocast."""
    grad, inputs = problem((64,), 48, 32, torch.float32, device)

    def step(function):
        leaves = [t.clone().requires_grad_() for t in inputs]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = function(*leaves)
        return out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))

    ours = step(lambda *t: kernel.linear(*t, activation=activation))
    theirs = step(lambda *t: reference.eager_linear(*t, activation))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert (mine - other).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * other.abs().max()


IN_DIMS = [(0, None, None), (1, None, None), (0, 0, None), (0, 0, 0), (None, 0, 0), (None, None, 0), (1, 1, 0)]


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
@ACTIVATION_CASES
def test_vmap(kernel, device, activation, in_dims):
    shapes = ((3, 5), (4, 5), (4,))
    inputs = [
        torch.randn(shape, dtype=torch.float64, device=device)
        if in_dim is None
        else torch.randn(2, *shape, dtype=torch.float64, device=device).movedim(0, in_dim)
        for shape, in_dim in zip(shapes, in_dims, strict=True)
    ]

    def ours(*t):
        return kernel.linear(*t, activation=activation)

    def theirs(*t):
        return reference.eager_linear(*t, activation)

    def grads(function):
        return torch.func.grad(lambda *t: function(*t).square().sum(), argnums=(0, 1, 2))

    for wrap in (lambda function: function, grads):
        mine, expected = (torch.vmap(wrap(function), in_dims)(*inputs) for function in (ours, theirs))
        torch.testing.assert_close(mine, expected)


@ACTIVATION_CASES
def test_functional_transforms(kernel, device, activation):
    """jvp, hessian by either mode and per-sample gradients; a lost tangent would be a silent zero."""
    _, inputs = problem((3,), 4, 5, torch.float64, device)
    tangents = tuple(torch.randn_like(t) for t in inputs)

    def ours(*t):
        return kernel.linear(*t, activation=activation)

    def theirs(*t):
        return reference.eager_linear(*t, activation)

    torch.testing.assert_close(torch.func.jvp(ours, inputs, tangents), torch.func.jvp(theirs, inputs, tangents))
    x, _, bias = inputs
    for transform in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        mine, expected = (
            transform(lambda w, function=function: function(x, w, bias).pow(3).sum())(inputs[1])
            for function in (ours, theirs)
        )
        torch.testing.assert_close(mine, expected)


@ACTIVATION_CASES
def test_forward_mode_of_each_input(kernel, device, activation):
    _, inputs = problem((3,), 4, 5, torch.float64, device)
    for place in range(3):
        results = []
        for function in (lambda *t: kernel.linear(*t, activation=activation), None):
            with torch.autograd.forward_ad.dual_level():
                duals = list(inputs)
                duals[place] = torch.autograd.forward_ad.make_dual(inputs[place], torch.ones_like(inputs[place]))
                out = function(*duals) if function else reference.eager_linear(*duals, activation)
                results.append(torch.autograd.forward_ad.unpack_dual(out).tangent)
        assert results[0] is not None
        torch.testing.assert_close(*results)
