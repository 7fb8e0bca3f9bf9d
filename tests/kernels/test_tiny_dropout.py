"""A probability that rounds to nothing drops nothing, forward and backward."""

from __future__ import annotations

import pytest
import torch

from stoker.kernels.attention import attention_packed
from stoker.kernels.dropout import dropout
from stoker.kernels.embedding import embedding_layer_norm_dropout
from stoker.kernels.norm import dropout_add_layer_norm, dropout_add_rms_norm

PROBABILITIES = [1e-12, 7.6e-6]
ALMOST = 0.5 / 65536 * (1 - 1e-12)  # rounds to nothing, unless it was rounded to fp32 before


def _assert_same(function, *tensors: torch.Tensor, p: float) -> None:
    found = []
    for probability in (p, 0.0):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        y = function(*leaves, probability)
        found.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("p", [*PROBABILITIES, ALMOST])
@pytest.mark.parametrize("residual", [True, False])
def test_norms(p: float, residual: bool) -> None:
    x, other, weight, bias = torch.randn(5, 70), torch.randn(5, 70), torch.rand(70), torch.rand(70)
    # gradients that are never written would show as what was in memory before
    rubbish = [torch.full((5, 70), 7e7) for _ in range(50)]
    del rubbish
    for norm in (dropout_add_layer_norm, dropout_add_rms_norm):
        if residual:
            _assert_same(lambda x, r, w, b, p, norm=norm: norm(x, r, w, x_bias=b, p=p), x, other, weight, bias, p=p)
        else:
            _assert_same(lambda x, w, b, p, norm=norm: norm(x, None, w, x_bias=b, p=p), x, weight, bias, p=p)


@pytest.mark.parametrize("p", PROBABILITIES)
def test_the_other_kernels(p: float) -> None:
    _assert_same(lambda x, p: dropout(x, p), torch.randn(5, 70), p=p)
    ends = torch.tensor([0, 3, 9])
    _assert_same(lambda x, p: attention_packed(x, ends, 2, dropout_p=p), torch.randn(9, 3 * 16), p=p)
    ids = torch.randint(0, 10, (4, 6))
    _assert_same(
        lambda table, weight, p: embedding_layer_norm_dropout(
            ids, None, None, table, None, None, weight, eps=1e-6, p=p
        ),
        torch.randn(10, 24),
        torch.rand(24),
        p=p,
    )
