"""Gradients of linear_geglu and geglu_mlp: values, what is asked for, what is kept, second derivatives, modes."""

import itertools

import pytest
import reference
import torch
from calls import Calls
from reference import DTYPES, FORMS, HALVES
from test_mlp import eager, gated, problem
from torch.utils.checkpoint import checkpoint

FORM_CASES = pytest.mark.parametrize("approximate", FORMS)
BIAS_CASES = pytest.mark.parametrize("with_bias", (False, True), ids=("plain", "bias"))
RECOMPUTE_CASES = pytest.mark.parametrize("recompute", (False, True), ids=("keeps", "recomputes"))

ROWS, HIDDEN = 64, 32


@pytest.fixture
def leaves(device):
    return [t.requires_grad_() for t in problem((ROWS,), 16, HIDDEN, 16, torch.float32, device)]


def block(kernel, tensors, **options):
    """geglu_mlp as a function of those of its arguments that are given."""

    def function(*given):
        given = iter(given)
        return kernel.geglu_mlp(*(None if t is None else next(given) for t in tensors), **options)

    return function


@FORM_CASES
@BIAS_CASES
@RECOMPUTE_CASES
@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
def test_gradcheck(kernel, device, lead, approximate, with_bias, recompute):
    tensors = problem(lead, 4, 5, 3, torch.float64, device, with_bias)
    given = [t.requires_grad_() for t in tensors if t is not None]
    function = block(kernel, tensors, approximate=approximate, recompute=recompute)
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


@FORM_CASES
def test_gradcheck_of_the_first_half(kernel, device, approximate):
    given = [t.requires_grad_() for t in gated(problem((2, 3), 4, 5, 3, torch.float64, device))]
    assert torch.autograd.gradcheck(lambda *t: kernel.linear_geglu(*t, approximate=approximate), given)
    assert torch.autograd.gradgradcheck(lambda *t: kernel.linear_geglu(*t, approximate=approximate), given)


@RECOMPUTE_CASES
def test_one_tensor_as_two_arguments(kernel, device, recompute):
    """Its gradient is the sum of both, and so is its second derivative."""
    x, weight, _, down, *_ = (t.requires_grad_() for t in problem((3,), 4, 5, 4, torch.float64, device))
    leaves = (x, weight, down)

    def function(x, weight, down):
        return kernel.geglu_mlp(x, weight, weight, down, recompute=recompute)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)
    out = function(*leaves).square().sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, create_graph=True), first)


@FORM_CASES
@RECOMPUTE_CASES
@pytest.mark.parametrize("dtype", (torch.float32, *HALVES), ids=str)
def test_no_less_accurate_than_eager(kernel, device, dtype, approximate, recompute):
    tensors = problem((257,), 96, 200, 64, dtype, device)
    grad = torch.randn(257, 64, device=device).to(dtype)

    def grads(function, tensors, grad):
        leaves = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(function(*leaves), leaves, grad)

    ours = grads(lambda *t: kernel.geglu_mlp(*t, approximate=approximate, recompute=recompute), tensors, grad)
    theirs = grads(lambda *t: eager(*t, approximate)[1], tensors, grad)
    exact = grads(lambda *t: eager(*t, approximate)[1], [t.double() for t in tensors], grad.double())
    for place, (mine, their, truth) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert mine.dtype == dtype
        errors = [(g.double() - truth).square().mean().sqrt() for g in (mine, their)]
        # float32 sums in another order than eager's may be luckier or not; half types are rounded far above that.
        margin = 2.0 if dtype == torch.float32 else reference.EAGER_MARGIN
        assert errors[0] <= margin * errors[1], f"argument {place}: {errors[0]:.3e}, eager {errors[1]:.3e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_gradients_are_summed_in_float32(kernel, device, dtype):
    """Over more rows than a running sum in a half type can count."""
    rows = 4099
    x, weights = torch.zeros(rows, 8, device=device, dtype=dtype), torch.zeros(3, 8, 8, device=device, dtype=dtype)
    biases = torch.tensor([0.0, 1.0, 0.0], device=device, dtype=dtype)[:, None].repeat(1, 8)
    weights[2] = torch.eye(8, device=device)
    leaves = [bias.clone().requires_grad_() for bias in biases]
    kernel.geglu_mlp(x, *weights, *leaves).sum().backward()
    # gelu(0) * 1: the slope of the gate's bias is gelu'(0) = 0.5, of up's gelu(0) = 0, of down's 1.
    for leaf, slope in zip(leaves, (0.5, 0.0, 1.0), strict=True):
        assert torch.equal(leaf.grad, torch.full_like(leaf, rows * slope))


@RECOMPUTE_CASES
def test_each_gradient_only_when_asked_for(kernel, ops, leaves, recompute):
    """Every subset of the arguments; frozen ones cost no product."""
    everything = torch.autograd.grad(kernel.geglu_mlp(*leaves).sum(), leaves)
    for needs in itertools.product((False, True), repeat=len(leaves)):
        if not any(needs):
            continue
        given = [t.detach().requires_grad_(need) for t, need in zip(leaves, needs, strict=True)]
        out = kernel.geglu_mlp(*given, recompute=recompute)
        with Calls() as calls:
            out.sum().backward()
        for leaf, need, expected in zip(given, needs, everything, strict=True):
            assert (leaf.grad is not None) == need
            if need:
                torch.testing.assert_close(leaf.grad, expected)
        through = any(needs[:3]) or any(needs[4:6])
        assert calls.seen.count(ops.geglu_backward.default) == through
        assert calls.seen.count(ops.geglu.default) == needs[3]
        assert calls.seen.count(ops.linear_backward.default) == 1 + 2 * through


def kept(function, leaves):
    """How many elements autograd keeps for a call, beside the arguments."""
    own, saved = {leaf.data_ptr() for leaf in leaves}, []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*leaves)
    return sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in own)


def test_what_is_kept_for_backward(kernel, leaves):
    """gate and up, or nothing; eager keeps those two, gelu(gate) and their product."""
    assert kept(kernel.geglu_mlp, leaves) == 2 * ROWS * HIDDEN
    assert kept(lambda *t: kernel.geglu_mlp(*t, recompute=True), leaves) == 0
    assert kept(lambda *t: eager(*t)[1], leaves) == 4 * ROWS * HIDDEN


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="the compiler of torch 2.11 keeps them all the same",
)
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_recompute_keeps_nothing_either(kernel, leaves, backend):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: kernel.geglu_mlp(*t, recompute=True), fullgraph=True, backend=backend)
    ours, theirs = (torch.autograd.grad(f(*leaves).sum(), leaves) for f in (compiled, kernel.geglu_mlp))
    torch.testing.assert_close(ours, theirs)
    assert kept(compiled, leaves) == 0


@RECOMPUTE_CASES
def test_backward_leaves_everything_alone_and_runs_twice(kernel, leaves, recompute):
    before = [leaf.detach().clone() for leaf in leaves]
    out = kernel.geglu_mlp(*leaves, recompute=recompute)
    value = out.detach().clone()
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    for mine, again in zip(first, torch.autograd.grad(out.sum(), leaves), strict=True):
        reference.assert_same_bits(mine, again)
    assert torch.equal(out, value)
    assert all(torch.equal(leaf, old) for leaf, old in zip(leaves, before, strict=True))


@RECOMPUTE_CASES
def test_an_overwritten_argument_is_noticed(kernel, leaves, recompute):
    down = leaves[3].detach()
    out = kernel.geglu_mlp(*leaves[:3], down, *leaves[4:], recompute=recompute)
    down.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@RECOMPUTE_CASES
@pytest.mark.parametrize("again", (False, True), ids=("once", "create_graph"))
def test_backward_inside_autocast(kernel, leaves, recompute, again):
    """Gradients of a float32 forward stay float32 when backward runs where autocast is on."""
    expected = torch.autograd.grad(eager(*leaves)[1].square().sum(), leaves)
    out = kernel.geglu_mlp(*leaves, recompute=recompute).square().sum()
    with torch.autocast(leaves[0].device.type, dtype=torch.bfloat16):
        ours = torch.autograd.grad(out, leaves, create_graph=again)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@RECOMPUTE_CASES
def test_training_step_under_autocast(kernel, leaves, recompute):
    """float32 parameters, bfloat16 products: values and types of the composition under the same autocast."""

    def step(function):
        with torch.autocast(leaves[0].device.type, dtype=torch.bfloat16):
            out = function(*leaves)
        return out, *torch.autograd.grad(out.float().sum(), leaves)

    ours, theirs = step(lambda *t: kernel.geglu_mlp(*t, recompute=recompute)), step(lambda *t: eager(*t)[1])
    for mine, their in zip(ours, theirs, strict=True):
        assert mine.dtype == their.dtype
        assert (mine - their).abs().max() <= 3e-2 * their.abs().max()


@RECOMPUTE_CASES
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing(kernel, leaves, recompute, reentrant):
    function = block(kernel, leaves, recompute=recompute)
    expected = torch.autograd.grad(function(*leaves).sum(), leaves)
    checkpoint(function, *leaves, use_reentrant=reentrant).sum().backward()
    for leaf, theirs in zip(leaves, expected, strict=True):
        reference.assert_same_bits(leaf.grad, theirs)


@RECOMPUTE_CASES
def test_functional_gradients(kernel, leaves, recompute):
    """torch.func's transforms, alone and over a batch."""
    x, *parameters = (leaf.detach().double() for leaf in leaves)
    by_x = torch.func.grad(lambda x: kernel.geglu_mlp(x, *parameters, recompute=recompute).square().sum())
    theirs = torch.func.grad(lambda x: eager(x, *parameters)[1].square().sum())
    torch.testing.assert_close(by_x(x), theirs(x))
    torch.testing.assert_close(torch.vmap(by_x)(x), torch.vmap(theirs)(x))
