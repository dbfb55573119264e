"""The gated block on a GPU: which kernels run, tails of the one for few rows, graphs, streams, memory."""

import itertools

import pytest
import torch
from reference import FORMS, HALVES
from test_gpu import cuda, launched  # noqa: F401  (cuda is a fixture)
from test_mlp import assert_no_worse, eager, gated, problem, truth

pytestmark = [pytest.mark.gpu, pytest.mark.native]


def is_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def route(ops, tensors):
    return ops.geglu_mlp_route(*tensors, True, False)


def test_routes(ops, cuda):  # noqa: F811
    few, products = "few_rows+few_rows", "cublaslt+cublaslt+geglu+cublaslt"
    small = {m: problem((m,), 768, 1152, 768, torch.bfloat16, cuda) for m in (1, 8, 16, 17)}
    large = {m: problem((m,), 4096, 4096, 4096, torch.bfloat16, cuda) for m in (1, 8, 9)}
    if is_hopper():
        assert [route(ops, small[m]) for m in (1, 8, 16)] == [few] * 3
        assert [route(ops, large[m]) for m in (1, 8)] == [few] * 2
    assert route(ops, small[17]) == route(ops, large[9]) == products
    _, *parameters = small[1]
    assert route(ops, [t.float() for t in small[1]]).startswith("torch")
    shifted = torch.randn(769, device=cuda).bfloat16()[1:].view(1, 768)
    assert not route(ops, (shifted, *parameters)).startswith("few_rows")


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


@pytest.mark.parametrize("m", (4, 64))
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


@pytest.mark.sanitize
@pytest.mark.parametrize("m", (1, 8, 13))
@pytest.mark.parametrize("h", (16, 37))
def test_sanitize_mlp(kernel, cuda, m, h):  # noqa: F811
    tensors = problem((m,), 136, h, 24, torch.bfloat16, cuda)
    exact = truth(*tensors)[0]
    hidden = kernel.linear_geglu(*gated(tensors))
    assert (hidden.double() - exact).abs().max() <= 0.02 * exact.abs().max()
