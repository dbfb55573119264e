"""Hopper's kernel for few rows of large weights: every configuration over tails, layouts, memory."""

import itertools
import re

import pytest
import torch
from reference import FORMS, HALVES
from test_gpu import cuda, launched  # noqa: F401  (cuda is a fixture)
from test_mlp import assert_no_worse, eager, problem, truth
from test_mlp_gpu import halves, route
from test_tall_gemm_gpu import (
    apart,
    assert_block,
    assert_first_half,
    chosen,
    on_hopper,
    poisoned_block,
    way_back,
    without_down,
)

pytestmark = [pytest.mark.gpu, pytest.mark.native, on_hopper]

# Around the room for 16 and for 64 rows of x, and in between.
GATED_ROWS = (9, 15, 16, 17, 33, 63, 64)
# Columns that give each multiprocessor of 132 a tile of 64 (the least), 104, 128, 136 (a third consumer), 192 (the
# most), 104 in two turns; one more, one less than some. With each a depth around steps of 64 that makes it large.
GATED_SIZES = (
    (8448, 1096),
    (13_728, 648),
    (16_896, 584),
    (16_897, 512),
    (16_895, 520),
    (25_344, 392),
    (25_345, 584),
)
GATED_TILES = {64, 104, 128, 136, 192}
ROWS = (17, 64, 65, 127, 128)
# Results of the way back around its least tile, 8 columns, an odd row; up to all multiprocessors with tiles of 128.
COLS = (1, 7, 8, 63, 64, 65, 200, 1028, 2048, 3587)
# Less and more steps of 64 than the depth can be split into, and more than the ring has stages.
DEPTHS = (8, 64, 72, 200, 520, 4104)


def tile_and_split(name):
    found = re.fullmatch(r"thin_gemm:(\d+)x(\d)", name)
    assert found, name
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("with_bias", (False, True), ids=("plain", "bias"))
def test_gate_and_up_in_every_configuration(kernel, ops, cuda, dtype, approximate, with_bias):  # noqa: F811
    tiles = set()
    # From 5 rows on where the weights are so large.
    cases = [(rows, *size) for rows, size in itertools.product(GATED_ROWS, GATED_SIZES)]
    for rows, cols, depth in (*cases, (5, 16_896, 2048), (8, 8448, 4104)):
        tensors = without_down(rows, depth, cols, dtype, cuda, with_bias)
        tile, split = tile_and_split(chosen(ops, tensors))
        assert split == 1
        tiles.add(tile)
        assert_first_half(kernel, tensors, approximate, f"{rows} {cols} {depth} {tile}")
    if torch.cuda.get_device_properties(cuda).multi_processor_count == 132:
        assert tiles == GATED_TILES


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("with_bias", (False, True), ids=("plain", "bias"))
def test_one_weight_in_every_configuration(kernel, ops, cuda, dtype, with_bias):  # noqa: F811
    splits = set()
    for rows, cols, depth in itertools.product(ROWS, COLS, DEPTHS):
        tensors = problem((rows,), 8, depth, cols, dtype, cuda, with_bias)
        tile, split = tile_and_split(way_back(ops, tensors))
        splits.add(split)
        out = poisoned_block(kernel, tensors)
        if out.numel() >= 1024:
            assert_no_worse(out, eager(*tensors)[1], truth(*tensors)[1], f"{rows} {cols} {depth} {tile} {split}")
        else:
            exact = truth(*tensors)[1]
            assert (out.double() - exact).abs().max() <= 0.02 * exact.abs().max().clamp(min=1)
    # The depth of 2048 columns, and of 5376, over as few blocks as fill the machine.
    for rows, cols, depth in ((12, 2048, 16_384), (64, 2048, 16_384), (16, 5376, 21_504), (100, 3584, 14_336)):
        tensors = problem((rows,), 8, depth, cols, dtype, cuda, with_bias)
        splits.add(tile_and_split(way_back(ops, tensors))[1])
        assert_block(kernel, tensors, f"{rows} {cols} {depth}")
    assert {1, 2, 3, 4, 6} <= splits


def test_sums_do_not_depend_on_the_run(kernel, ops, cuda):  # noqa: F811
    """Blocks add up in the order of their ranks, whoever is first."""
    for rows in (12, 48, 100):
        tensors = problem((rows,), 2048, 8192, 2048, torch.bfloat16, cuda)
        assert tile_and_split(way_back(ops, tensors))[1] > 1
        expected = kernel.geglu_mlp(*tensors)
        assert all(torch.equal(kernel.geglu_mlp(*tensors), expected) for _ in range(100))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_layouts(kernel, ops, cuda, dtype):  # noqa: F811
    """Rows of x and of the weights further apart than they are long, packed halves, more dimensions than two."""
    tensors = problem((24,), 2048, 8192, 1024, dtype, cuda)
    expected = kernel.geglu_mlp(*tensors)
    x, gate, up, down, *rest = tensors

    for layout in (
        (apart(x, 8), apart(gate, 24), apart(up, 40), apart(down, 8), *rest),
        halves(tensors),
        (x.view(2, 3, 4, 2048), gate, up, down, *rest),
    ):
        assert route(ops, layout).count("thin_gemm") == 2
        assert torch.equal(kernel.geglu_mlp(*layout).view(24, 1024), expected)


def test_two_launches(kernel, ops, cuda):  # noqa: F811
    tensors = problem((16,), 2048, 16_384, 2048, torch.bfloat16, cuda)
    names = launched(lambda: kernel.geglu_mlp(*tensors))
    assert len(names) == 2 and all("thin_gemm" in name for name in names), names


def test_weights_written_just_before(kernel, ops, cuda):  # noqa: F811
    """The second kernel reads its weight before the first one ends, but not before the one that writes it."""
    x, gate, up, down, *rest = problem((32,), 2048, 8192, 2048, torch.bfloat16, cuda, False)
    assert route(ops, (x, gate, up, down, *rest)).count("thin_gemm") == 2
    values = [[torch.randn_like(weight).mul_(0.02) for weight in (gate, up, down)] for _ in range(4)]
    expected = [kernel.geglu_mlp(x, *weights, *rest) for weights in values]
    for _ in range(25):
        for weights, result in zip(values, expected, strict=True):
            for target, source in zip((gate, up, down), weights, strict=True):
                target.copy_(source)
            assert torch.equal(kernel.geglu_mlp(x, gate, up, down, *rest), result)


def test_infinities_and_nan_stay_in_their_row(kernel, ops, cuda):  # noqa: F811
    """Rows that a tile lacks are whatever shared memory holds: they must not reach those that are there."""
    x, *parameters = problem((40,), 2048, 8192, 1032, torch.bfloat16, cuda)
    expected = kernel.geglu_mlp(x, *parameters)
    spoiled = x.clone()
    spoiled[[3, 39]] = torch.tensor([[float("nan")], [float("inf")]], device=cuda, dtype=x.dtype)
    out = kernel.geglu_mlp(spoiled, *parameters)
    rest = [row for row in range(40) if row not in (3, 39)]
    assert torch.equal(out[rest], expected[rest]) and out[3].isnan().all()


def test_what_it_refuses_goes_another_way(kernel, ops, cuda):  # noqa: F811
    tensors = problem((24,), 2048, 8192, 1024, torch.bfloat16, cuda)
    x, gate, up, *rest = tensors
    shifted = torch.empty(x.numel() + 1, device=cuda, dtype=x.dtype)[1:].view_as(x).copy_(x)
    for other in (
        (shifted, gate, up, *rest),
        (x.t().contiguous().t(), gate, up, *rest),
        (x, gate.t().contiguous().t(), up.t().contiguous().t(), *rest),
        problem((24,), 2049, 8192, 1024, torch.bfloat16, cuda),
        problem((24,), 2048, 8193, 1024, torch.bfloat16, cuda),
    ):
        assert route(ops, other).count("thin_gemm") < 2
        out = kernel.geglu_mlp(*other)
        assert_no_worse(out, eager(*other)[1], truth(*other)[1], "refused")
    assert "thin_gemm" not in route(ops, [tensor.float() for tensor in tensors])


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("rows", "depth", "hidden", "cols"),
    [(9, 1032, 8456, 72), (16, 520, 16_897, 8), (40, 456, 25_344, 65), (17, 8, 1032, 200), (128, 8, 4104, 1028)],
)
def test_sanitize_thin_gemm(kernel, ops, cuda, rows, depth, hidden, cols):  # noqa: F811
    tensors = problem((rows,), depth, hidden, cols, torch.bfloat16, cuda)
    assert "thin_gemm" in route(ops, tensors)
    exact = truth(*tensors)[1]
    out = kernel.geglu_mlp(*tensors)
    assert (out.double() - exact).abs().max() <= 0.02 * exact.abs().max()
