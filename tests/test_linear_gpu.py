"""linear on a GPU: which route a call takes, alignment, graphs, streams and threads, memory, 64-bit sizes, tuning."""

import itertools

import pytest
import reference
import torch
from reference import ACTIVATIONS, HALVES
from test_gpu import assert_threads_agree, cuda, launched, need_memory  # noqa: F401  (cuda is a fixture)

pytestmark = [pytest.mark.gpu, pytest.mark.native]

ACTIVATION_CASES = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)


def problem(m, n, k, dtype=torch.bfloat16):
    x, weight = torch.randn(m, k, device="cuda"), 1.5 * torch.randn(n, k, device="cuda") / k**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(n, device="cuda").to(dtype)


def route(ops, x, weight, bias, activation, training=False, tf32=False):
    return ops.linear_route(x, weight, bias, ACTIVATIONS.index(activation), tf32, training)


# ---- routes ----


@pytest.mark.parametrize("dtype", (torch.float32, *HALVES), ids=str)
@pytest.mark.parametrize("training", (False, True), ids=("inference", "training"))
def test_aligned_operands_take_cublaslt(ops, cuda, dtype, training):  # noqa: F811
    operands = problem(64, 128, 256, dtype)
    routes = [route(ops, *operands, activation, training, tf32=True) for activation in ACTIVATIONS]
    # The epilogue's GELU is the tanh form, where there is one for the type; the exact one is our own kernel's.
    assert routes[0] == "cublaslt" and routes[1] == "cublaslt+pointwise"
    assert routes[2] in (("cublaslt",) if dtype in HALVES else ("cublaslt", "cublaslt+pointwise"))


def test_what_is_torchs(ops, cuda):  # noqa: F811
    """float64, float32 without TF32, nothing to multiply, and rows that begin anywhere."""
    x, weight, bias = problem(64, 128, 257)
    for activation, expected in zip(ACTIVATIONS, ("torch", "torch+pointwise", "torch+pointwise"), strict=True):
        for operands in (
            problem(64, 128, 256, torch.float64),
            problem(64, 128, 256, torch.float32),
            (x[:, :0], weight[:, :0], bias),
            (x, weight, bias),
        ):
            for training in (False, True):
                assert route(ops, *operands, activation, training) == expected


@pytest.mark.parametrize("dtype", (torch.float32, *HALVES), ids=str)
@ACTIVATION_CASES
def test_every_combination_of_offsets(kernel, ops, cuda, dtype, activation):  # noqa: F811
    """x, weight and bias each 0, 1, 2, 4 or 8 elements off 16 bytes, and rows one element longer than they are."""
    m, n, k = 33, 72, 64

    def placed(offset, rows, cols, pad):
        buffer = torch.full((offset + rows * (cols + pad),), float("nan"), device=cuda, dtype=dtype)
        view = buffer[offset:].view(rows, cols + pad)[:, :cols]
        view.copy_(torch.randn(rows, cols, device=cuda))
        return view

    taken = set()
    for x_offset, weight_offset, bias_offset in itertools.product((0, 1, 2, 4, 8), repeat=3):
        for pad in (0, 1):
            x, weight = placed(x_offset, m, k, pad), placed(weight_offset, n, k, pad)
            bias = placed(bias_offset, 1, n, 0)[0]
            out = kernel.linear(x, weight, bias, activation=activation)
            reference.assert_linear_is_accurate(out, x, weight, bias, activation)
            taken.add(route(ops, x, weight, bias, activation))
    torch.cuda.synchronize()
    # Both kinds were seen: what is aligned, and what is not. float32 is torch's as long as TF32 is not allowed.
    kinds = {name.split("+")[0] for name in taken}
    assert kinds == ({"torch"} if dtype == torch.float32 else {"torch", "cublaslt"})


@pytest.mark.parametrize("offset", (0, 1, 2, 4, 8))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@ACTIVATION_CASES
def test_gradients_of_operands_at_offsets(kernel, cuda, dtype, activation, offset):  # noqa: F811
    m, n, k = 65, 72, 64
    bias = torch.randn(n + 16, device=cuda).to(dtype)[offset : offset + n]
    weight = torch.randn(n * k + 16, device=cuda).to(dtype)[offset : offset + n * k].view(n, k)
    x = torch.randn(m * k + 16, device=cuda).to(dtype)[offset : offset + m * k].view(m, k)
    grad = torch.randn(m * n + 16, device=cuda).to(dtype)[offset : offset + m * n].view(m, n)
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    ours = torch.autograd.grad(kernel.linear(*leaves, activation=activation), leaves, grad)
    for mine, truth in zip(ours, reference.linear_grads(grad, x, weight, bias, activation), strict=True):
        assert (mine.double() - truth).abs().max() <= 8 * torch.finfo(dtype).eps * truth.abs().max()


@ACTIVATION_CASES
def test_tf32_only_where_torch_allows_it(kernel, cuda, activation):  # noqa: F811
    x, weight, bias = problem(256, 256, 1024, torch.float32)
    exact = reference.linear(x, weight, bias, activation)
    before = torch.backends.cuda.matmul.fp32_precision
    errors = {}
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            out = kernel.linear(x, weight, bias, activation=activation)
            errors[precision] = reference.Error.of(out, exact).rms
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert errors["ieee"] < 2e-6 < 1e-4 < errors["tf32"] < 1e-2


# ---- launches and memory ----


def test_a_fused_call_is_one_launch(kernel, ops, cuda):  # noqa: F811
    x, weight, bias = problem(1024, 1024, 512)
    for activation in ACTIVATIONS:
        names = launched(lambda activation=activation: kernel.linear(x, weight, bias, activation=activation))
        pointwise = route(ops, x, weight, bias, activation) == "cublaslt+pointwise"
        # A product that is split over K adds a reduction.
        assert len(names) <= (3 if pointwise else 2), names


@ACTIVATION_CASES
def test_no_strided_operand_is_copied(kernel, cuda, activation):  # noqa: F811
    x, weight, bias = problem(1024, 1024, 512)
    padded = torch.randn(1024, 520, device=cuda).bfloat16()[:, :512]
    for operands in ((x, weight, bias), (padded, weight, bias), (x, weight.t().contiguous().t(), bias)):
        kernel.linear(*operands, activation=activation)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = kernel.linear(*operands, activation=activation)
        workspace = 64 << 20
        # torch's allocator does not split what is less than 1 MiB off a block.
        slack = 1 << 20
        assert torch.cuda.max_memory_allocated() - before <= out.nbytes + workspace + slack
        assert torch.cuda.memory_allocated() - before <= out.nbytes + slack


def test_nothing_waits_for_the_gpu(kernel, cuda):  # noqa: F811
    x, weight, bias = (t.requires_grad_() for t in problem(64, 128, 256))
    kernel.linear(x, weight, bias, activation="gelu_tanh").sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for activation in ACTIVATIONS:
            kernel.linear(x, weight, bias, activation=activation).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ACTIVATION_CASES
def test_results_past_two_to_the_31_elements(kernel, cuda, activation):  # noqa: F811
    need_memory(14)
    m, n, k = 65_537, 32_776, 16
    x, weight, bias = problem(m, n, k)
    watched = [0, 1, 65_519, 65_520, m - 1]
    out = kernel.linear(x, weight, bias, activation=activation)
    reference.assert_linear_is_accurate(out[watched], x[watched], weight, bias, activation)


# ---- graphs, streams, threads, devices ----


@ACTIVATION_CASES
def test_cuda_graph(kernel, cuda, activation):  # noqa: F811
    inputs = problem(64, 136, 96)
    leaves = [t.detach().requires_grad_() for t in inputs]
    grad = torch.randn(64, 136, device=cuda).bfloat16()

    def step():
        with torch.no_grad():
            bare = kernel.linear(*leaves, activation=activation)
        out = kernel.linear(*leaves, activation=activation)
        return bare, out, *torch.autograd.grad(out, leaves, grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for tensor in (*leaves, grad):
                tensor.normal_()
        graph.replay()
        torch.cuda.synchronize()
        arguments = [t.detach() for t in leaves]
        for out in captured[:2]:
            reference.assert_linear_is_accurate(out.detach(), *arguments, activation)
        expected = reference.linear_grads(grad, *arguments, activation)
        for mine, truth in zip(captured[2:], expected, strict=True):
            assert (mine.double() - truth).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * truth.abs().max()


def test_a_first_call_may_be_captured(kernel, cuda):  # noqa: F811
    """A shape that was never seen before the capture: its algorithm is chosen without a synchronisation."""
    x, weight, bias = problem(72, 200, 104)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.linear(x, weight, bias, activation="gelu_tanh")
    graph.replay()
    torch.cuda.synchronize()
    reference.assert_linear_is_accurate(out, x, weight, bias, "gelu_tanh")


def test_runs_on_the_current_stream(kernel, cuda):  # noqa: F811
    x, weight, bias = torch.zeros(512, 512, device=cuda), torch.eye(512, device=cuda), torch.ones(512, device=cuda)
    expected = {None: 4.0, "gelu": 3.99987, "gelu_tanh": 3.99993}
    kernel.linear(x, weight, bias)
    for activation in ACTIVATIONS:
        x.zero_()
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            x.fill_(3.0)
            out = kernel.linear(x, weight, bias, activation=activation)
        stream.synchronize()
        assert torch.all(out == out[0, 0]) and out[0, 0].item() == pytest.approx(expected[activation], abs=1e-4)


def test_threads_and_streams(kernel, cuda):  # noqa: F811
    """Over mixed shapes, types and activations."""
    shapes = [(64, 128, 256), (1, 64, 512), (333, 72, 40), (128, 1024, 64)]
    cases = [
        (problem(*shape, dtype), activation)
        for shape in shapes
        for dtype in (torch.float32, *HALVES)
        for activation in ACTIVATIONS
    ]

    def run(inputs, activation):
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = kernel.linear(*leaves, activation=activation)
        return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))

    def assert_same(results, expected):
        for mine, theirs in zip(results, expected, strict=True):
            reference.assert_same_bits(mine, theirs)

    assert_threads_agree(run, cases, assert_same)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices_in_turn(kernel, cuda):  # noqa: F811
    """One thread, two devices, the other one current; then both devices from two threads at once."""
    inputs = problem(64, 128, 256)
    expected = {name: kernel.linear(*inputs, activation=name) for name in ACTIVATIONS}
    there = [t.to("cuda:1") for t in inputs]

    def check():
        for _ in range(20):
            for name in ACTIVATIONS:
                for operands in (inputs, there):
                    out = kernel.linear(*operands, activation=name)
                    assert out.device == operands[0].device and torch.cuda.current_device() == 0
                    torch.testing.assert_close(out.cpu(), expected[name].cpu(), rtol=2e-2, atol=2e-2)

    with torch.cuda.device(0):
        check()
    with pytest.raises(RuntimeError, match=r"\bweight must\b"):
        kernel.linear(inputs[0], there[1], inputs[2])
    with pytest.raises(RuntimeError, match=r"\bbias must\b"):
        kernel.linear(inputs[0], inputs[1], there[2])


def test_mixed_devices(kernel, cuda):  # noqa: F811
    x, weight, bias = problem(8, 16, 24)
    for operands, named in (
        ((x.cpu(), weight, bias), "weight"),
        ((x, weight.cpu(), bias), "weight"),
        ((x, weight, bias.cpu()), "bias"),
    ):
        with pytest.raises(RuntimeError, match=rf"\b{named} must\b"):
            kernel.linear(*operands)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@ACTIVATION_CASES
def test_the_same_bits_run_after_run(kernel, cuda, dtype, activation):  # noqa: F811
    inputs = problem(2048, 768, 512, dtype)
    grad = torch.randn(2048, 768, device=cuda).to(dtype)

    def run():
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = kernel.linear(*leaves, activation=activation)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    first = run()
    for _ in range(5):
        for mine, theirs in zip(run(), first, strict=True):
            reference.assert_same_bits(mine, theirs)


@ACTIVATION_CASES
def test_kernels_that_overlap_wait_for_each_other(kernel, cuda, activation):  # noqa: F811
    """GELU and its gradient begin before the kernel that writes their input is done. The memory they get is dirty."""
    results = []
    operands = [t.requires_grad_() for t in problem(2048, 1024, 4096)]
    grad = torch.randn(2048, 1024, device=cuda).bfloat16()
    for fill in (float("nan"), 1e30, 0.0, float("nan"), 7.0):
        for _ in range(20):
            spoiled = [torch.full((2048, 1024), fill, device=cuda, dtype=torch.bfloat16) for _ in range(4)]
            del spoiled
            out = kernel.linear(*operands, activation=activation)
            results.append((out.detach(), *torch.autograd.grad(out, operands, grad)))
    for others in results[1:]:
        for mine, first in zip(others, results[0], strict=True):
            reference.assert_same_bits(mine, first)


# ---- for compute-sanitizer ----


@pytest.mark.sanitize
@pytest.mark.parametrize("offset", (0, 1, 8))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@ACTIVATION_CASES
def test_sanitize_linear(kernel, cuda, dtype, activation, offset):  # noqa: F811
    """Forward and backward, with more rows than one chunk of the bias gradient has, and columns beyond a tile."""
    m, n, k = 131, 264, 40
    weight = torch.randn(n * k + 8, device=cuda).to(dtype)[offset : offset + n * k].view(n, k)
    leaves = [t.requires_grad_() for t in (torch.randn(m, k, device=cuda).to(dtype), weight)]
    leaves.append(torch.randn(n + 8, device=cuda).to(dtype)[offset : offset + n].requires_grad_())
    grad = torch.randn(m * n + 8, device=cuda).to(dtype)[offset : offset + m * n].view(m, n)
    out = kernel.linear(*leaves, activation=activation)
    reference.assert_linear_is_accurate(out.detach(), *(leaf.detach() for leaf in leaves), activation)
    for mine, truth in zip(
        torch.autograd.grad(out, leaves, grad), reference.linear_grads(grad, *leaves, activation), strict=True
    ):
        assert (mine.double() - truth).abs().max() <= 8 * torch.finfo(dtype).eps * truth.abs().max()
