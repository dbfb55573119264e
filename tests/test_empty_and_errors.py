"""Empty tensors, and every kind of bad input: one error that names the argument, and a kernel that works after it."""

import pytest
import reference
import torch
from reference import DTYPES

DTYPE_CASES = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# No rows, no rows in the middle, no columns, nothing at all.
EMPTY_SHAPES = [(0, 8), (3, 0, 8), (5, 0), (0,), (0, 0), (2, 0, 3, 4)]


@pytest.fixture(autouse=True)
def still_works(kernel, device):
    """After each case an ordinary call gives the right numbers, and no error is pending on the device."""
    yield
    gate, up = (torch.randn(3, 37, device=device) for _ in "gu")
    reference.assert_accurate(kernel.geglu(gate, up), gate, up, "tanh")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        assert torch.ones(1, device=device).add(1).item() == 2


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
@DTYPE_CASES
def test_empty_split(kernel, device, shape, dtype):
    gate, up = (torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for _ in "gu")
    out = kernel.geglu(gate, up)
    assert (out.shape, out.dtype, out.device) == (gate.shape, dtype, gate.device)
    out.sum().backward()
    assert gate.grad.shape == up.grad.shape == gate.shape


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
@DTYPE_CASES
def test_empty_packed(kernel, device, shape, dtype):
    packed = (*shape[:-1], 2 * shape[-1])
    x = torch.empty(packed, dtype=dtype, device=device, requires_grad=True)
    for gate_first in (True, False):
        out = kernel.geglu_packed(x, gate_first=gate_first)
        assert out.shape == shape and out.dtype == dtype
        x.grad = None
        out.sum().backward()
        assert x.grad.shape == packed
    for function in (kernel.gelu_and_mul, kernel.gelu_tanh_and_mul):
        function(torch.empty(shape, dtype=dtype, device=device), x.detach())


def test_empty_second_derivative(kernel, device):
    gate, up = (torch.empty(0, 4, dtype=torch.float64, device=device, requires_grad=True) for _ in "gu")
    first = torch.autograd.grad(kernel.geglu(gate, up).sum(), (gate, up), create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first), (gate, up))
    assert all(g.shape == (0, 4) for g in second)


def new(*shape, dtype=torch.float32):
    return lambda device: torch.ones(shape, dtype=dtype, device=device)


def sparse(*shape):
    return lambda device: torch.ones(shape, device=device).to_sparse()


def meta(*shape):
    return lambda device: torch.ones(shape, device="meta")


def naming(argument):
    """The message names the argument and says what it must be; a mere "out" would match "out of memory" as well."""
    return rf"\b{argument} (must|requires)\b"


def nothing(value):
    return lambda device: value


REFUSED = (RuntimeError, NotImplementedError)
ROW = new(4, 8)

# (gate, up, which of them the message names, the error)
SPLIT_CASES = {
    "fewer_rows": (ROW, new(3, 8), "up", REFUSED),
    "fewer_columns": (ROW, new(4, 7), "up", REFUSED),
    # Broadcasting is torch's, not ours: an expanded tensor is welcome, an unexpanded one is a mistake.
    "broadcastable": (ROW, new(1, 8), "up", REFUSED),
    "same_size_other_shape": (ROW, new(8, 4), "up", REFUSED),
    "fewer_dimensions": (ROW, new(32), "up", REFUSED),
    "other_float": (ROW, new(4, 8, dtype=torch.bfloat16), "up", REFUSED),
    "half_and_bfloat16": (new(4, 8, dtype=torch.float16), new(4, 8, dtype=torch.bfloat16), "up", REFUSED),
    "integers": (new(4, 8, dtype=torch.int32), new(4, 8, dtype=torch.int32), "gate", REFUSED),
    "bytes": (new(4, 8, dtype=torch.uint8), new(4, 8, dtype=torch.uint8), "gate", REFUSED),
    "booleans": (new(4, 8, dtype=torch.bool), new(4, 8, dtype=torch.bool), "gate", REFUSED),
    "complex": (new(4, 8, dtype=torch.complex64), new(4, 8, dtype=torch.complex64), "gate", REFUSED),
    "float8": (new(4, 8, dtype=torch.float8_e4m3fn), new(4, 8, dtype=torch.float8_e4m3fn), "gate", REFUSED),
    "integer_up": (ROW, new(4, 8, dtype=torch.int64), "up", REFUSED),
    "zero_dimensions": (new(), new(), "gate", REFUSED),
    "meta": (meta(4, 8), meta(4, 8), "gate", REFUSED),
    "meta_up": (ROW, meta(4, 8), "up", REFUSED),
    "sparse_gate": (sparse(4, 8), ROW, "gate", REFUSED),
    "sparse_up": (ROW, sparse(4, 8), "up", REFUSED),
    "none": (nothing(None), ROW, "gate", TypeError),
    "list": (ROW, nothing([1.0, 2.0]), "up", TypeError),
    "number": (ROW, nothing(2.0), "up", TypeError),
}


@pytest.mark.parametrize("case", SPLIT_CASES)
@pytest.mark.parametrize("needs_grad", (False, True), ids=("plain", "needs_grad"))
def test_bad_split(kernel, device, case, needs_grad):
    gate, up, named, error = SPLIT_CASES[case]
    gate, up = gate(device), up(device)
    for tensor in (gate, up):
        if needs_grad and isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_()
    with pytest.raises(error, match=naming(named)):
        kernel.geglu(gate, up)


PACKED_CASES = {
    "odd_width": (new(4, 7), REFUSED),
    "one_column": (new(4, 1), REFUSED),
    "integers": (new(4, 8, dtype=torch.int64), REFUSED),
    "complex": (new(4, 8, dtype=torch.complex128), REFUSED),
    "zero_dimensions": (new(), REFUSED),
    "meta": (meta(4, 8), REFUSED),
    "sparse": (sparse(4, 8), REFUSED),
    "none": (nothing(None), TypeError),
}


@pytest.mark.parametrize("case", PACKED_CASES)
@pytest.mark.parametrize("needs_grad", (False, True), ids=("plain", "needs_grad"))
def test_bad_packed(kernel, device, case, needs_grad):
    make, error = PACKED_CASES[case]
    x = make(device)
    if needs_grad and isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
        x.requires_grad_()
    with pytest.raises(error, match=naming("x")):
        kernel.geglu_packed(x)
    if isinstance(x, torch.Tensor):
        x.requires_grad_(False)
    for function in (kernel.gelu_and_mul, kernel.gelu_tanh_and_mul):
        with pytest.raises(error, match=naming("x")):
            function(torch.ones(4, 4, device=device), x)


@pytest.mark.parametrize("approximate", ("erf", "TANH", "", None, True, 0))
def test_unknown_approximate(kernel, device, approximate):
    x = torch.ones(2, 4, device=device)
    for call in (
        lambda: kernel.geglu(x, x, approximate=approximate),
        lambda: kernel.geglu_packed(x, approximate=approximate),
    ):
        with pytest.raises(ValueError, match=naming("approximate")):
            call()


OUT_CASES = {
    "too_wide": (new(4, 8), REFUSED),
    "too_few_rows": (new(3, 4), REFUSED),
    "wrong_dimensions": (new(2, 2, 4), REFUSED),
    "broadcastable": (new(1, 4), REFUSED),
    "other_dtype": (new(4, 4, dtype=torch.float16), REFUSED),
    "integers": (new(4, 4, dtype=torch.int32), REFUSED),
    "meta": (meta(4, 4), REFUSED),
    "sparse": (sparse(4, 4), REFUSED),
    # Two elements of such an `out` would share one place in memory.
    "expanded": (lambda device: torch.ones(1, 4, device=device).expand(4, 4), REFUSED),
    "none": (nothing(None), TypeError),
}


@pytest.mark.parametrize("case", OUT_CASES)
@pytest.mark.parametrize("name", ("gelu_and_mul", "gelu_tanh_and_mul"))
def test_bad_out(kernel, device, case, name):
    make, error = OUT_CASES[case]
    out, x = make(device), torch.randn(4, 8, device=device)
    dense = isinstance(out, torch.Tensor) and out.layout == torch.strided and not out.is_meta
    before = out.clone() if dense else None
    with pytest.raises(error, match=naming("out")):
        getattr(kernel, name)(out, x)
    # Refused before anything was written.
    assert not dense or torch.equal(out, before)


@pytest.mark.parametrize("name", ("gelu_and_mul", "gelu_tanh_and_mul"))
def test_out_that_overlaps_x(kernel, device, name):
    x = torch.randn(4, 8, device=device)
    before = x.clone()
    # Rows of either half, a dense block at the start and one inside, and columns with gaps: x has no gaps, so whatever
    # begins inside it is its memory.
    dense = x.view(-1)
    for out in (x[:, :4], x[:, 4:], dense[:16].view(4, 4), dense[2:18].view(4, 4), x[:, ::2], x[:, 1::2]):
        with pytest.raises(RuntimeError, match=naming("out")):
            getattr(kernel, name)(out, x)
        assert torch.equal(x, before)


@pytest.mark.parametrize("name", ("gelu_and_mul", "gelu_tanh_and_mul"))
def test_out_variant_refuses_what_needs_a_gradient(kernel, device, name):
    function = getattr(kernel, name)
    x, out = torch.randn(4, 8, device=device), torch.zeros(4, 4, device=device)
    with pytest.raises(RuntimeError, match=naming("x")):
        function(out, x.clone().requires_grad_())
    with pytest.raises(RuntimeError, match=naming("out")):
        function(out.clone().requires_grad_(), x)
    assert (out == 0).all()
    with torch.no_grad():
        function(out, x.requires_grad_())
    assert (out != 0).all()


@pytest.mark.gpu
def test_bad_devices(kernel, device):
    if device.type != "cuda":
        pytest.skip("two kinds of device are needed")
    here, there = torch.ones(4, 8, device=device), torch.ones(4, 8)
    for gate, up in ((here, there), (there, here)):
        with pytest.raises(REFUSED, match=naming("up")):
            kernel.geglu(gate, up)
    with pytest.raises(REFUSED, match=naming("out")):
        kernel.gelu_and_mul(torch.ones(4, 4), here)
