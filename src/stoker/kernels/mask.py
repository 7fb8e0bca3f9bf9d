"""The tokens of an attention mask, found in one native call where torch needs twenty operators (csrc/kernels/mask.cpp).

firsts, counts: of each row of the mask, the column of its first token and how many there are
index, positions: of each token, its place in (rows * columns), and which token of its row it is
starts: the first token of each row that has one, and the number of all tokens
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.kernels import native

__all__ = ["MaskTokens", "read_tokens"]


@dataclass(frozen=True)
class MaskTokens:
    firsts: Tensor
    counts: Tensor
    index: Tensor
    positions: Tensor
    starts: Tensor
    longest: int
    shifted: bool
    """A row begins with padding."""


def read_tokens(mask: Tensor) -> MaskTokens | str:
    """The tokens of a mask (rows, columns) of type bool; a reason if they do not follow each other, or there are none."""
    if mask.dtype != torch.bool or mask.dim() != 2 or mask.device.type != "cpu":
        raise ValueError(f"mask: must be (rows, columns) of type bool on the CPU, not {mask.dtype} {tuple(mask.shape)}")
    mask = mask.contiguous()
    rows, columns = mask.shape
    firsts, counts = torch.empty(2, rows, dtype=torch.int64).unbind()
    call = native.struct("stoker_mask_call")(
        mask=mask.data_ptr(), firsts=firsts.data_ptr(), counts=counts.data_ptr(), rows=rows, columns=columns
    )
    native.call("stoker_read_mask", call)
    if call.broken:
        return "the attention mask has holes"
    if not call.tokens:
        return "the batch has no real token"
    index, positions = torch.empty(2, call.tokens, dtype=torch.int64).unbind()
    starts = torch.empty(call.sequences + 1, dtype=torch.int64)
    call.index, call.positions, call.starts = index.data_ptr(), positions.data_ptr(), starts.data_ptr()
    native.call("stoker_read_mask", call)
    return MaskTokens(firsts, counts, index, positions, starts, call.longest, bool(call.shifted))
