"""linear under torch.compile, and what opcheck says of its operators."""

import pytest
import reference
import torch
from graphs import Recorder
from reference import ACTIVATIONS
from test_linear_backward import ACTIVATION_CASES, NEEDS, problem


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
    seen = Recorder()
    _, inputs = problem((16,), 24, 16, torch.float32, device)
    with torch.no_grad():
        torch.compile(
            lambda *t: kernel.linear(*t, activation=activation),
            fullgraph=True,
            backend=seen.backend,
        )(*inputs)
    assert seen.targets == [ops.linear.default]


@pytest.mark.native
@pytest.mark.usefixtures("fresh_dynamo")
@ACTIVATION_CASES
def test_the_compiled_backward_holds_one_operator(kernel, ops, device, activation):
    """A gradient for the pre-activation that nobody asked for would bring the composition back in."""
    seen = Recorder(backward=True)
    grad, inputs = problem((16,), 24, 16, torch.float32, device)
    leaves = [t.clone().requires_grad_() for t in inputs]
    compiled = torch.compile(
        lambda *t: kernel.linear(*t, activation=activation),
        fullgraph=True,
        backend=seen.backend,
    )
    torch.autograd.grad(compiled(*leaves), leaves, grad)
    assert len(seen.graphs) == 1
    assert [target for target in seen.targets if isinstance(target, torch._ops.OpOverload)] == [
        ops.linear_backward.default
    ]


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
