"""Forward results of every entry point: values, types, gate order, rounding order."""

import pytest
import reference
import torch
from reference import DTYPES, FORMS, HALVES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.capability
def test_geglu_is_accurate(kernel, device, dtype, approximate):
    # 1234 columns: no power of two, so every vector length leaves a tail.
    gate, up = (torch.randn(64, 1234, device=device).to(dtype) for _ in "gu")
    out = kernel.geglu(gate, up, approximate=approximate)
    assert out.device == gate.device
    reference.assert_accurate(out, gate, up, approximate)


@pytest.mark.parametrize("gate_first", (True, False))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.capability
def test_packed_is_accurate(kernel, device, dtype, approximate, gate_first):
    x = torch.randn(3, 21, 2 * 617, device=device).to(dtype)
    gate, up = reference.split(x, gate_first)
    out = kernel.geglu_packed(x, approximate=approximate, gate_first=gate_first)
    assert out.is_contiguous()
    reference.assert_accurate(out, gate, up, approximate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "approximate"), [("gelu_and_mul", "none"), ("gelu_tanh_and_mul", "tanh")])
@pytest.mark.capability
def test_out_variant_is_accurate(kernel, device, dtype, name, approximate):
    x = torch.randn(3, 21, 2 * 617, device=device).to(dtype)
    out = torch.full((3, 21, 617), 42.0, device=device, dtype=dtype)
    assert getattr(kernel, name)(out, x) is out
    reference.assert_accurate(out, *reference.split(x), approximate)


@pytest.mark.parametrize("approximate", FORMS)
def test_which_half_is_the_gate(kernel, device, approximate):
    """[1, 2 | 3, 4]: activated first is (gelu(1) * 3, gelu(2) * 4), activated second (1 * gelu(3), 2 * gelu(4))."""
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64, device=device)
    g = {v: reference.gelu(torch.tensor(float(v), dtype=torch.float64), approximate).item() for v in (1, 2, 3, 4)}
    first = torch.tensor([[g[1] * 3, g[2] * 4]], dtype=torch.float64, device=device)
    second = torch.tensor([[1 * g[3], 2 * g[4]]], dtype=torch.float64, device=device)
    torch.testing.assert_close(kernel.geglu_packed(x, approximate=approximate), first)
    torch.testing.assert_close(kernel.geglu_packed(x, approximate=approximate, gate_first=True), first)
    torch.testing.assert_close(kernel.geglu_packed(x, approximate=approximate, gate_first=False), second)
    torch.testing.assert_close(kernel.geglu(x[:, 2:], x[:, :2], approximate=approximate), second)


def test_the_default_form_is_tanh(kernel, device):
    """At 2.699 the forms lie 4.73e-4 apart, more than anywhere else."""
    gate = torch.tensor([2.699, -2.699], dtype=torch.float64, device=device)
    one = torch.ones_like(gate)
    assert (reference.gelu(gate, "tanh") - reference.gelu(gate, "none")).abs().min() > 4.7e-4
    for out in (kernel.geglu(gate, one), kernel.geglu_packed(torch.cat((gate, one)))):
        torch.testing.assert_close(out, reference.gelu(gate, "tanh"))


@pytest.mark.parametrize("approximate", FORMS)
def test_the_product_is_rounded_twice(kernel, device, approximate):
    """gelu(1) rounds to 0.83984375 in bfloat16 and times 3 to 2.515625, eager's value; one rounding gives 2.53125."""
    gate, up = (torch.tensor([v], dtype=torch.bfloat16, device=device) for v in (1.0, 3.0))
    # As one element and as a full vector: both paths of the kernel round alike.
    for count in (1, 67):
        out = kernel.geglu(gate.repeat(count), up.repeat(count), approximate=approximate)
        assert out.tolist() == [2.515625] * count


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", FORMS)
def test_every_entry_point_gives_the_same_bits(kernel, ops, device, dtype, approximate):
    """The entry points differ in how they walk memory, not in arithmetic; each is compared with fp64 elsewhere."""
    tanh = approximate == "tanh"
    x = torch.randn(5, 2 * 67, device=device).to(dtype)
    gate, up = (half.contiguous() for half in reference.split(x))
    expected = kernel.geglu(gate, up, approximate=approximate)
    out = torch.empty_like(gate)
    (kernel.gelu_tanh_and_mul if tanh else kernel.gelu_and_mul)(out, x)
    layer = kernel.layers.GeluTanhAndMul() if tanh else kernel.layers.GeluAndMul()
    swapped = torch.cat((up, gate), dim=-1)
    for other in (
        out,
        layer(x),
        kernel.geglu_packed(x, approximate=approximate),
        kernel.geglu_packed(swapped, approximate=approximate, gate_first=False),
        ops.geglu(gate, up, tanh),
        ops.geglu_packed(x, tanh, True),
        ops.geglu_packed(swapped, tanh, False),
    ):
        reference.assert_same_bits(other, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_result_is_fresh_and_untracked(kernel, device, dtype):
    gate, up = (torch.randn(4, 33, device=device).to(dtype) for _ in "gu")
    before = gate.clone(), up.clone()
    out = kernel.geglu(gate, up)
    assert not out.requires_grad
    assert out.data_ptr() not in (gate.data_ptr(), up.data_ptr())
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])
    with torch.no_grad():
        assert not kernel.geglu(gate.requires_grad_(), up).requires_grad


def test_public_names(kernel):
    functions = ["geglu", "geglu_mlp", "geglu_packed", "gelu_and_mul", "gelu_tanh_and_mul", "linear", "linear_geglu"]
    assert sorted(kernel.__all__) == sorted([*functions, "layers", "load_tuning", "save_tuning", "tune"])
    for name in kernel.__all__:
        assert hasattr(kernel, name)


@pytest.mark.capability
def test_large_input_is_split_over_threads_without_a_seam(kernel, device):
    """Past any parallel grain: the ranges of the threads join, whatever their number."""
    gate, up = (torch.randn(1027, 1031, device=device) for _ in "gu")
    whole = kernel.geglu(gate, up)
    reference.assert_accurate(whole, gate, up, "tanh")
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(kernel.geglu(gate, up), whole)
    finally:
        torch.set_num_threads(threads)
