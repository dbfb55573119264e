"""Shapes, strides, offsets, dtypes, forms and gate orders that nobody thought of, drawn by hypothesis."""

import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import DTYPES, FORMS

# Each example is a forward and a backward of at most a few thousand elements.
SETTINGS = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def views(draw, shape):
    """(sizes of a dense buffer, function that turns it into a view of `shape`), by slices, steps and a permutation."""
    rank = len(shape)
    order = draw(st.permutations(range(rank)))
    before, after, steps = ([], [], [])
    for _ in shape:
        before.append(draw(st.integers(0, 3)))
        after.append(draw(st.integers(0, 3)))
        # A step in one of four dimensions, so that unit strides stay common.
        steps.append(draw(st.sampled_from((1, 1, 1, 2, 3))))
    expanded = [draw(st.integers(0, 7)) == 0 for _ in range(rank)]
    sizes = [
        before[axis] + (1 if expanded[axis] else max(0, (shape[axis] - 1) * steps[axis] + 1)) + after[axis]
        for axis in range(rank)
    ]

    def view(buffer):
        buffer = buffer.permute([order.index(axis) for axis in range(rank)])
        for axis in range(rank):
            length = 1 if expanded[axis] else max(0, (shape[axis] - 1) * steps[axis] + 1)
            buffer = buffer.narrow(axis, before[axis], length)
            buffer = buffer[(slice(None),) * axis + (slice(None, None, steps[axis]),)]
        return buffer.expand(shape)

    return [sizes[axis] for axis in order], view


SHAPES = st.lists(st.integers(0, 6), min_size=0, max_size=4).flatmap(
    # The last dimension crosses a block of 64 every now and then.
    lambda outer: st.one_of(st.integers(0, 9), st.integers(60, 70), st.integers(120, 140)).map(lambda d: (*outer, d))
)


def filled(sizes, dtype, device, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(device, dtype)


@st.composite
def split_cases(draw):
    shape = draw(SHAPES)
    return shape, [draw(views(shape)) for _ in range(3)], draw(st.integers(0, 2**31))


@given(case=split_cases(), dtype=st.sampled_from(DTYPES), approximate=st.sampled_from(FORMS))
@SETTINGS
def test_split(kernel, device, case, dtype, approximate):
    shape, (gate_view, up_view, grad_view), seed = case
    gate, up, grad = (
        view(filled(sizes, dtype, device, seed + i)) for i, (sizes, view) in enumerate((gate_view, up_view, grad_view))
    )
    assert gate.shape == up.shape == grad.shape == shape
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    out = kernel.geglu(*leaves, approximate=approximate)
    reference.assert_accurate(out.detach(), gate, up, approximate)
    assert out.stride() == torch.empty_like(gate).stride()
    grads = torch.autograd.grad(out, leaves, grad)
    reference.assert_accurate_grads(grads, grad, gate, up, approximate)


@st.composite
def packed_cases(draw):
    shape = draw(SHAPES)
    packed = (*shape[:-1], 2 * shape[-1])
    return shape, draw(views(packed)), draw(views(shape)), draw(st.integers(0, 2**31))


@given(
    case=packed_cases(),
    dtype=st.sampled_from(DTYPES),
    approximate=st.sampled_from(FORMS),
    gate_first=st.booleans(),
)
@SETTINGS
def test_packed(kernel, device, case, dtype, approximate, gate_first):
    shape, (sizes, view), (grad_sizes, grad_view), seed = case
    x, grad = view(filled(sizes, dtype, device, seed)), grad_view(filled(grad_sizes, dtype, device, seed + 1))
    gate, up = reference.split(x, gate_first)
    leaf = x.detach().requires_grad_()
    out = kernel.geglu_packed(leaf, approximate=approximate, gate_first=gate_first)
    assert out.shape == shape and out.is_contiguous()
    reference.assert_accurate(out.detach(), gate, up, approximate)
    (packed_grad,) = torch.autograd.grad(out, leaf, grad)
    reference.assert_accurate_grads(reference.split(packed_grad, gate_first), grad, gate, up, approximate)


@given(case=packed_cases(), dtype=st.sampled_from(DTYPES), approximate=st.sampled_from(FORMS), gap=st.integers(0, 5))
@SETTINGS
def test_out_variants(kernel, device, case, dtype, approximate, gap):
    """The result lands in a strided `out`, and the sentinel around it stays."""
    shape, (sizes, view), _, seed = case
    x = view(filled(sizes, dtype, device, seed))
    buffer = torch.full((*shape[:-1], shape[-1] + gap), 42.0, dtype=dtype, device=device)
    out = buffer.transpose(0, -1).contiguous().transpose(0, -1)[..., : shape[-1]] if gap % 2 else buffer[..., gap:]
    whole = out._base if out._base is not None else out
    (kernel.gelu_tanh_and_mul if approximate == "tanh" else kernel.gelu_and_mul)(out, x)
    reference.assert_accurate(out, *reference.split(x), approximate)
    out.fill_(42.0)
    assert (whole == 42.0).all()


@given(
    values=st.lists(
        st.tuples(st.floats(allow_nan=True, allow_infinity=True, width=32), st.floats(width=32, allow_nan=True)),
        min_size=1,
        max_size=40,
    ),
    dtype=st.sampled_from(DTYPES),
    approximate=st.sampled_from(FORMS),
)
@SETTINGS
def test_any_values(kernel, device, values, dtype, approximate):
    """Whatever the bits: finite where perfect arithmetic is, the same infinities and NaN, the sign of the product."""
    gate, up = (torch.tensor(column, dtype=torch.float64).to(device, dtype) for column in zip(*values, strict=True))
    out = kernel.geglu(gate, up, approximate=approximate)
    expected, _, _ = reference.rounded_steps(torch.ones_like(gate), gate, up, approximate)
    # At the edge of overflow one step of gelu(gate) decides; and what s(x) flushed to zero times infinity is NaN.
    settled = expected.abs().double() < torch.finfo(dtype).max / 2
    reference.assert_accurate(out[settled], gate[settled], up[settled], approximate)
    overflow = (gate.double().abs() * up.double().abs() > 4.0 * torch.finfo(dtype).max) & (gate > 0) & up.isfinite()
    reference.assert_same_bits(out[overflow & gate.isfinite()], expected[overflow & gate.isfinite()])
    special = gate.isnan() | up.isnan() | (gate == float("-inf"))
    assert out[special].isnan().all()
    infinite = (gate == float("inf")) & (up != 0) & ~up.isnan()
    reference.assert_same_bits(out[infinite], expected[infinite])


@pytest.mark.parametrize("shape", [(2, 3), (5,)], ids=str)
def test_the_drawn_views_are_views(shape):
    """A strategy that only made dense tensors would test nothing."""
    seen = set()

    @given(case=views(shape))
    @settings(SETTINGS, max_examples=60)
    def collect(case):
        sizes, view = case
        result = view(torch.zeros(sizes))
        assert result.shape == shape
        seen.add((result.is_contiguous(), 0 in result.stride(), result.storage_offset() > 0))

    collect()
    assert len(seen) >= 4
