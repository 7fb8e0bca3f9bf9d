"""The tokens of a mask are where torch's own operators find them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stoker.kernels.mask import MaskTokens, read_tokens


def mask_of(*rows: tuple[int, int], columns: int = 7) -> Tensor:
    """Rows with tokens from one column to another."""
    at = torch.arange(columns)
    return torch.stack([(at >= begin) & (at < end) for begin, end in rows])


@pytest.mark.parametrize(
    "rows", [[(0, 7)], [(0, 3), (0, 7), (0, 1)], [(2, 7), (0, 7)], [(3, 5), (0, 0), (6, 7)], [(0, 0), (0, 4), (0, 0)]]
)
def test_tokens_are_found_where_torch_finds_them(rows: list[tuple[int, int]]) -> None:
    mask = mask_of(*rows)
    found = read_tokens(mask)
    assert isinstance(found, MaskTokens)
    lengths = mask.sum(1)
    starts = torch.where(lengths > 0, mask.int().argmax(1), 0)
    index = mask.reshape(-1).nonzero().squeeze(1)
    assert torch.equal(found.counts, lengths)
    assert torch.equal(found.firsts, starts)
    assert torch.equal(found.index, index)
    assert torch.equal(found.positions, index % 7 - starts.repeat_interleave(lengths))
    assert found.starts.tolist() == [0, *lengths[lengths > 0].cumsum(0).tolist()]
    assert found.longest == int(lengths.max())
    assert found.shifted == any(begin > 0 for begin, end in rows if end > begin)


def test_a_mask_that_is_not_dense_is_read_like_its_copy() -> None:
    mask = mask_of((0, 5), (0, 2), (0, 7))
    wide = torch.zeros(3, 14, dtype=torch.bool)
    wide[:, ::2] = mask
    one, other = read_tokens(wide[:, ::2]), read_tokens(mask)
    assert isinstance(one, MaskTokens)
    assert isinstance(other, MaskTokens)
    assert torch.equal(one.index, other.index)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.tensor([[True, False, True]]), "the attention mask has holes"),
        (torch.zeros(2, 3, dtype=torch.bool), "the batch has no real token"),
        (torch.zeros(0, 3, dtype=torch.bool), "the batch has no real token"),
    ],
)
def test_a_mask_without_sequences_gives_the_reason(mask: Tensor, reason: str) -> None:
    assert read_tokens(mask) == reason


def test_other_types_and_shapes_are_refused() -> None:
    for mask in (torch.ones(2, 3), torch.ones(3, dtype=torch.bool)):
        with pytest.raises(ValueError, match="must be"):
            read_tokens(mask)
