"""Hopper's kernel for many rows, of gate and up or of one weight: configurations over tails, layouts, refusals."""

import itertools
from functools import partial

import pytest
import torch
from reference import FORMS, HALVES
from test_gpu import cuda, launched, need_memory  # noqa: F401  (cuda is a fixture)
from test_mlp import assert_no_worse, eager, gated, problem, truth
from test_mlp_gpu import halves, route

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
pytestmark = [pytest.mark.gpu, pytest.mark.native, on_hopper]

# Of gate and up.
CONFIGS = {f"tall_gemm:{tile_cols}x{cluster}" for tile_cols in (96, 88, 80, 72, 64) for cluster in (2, 1)}
# Around a tile of 128 rows, a warp's 16, two tiles, the row from which on the kernel takes large weights as well.
ROWS = (17, 64, 127, 128, 129, 257, 300, 449)
# Around a tile of 64; then as many as make each configuration the best on 132 multiprocessors, one more, one less.
COLS = (63, 64, 65, 6336, 8449, 10559, 10560, 10561, 12671, 12672, 12673)
# Around a stage of 64, and more stages than the ring has.
DEPTHS = (8, 64, 72, 200, 584)
# Of many stages.
DEEP = (
    (384, 4928, 1696),
    (379, 4927, 1696),
    (256, 14_336, 3584),
    (250, 14_335, 3576),
)
# Of one weight: rows, columns and depths, whole tiles and odd ends in all three; one turn of all blocks and several.
PLAIN = ((8192, 768, 3072), (8301, 767, 1152), (8448, 1151, 1096), (16_384, 768, 584), (8311, 765, 8))


def chosen(ops, tensors) -> str:
    """The first half's kernel."""
    return route(ops, tensors).split("+")[0]


def way_back(ops, tensors) -> str:
    return route(ops, tensors).split("+")[-1]


def without_down(rows, depth, cols, dtype, device, with_bias=True):
    """A problem whose way back is as small as can be: here the way in counts."""
    return problem((rows,), depth, cols, 8, dtype, device, with_bias)


def in_poisoned_memory(run, x, *widths) -> torch.Tensor:
    """run(), whose tensors of x's rows and `widths` lie where NaN was, so that an element not written is seen."""
    dirty = [x.new_full((x.shape[0], width), float("nan")) for width in widths]
    addresses = {tensor.data_ptr() for tensor in dirty}
    del dirty
    out = run()
    assert out.data_ptr() in addresses
    return out


def poisoned(kernel, tensors, approximate="tanh") -> torch.Tensor:
    """linear_geglu's result, in memory that held NaN."""
    run = partial(kernel.linear_geglu, *gated(tensors), approximate=approximate)
    return in_poisoned_memory(run, tensors[0], tensors[1].shape[0])


def poisoned_block(kernel, tensors) -> torch.Tensor:
    """geglu_mlp's result, in memory that held NaN, as the first half's is."""
    x, gate, _, down, *_ = tensors
    return in_poisoned_memory(partial(kernel.geglu_mlp, *tensors), x, gate.shape[0], down.shape[0])


def assert_first_half(kernel, tensors, approximate, what) -> None:
    """Every element of linear_geglu's result is written, and its error no larger than eager's."""
    out = poisoned(kernel, tensors, approximate)
    assert_no_worse(out, eager(*tensors, approximate)[0], truth(*tensors, approximate=approximate)[0], what)


def assert_block(kernel, tensors, what) -> None:
    """The same of geglu_mlp's."""
    out = poisoned_block(kernel, tensors)
    assert_no_worse(out, eager(*tensors)[1], truth(*tensors)[1], what)


def apart(tensor, by) -> torch.Tensor:
    """The matrix with its rows `by` elements further apart, and NaN in between."""
    wide = tensor.new_full((tensor.shape[0], tensor.shape[1] + by), float("nan"))
    wide[:, : tensor.shape[1]] = tensor
    return wide[:, : tensor.shape[1]]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("with_bias", (False, True), ids=("plain", "bias"))
def test_tails_in_every_configuration(kernel, ops, cuda, dtype, approximate, with_bias):  # noqa: F811
    found = set()
    shallow = itertools.product(ROWS, COLS, DEPTHS)
    for rows, cols, depth in (*DEEP, *(case for case in shallow if case[1] <= 65 or case[2] in (72, 584))):
        tensors = without_down(rows, depth, cols, dtype, cuda, with_bias)
        config = chosen(ops, tensors)
        assert config in CONFIGS
        found.add(config)
        assert_first_half(kernel, tensors, approximate, f"{rows} {cols} {depth} {config}")
    if torch.cuda.get_device_properties(cuda).multi_processor_count == 132:
        assert found == CONFIGS


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("with_bias", (False, True), ids=("plain", "bias"))
def test_one_weight(kernel, ops, cuda, dtype, with_bias):  # noqa: F811
    for rows, cols, depth in PLAIN:
        tensors = problem((rows,), 8, depth, cols, dtype, cuda, with_bias)
        if torch.cuda.get_device_properties(cuda).multi_processor_count == 132:
            assert way_back(ops, tensors) == "tall_gemm:192x2"
        assert_block(kernel, tensors, f"{rows} {cols} {depth}")


@pytest.mark.parametrize("approximate", FORMS)
def test_many_turns_of_a_block(kernel, ops, cuda, approximate):  # noqa: F811
    """Each multiprocessor makes a dozen tiles, of more stages than the ring has."""
    tensors = without_down(1500, 1032, 12_672, torch.bfloat16, cuda)
    assert chosen(ops, tensors) in CONFIGS
    assert_first_half(kernel, tensors, approximate, "many turns")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_layouts(kernel, ops, cuda, dtype):  # noqa: F811
    """Rows of x and of the weights further apart than they are long, packed halves, more dimensions than two."""
    tensors = without_down(600, 136, 200, dtype, cuda)
    expected = kernel.linear_geglu(*gated(tensors))
    x, gate, up, *rest = tensors

    given = (apart(x, 8), apart(gate, 24), apart(up, 40), *rest)
    for layout in (given, halves(tensors), (x.view(3, 200, 136), gate, up, *rest)):
        assert chosen(ops, layout) in CONFIGS
        assert torch.equal(kernel.linear_geglu(*gated(layout)).view(600, 200), expected)


def test_one_launch_for_both_projections(kernel, ops, cuda):  # noqa: F811
    tensors = without_down(8192, 768, 3072, torch.bfloat16, cuda)
    assert chosen(ops, tensors) in CONFIGS
    names = launched(lambda: kernel.linear_geglu(*gated(tensors)))
    assert len(names) == 1 and "tall_gemm" in names[0], names


def test_nothing_outside_the_result_is_written(kernel, cuda):  # noqa: F811
    """A view whose neighbours are the graph's: the result lies between two rows of sentinels."""
    for rows, cols in ((300, 97), (129, 264), (64, 65)):
        tensors = without_down(rows, 72, cols, torch.bfloat16, cuda)
        dirty = torch.full((3, rows, cols), 42.0, device=cuda, dtype=torch.bfloat16)
        out = kernel.linear_geglu(*gated(tensors))
        assert torch.isfinite(out).all() and (dirty == 42.0).all()


def test_infinities_and_nan_stay_in_their_row(kernel, cuda):  # noqa: F811
    """Rows that a tile lacks are whatever shared memory holds: they must not reach those that are there."""
    x, *parameters = without_down(200, 128, 192, torch.bfloat16, cuda)
    expected = kernel.linear_geglu(*gated((x, *parameters)))
    spoiled = x.clone()
    spoiled[[3, 130]] = torch.tensor([[float("nan")], [float("inf")]], device=cuda, dtype=x.dtype)
    out = kernel.linear_geglu(*gated((spoiled, *parameters)))
    rest = [row for row in range(200) if row not in (3, 130)]
    assert torch.equal(out[rest], expected[rest]) and out[3].isnan().all()


def test_what_it_refuses_goes_another_way(kernel, ops, cuda):  # noqa: F811
    tensors = without_down(600, 136, 200, torch.bfloat16, cuda)
    x, gate, up, *rest = tensors
    shifted = torch.empty(x.numel() + 1, device=cuda, dtype=x.dtype)[1:].view_as(x).copy_(x)
    for other in (
        (shifted, gate, up, *rest),
        (x.t().contiguous().t(), gate, up, *rest),
        (x, gate.t().contiguous().t(), up.t().contiguous().t(), *rest),
        without_down(600, 139, 200, torch.bfloat16, cuda),
    ):
        assert chosen(ops, other) not in CONFIGS
        out = kernel.linear_geglu(*gated(other))
        assert_no_worse(out, eager(*other)[0], truth(*other)[0], "refused")
    assert chosen(ops, [t.float() for t in tensors]) not in CONFIGS


def test_more_than_two_to_the_31_results(kernel, ops, cuda):  # noqa: F811
    need_memory(24)
    rows, cols = 131_073, 16_392
    tensors = without_down(rows, 16, cols, torch.bfloat16, cuda, False)
    assert rows * cols > 2**31 and chosen(ops, tensors) in CONFIGS
    out = poisoned(kernel, tensors)
    assert not out[::4099].isnan().any()
    watched = [0, 1, 65_537, 131_008, 131_071, rows - 1]
    some = (tensors[0][watched], *tensors[1:])
    assert_no_worse(out[watched], eager(*some)[0], truth(*some)[0], "the last rows")


@pytest.mark.sanitize
def test_sanitize_tall_gemm_of_one_weight(kernel, ops, cuda):  # noqa: F811
    tensors = problem((8301,), 8, 456, 767, torch.bfloat16, cuda)
    assert "tall_gemm:192" in way_back(ops, tensors)
    expected = eager(*tensors)[1]
    out = kernel.geglu_mlp(*tensors)
    assert (out - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("rows", "cols", "depth"),
    [
        (17, 64, 8),
        (300, 97, 456),
        (129, 264, 8),
        (449, 6336, 456),
        (384, 10_561, 72),
        (384, 4928, 1696),
    ],
)
def test_sanitize_tall_gemm(kernel, ops, cuda, rows, cols, depth):  # noqa: F811
    tensors = without_down(rows, depth, cols, torch.bfloat16, cuda)
    assert chosen(ops, tensors) in CONFIGS
    exact = truth(*tensors)[0]
    out = kernel.linear_geglu(*gated(tensors))
    assert (out.double() - exact).abs().max() <= 0.02 * exact.abs().max()
