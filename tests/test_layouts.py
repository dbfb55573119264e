"""Strides, offsets, widths: any layout gives the bits of its dense copy, and nothing outside the result is written."""

import layouts
import pytest
import reference
import torch
from layouts import LAYOUTS, WIDTHS
from reference import DTYPES, FORMS

LAYOUT_CASES = pytest.mark.parametrize("layout", LAYOUTS, ids=layouts.ids(LAYOUTS))
DTYPE_CASES = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SENTINEL = 42.0


@LAYOUT_CASES
@DTYPE_CASES
@pytest.mark.capability
def test_forward(kernel, device, alike, layout, dtype):
    alike(dtype)
    gate, up = layout.tensors(dtype, device)
    for approximate in FORMS:
        out = kernel.geglu(gate, up, approximate=approximate)
        reference.assert_accurate(out, gate, up, approximate)
        assert out.stride() == torch.empty_like(gate).stride()
        dense = kernel.geglu(gate.clone().contiguous(), up.clone().contiguous(), approximate=approximate)
        reference.assert_same_bits(out, dense)


@LAYOUT_CASES
@DTYPE_CASES
@pytest.mark.capability
def test_backward(kernel, device, alike, layout, dtype):
    alike(dtype)
    gate, up = layout.tensors(dtype, device)
    grad = torch.randn(gate.shape, device=device).to(dtype)
    for approximate in FORMS:
        # detach keeps the strides; the leaves are views of the same memory.
        leaves = [t.detach().requires_grad_() for t in (gate, up)]
        grads = torch.autograd.grad(kernel.geglu(*leaves, approximate=approximate), leaves, grad)
        reference.assert_accurate_grads(grads, grad, gate, up, approximate)
        dense = [t.clone().contiguous().requires_grad_() for t in (gate, up)]
        expected = torch.autograd.grad(kernel.geglu(*dense, approximate=approximate), dense, grad)
        for actual, wanted in zip(grads, expected, strict=True):
            reference.assert_same_bits(actual, wanted)


@pytest.mark.parametrize("d", WIDTHS)
@DTYPE_CASES
@pytest.mark.capability
def test_packed_widths(kernel, device, d, dtype):
    x = torch.randn(3, 2 * d, device=device).to(dtype)
    for gate_first in (True, False):
        gate, up = reference.split(x, gate_first)
        leaf = x.clone().requires_grad_()
        out = kernel.geglu_packed(leaf, gate_first=gate_first)
        reference.assert_accurate(out.detach(), gate, up, "tanh")
        grad = torch.randn(3, d, device=device).to(dtype)
        (packed_grad,) = torch.autograd.grad(out, leaf, grad)
        assert packed_grad.shape == x.shape
        reference.assert_accurate_grads(reference.split(packed_grad, gate_first), grad, gate, up, "tanh")


PACKED = {
    # (what is packed, why)
    "row_slice": lambda new: new(9, 40)[2:7],
    "every_other_row": lambda new: new(10, 40)[::2],
    "swapped_batch": lambda new: new(4, 3, 40).transpose(0, 1),
    "padded_rows": lambda new: new(5, 47)[:, :40],
    "column_slice_at_odd_offset": lambda new: new(5, 47)[:, 3:43],
    "every_other_column": lambda new: new(5, 80)[:, ::2],
    "column_major": lambda new: new(40, 6).t(),
    "expanded_rows": lambda new: new(1, 40).expand(6, 40),
    "offset": lambda new: new(1 + 5 * 40)[1:].view(5, 40),
    "one_dim": lambda new: new(40),
    "four_dims_permuted": lambda new: new(2, 3, 4, 40).permute(2, 0, 1, 3),
    "seven_dims": lambda new: new(3, 3, 3, 3, 3, 3, 12)[:2, :2, :2, :2, :2, :2, :10],
}


@pytest.mark.parametrize("name", PACKED)
@DTYPE_CASES
def test_packed_layouts(kernel, device, name, dtype):
    x = PACKED[name](lambda *shape: torch.randn(*shape, device=device).to(dtype))
    for gate_first in (True, False):
        gate, up = reference.split(x, gate_first)
        leaf = x.detach().requires_grad_()
        out = kernel.geglu_packed(leaf, approximate="none", gate_first=gate_first)
        assert out.is_contiguous() and out.shape == gate.shape
        reference.assert_accurate(out.detach(), gate, up, "none")
        grad = torch.randn(gate.shape, device=device).to(dtype)
        (packed_grad,) = torch.autograd.grad(out, leaf, grad)
        reference.assert_accurate_grads(reference.split(packed_grad, gate_first), grad, gate, up, "none")


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("d", (1, 5, 16, 27))
@DTYPE_CASES
def test_out_variant_writes_its_slice_and_nothing_else(kernel, device, offset, d, dtype):
    """`out` slides over a sentinel-filled buffer, by rows with a gap of three columns between them."""
    x = torch.randn(4, 2 * d, device=device).to(dtype)
    buffer = torch.full((offset + 4 * (d + 3) + 9,), SENTINEL, device=device, dtype=dtype)
    out = buffer[offset : offset + 4 * (d + 3)].view(4, d + 3)[:, :d]
    kernel.gelu_tanh_and_mul(out, x)
    reference.assert_accurate(out, *reference.split(x), "tanh")
    out.fill_(SENTINEL)
    assert torch.all(buffer == SENTINEL)


@pytest.mark.parametrize("shape", [(3, 1), (3, 17), (1, 1031), (257, 33), (2, 3, 5)])
@DTYPE_CASES
def test_every_element_of_a_result_is_written(kernel, device, shape, dtype):
    """Fresh memory is filled with NaN, so an element that nobody writes cannot hold a right value by luck."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        gate, up, grad = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
        packed = torch.cat((gate, up), dim=-1)
        leaves = [t.requires_grad_() for t in (gate, up, packed)]
        # A filled allocation proves that the net is up.
        assert torch.empty_like(grad).isnan().all()
        split_out, packed_out = kernel.geglu(gate, up), kernel.geglu_packed(packed)
        grads = torch.autograd.grad((split_out, packed_out), leaves, (grad, grad))
        for result in (split_out, packed_out, *grads):
            assert not result.isnan().any()
    finally:
        torch.use_deterministic_algorithms(deterministic)


@DTYPE_CASES
def test_nothing_beside_the_input_is_read(kernel, device, dtype):
    """Input rows are islands in a sea of NaN, at every small offset."""
    for offset in range(5):
        buffer = torch.full((3, 3 * 32), float("nan"), device=device, dtype=dtype)
        gate, up = buffer[:, offset : offset + 19], buffer[:, 40 + offset : 40 + offset + 19]
        gate.normal_(), up.normal_()
        leaves = [t.detach().requires_grad_() for t in (gate, up)]
        out = kernel.geglu(*leaves)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        for result in (out, *grads):
            assert result.isfinite().all()
