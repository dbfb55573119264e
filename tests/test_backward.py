"""First and second derivatives, and what backward must leave alone."""

import math
import sys

import pytest
import reference
import torch
from reference import DTYPES, FORMS

FORM_CASES = pytest.mark.parametrize("approximate", FORMS)
DTYPE_CASES = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_same_bits(actual, expected):
    for mine, theirs in zip(actual, expected, strict=True):
        reference.assert_same_bits(mine, theirs)


def doubles(*shape, device):
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)


@FORM_CASES
def test_gradcheck(kernel, device, approximate):
    gate, up = doubles(3, 5, device=device), doubles(3, 5, device=device)
    assert torch.autograd.gradcheck(lambda g, u: kernel.geglu(g, u, approximate=approximate), (gate, up))
    # One side alone: the other gradient is not asked for.
    assert torch.autograd.gradcheck(lambda g: kernel.geglu(g, up.detach(), approximate=approximate), (gate,))
    assert torch.autograd.gradcheck(lambda u: kernel.geglu(gate.detach(), u, approximate=approximate), (up,))


@pytest.mark.parametrize("gate_first", (True, False))
@FORM_CASES
def test_gradcheck_packed(kernel, device, approximate, gate_first):
    x = doubles(3, 2, 10, device=device)

    def packed(t):
        return kernel.geglu_packed(t, approximate=approximate, gate_first=gate_first)

    assert torch.autograd.gradcheck(packed, (x,))
    assert torch.autograd.gradcheck(lambda t: packed(t.transpose(0, 1)), (x,))
    assert torch.autograd.gradgradcheck(packed, (x,))


@FORM_CASES
def test_gradgradcheck(kernel, device, approximate):
    gate, up = doubles(3, 5, device=device), doubles(5, 3, device=device)

    def split(g, u):
        return kernel.geglu(g, u.t(), approximate=approximate)

    assert torch.autograd.gradgradcheck(split, (gate, up))
    assert torch.autograd.gradgradcheck(lambda g: split(g, up.detach()), (gate,))
    assert torch.autograd.gradgradcheck(lambda u: split(gate.detach(), u), (up,))


def test_second_derivative_at_zero(kernel, device):
    """The exact form has slope 0.5 and curvature 2 / sqrt(2 pi) = 0.79788 at 0."""
    gate = torch.zeros(1, dtype=torch.float64, device=device, requires_grad=True)
    (slope,) = torch.autograd.grad(
        kernel.geglu(gate, torch.ones_like(gate), approximate="none"), gate, create_graph=True
    )
    assert slope.item() == pytest.approx(0.5, rel=1e-15)
    (curvature,) = torch.autograd.grad(slope, gate)
    assert curvature.item() == pytest.approx(2 / math.sqrt(2 * math.pi), rel=1e-15)


@DTYPE_CASES
@FORM_CASES
def test_gradient_penalty_equals_eager(kernel, device, dtype, approximate):
    """create_graph=True: the second pass sees the first one's inputs, not constants."""
    gate, up = (torch.randn(4, 9, device=device).to(dtype) for _ in "gu")

    def penalty(function, dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (gate, up)]
        first = torch.autograd.grad(function(*leaves).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    ours = penalty(lambda g, u: kernel.geglu(g, u, approximate=approximate), dtype)
    eager = penalty(lambda g, u: reference.eager(g, u, approximate), dtype)
    exact = penalty(lambda g, u: reference.eager(g, u, approximate), torch.float64)
    for mine, theirs, truth in zip(ours, eager, exact, strict=True):
        assert mine.dtype == dtype
        # A chain of about eight stored terms: eager's own worst error, or eight halves of the largest value's eps
        # where eager happens to be exact.
        slack = 4 * torch.finfo(dtype).eps * truth.abs().max().item()
        worst = reference.Error.of(mine, truth).worst
        assert worst <= reference.EAGER_MARGIN * reference.Error.of(theirs, truth).worst + slack


@DTYPE_CASES
@FORM_CASES
@pytest.mark.capability
def test_gradients_are_accurate(kernel, ops, device, dtype, approximate):
    gate, up, grad = (torch.randn(64, 1234, device=device).to(dtype) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    grads = torch.autograd.grad(kernel.geglu(*leaves, approximate=approximate), leaves, grad)
    reference.assert_accurate_grads(grads, grad, gate, up, approximate)
    # The operators below autograd give the same.
    assert_same_bits(ops.geglu_backward(grad, gate, up, approximate == "tanh"), grads)
    for gate_first in (True, False):
        packed = torch.cat((gate, up) if gate_first else (up, gate), dim=-1)
        packed_grad = ops.geglu_packed_backward(grad, packed, approximate == "tanh", gate_first)
        assert_same_bits(reference.split(packed_grad, gate_first), grads)


def test_packed_gradient_goes_to_the_half_it_belongs_to(kernel, device):
    """Gate [1, 2], up [3, 4]: grad_up is gelu(gate), grad_gate is up * gelu'(gate)."""
    gate, up = (torch.tensor([v], dtype=torch.float64, device=device) for v in ([1.0, 2.0], [3.0, 4.0]))
    grad_gate, grad_up = reference.geglu_grads(torch.ones_like(gate), gate, up, "tanh")
    for gate_first in (True, False):
        order = (lambda g, u: (g, u)) if gate_first else (lambda g, u: (u, g))
        x = torch.cat(order(gate, up), dim=-1).requires_grad_()
        kernel.geglu_packed(x, gate_first=gate_first).sum().backward()
        torch.testing.assert_close(x.grad, torch.cat(order(grad_gate, grad_up), dim=-1))


INCOMING = {
    "permuted": lambda grad: grad.permute(1, 0, 2).contiguous().permute(1, 0, 2),
    "every_other_column": lambda grad: torch.stack((grad, torch.full_like(grad, math.nan)), -1).flatten(-2)[..., ::2],
    "column_major": lambda grad: grad.transpose(1, 2).contiguous().transpose(1, 2),
    "offset": lambda grad: torch.cat((grad.flatten()[:1], grad.flatten()))[1:].view(grad.shape),
    "negative_bit": lambda grad: torch._neg_view(-grad),
}


@pytest.mark.parametrize("name", INCOMING)
@DTYPE_CASES
def test_incoming_gradient_layouts(kernel, device, name, dtype):
    gate, up, grad = (torch.randn(2, 4, 10, device=device).to(dtype) for _ in range(3))
    strided = INCOMING[name](grad)
    assert torch.equal(strided, grad)
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    packed = torch.cat((gate, up), -1).requires_grad_()
    grads = torch.autograd.grad(kernel.geglu(*leaves), leaves, strided)
    reference.assert_accurate_grads(grads, grad, gate, up, "tanh")
    (packed_grad,) = torch.autograd.grad(kernel.geglu_packed(packed), packed, strided)
    assert_same_bits(reference.split(packed_grad), grads)


@DTYPE_CASES
def test_stride_zero_incoming_gradient(kernel, device, dtype):
    """`sum().backward()` hands down one value with strides (0, 0)."""
    gate, up = (torch.randn(6, 21, device=device).to(dtype) for _ in "gu")
    leaves = [t.clone().requires_grad_() for t in (gate, up)]
    seen = []
    out = kernel.geglu(*leaves)
    out.register_hook(lambda grad: seen.append(grad.stride()))
    out.sum().backward()
    assert seen == [(0, 0)]
    grads = leaves[0].grad, leaves[1].grad
    reference.assert_accurate_grads(grads, torch.ones_like(gate), gate, up, "tanh")


@DTYPE_CASES
@FORM_CASES
def test_backward_leaves_its_inputs_alone_and_runs_twice(kernel, device, dtype, approximate):
    gate, up, grad = (torch.randn(5, 33, device=device).to(dtype) for _ in range(3))
    copies = [t.clone() for t in (gate, up, grad)]
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    out = kernel.geglu(gate, up, approximate=approximate)
    kept = out.detach().clone()
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    again = torch.autograd.grad(out, leaves, grad)
    assert_same_bits(first, again)
    reference.assert_accurate_grads(again, *copies[2:], *copies[:2], approximate)
    assert_same_bits((gate, up, grad, out), (*copies, kept))


def test_saved_outputs_of_other_ops_survive(kernel, device):
    """exp keeps its output for its own backward; a kernel that wrote its gradients there would spoil it."""
    x = doubles(4, 11, device=device)
    ours = torch.autograd.grad(kernel.geglu(x.exp(), x.exp()).sum(), x)[0]
    shared = x.exp()
    once = torch.autograd.grad(kernel.geglu(shared, shared).sum(), x)[0]
    expected = torch.autograd.grad(reference.eager(x.exp(), x.exp(), "tanh").sum(), x)[0]
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(once, expected)


@DTYPE_CASES
def test_one_tensor_as_gate_and_up(kernel, device, dtype):
    x = torch.randn(4, 19, device=device).to(dtype)
    leaf = x.clone().requires_grad_()
    kernel.geglu(leaf, leaf).sum().backward()
    parts = reference.geglu_grads(torch.ones_like(x), x, x, "tanh")
    # Each part is stored (two roundings), then their sum is (one more); the parts may cancel.
    size = parts[0].abs() + parts[1].abs() + x.double().abs()
    assert ((leaf.grad.double() - sum(parts)).abs() <= 2 * torch.finfo(dtype).eps * size).all()


def test_only_what_is_asked_for_gets_a_gradient(kernel, device):
    gate, up = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device, requires_grad=True)
    kernel.geglu(gate, up).sum().backward()
    assert gate.grad is None
    torch.testing.assert_close(up.grad.double(), reference.gelu(gate, "tanh"))


FIRST_DERIVATIVES = {
    "geglu": ("autograd", "GeGLUBackward", lambda kernel, x, y: kernel.geglu(x, y)),
    "geglu_packed": (
        "autograd",
        "GeGLUPackedBackward",
        lambda kernel, x, y: kernel.geglu_packed(x) + kernel.geglu_packed(y),
    ),
    "linear": ("linear_autograd", "LinearBackward", lambda kernel, x, y: kernel.linear(x, y)),
    "linear_gelu": ("linear_autograd", "LinearBackward", lambda kernel, x, y: kernel.linear(x, y, activation="gelu")),
}


@pytest.mark.parametrize("name", FIRST_DERIVATIVES)
def test_a_backward_pass_is_a_function_only_if_it_is_differentiated(kernel, device, monkeypatch, name):
    """A Function inside a Function costs host time in every training step, and torch 2.5 cannot compile it."""
    module, function, call = FIRST_DERIVATIVES[name]
    function = getattr(sys.modules[f"{kernel.__name__}.{module}"], function)
    entered = []
    monkeypatch.setattr(
        function, "apply", lambda *arguments, apply=function.apply: entered.append(1) or apply(*arguments)
    )
    x, y = doubles(4, 6, device=device), doubles(4, 6, device=device)
    plain = torch.autograd.grad(call(kernel, x, y).sum(), (x, y))
    assert not entered
    differentiable = torch.autograd.grad(call(kernel, x, y).sum(), (x, y), create_graph=True)
    assert entered and all(gradient.requires_grad for gradient in differentiable)
    assert_same_bits(plain, differentiable)
