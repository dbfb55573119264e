"""torch.compile without a graph break: static and dynamic shapes, forward and backward, functions and layers."""

import pytest
import reference
import torch
from graphs import Recorder
from reference import FORMS
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

BACKENDS = pytest.mark.parametrize("backend", ("aot_eager", "inductor"))

# B23: the most graphs that six sequence lengths may cost: one static, one dynamic.
MOST_GRAPHS = 2
LENGTHS = (8, 12, 17, 31, 64, 100)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_close_to_eager(mine, theirs):
    """Compiled and eager calls run the same kernel on the same numbers, but layers have matmuls around it."""
    eps = torch.finfo(theirs.dtype).eps
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    assert (mine.double() - theirs.double()).abs().max() <= 8 * eps * theirs.double().abs().max()


@BACKENDS
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
@pytest.mark.parametrize("approximate", FORMS)
def test_functions(kernel, device, backend, dynamic, approximate):
    def both(gate, up, packed):
        return kernel.geglu(gate, up, approximate=approximate) + kernel.geglu_packed(
            packed, approximate=approximate, gate_first=False
        )

    compiled = torch.compile(both, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (5, 9):
        inputs = [torch.randn(rows, width, device=device) for width in (33, 33, 66)]
        reference.assert_same_bits(compiled(*inputs), both(*inputs))
        gate, up, packed = inputs
        exact = reference.geglu(gate, up, approximate) + reference.geglu(*reference.split(packed, False), approximate)
        assert_close_to_eager(compiled(*inputs), exact.float())


@BACKENDS
@pytest.mark.parametrize("dynamic", (False, True), ids=("static", "dynamic"))
def test_backward(kernel, device, backend, dynamic):
    compiled = torch.compile(
        lambda g, u: (kernel.geglu(g, u) * 2).sum() + kernel.geglu_packed(torch.cat((g, u), -1)).square().sum(),
        fullgraph=True,
        dynamic=dynamic,
        backend=backend,
    )
    for shape in ((5, 33), (2, 7, 16)):
        gate, up = (torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for _ in "gu")
        grads = torch.autograd.grad(compiled(gate, up), (gate, up))
        out = reference.geglu(gate.detach(), up.detach(), "tanh")
        expected = reference.geglu_grads(2 + 2 * out, gate.detach(), up.detach(), "tanh")
        torch.testing.assert_close(grads, expected)


@BACKENDS
def test_strided_inputs(kernel, device, backend):
    """A fake of another layout than the real result's would be caught by the guard inductor puts on strides."""
    compiled = torch.compile(
        lambda x: kernel.geglu(*x.transpose(0, 1).chunk(2, -1)).transpose(0, 1) + 1, fullgraph=True, backend=backend
    )
    x = torch.randn(3, 4, 32, device=device)
    gate, up = x.chunk(2, -1)
    reference.assert_same_bits(compiled(x), kernel.geglu(gate, up) + 1)


@BACKENDS
@pytest.mark.parametrize("name", ("gelu_and_mul", "gelu_tanh_and_mul"))
def test_out_variants(kernel, device, backend, name):
    """The compiler must know that `out` changes: it is read after the call, and so is a view of it."""
    function = getattr(kernel, name)

    def write_and_read(x):
        out = x.new_zeros(*x.shape[:-1], x.shape[-1] // 2)
        before = out.clone()
        function(out, x)
        return before, out * 2, out[..., 1:]

    x = torch.randn(3, 4, 32, device=device)
    before, doubled, tail = torch.compile(write_and_read, fullgraph=True, backend=backend)(x)
    expected = kernel.geglu(*x.chunk(2, -1), approximate="none" if name == "gelu_and_mul" else "tanh")
    assert (before == 0).all()
    reference.assert_same_bits(doubled, expected * 2)
    reference.assert_same_bits(tail, expected[..., 1:])


class Host(nn.Module):
    """The block of the Gemma family."""

    def __init__(self, act_fn):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(24, 48, bias=False), nn.Linear(24, 48, bias=False)
        self.down_proj = nn.Linear(48, 24, bias=False)
        self.act_fn = act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def kernelized(kernel, act_fn, device):
    """(host, host with the layer's forward), with the same weights."""
    host, other = Host(act_fn).to(device), Host(act_fn).to(device)
    other.load_state_dict(host.state_dict())
    other.forward = kernel.layers.GeGLUMLP.forward.__get__(other)
    return host, other


@BACKENDS
@pytest.mark.parametrize(
    "act_fn", (nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU()), ids=("exact", "tanh", "silu_takes_the_hosts_path")
)
def test_layer_forward_and_backward(kernel, device, backend, act_fn):
    host, layer = kernelized(kernel, act_fn, device)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = torch.randn(2, 7, 24, device=device)
    compiled(x).square().sum().backward()
    host(x).square().sum().backward()
    assert_close_to_eager(compiled(x), host(x))
    for mine, theirs in zip(layer.parameters(), host.parameters(), strict=True):
        assert_close_to_eager(mine.grad, theirs.grad)


def test_six_lengths_cost_at_most_two_graphs(kernel, device):
    _, layer = kernelized(kernel, nn.GELU(approximate="tanh"), device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for length in LENGTHS:
        x = torch.randn(2, length, 24, device=device)
        assert_close_to_eager(compiled(x), layer(x))
    assert 1 <= counter.frame_count <= MOST_GRAPHS


@pytest.mark.native
@pytest.mark.parametrize("act_fn", (nn.GELU(), nn.GELU(approximate="tanh")), ids=("exact", "tanh"))
def test_the_graph_calls_our_operator(kernel, ops, device, act_fn):
    """A compile test that ran something else would pass all of the above."""
    seen = Recorder()
    _, layer = kernelized(kernel, act_fn, device)
    with torch.no_grad():
        torch.compile(layer, fullgraph=True, backend=seen.backend)(torch.randn(2, 24, device=device))
    targets = seen.targets
    assert targets.count(ops.geglu_mlp.default) == 1
    assert not any("gelu" in str(target) and target is not ops.geglu_mlp.default for target in targets)


def test_a_planted_graph_break_is_noticed(kernel):
    """Proves that `fullgraph=True` on what these tests call does refuse."""

    def broken(x):
        torch._dynamo.graph_break()
        return kernel.geglu(x, x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, fullgraph=True, backend="aot_eager")(torch.randn(4))


@pytest.mark.gpu
def test_reduce_overhead(kernel, device):
    """CUDA graph trees: several replays with new numbers, forward and backward."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs")
    host, layer = kernelized(kernel, nn.GELU(approximate="tanh"), device)
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(16, 24, device=device)
        layer.zero_grad(), host.zero_grad()
        out = compiled(x)
        out.square().sum().backward()
        expected = host(x)
        expected.square().sum().backward()
        assert_close_to_eager(out, expected)
        for mine, theirs in zip(layer.parameters(), host.parameters(), strict=True):
            assert_close_to_eager(mine.grad, theirs.grad)
