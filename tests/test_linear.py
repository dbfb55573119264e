"""linear: values, shapes, layouts, types, routes, and every kind of bad input."""

import itertools

import pytest
import reference
import torch
import torch.nn.functional as F
from reference import ACTIVATIONS, DTYPES

ACTIVATION_CASES = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
DTYPE_CASES = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def problem(m, n, k, dtype, device):
    """x (m, k), weight (n, k) and bias (n,), with pre-activations spread over both tails of GELU."""
    x, weight = (torch.randn(rows, k, device=device) for rows in (m, n))
    weight = 1.5 * weight / max(k, 1) ** 0.5
    return x.to(dtype), weight.to(dtype), torch.randn(n, device=device).to(dtype)


@pytest.mark.parametrize("with_bias", (True, False), ids=("bias", "no_bias"))
@pytest.mark.parametrize("shape", [(257, 1234, 768), (1024, 64, 32), (16, 1024, 2048), (1, 4096, 1024)], ids=str)
@DTYPE_CASES
@ACTIVATION_CASES
@pytest.mark.capability
def test_no_less_accurate_than_eager(kernel, device, activation, dtype, shape, with_bias):
    x, weight, bias = problem(*shape, dtype, device)
    arguments = (x, weight, bias if with_bias else None)
    out = kernel.linear(*arguments, activation=activation)
    assert out.is_contiguous() and out.device == x.device
    reference.assert_linear_is_no_worse_than_eager(
        f"linear {activation} {dtype} {shape}",
        out,
        reference.eager_linear(*arguments, activation),
        reference.perfect_linear(*arguments, activation),
        reference.linear(*arguments, activation),
    )


SIZES = (0, 1, 2, 127, 1024)


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("n", SIZES)
@DTYPE_CASES
def test_sizes(kernel, device, n, k, dtype):
    """Including K = 0, whose result is the activated bias, and the tall and the wide."""
    for m, activation in itertools.product(SIZES, ACTIVATIONS):
        if m * n * k > 1024 * 127 * 127:
            continue
        x, weight, bias = problem(m, n, k, dtype, device)
        for arguments in ((x, weight, bias), (x, weight)):
            out = kernel.linear(*arguments, activation=activation)
            assert out.shape == (m, n)
            reference.assert_linear_is_accurate(out, *arguments, *(None,) * (3 - len(arguments)), activation)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (0, 3), (2, 0), (1, 1, 1, 1, 5)], ids=str)
@ACTIVATION_CASES
def test_ranks(kernel, device, lead, activation):
    x, weight, bias = torch.randn(*lead, 24, device=device), torch.randn(40, 24, device=device), None
    for bias in (None, torch.randn(40, device=device)):
        out = kernel.linear(x, weight, bias, activation=activation)
        assert out.shape == (*lead, 40) and out.is_contiguous()
        reference.assert_linear_is_accurate(out, x, weight, bias, activation)


@ACTIVATION_CASES
def test_without_products_the_bias_is_left(kernel, device, activation):
    bias = torch.tensor([1.0, -2.0, 0.5], device=device)
    x, weight = torch.empty(2, 2, 0, device=device), torch.empty(3, 0, device=device)
    out = kernel.linear(x, weight, bias, activation=activation)
    reference.assert_linear_is_accurate(out, x, weight, bias, activation)
    assert (kernel.linear(x, weight, activation=activation) == 0).all()


@DTYPE_CASES
def test_which_gelu(kernel, device, dtype):
    """At +-2.699 the forms lie 4.73e-4 apart, and it is float32 and float64 that can tell."""
    for value in (2.699, -2.699):
        # As the sum of a product and a bias, in a single element and in a block that a fused product takes.
        for m, n, k in ((1, 1, 1), (64, 64, 64)):
            x = torch.zeros(m, k, device=device, dtype=dtype)
            x[:, 0] = 1
            weight = torch.zeros(n, k, device=device, dtype=dtype)
            weight[:, 0] = value - 0.25
            bias = torch.full((n,), 0.25, device=device, dtype=dtype)
            pre = reference.preactivation(x, weight, bias)
            out = {name: kernel.linear(x, weight, bias, activation=name).double() for name in ACTIVATIONS}
            assert torch.equal(out[None], pre.to(dtype).double())
            step = torch.finfo(dtype).eps * 2.699
            for name, other in (("gelu", "tanh"), ("gelu_tanh", "none")):
                own = reference.activate(pre, name)
                assert (out[name] - own).abs().max() <= step
                if step < 1e-4:
                    assert (out[name] - reference.gelu(pre, other)).abs().min() > 4.6e-4


@ACTIVATION_CASES
def test_infinities_and_nan(kernel, device, activation):
    """As the composition has them: a NaN row stays a row, and gelu(-inf) is NaN."""
    x = torch.ones(4, 8, device=device)
    x[1, 3], x[2, 0], x[3, 0] = float("nan"), float("inf"), float("-inf")
    weight, bias = torch.full((6, 8), 0.5, device=device), torch.zeros(6, device=device)
    expected = reference.linear(x, weight, bias, activation).float()
    torch.testing.assert_close(kernel.linear(x, weight, bias, activation=activation), expected, equal_nan=True)


# ---- layouts ----


def padded(rows, cols, pad, new):
    """Rows followed by `pad` columns of NaN: what is read past a row's end shows."""
    buffer = new(rows, cols + pad)
    buffer[:, cols:] = float("nan")
    return buffer[:, :cols]


MATRICES = {
    "dense": lambda r, c, new: new(r, c),
    "transposed": lambda r, c, new: new(c, r).t(),
    "pitch_8": lambda r, c, new: padded(r, c, 8, new),
    "pitch_1": lambda r, c, new: padded(r, c, 1, new),
    "transposed_pitch_3": lambda r, c, new: padded(c, r, 3, new).t(),
    "every_other_column": lambda r, c, new: new(r, 2 * c)[:, ::2],
    "every_other_row": lambda r, c, new: new(2 * r, c)[::2],
    "expanded_rows": lambda r, c, new: new(1, c).expand(r, c),
    "expanded_columns": lambda r, c, new: new(r, 1).expand(r, c),
    "offset_1": lambda r, c, new: new(r * c + 1)[1:].view(r, c),
    "negative_bit": lambda r, c, new: torch._neg_view(new(r, c)),
}


@pytest.mark.parametrize("weight_layout", MATRICES)
@pytest.mark.parametrize("x_layout", MATRICES)
def test_layouts(kernel, device, x_layout, weight_layout):
    for dtype, activation in itertools.product((torch.float32, torch.bfloat16), ACTIVATIONS):

        def new(*shape, dtype=dtype):
            return torch.randn(*shape, device=device).to(dtype)

        x, weight, bias = MATRICES[x_layout](24, 32, new), MATRICES[weight_layout](40, 32, new), new(80)[::2]
        out = kernel.linear(x, weight, bias, activation=activation)
        assert out.is_contiguous()
        reference.assert_linear_is_accurate(out, x, weight, bias, activation)


BATCHES = {
    "swapped": lambda new: new(5, 3, 32).transpose(0, 1),
    "padded_batch": lambda new: new(3, 7, 32)[:, :5],
    "permuted": lambda new: new(32, 3, 5).permute(1, 2, 0),
    "expanded_batch": lambda new: new(1, 5, 32).expand(3, 5, 32),
    "size_one": lambda new: new(3, 1, 32).as_strided((3, 1, 32), (32, 1000, 1)),
    "vector_strided": lambda new: new(64)[::2],
}


@pytest.mark.parametrize("name", BATCHES)
@ACTIVATION_CASES
def test_batched_layouts(kernel, device, name, activation):
    x = BATCHES[name](lambda *shape: torch.randn(*shape, device=device))
    weight, bias = torch.randn(16, 32, device=device), torch.randn(16, device=device)
    out = kernel.linear(x, weight, bias, activation=activation)
    assert out.is_contiguous()
    reference.assert_linear_is_accurate(out, x, weight, bias, activation)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@ACTIVATION_CASES
def test_operands_at_every_offset(kernel, device, dtype, activation):
    """A slice of a bias, a weight or an activation begins anywhere; the neighbours are NaN."""

    def placed(offset, *shape):
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 24,), float("nan"), device=device, dtype=dtype)
        buffer[offset : offset + count] = torch.randn(count, device=device).to(dtype)
        return buffer[offset : offset + count].view(shape)

    m, n, k = 24, 40, 64
    for offset in range(17):
        x, weight, bias = placed(0, m, k), placed(0, n, k), placed(offset, n)
        out = kernel.linear(x, weight, bias, activation=activation)
        reference.assert_linear_is_accurate(out, x, weight, bias, activation)
    for x_offset, weight_offset in itertools.product((0, 1, 2, 4, 8), repeat=2):
        x, weight, bias = placed(x_offset, m, k), placed(weight_offset, n, k), placed(1, n)
        out = kernel.linear(x, weight, bias, activation=activation)
        reference.assert_linear_is_accurate(out, x, weight, bias, activation)


def test_result_is_fresh_and_untracked(kernel, device):
    x, weight, bias = problem(8, 16, 32, torch.float32, device)
    before = [t.clone() for t in (x, weight, bias)]
    for activation in ACTIVATIONS:
        out = kernel.linear(x, weight, bias, activation=activation)
        assert not out.requires_grad and out.data_ptr() not in {t.data_ptr() for t in (x, weight, bias)}
        assert all(torch.equal(now, then) for now, then in zip((x, weight, bias), before, strict=True))
        reference.assert_same_bits(kernel.linear(x, weight, bias, activation=activation), out)
        with torch.no_grad():
            assert not kernel.linear(x, weight.requires_grad_(), bias, activation=activation).requires_grad
        weight.requires_grad_(False)


def test_inference_mode(kernel, device):
    with torch.inference_mode():
        x, weight, bias = problem(8, 16, 32, torch.float32, device)
        out = kernel.linear(x, weight, bias, activation="gelu")
    assert out.is_inference()
    reference.assert_linear_is_accurate(out.clone(), x.clone(), weight.clone(), bias.clone(), "gelu")


# ---- routes ----


@ACTIVATION_CASES
def test_the_route_is_told(kernel, ops, device, activation):
    """On the CPU there is one; on CUDA which one is the affair of test_linear_gpu.py."""
    x, weight, bias = problem(8, 16, 32, torch.float32, device)
    for training in (False, True):
        route = ops.linear_route(x, weight, bias, ACTIVATIONS.index(activation), False, training)
        assert isinstance(route, str) and route
        if device.type == "cpu":
            assert "cublaslt" not in route


def test_tuning_on_the_cpu_does_nothing_and_says_so(kernel, device, tmp_path, caplog):
    if device.type != "cpu":
        pytest.skip("the CPU's behaviour")
    x, weight, bias = problem(8, 16, 32, torch.float32, device)
    with caplog.at_level("INFO", logger="geglu"):
        assert kernel.tune(x, weight, bias, activation="gelu_tanh") == ()
    assert "nothing to choose" in caplog.text
    path = tmp_path / "tuning.json"
    kernel.save_tuning(path)
    assert kernel.load_tuning(path).refused == ()
    with pytest.raises(ValueError, match=r"\bactivation must\b"):
        kernel.tune(x, weight, bias, activation="relu")
    with pytest.raises(RuntimeError, match=r"\bweight must\b"):
        kernel.tune(x, weight[:, :-1], bias)
    with pytest.raises(TypeError, match=r"\bx must\b"):
        kernel.tune(None, weight, bias)


NOT_A_TUNING_FILE = {
    "not_json": ("{", "must hold JSON"),
    "a_list": ("[]", "must be of format 1"),
    "other_format": ('{"format": 2, "entries": []}', "must be of format 1"),
    "no_entries": ('{"format": 1}', "entries .* must be a list"),
}


@pytest.mark.parametrize("name", NOT_A_TUNING_FILE)
def test_a_file_that_is_no_tuning_file(kernel, tmp_path, name):
    text, message = NOT_A_TUNING_FILE[name]
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        kernel.load_tuning(path)
    assert str(path) in str(caught.value)


def test_entries_that_do_not_fit_are_refused_one_by_one(kernel, tmp_path):
    path = tmp_path / "tuning.json"
    path.write_text('{"format": 1, "entries": [3, {"dtype": 1}, {"dtype": "a b"}, {"nonsense": "word"}, {}]}')
    loaded = kernel.load_tuning(path)
    assert loaded.taken == 0 and len(loaded.refused) == 5
    for place, reason in enumerate(loaded.refused):
        assert reason.startswith(f"entry {place}: ") and len(reason) > len(f"entry {place}: ")


def test_a_tuning_file_is_written_whole_or_not_at_all(kernel, tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    assert kernel.save_tuning(path) >= 0
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", fail)
        with pytest.raises(OSError, match="disk full"):
            kernel.save_tuning(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        kernel.save_tuning(tmp_path / "missing" / "tuning.json")
    with pytest.raises(FileNotFoundError):
        kernel.load_tuning(tmp_path / "missing.json")


# ---- bad input ----


def new(*shape, dtype=torch.float32):
    return lambda device: torch.ones(shape, dtype=dtype, device=device)


def value(anything):
    return lambda device: anything


def naming(argument):
    return rf"\b{argument} (must|requires)\b"


X, WEIGHT, BIAS = new(5, 4, 8), new(6, 8), new(6)
REFUSED = (RuntimeError, NotImplementedError)

# (x, weight, bias, the argument that the message names, the error, numbers that it holds)
BAD = {
    "other_k": (X, new(6, 7), BIAS, "weight", REFUSED, ("8", "7")),
    "transposed_weight": (X, new(8, 6), BIAS, "weight", REFUSED, ("8", "6")),
    "weight_1d": (X, new(8), BIAS, "weight", REFUSED, ()),
    "weight_3d": (X, new(1, 6, 8), BIAS, "weight", REFUSED, ()),
    "x_0d": (new(), WEIGHT, BIAS, "x", REFUSED, ()),
    "short_bias": (X, WEIGHT, new(5), "bias", REFUSED, ("6", "5")),
    "bias_of_one": (X, WEIGHT, new(1), "bias", REFUSED, ("6", "1")),
    "bias_2d": (X, WEIGHT, new(1, 6), "bias", REFUSED, ("6",)),
    "bias_0d": (X, WEIGHT, new(), "bias", REFUSED, ()),
    "weight_dtype": (X, new(6, 8, dtype=torch.bfloat16), BIAS, "weight", REFUSED, ()),
    "bias_dtype": (X, WEIGHT, new(6, dtype=torch.float64), "bias", REFUSED, ()),
    "integers": (new(4, 8, dtype=torch.int32), new(6, 8, dtype=torch.int32), None, "x", REFUSED, ()),
    "complex": (new(4, 8, dtype=torch.complex64), new(6, 8, dtype=torch.complex64), None, "x", REFUSED, ()),
    "float8": (new(4, 8, dtype=torch.float8_e4m3fn), new(6, 8, dtype=torch.float8_e4m3fn), None, "x", REFUSED, ()),
    "integer_weight": (X, new(6, 8, dtype=torch.int64), BIAS, "weight", REFUSED, ()),
    "meta_x": (lambda device: torch.ones(4, 8, device="meta"), WEIGHT, BIAS, "x", REFUSED, ()),
    "meta_weight": (X, lambda device: torch.ones(6, 8, device="meta"), BIAS, "weight", REFUSED, ()),
    "meta_bias": (X, WEIGHT, lambda device: torch.ones(6, device="meta"), "bias", REFUSED, ()),
    "sparse_x": (lambda device: torch.ones(4, 8, device=device).to_sparse(), WEIGHT, BIAS, "x", REFUSED, ()),
    "sparse_weight": (X, lambda device: torch.ones(6, 8, device=device).to_sparse(), BIAS, "weight", REFUSED, ()),
    "x_none": (value(None), WEIGHT, BIAS, "x", TypeError, ()),
    "weight_list": (X, value([1.0]), BIAS, "weight", TypeError, ()),
    "bias_number": (X, WEIGHT, value(1.0), "bias", TypeError, ()),
}


@pytest.mark.parametrize("needs_grad", (False, True), ids=("plain", "needs_grad"))
@ACTIVATION_CASES
@pytest.mark.parametrize("case", BAD)
def test_bad_input(kernel, device, case, activation, needs_grad):
    *makers, named, error, numbers = BAD[case]
    arguments = [None if make is None else make(device) for make in makers]
    for tensor in arguments:
        if needs_grad and isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_()
    with pytest.raises(error, match=naming(named)) as caught:
        kernel.linear(*arguments, activation=activation)
    assert all(number in str(caught.value) for number in numbers)
    # And an ordinary call after it gives the right numbers.
    x, weight, bias = problem(3, 5, 7, torch.float32, device)
    reference.assert_linear_is_accurate(kernel.linear(x, weight, bias), x, weight, bias, None)


@pytest.mark.parametrize("activation", ("relu", "GELU", "", "tanh", True, 0, ["gelu"]), ids=str)
def test_unknown_activation(kernel, device, activation):
    x, weight, bias = problem(3, 5, 7, torch.float32, device)
    with pytest.raises(ValueError, match=naming("activation")):
        kernel.linear(x, weight, bias, activation=activation)


# ---- autocast ----

KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("amp", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("x_dtype", KINDS, ids=str)
def test_autocast_casts_as_for_torchs_linear(kernel, device, amp, x_dtype):
    """Result type, values and gradients' types for every combination, or an error where torch has one."""
    for weight_dtype, bias_dtype in itertools.product(KINDS, (None, *KINDS)):
        leaves = [torch.randn(5, 8, device=device).to(x_dtype), torch.randn(6, 8, device=device).to(weight_dtype)]
        if bias_dtype is not None:
            leaves.append(torch.randn(6, device=device).to(bias_dtype))
        leaves = [leaf.requires_grad_() for leaf in leaves]
        with torch.autocast(device.type, dtype=amp):
            try:
                theirs = F.linear(*leaves)
            except RuntimeError:
                with pytest.raises(RuntimeError, match=r"\b(weight|bias) must\b"):
                    kernel.linear(*leaves)
                continue
            with torch.no_grad():
                bare = kernel.linear(*leaves)
            ours = kernel.linear(*leaves)
        assert ours.dtype == bare.dtype == theirs.dtype
        scale = theirs.detach().double().abs().max()
        for mine in (ours, bare):
            assert (mine - theirs).detach().abs().max() <= 2 * torch.finfo(theirs.dtype).eps * scale
        grads = torch.autograd.grad(ours, leaves, torch.ones_like(ours))
        assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]


def test_disabled_autocast_and_other_devices_autocast(kernel, device):
    x, weight, bias = problem(5, 6, 8, torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16), torch.autocast(device.type, enabled=False):
        assert kernel.linear(x, weight, bias).dtype == torch.float32
    other = "cuda" if device.type == "cpu" else "cpu"
    if other == "cpu" or torch.cuda.is_available():
        with torch.autocast(other, dtype=torch.bfloat16):
            assert kernel.linear(x, weight, bias).dtype == torch.float32


def test_mixed_dtypes_outside_autocast_are_one_clear_error(kernel, device):
    for kinds in itertools.product((torch.float32, torch.bfloat16), repeat=3):
        x, weight, bias = (
            torch.ones(shape, dtype=kind, device=device)
            for shape, kind in zip(((5, 8), (6, 8), (6,)), kinds, strict=True)
        )
        if len(set(kinds)) == 1:
            assert kernel.linear(x, weight, bias).dtype == kinds[0]
        else:
            with pytest.raises(RuntimeError, match=naming("weight" if kinds[1] != kinds[0] else "bias")):
                kernel.linear(x, weight, bias)
