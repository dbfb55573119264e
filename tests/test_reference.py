"""The yardstick itself: the reference against 40 digits, and bounds that let right results pass and wrong ones not."""

import digits
import pytest
import reference
import torch
from reference import DTYPES, FORMS

FORM_CASES = pytest.mark.parametrize("approximate", FORMS)
DTYPE_CASES = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@FORM_CASES
def test_reference_has_twelve_digits(approximate):
    x = torch.linspace(-20, 20, 161, dtype=torch.float64)
    value, slope = reference.gelu(x, approximate), reference.gelu_derivative(x, approximate)
    for point, got, got_slope in zip(x.tolist(), value.tolist(), slope.tolist(), strict=True):
        assert got == pytest.approx(float(digits.gelu(point, approximate)), rel=1e-12, abs=1e-300)
        assert got_slope == pytest.approx(float(digits.derivative(point, approximate)), rel=1e-10, abs=1e-300)


@DTYPE_CASES
@FORM_CASES
def test_perfect_arithmetic_with_eagers_roundings_is_within_the_bounds(dtype, approximate):
    gate = torch.cat((torch.randn(20000), torch.linspace(-40, 40, 2001))).to(dtype)
    up, grad = (torch.randn(gate.shape).to(dtype) for _ in range(2))
    out, *grads = reference.rounded_steps(grad, gate, up, approximate)
    reference.assert_accurate(out, gate, up, approximate)
    reference.assert_accurate_grads(tuple(grads), grad, gate, up, approximate)


WRONG = {
    "swapped": lambda gate, up, form: reference.geglu(up, gate, form),
    "squared": lambda gate, up, form: reference.geglu(gate, up, form).square(),
    "silu": lambda gate, up, form: torch.nn.functional.silu(gate.double()) * up.double(),
    "not_gated": lambda gate, up, form: reference.gelu(gate, form),
    "last_skipped": lambda gate, up, form: torch.cat((reference.geglu(gate, up, form)[:-1], torch.zeros(1))),
    "one_nan": lambda gate, up, form: torch.cat((reference.geglu(gate, up, form)[:-1], torch.full((1,), torch.nan))),
    "one_part_in_fifty_off": lambda gate, up, form: reference.geglu(gate, up, form) * 1.02,
}


@pytest.mark.parametrize("name", WRONG)
@DTYPE_CASES
@FORM_CASES
def test_wrong_results_are_refused(name, dtype, approximate):
    gate, up = (torch.randn(101).to(dtype) for _ in "gu")
    with pytest.raises(AssertionError):
        reference.assert_accurate(WRONG[name](gate, up, approximate).to(dtype), gate, up, approximate)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@FORM_CASES
def test_the_other_form_is_refused(dtype, approximate):
    """4.73e-4 apart at most: more than the wide types' bound. For the halves, equality with eager's bits tells."""
    gate = torch.tensor([2.699, -2.699], dtype=dtype)
    other = reference.gelu(gate, "none" if approximate == "tanh" else "tanh").to(dtype)
    with pytest.raises(AssertionError):
        reference.assert_accurate(other, gate, torch.ones_like(gate), approximate)


@FORM_CASES
def test_a_dropped_term_of_the_derivative_is_refused(approximate):
    gate, up, grad = (torch.randn(101, dtype=torch.float64) for _ in range(3))
    grad_gate, grad_up = reference.geglu_grads(grad, gate, up, approximate)
    only_factor = grad * up * reference.gelu(gate, approximate) / gate
    for wrong in ((only_factor, grad_up), (grad_up, grad_gate), (grad_gate, torch.zeros_like(grad_up))):
        with pytest.raises(AssertionError):
            reference.assert_accurate_grads(wrong, grad, gate, up, approximate)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_ulp_distance(dtype):
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    a = torch.tensor([1.0, 1.0, -1.0, 0.0, tiny, torch.nan, torch.nan], dtype=dtype)
    b = torch.tensor([1.0, 1.0 + 2 * eps, -1.0 - eps, -0.0, -tiny, torch.nan, 1.0], dtype=dtype)
    assert reference.ulp_distance(a, b).tolist() == [0, 2, 1, 0, 2, 0, torch.iinfo(torch.int64).max]


def test_same_bits_tells_values_apart():
    one = torch.tensor([1.0, torch.nan])
    reference.assert_same_bits(one, one.clone())
    for other in (one.double(), one[:1], torch.tensor([1.0, 1.0]), torch.tensor([1.0 + 2**-23, torch.nan])):
        with pytest.raises(AssertionError):
            reference.assert_same_bits(other, one)
