"""Memory layouts that users' gate and up tensors have, each with the reason why it is a case of its own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """`make(new)` returns (gate, up); `new(*shape)` gives fresh random values in a dense tensor."""

    name: str
    make: Callable[[Callable[..., Tensor]], tuple[Tensor, Tensor]]

    def tensors(self, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
        return self.make(lambda *shape: torch.randn(*shape, device=device).to(dtype))


def _poisoned(new, shape, pad):
    """Rows followed by `pad` columns of NaN: what is read past a row's end shows."""
    buffer = new(*shape[:-1], shape[-1] + pad)
    buffer[..., shape[-1] :] = float("nan")
    return buffer[..., : shape[-1]]


def _negated(t: Tensor) -> Tensor:
    """A view whose stored sign is the wrong one, as `z.conj().imag` is."""
    return torch._neg_view(t)


LAYOUTS = [
    Layout("dense", lambda new: (new(5, 37), new(5, 37))),
    Layout("one_dim", lambda new: (new(129), new(129))),
    Layout("one_dim_strided", lambda new: (new(66)[::2], new(99)[::3])),
    # Halves of one packed projection: each row is dense, rows are 2 * d apart.
    Layout("packed_halves", lambda new: tuple(new(4, 3, 48).chunk(2, -1))),
    # The second half starts at an odd element, so the two halves differ in alignment.
    Layout("packed_odd_halves", lambda new: tuple(new(6, 2 * 27).chunk(2, -1))),
    # The last stride is 1 and nothing else is dense; the padding is NaN.
    Layout("padded_rows", lambda new: (_poisoned(new, (7, 19), 8), _poisoned(new, (7, 19), 3))),
    # Swapped leading dimensions: last stride 1, row stride not the width. (S, B, V) -> (B, S, V).
    Layout("swapped_batch", lambda new: (new(4, 2, 8).transpose(0, 1), new(4, 2, 8).transpose(0, 1))),
    # Only one of the two is swapped, so no single order suits both.
    Layout("one_swapped_batch", lambda new: (new(4, 2, 8).transpose(0, 1), new(2, 4, 8))),
    Layout("permuted_4d", lambda new: (new(2, 3, 4, 16).permute(2, 0, 1, 3), new(4, 2, 3, 16))),
    Layout("permuted_4d_halves", lambda new: tuple(new(2, 3, 4, 32).permute(2, 0, 1, 3).chunk(2, -1))),
    Layout("channels_last", lambda new: tuple(new(2, 8, 3, 5).to(memory_format=torch.channels_last) for _ in "gu")),
    # Five dimensions none of which merges with its neighbour.
    Layout("five_dims", lambda new: (new(3, 3, 3, 3, 9)[:2, :2, :2, :2, :7], new(2, 2, 2, 2, 7))),
    # More unmergeable dimensions than any kernel walks without a copy.
    Layout("seven_dims", lambda new: (new(3, 3, 3, 3, 3, 3, 8)[:2, :2, :2, :2, :2, :2, :5], new(2, 2, 2, 2, 2, 2, 5))),
    # More dimensions than any plan has room for, nearly all of one element; dense and not.
    Layout("twenty_dims", lambda new: (new(2, *[1] * 17, 3, 5), new(3, *[1] * 17, 2, 5).transpose(0, 18))),
    # Dense in column-major order: no row has unit stride.
    Layout("column_major", lambda new: (new(9, 14).t(), new(9, 14).t())),
    Layout("row_and_column_major", lambda new: (new(14, 9), new(9, 14).t())),
    Layout("every_other_column", lambda new: (new(5, 42)[:, ::2], new(5, 21))),
    Layout("every_other_row", lambda new: (new(10, 16)[::2], new(10, 16)[1::2])),
    # Stride 0 in the rows, in the columns, in both.
    Layout("expanded_rows", lambda new: (new(6, 16), new(1, 16).expand(6, 16))),
    Layout("expanded_columns", lambda new: (new(6, 1).expand(6, 16), new(6, 16))),
    Layout("expanded_scalar", lambda new: (new(1).expand(5, 6), new(1).expand(5, 6))),
    # Rows that overlap in memory, as a sliding window has them.
    Layout("overlapping_rows", lambda new: (new(64).as_strided((10, 16), (4, 1)), new(10, 16))),
    # One element off the allocation's alignment, each tensor by another amount.
    Layout("offset", lambda new: (new(1 + 5 * 24)[1:].view(5, 24), new(3 + 5 * 24)[3:].view(5, 24))),
    # A dimension of one element may carry any stride.
    Layout("size_one_stride", lambda new: (new(5, 1, 8).as_strided((5, 1, 8), (8, 1000, 1)), new(5, 1, 8))),
    Layout("same_tensor", lambda new: (lambda t: (t, t))(new(5, 16))),
    # Real data with torch's negative bit set.
    Layout("negative_bit", lambda new: (_negated(new(4, 6)), _negated(new(4, 6)))),
]


def ids(layouts: list[Layout]) -> list[str]:
    return [layout.name for layout in layouts]


# Widths around every vector length, and the two that broke other kernels: half a packed row of 3420 halves starts 8
# bytes off a 16-byte boundary, and one of 1234 starts 4 bytes off. 1710 is 3420 split once more.
WIDTHS = (1, 2, 3, 4, 6, 7, 8, 12, 15, 16, 17, 31, 33, 63, 65, 1234, 1710, 3420)
