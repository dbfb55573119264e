"""Gradients of linear: values, what is asked for, what is kept, layouts, second derivatives, transforms."""

import itertools

import pytest
import reference
import torch
from reference import ACTIVATIONS, DTYPES
from torch.utils.checkpoint import checkpoint

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


# ---- modes and transforms ----


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


# ---- torch.compile and opcheck ----


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@ACTIVATION_CASES
def test_compiled_with_dynamic_rows(kernel, device, backend, activation):
    compiled = torch.compile(
        lambda *t: kernel.linear(*t, activation=activation), fullgraph=True, dynamic=True, backend=backend
    )
    counter = torch._dynamo.utils.counters["stats"]
    counter.clear()
    _, (_, weight, bias) = problem((1,), 24, 16, torch.float64, device)
    for rows in (5, 17, 64, 100):
        grad, (x, _, _) = problem((rows,), 24, 16, torch.float64, device)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, weight, bias), reference.linear(x, weight, bias, activation))
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        grads = torch.autograd.grad(compiled(*leaves), leaves, grad)
        torch.testing.assert_close(grads, reference.linear_grads(grad, x, weight, bias, activation))
    # One graph without gradients and one with them.
    assert counter["unique_graphs"] <= 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("inside", (True, False), ids=("inside", "around"))
def test_compiled_under_autocast(kernel, device, backend, inside):
    """Autocast entered inside the compiled function, and around a call of it; then without, with the same function."""
    grad, inputs = problem((16,), 24, 16, torch.float32, device)

    def function(x, weight, bias):
        enabled = inside or torch.is_autocast_enabled(device.type)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
            return kernel.linear(x, weight, bias, activation="gelu")

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for around in (True, False):
        results = []
        for call in (compiled, function):
            leaves = [t.clone().requires_grad_() for t in inputs]
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=around):
                out = call(*leaves)
            results.append((out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))))
        assert results[0][0].dtype == (torch.bfloat16 if inside or around else torch.float32)
        for mine, theirs in zip(*results, strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.native
@pytest.mark.usefixtures("fresh_dynamo")
@ACTIVATION_CASES
def test_the_graph_holds_one_operator(kernel, ops, device, activation):
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    _, inputs = problem((16,), 24, 16, torch.float32, device)
    with torch.no_grad():
        torch.compile(
            lambda *t: kernel.linear(*t, activation=activation),
            fullgraph=True,
            backend=aot_autograd(fw_compiler=record),
        )(*inputs)
    targets = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [ops.linear.default]


@pytest.mark.native
@pytest.mark.usefixtures("fresh_dynamo")
@ACTIVATION_CASES
def test_the_compiled_backward_holds_one_operator(kernel, ops, device, activation):
    """A gradient for the pre-activation that nobody asked for would bring the composition back in."""
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def record(graph, inputs):
        graphs.append(graph)
        return graph.forward

    grad, inputs = problem((16,), 24, 16, torch.float32, device)
    leaves = [t.clone().requires_grad_() for t in inputs]
    compiled = torch.compile(
        lambda *t: kernel.linear(*t, activation=activation),
        fullgraph=True,
        backend=aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=record),
    )
    torch.autograd.grad(compiled(*leaves), leaves, grad)
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert [target for target in targets if isinstance(target, torch._ops.OpOverload)] == [ops.linear_backward.default]


@pytest.mark.usefixtures("fresh_dynamo")
def test_tuning_inside_a_compiled_function_is_refused(kernel, device):
    _, inputs = problem((16,), 24, 16, torch.float32, device)
    with pytest.raises(Exception, match=r"outside torch\.compile"):
        torch.compile(lambda *t: kernel.tune(*t), fullgraph=True, backend="eager")(*inputs)


OPCHECK_LAYOUTS = {
    "dense": lambda x, weight, bias: (x, weight, bias),
    "no_bias": lambda x, weight, bias: (x, weight, None),
    "transposed_weight": lambda x, weight, bias: (x, weight.t().contiguous().t(), bias),
    "swapped_x": lambda x, weight, bias: (x.transpose(0, -2), weight, bias),
    "strided_bias": lambda x, weight, bias: (x, weight, bias.repeat_interleave(2)[::2]),
}


@pytest.mark.parametrize("name", OPCHECK_LAYOUTS)
@pytest.mark.parametrize("lead", [(), (4,), (2, 3), (0,)], ids=str)
@ACTIVATION_CASES
def test_opcheck(ops, device, activation, lead, name):
    if name == "swapped_x" and len(lead) < 1:
        pytest.skip("one dimension")
    grad, inputs = problem(lead, 6, 5, torch.float32, device)
    inputs = OPCHECK_LAYOUTS[name](*inputs)
    code = ACTIVATIONS.index(activation)
    torch.library.opcheck(ops.linear.default, (*inputs, code, False))
    torch.library.opcheck(ops.linear_with_preactivation.default, (*inputs, code or 1, False))
    x, weight, _ = inputs
    pre = reference.preactivation(*inputs).float() if code else None
    grad = torch.randn(*x.shape[:-1], 6, device=device)
    for needs in NEEDS:
        arguments = (grad, x if needs[1] else None, weight if needs[0] else None, pre, code, False, *needs)
        torch.library.opcheck(ops.linear_backward.default, arguments)
