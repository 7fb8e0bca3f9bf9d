"""The two clipping kernels, on lists of gradients of any size. tests/model/test_clip_gradients.py tests what is built on them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from stoker.model import clip_grad_norm_


@pytest.mark.parametrize("seed", range(6))
def test_random_lists_of_gradients_are_clipped_as_torch_clips_them(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [chance.choice((0, 1, 7, 33, 32_768, 40_001)) for _ in range(chance.randint(1, 9))] + [5]
    ours = [nn.Parameter(torch.zeros(size)) for size in sizes]
    theirs = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    torch.testing.assert_close(clip_grad_norm_(ours, 0.5), nn.utils.clip_grad_norm_(theirs, 0.5), rtol=1e-4, atol=0.0)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=0.0)
