"""What only a GPU can show: huge tensors, streams, graphs, devices, launches, memory, alignment."""

import itertools
import threading

import layouts
import pytest
import reference
import torch
from layouts import LAYOUTS, WIDTHS
from reference import DTYPES, FORMS

pytestmark = pytest.mark.gpu

GIB = 2**30


@pytest.fixture
def cuda(kernel):
    if "_cuda_" not in kernel.__name__:
        pytest.skip("the loaded variant is not a CUDA one")
    torch.cuda.empty_cache()
    return torch.device("cuda", torch.cuda.current_device())


def need_memory(gib):
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"{gib} GiB of free GPU memory are needed, {free / GIB:.0f} are there")


def assert_threads_agree(run, cases, assert_same):
    """Eight threads, each with its own stream and order of the cases: the results of one after the other."""
    serial = [run(*case) for case in cases]
    torch.cuda.synchronize()
    failures = []

    def work(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(4 * len(cases)):
                    place = (turn * 7 + number * 5) % len(cases)
                    results = run(*cases[place])
                    torch.cuda.current_stream().synchronize()
                    assert_same(results, serial[place])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def halves(*shape):
    """bfloat16 N(0, 1), made in place: the huge cases have no room for a float32 copy."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


# ---- 64-bit offsets ----

# With 14,336 columns, rows 74,898 and 149,796 hold elements 2^31 and 2^32 of a packed tensor; row 149,796 holds
# element 2^31 of one half.
WIDTH = 14336
ROWS = 149_911
WATCHED = [0, 1, 74_897, 74_898, 74_899, 74_900, 149_795, 149_796, 149_797, 149_798, ROWS - 1]


def test_packed_past_two_to_the_32_elements(kernel, cuda):
    need_memory(22)
    x = halves(ROWS, 2 * WIDTH)
    expected = kernel.geglu_packed(x[WATCHED])
    reference.assert_accurate(expected, *reference.split(x[WATCHED]), "tanh")
    out = kernel.geglu_packed(x)
    reference.assert_same_bits(out[WATCHED], expected)
    del out
    # Rows of a sentinel lie before and behind the slice that is written.
    buffer = torch.full((ROWS + 2, WIDTH), 42.0, dtype=torch.bfloat16, device=cuda)
    kernel.gelu_tanh_and_mul(buffer[1:-1], x)
    reference.assert_same_bits(buffer[1:-1][WATCHED], expected)
    assert (buffer[0] == 42).all() and (buffer[-1] == 42).all()


def test_packed_backward_past_two_to_the_32_elements(kernel, ops, cuda):
    need_memory(22)
    x, grad = halves(ROWS, 2 * WIDTH), halves(ROWS, WIDTH)
    expected = ops.geglu_packed_backward(grad[WATCHED], x[WATCHED], True, True)
    gate, up = reference.split(x[WATCHED])
    reference.assert_accurate_grads(reference.split(expected), grad[WATCHED], gate, up, "tanh")
    reference.assert_same_bits(ops.geglu_packed_backward(grad, x, True, True)[WATCHED], expected)


@pytest.mark.parametrize("padding", (0, 1), ids=("dense", "padded_rows"))
def test_split_past_two_to_the_31_elements(kernel, ops, cuda, padding):
    """Padded by one element, so that rows are misaligned and the walk is by rows and not flat."""
    need_memory(26)
    gate, up, grad = (halves(ROWS, WIDTH + padding)[:, :WIDTH] for _ in range(3))
    small = [t[WATCHED] for t in (gate, up, grad)]
    expected = kernel.geglu(*small[:2], approximate="none")
    reference.assert_accurate(expected, *small[:2], "none")
    reference.assert_same_bits(kernel.geglu(gate, up, approximate="none")[WATCHED], expected)
    grads = ops.geglu_backward(small[2], *small[:2], False)
    for mine, theirs in zip(ops.geglu_backward(grad, gate, up, False), grads, strict=True):
        reference.assert_same_bits(mine[WATCHED], theirs)


def test_one_row_past_two_to_the_31_elements(kernel, cuda):
    need_memory(14)
    count = 2**31 + 4097
    gate, up = halves(count), halves(count)
    out = kernel.geglu(gate, up)
    for part in (slice(0, 64), slice(2**31 - 64, 2**31 + 64), slice(count - 64, count)):
        reference.assert_accurate(out[part], gate[part], up[part], "tanh")


# ---- alignment ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_combination_of_offsets(kernel, ops, cuda, dtype):
    """gate, up and out each 0, 1, 2, 4 or 8 elements off 16 bytes, independently; rows long enough for vectors."""
    rows, columns, offsets = 3, 200, (0, 1, 2, 4, 8)

    def placed(offset):
        return torch.randn(offset + rows * columns, device=cuda).to(dtype)[offset:].view(rows, columns)

    for gate_offset, up_offset in itertools.product(offsets, repeat=2):
        gate, up, grad = placed(gate_offset), placed(up_offset), placed(up_offset)
        reference.assert_accurate(kernel.geglu(gate, up), gate, up, "tanh")
        reference.assert_accurate_grads(ops.geglu_backward(grad, gate, up, True), grad, gate, up, "tanh")
    for x_offset, out_offset in itertools.product(offsets, repeat=2):
        x = torch.randn(x_offset + rows * 2 * columns, device=cuda).to(dtype)[x_offset:].view(rows, 2 * columns)
        out = placed(out_offset)
        kernel.gelu_and_mul(out, x)
        reference.assert_accurate(out, *reference.split(x), "none")


# ---- launches, memory, synchronisation ----


def launched(call):
    """Names of the GPU kernels that one call launches; copies and fills count as well."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def regular_inputs():
    """Layouts that models have: none of them may cost a copy."""
    packed = halves(8, 128, 2 * 1024)
    return {
        "dense": (halves(8, 128, 1024), halves(8, 128, 1024)),
        "packed_halves": tuple(packed.chunk(2, -1)),
        "swapped_batch": tuple(halves(128, 8, 1024).transpose(0, 1) for _ in "gu"),
        "padded_rows": tuple(halves(8, 128, 1032)[..., :1024] for _ in "gu"),
    }


NATIVE_ALONE = pytest.param("swapped_batch", marks=pytest.mark.native)


@pytest.mark.parametrize("name", ("dense", "packed_halves", NATIVE_ALONE, "padded_rows"))
def test_one_launch_and_no_copy(kernel, ops, cuda, name):
    gate, up = regular_inputs()[name]
    grad = torch.ones_like(gate)
    for call, results in (
        (lambda: kernel.geglu(gate, up), 1),
        (lambda: ops.geglu_backward(grad, gate, up, True), 2),
    ):
        assert len(launched(call)) == 1
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = call()
        size = gate.numel() * gate.element_size()
        # The allocator rounds each block up to 512 bytes.
        assert torch.cuda.max_memory_allocated() - before <= results * (size + 512)
        del kept


def test_packed_is_one_launch(kernel, ops, cuda):
    x, grad, out = halves(64, 2048), halves(64, 1024), halves(64, 1024)
    for call in (
        lambda: kernel.geglu_packed(x),
        lambda: ops.geglu_packed_backward(grad, x, True, True),
        lambda: kernel.gelu_tanh_and_mul(out, x),
    ):
        assert len(launched(call)) == 1


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)], ids=str)
def test_empty_launches_nothing(kernel, ops, cuda, shape):
    gate = torch.empty(shape, device=cuda)
    assert launched(lambda: kernel.geglu(gate, gate)) == []
    assert launched(lambda: ops.geglu_backward(gate, gate, gate, True)) == []


def test_nothing_waits_for_the_gpu(kernel, cuda):
    gate, up = (torch.randn(64, 100, device=cuda, requires_grad=True) for _ in "gu")
    x, out = torch.randn(64, 200, device=cuda), torch.empty(64, 100, device=cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel.geglu(gate, up).sum().backward()
        kernel.geglu_packed(x)
        kernel.gelu_and_mul(out, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- streams, graphs, devices ----


def test_runs_on_the_current_stream(kernel, cuda):
    """The input is written late on a side stream; a launch on another stream would read it before."""
    stream = torch.cuda.Stream()
    gate, up = torch.zeros(1 << 20, device=cuda), torch.ones(1 << 20, device=cuda)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        gate.fill_(3.0)
        out = kernel.geglu(gate, up)
    stream.synchronize()
    assert torch.all(out == out[0]) and out[0].item() == pytest.approx(2.9964, abs=1e-3)


def test_cuda_graph(kernel, ops, cuda):
    gate, up, grad = (torch.randn(64, 517, device=cuda).bfloat16() for _ in range(3))
    x = torch.randn(64, 1034, device=cuda).bfloat16()
    out = torch.empty(64, 517, device=cuda).bfloat16()

    def calls():
        kernel.gelu_tanh_and_mul(out, x)
        return kernel.geglu(gate, up), kernel.geglu_packed(x), *ops.geglu_backward(grad, gate, up, True), out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    for _ in range(3):
        for tensor in (gate, up, grad, x):
            tensor.normal_()
        graph.replay()
        torch.cuda.synchronize()
        reference.assert_accurate(captured[0], gate, up, "tanh")
        reference.assert_accurate(captured[1], *reference.split(x), "tanh")
        reference.assert_accurate_grads(captured[2:4], grad, gate, up, "tanh")
        reference.assert_same_bits(captured[4], captured[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_data_on_another_device_than_the_current(kernel, cuda):
    other = torch.device("cuda", 1)
    with torch.cuda.device(0):
        gate, up = (torch.randn(8, 4096, device=other).bfloat16().requires_grad_() for _ in "gu")
        out = kernel.geglu(gate, up)
        grads = torch.autograd.grad(out, (gate, up), torch.ones_like(out))
        packed = kernel.geglu_packed(torch.cat((gate, up), -1).detach())
        written = torch.empty_like(packed)
        kernel.gelu_tanh_and_mul(written, torch.cat((gate, up), -1).detach())
        assert torch.cuda.current_device() == 0
    assert {t.device for t in (out, packed, written, *grads)} == {other}
    reference.assert_accurate(out.detach(), gate.detach(), up.detach(), "tanh")
    reference.assert_accurate_grads(grads, torch.ones_like(out), gate.detach(), up.detach(), "tanh")
    for result in (packed, written):
        reference.assert_same_bits(result, out.detach())
    with pytest.raises(RuntimeError, match=r"\bup must\b"):
        kernel.geglu(gate.detach(), up.detach().to("cuda:0"))


# ---- the two implementations ----


@pytest.mark.parametrize("dtype", reference.HALVES, ids=str)
@pytest.mark.parametrize("approximate", FORMS)
def test_cpu_and_cuda_agree(kernel, ops, cuda, dtype, approximate):
    """The same rounding order on both: nearly all bits are equal, and gelu(gate) never more than one step apart."""
    gate, up, grad = (torch.randn(512, 1024).to(dtype) for _ in range(3))
    on_cuda = [t.to(cuda) for t in (gate, up, grad)]
    share = 0.999 if dtype == torch.bfloat16 else 0.99
    here, there = (kernel.geglu(*pair, approximate=approximate) for pair in ((gate, up), on_cuda[:2]))
    assert (here == there.cpu()).double().mean() >= share
    tanh = approximate == "tanh"
    grads = ops.geglu_backward(grad, gate, up, tanh), ops.geglu_backward(on_cuda[2], *on_cuda[:2], tanh)
    for mine, theirs in zip(*grads, strict=True):
        assert (mine == theirs.cpu()).double().mean() >= share
    one = torch.ones_like(gate)
    activated = kernel.geglu(gate, one, approximate=approximate)
    on_device = kernel.geglu(on_cuda[0], one.to(cuda), approximate=approximate).cpu()
    assert reference.ulp_distance(activated, on_device).max() <= 1


# ---- for compute-sanitizer ----


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", LAYOUTS, ids=layouts.ids(LAYOUTS))
def test_sanitize_layouts(kernel, ops, cuda, layout):
    for dtype in (torch.float32, torch.bfloat16):
        gate, up = layout.tensors(dtype, cuda)
        grad = torch.randn(gate.shape[::-1], device=cuda).to(dtype).permute(*range(gate.dim() - 1, -1, -1))
        reference.assert_accurate(kernel.geglu(gate, up), gate, up, "tanh")
        reference.assert_accurate_grads(ops.geglu_backward(grad, gate, up, True), grad, gate, up, "tanh")


@pytest.mark.sanitize
@pytest.mark.parametrize("d", WIDTHS)
def test_sanitize_packed(kernel, ops, cuda, d):
    for dtype in (torch.float32, torch.float16):
        x, grad = torch.randn(3, 2 * d, device=cuda).to(dtype), torch.randn(3, d, device=cuda).to(dtype)
        gate, up = reference.split(x)
        reference.assert_accurate(kernel.geglu_packed(x), gate, up, "tanh")
        packed_grad = ops.geglu_packed_backward(grad, x, True, True)
        reference.assert_accurate_grads(reference.split(packed_grad), grad, gate, up, "tanh")
