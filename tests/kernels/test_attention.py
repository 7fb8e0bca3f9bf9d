"""Attention over variable lengths equals the plain formula, one sequence at a time, in double precision."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoker.kernels import registry
from stoker.kernels.attention import attention, attention_packed

FP32, BF16 = 2e-6, 2e-2  # relative error of a whole tensor, in norm


def formula(q, k, v, starts, *, causal=False, window=None, bias=None, rotary=None, scale=None, factors=None):
    """softmax(scale * Q K^T + bias) V, with the probabilities multiplied by `factors` (tokens * heads, longest)."""
    tokens, heads, size = q.shape
    k, v = (t.repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
    if rotary is not None:
        cos, sin = (torch.cat([table, table], -1)[:, None] for table in rotary)
        q, k = (t * cos + torch.cat([-t[..., size // 2 :], t[..., : size // 2]], -1) * sin for t in (q, k))
    pieces = []
    for begin, end in itertools.pairwise(starts):
        length = end - begin
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], k[begin:end]) * (size**-0.5 if scale is None else scale)
        if bias is not None:
            scores = scores + bias[:, :length, :length]
        distance = torch.arange(length)[None] - torch.arange(length)[:, None]
        hidden = torch.zeros(length, length, dtype=torch.bool)
        if causal:
            hidden |= distance > 0
        if window is not None:
            hidden |= (distance < -window[0]) if window[0] >= 0 else False
            hidden |= (distance > window[1]) if window[1] >= 0 else False
        p = scores.masked_fill(hidden, -math.inf).softmax(-1)
        if factors is not None:
            p = p * factors.view(tokens, heads, -1)[begin:end, :, :length].permute(1, 0, 2)
        pieces.append(torch.einsum("hqk,khd->qhd", p, v[begin:end]))
    return torch.cat(pieces) if pieces else q


def distance(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def check(
    lengths,
    heads,
    kv_heads,
    size,
    *,
    dtype=torch.float32,
    p=0.0,
    bias=False,
    rotary=False,
    packed=True,
    seed=0,
    **options,
):
    generator = torch.Generator().manual_seed(seed)
    tokens, longest = sum(lengths), max(lengths, default=0)
    starts = list(itertools.accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(tokens, heads, size, generator=generator).to(dtype)
    table = torch.randn(heads, longest + 2, longest + 2, generator=generator, requires_grad=True) if bias else None
    turns = None
    if rotary:
        angles = torch.randn(tokens, size // 2, generator=generator)
        turns = (angles.cos(), angles.sin())

    torch.manual_seed(seed)
    if packed:
        out = attention_packed(qkv, cu_seqlens, heads, kv_heads, dropout_p=p, bias=table, rotary=turns, **options)
    else:
        parts = qkv.unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], 1)
        out = attention(*parts, cu_seqlens, dropout_p=p, bias=table, rotary=turns, **options)
    out.backward(grad.view_as(out))

    torch.manual_seed(seed)
    factors = registry.reference_factors(registry.draw_key(), tokens * heads, longest, p).double() if p else None
    qkv2 = qkv.detach().double().requires_grad_()
    table2 = table.detach().double().requires_grad_() if bias else None
    parts = qkv2.unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], 1)
    turns2 = tuple(t.double() for t in turns) if rotary else None
    want = formula(*parts, starts, bias=table2, rotary=turns2, factors=factors, **options)
    want.backward(grad.double())

    tolerance = FP32 if dtype == torch.float32 else BF16
    assert distance(out, want.view_as(out)) < tolerance
    assert distance(qkv.grad, qkv2.grad) < tolerance
    if bias:
        assert distance(table.grad, table2.grad) < tolerance


LENGTHS = {
    "one token": [1],
    "short": [5],
    "mixed": [17, 1, 64, 130],
    "two key blocks": [600, 33],
    "empty ones": [0, 7, 0, 9, 0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_equals_the_formula(lengths, p, dtype):
    check(lengths, 4, 4, 24, p=p, dtype=dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (64, 64), "p": 0.1},
        {"window": (3, 0)},
        {"window": (-1, 5)},
        {"window": (0, 0)},
        {"bias": True, "p": 0.1},
        {"bias": True, "causal": True},
        {"rotary": True, "p": 0.2},
        {"rotary": True, "window": (16, 16)},
        {"scale": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_options_equal_the_formula(options, kv_heads):
    check([60, 1, 33, 170, 12, 9], 4, kv_heads, 16, **options)
    check([60, 1, 33], 4, kv_heads, 16, packed=False, **options)


@pytest.mark.parametrize(
    "options", [{"p": 0.1}, {"bias": True}, {"window": (700, 20), "rotary": True}, {"causal": True}], ids=str
)
def test_long_sequences_are_blocked(options):
    check([2500, 100], 2, 1, 8, **options)


@pytest.mark.parametrize("size", [1, 7, 32, 64, 80, 128])
def test_any_head_size(size):
    check([50, 70], 2, 2, size, p=0.1)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=6).filter(any),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    size=st.integers(1, 40),
    causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(-1, 70), st.integers(-1, 70)),
    p=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**16),
)
def test_random_shapes(lengths, groups, kv_heads, size, causal, window, p, seed):
    check(lengths, groups * kv_heads, kv_heads, size, causal=causal, window=window, p=p, seed=seed)


def run(threads: int, lengths=(600, 300, 17, 2100), **options):
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(3)
        cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
        qkv = torch.randn(sum(lengths), 3 * 2 * 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = attention_packed(qkv, cu_seqlens, 2, dropout_p=0.1, **options)
        out.sum().backward()
        return out.detach(), qkv.grad
    finally:
        torch.set_num_threads(previous)


def test_the_number_of_threads_changes_no_bit():
    one = run(1)
    for threads in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(run(threads), one, strict=True))


def test_several_python_threads_may_call_at_once():
    want = run(1, lengths=(100, 50))
    results: list = []

    def work():
        cu_seqlens = torch.tensor([0, 100, 150])
        qkv = torch.randn(150, 3 * 2 * 16, generator=torch.Generator().manual_seed(1))
        results.append(attention_packed(qkv, cu_seqlens, 2))

    workers = [threading.Thread(target=work) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 6
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].shape == want[0].shape


def test_no_tokens_give_no_output_and_no_gradient():
    qkv = torch.zeros(0, 3 * 8, requires_grad=True)
    out = attention_packed(qkv, torch.tensor([0, 0, 0]), 2)
    out.sum().backward()
    assert out.shape == (0, 8)
    assert qkv.grad.shape == (0, 24)


def test_huge_scores_do_not_overflow_and_nan_is_not_hidden():
    cu_seqlens = torch.tensor([0, 4])
    big = torch.full((4, 1, 8), 1e15)
    out = attention(big, big, torch.ones(4, 1, 8), cu_seqlens)
    assert torch.allclose(out, torch.ones_like(out))
    sick = torch.randn(8, 1, 8)
    sick[2] = math.nan
    out = attention(sick, torch.randn(8, 1, 8), torch.ones(8, 1, 8), torch.tensor([0, 4, 8]))
    assert out[2].isnan().all()
    assert not out[[0, 1, 3, 4, 5, 6, 7]].isnan().any()


def test_minus_infinity_in_the_bias_hides_keys():
    q, k, v = (torch.randn(6, 1, 8) for _ in range(3))
    bias = torch.zeros(1, 6, 6)
    bias[:, :, 4:] = -math.inf
    out = attention(q, k, v, torch.tensor([0, 6]), bias=bias)
    want = formula(q.double(), k.double(), v.double(), [0, 6], bias=bias.double())
    assert distance(out, want) < FP32
    bias[:] = -math.inf
    assert torch.equal(attention(q, k, v, torch.tensor([0, 6]), bias=bias), torch.zeros(6, 1, 8))


def test_inputs_may_be_strided():
    q, k, v = (torch.randn(8, 2, 30).transpose(1, 2)[:, ::2].transpose(1, 2) for _ in range(3))
    assert not q.is_contiguous()
    cu_seqlens = torch.tensor([0, 3, 8])
    out = attention(q, k, v, cu_seqlens)
    assert torch.equal(out, attention(q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens))


def test_checkpointing_repeats_the_same_mask():
    from torch.utils.checkpoint import checkpoint

    cu_seqlens = torch.tensor([0, 20, 50])

    def gradient(wrap: bool):
        torch.manual_seed(0)
        qkv = torch.randn(50, 3 * 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        call = lambda x: attention_packed(x, cu_seqlens, 2, dropout_p=0.5)  # noqa: E731
        out = checkpoint(call, qkv, use_reentrant=False) if wrap else call(qkv)
        (out**2).sum().backward()
        return qkv.grad

    assert torch.equal(gradient(True), gradient(False))


def test_the_dispatcher_accepts_the_operator():
    options = (torch.tensor([0, 3, 5]), None, None, None, None, 2**62, 2**62, 0.5, 0.0)
    qkv = torch.randn(5, 3 * 8, requires_grad=True)
    torch.library.opcheck(torch.ops.stoker.attention_packed.default, (qkv, 2, 2, *options))
    q, k, v = (torch.randn(5, 2, 4, requires_grad=True) for _ in range(3))
    torch.library.opcheck(torch.ops.stoker.attention.default, (q, k, v, *options))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlens": torch.tensor([0, 4])}, "number of tokens, 6"),
        ({"cu_seqlens": torch.tensor([1, 6])}, "from 0"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 6])}, "decreases at sequence 1"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "cu_seqlens has dtype float32"),
        ({"k": torch.zeros(6, 3, 4), "v": torch.zeros(6, 3, 4)}, "2 query heads cannot share 3"),
        ({"k": torch.zeros(6, 2, 5)}, "k has shape"),
        ({"v": torch.zeros(6, 2, 4, dtype=torch.float64)}, "v has dtype float64"),
        ({"q": torch.zeros(6, 2, 4, device="meta")}, "q is on meta"),
        ({"bias": torch.zeros(2, 5, 5)}, "at least 6"),
        ({"dropout_p": 1.5}, "p is 1.5"),
        ({"rotary": (torch.zeros(5, 2), torch.zeros(5, 2))}, "cos has shape"),
        ({"rotary": (torch.zeros(6, 2), None)}, "one of the two is None"),
        ({"rotary": (torch.zeros(6, 2), torch.zeros(6, 2, device="meta"))}, "sin is on meta"),
        ({"rotary": (torch.zeros(6, 2, requires_grad=True), torch.zeros(6, 2))}, "asks for a gradient"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_named(change, words):
    arguments = {
        "q": torch.zeros(6, 2, 4),
        "k": torch.zeros(6, 2, 4),
        "v": torch.zeros(6, 2, 4),
        "cu_seqlens": torch.tensor([0, 6]),
    }
    arguments.update(change)
    with pytest.raises(ValueError, match=words):
        attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), arguments.pop("cu_seqlens"), **arguments)
