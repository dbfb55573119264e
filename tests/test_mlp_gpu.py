"""The gated block on a GPU: which kernels run, tails of the one for few rows, graphs, streams, memory."""

import itertools
import re

import pytest
import torch
from reference import FORMS, HALVES
from test_gpu import assert_threads_agree, cuda, launched, need_memory  # noqa: F401  (cuda is a fixture)
from test_mlp import assert_no_worse, eager, gated, problem, truth

pytestmark = [pytest.mark.gpu, pytest.mark.native]


def is_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def route(ops, tensors):
    return ops.geglu_mlp_route(*tensors, True, False)


def test_routes(ops, cuda):  # noqa: F811
    few, products = "few_rows+few_rows", "cublaslt+cublaslt+geglu+cublaslt"
    small = {m: problem((m,), 768, 1152, 768, torch.bfloat16, cuda) for m in (1, 8, 16, 17, 8192)}
    large = {m: problem((m,), 4096, 4096, 4096, torch.bfloat16, cuda) for m in (1, 8, 9, 160, 512)}
    if is_hopper():
        assert [route(ops, small[m]) for m in (1, 8, 16)] == [few] * 3
        assert [route(ops, large[m]) for m in (1, 8)] == [few] * 2
        tall_gemm, thin_gemm = r"tall_gemm:(96|88|80|72|64)x[12]", r"thin_gemm:\d+x\d"
        assert re.fullmatch(rf"{tall_gemm}\+cublaslt(:shipped)?", route(ops, large[512]))
        back = "tall_gemm:192x2"  # what fills 132 multiprocessors may not fill others
        if torch.cuda.get_device_properties(cuda).multi_processor_count != 132:
            back += "|cublaslt(:shipped)?"
        assert re.fullmatch(rf"{tall_gemm}\+({back})", route(ops, small[8192]))
        assert re.fullmatch(rf"{tall_gemm}\+{thin_gemm}", route(ops, small[17]))
        assert re.fullmatch(rf"{thin_gemm}\+{thin_gemm}", route(ops, large[9]))
    assert route(ops, large[160]) == products
    _, *parameters = small[1]
    assert route(ops, [t.float() for t in small[1]]).startswith("torch")
    for m in (1, 17):
        shifted = torch.randn(m * 768 + 1, device=cuda).bfloat16()[1:].view(m, 768)
        assert route(ops, (shifted, *parameters)).startswith(("torch", "cublaslt"))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("with_bias", (False, True), ids=("plain", "bias"))
def test_tails_of_the_kernel_for_few_rows(kernel, ops, cuda, dtype, approximate, with_bias):  # noqa: F811
    """Rows around a tile of 8, columns around one of 16, depths around a lane's piece, a chunk, all warps' step."""
    for m, h, k in itertools.product(
        (1, 2, 7, 8, 9, 15, 16), (1, 15, 16, 17, 37), (8, 24, 32, 40, 760, 768, 776, 1032)
    ):
        tensors = problem((m,), k, h, 8, dtype, cuda, with_bias)
        if h % 8:  # the way back would not be aligned; here the first half counts
            assert not is_hopper() or route(ops, tensors).startswith("few_rows+")
        hidden = kernel.linear_geglu(*gated(tensors), approximate=approximate)
        theirs, exact = eager(*tensors, approximate)[0], truth(*tensors, approximate=approximate)[0]
        if hidden.numel() >= 256:
            assert_no_worse(hidden, theirs, exact, f"{m} {h} {k}")
        else:
            eps = torch.finfo(dtype).eps
            assert (hidden.double() - exact).abs().max() <= 2 * eps * exact.abs().max() + eps


@pytest.mark.parametrize("m", (1, 8, 16, 64))
def test_whole_block(kernel, cuda, m):  # noqa: F811
    tensors = problem((m,), 768, 3072, 768, torch.bfloat16, cuda)
    out = kernel.geglu_mlp(*tensors)
    assert_no_worse(out, eager(*tensors)[1], truth(*tensors)[1], f"M = {m}")


def test_nothing_outside_the_result_is_written(kernel, cuda):  # noqa: F811
    """Results come from a pool of dirty memory whose neighbours must stay as they are."""
    for m, h in ((3, 17), (16, 31), (8, 1)):
        x, gate, up, *_ = problem((m,), 64, h, 8, torch.bfloat16, cuda, False)
        before = torch.full((1 << 16,), float("nan"), device=cuda, dtype=torch.bfloat16)
        out = kernel.linear_geglu(x, gate, up)
        assert torch.isfinite(out).all() and torch.isnan(before).all()


def test_launches(kernel, ops, cuda):  # noqa: F811
    tensors = problem((4,), 768, 3072, 768, torch.bfloat16, cuda)
    names = launched(lambda: kernel.geglu_mlp(*tensors))
    if route(ops, tensors) == "few_rows+few_rows":
        assert len(names) == 2 and all("skinny" in name for name in names), names


@pytest.mark.parametrize("m", (4, 64, 160, 300))
def test_cuda_graph_and_repetition(kernel, cuda, m):  # noqa: F811
    """The second kernel begins while the first runs: the same bits, replay after replay, whatever the memory held."""
    tensors = problem((m,), 1024, 4096, 1024, torch.bfloat16, cuda)
    expected = kernel.geglu_mlp(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [kernel.geglu_mlp(*tensors) for _ in range(8)]
    for fill in (float("nan"), 0.0, 1e30):
        for out in outs:
            out.fill_(fill)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)
    for _ in range(50):
        assert torch.equal(kernel.geglu_mlp(*tensors), expected)


def test_runs_on_the_current_stream(kernel, cuda):  # noqa: F811
    tensors = problem((4,), 1024, 4096, 1024, torch.bfloat16, cuda)
    expected = kernel.geglu_mlp(*tensors)
    stream = torch.cuda.Stream()
    x = torch.empty_like(tensors[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(tensors[0])
        out = kernel.geglu_mlp(x, *tensors[1:])
    stream.synchronize()
    assert torch.equal(out, expected)


def halves(tensors):
    """The same block with gate's and up's parameters as halves of one tensor each."""
    x, gate, up, down, gate_bias, up_bias, down_bias = tensors
    biases = (None, None) if gate_bias is None else torch.cat((gate_bias, up_bias)).chunk(2)
    return (x, *torch.cat((gate, up)).chunk(2), down, *biases, down_bias)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("with_bias", (False, True), ids=("plain", "bias"))
def test_halves_of_a_packed_weight_are_one_product(kernel, ops, cuda, dtype, approximate, with_bias):  # noqa: F811
    """Also where rows of one half are not aligned (2308 * 2 bytes; of both, 9232), and where not even both are."""
    cases = [
        (160, 4096, 2304, "cublaslt"),
        (160, 4096, 2308, "cublaslt"),
        (33, 4097, 37, "torch"),
        (1, 4097, 37, "torch"),
    ]
    for m, k, h, product in cases:
        tensors = halves(problem((m,), k, h, 64, dtype, cuda, with_bias))
        assert route(ops, tensors).startswith(f"{product}+geglu+")
        out = kernel.linear_geglu(*gated(tensors), approximate=approximate)
        theirs, exact = eager(*tensors, approximate)[0], truth(*tensors, approximate=approximate)[0]
        if out.numel() >= 4096:
            assert_no_worse(out, theirs, exact, f"{m} {h}")
        else:
            eps = torch.finfo(dtype).eps
            assert (out.double() - exact).abs().max() <= 4 * eps * exact.abs().max()


def test_halves_of_a_packed_weight_are_not_copied(kernel, ops, cuda):  # noqa: F811
    tensors = halves(problem((160,), 2048, 8192, 64, torch.bfloat16, cuda))
    assert route(ops, tensors).startswith("cublaslt+geglu+")
    names = launched(lambda: kernel.linear_geglu(*gated(tensors)))
    # A product that is split over K adds a reduction.
    assert len(names) <= 3, names
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = kernel.linear_geglu(*gated(tensors))
    workspace, slack = 32 << 20, 2 << 20
    assert torch.cuda.max_memory_allocated() - before <= 3 * out.nbytes + workspace + slack


def test_a_first_call_may_be_captured(kernel, cuda):  # noqa: F811
    """Shapes that were never seen before the capture, through either route."""
    for m in (5, 88):
        tensors = problem((m,), 216, 328, 1360, torch.bfloat16, cuda)
        packed = halves(tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [kernel.geglu_mlp(*tensors), kernel.geglu_mlp(*packed)]
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            assert_no_worse(out, eager(*tensors)[1], truth(*tensors)[1], f"{m}")


@pytest.mark.parametrize("recompute", (False, True))
def test_training_step_in_a_graph(kernel, cuda, recompute):  # noqa: F811
    leaves = [t.requires_grad_() for t in problem((64,), 216, 328, 136, torch.bfloat16, cuda)]

    def step():
        return torch.autograd.grad(kernel.geglu_mlp(*leaves, recompute=recompute).sum(), leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    for _ in range(3):
        for grad in grads:
            grad.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads, expected, strict=True))


def test_memory_of_a_training_step(kernel, cuda):  # noqa: F811
    """Held between forward and backward, in tensors of (rows, hidden): eager 4, ours 2, recomputed none."""
    leaves = [t.requires_grad_() for t in problem((4096,), 256, 2048, 256, torch.bfloat16, cuda)]
    unit = 4096 * 2048 * 2

    def held(function):
        function(*leaves).sum().backward()
        for leaf in leaves:
            leaf.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = function(*leaves)
        return (torch.cuda.memory_allocated() - before - out.nbytes) / unit

    found = [
        held(lambda *t: eager(*t)[1]),
        held(kernel.geglu_mlp),
        held(lambda *t: kernel.geglu_mlp(*t, recompute=True)),
    ]
    assert found == pytest.approx([4, 2, 0], abs=0.1)


def test_more_than_two_to_the_31_projected_elements(kernel, ops, cuda):  # noqa: F811
    need_memory(24)
    m, h = 65_537, 16_392
    tensors = halves(problem((m,), 17, h, 8, torch.bfloat16, cuda, False))
    assert m * 2 * h > 2**31 and route(ops, tensors).startswith("torch+geglu")
    out = kernel.linear_geglu(*gated(tensors))
    watched = [0, 1, 65_519, 65_520, m - 1]
    rows = (tensors[0][watched], *tensors[1:])
    assert_no_worse(out[watched], eager(*rows)[0], truth(*rows)[0], "the last rows")


def test_threads_and_streams(kernel, cuda):  # noqa: F811
    """Over both routes and packed halves."""
    cases = [problem((m,), 256, h, 64, dtype, cuda) for m in (1, 64, 333) for h in (72, 512) for dtype in HALVES]
    cases += [halves(case) for case in cases]

    def assert_same(out, expected):
        assert torch.equal(out, expected)

    assert_threads_agree(kernel.geglu_mlp, cases, assert_same)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one(kernel, cuda):  # noqa: F811
    tensors = problem((4,), 256, 512, 64, torch.bfloat16, cuda)
    there = [t.to("cuda:1") for t in tensors]
    for given in (there, halves(there)):
        out = kernel.geglu_mlp(*given)
        assert out.device == given[0].device and torch.cuda.current_device() == 0
        torch.testing.assert_close(out.cpu(), kernel.geglu_mlp(*tensors).cpu(), rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match=r"\bup_weight must be on the device of x"):
        kernel.geglu_mlp(*tensors[:2], there[2], *tensors[3:])


@pytest.mark.sanitize
@pytest.mark.parametrize("m", (1, 8, 13))
@pytest.mark.parametrize("h", (16, 37))
def test_sanitize_mlp(kernel, cuda, m, h):  # noqa: F811
    tensors = problem((m,), 136, h, 24, torch.bfloat16, cuda)
    exact = truth(*tensors)[0]
    hidden = kernel.linear_geglu(*gated(tensors))
    assert (hidden.double() - exact).abs().max() <= 0.02 * exact.abs().max()
