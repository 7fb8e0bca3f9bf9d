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


def formula(
    q, k, v, starts, *, key_starts=None, causal=False, window=None, bias=None, rotary=None, scale=None, softcap=None,
    sinks=None, position_q=None, position_k=None, rows_of=None, factors=None,
):  # fmt: skip
    """softmax(cap(scale * (Q K^T + R)) + bias) V, with the probabilities multiplied by `factors` (tokens * heads, longest)."""
    tokens, heads, size = q.shape
    k, v = (t.repeat_interleave(heads // k.shape[1], 1) for t in (k, v))
    if rotary is not None:
        half = rotary[0].shape[1]
        cos, sin = (torch.cat([table, table], -1)[:, None] for table in rotary)
        turned = [t[..., : 2 * half] for t in (q, k)]
        turned = [t * cos + torch.cat([-t[..., half:], t[..., :half]], -1) * sin for t in turned]
        q, k = (torch.cat([t, plain[..., 2 * half :]], -1) for t, plain in zip(turned, (q, k), strict=True))
    pieces = []
    for queries, keys in zip(slices(starts), slices(key_starts or starts), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys])
        if rows_of is not None:
            count = queries.stop - queries.start
            at = rows_of[rows_of.numel() // 2 + torch.arange(count)[:, None] - torch.arange(count)[None]]
            if position_k is not None:
                scores = scores + torch.einsum("qhd,qkhd->hqk", q[queries], position_k[at])
            if position_q is not None:
                scores = scores + torch.einsum("khd,qkhd->hqk", k[keys], position_q[at])
        scores = scores * (size**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows, columns = scores.shape[1:]
        if bias is not None:
            scores = scores + bias[:, :rows, :columns]
        distance = torch.arange(columns)[None] - torch.arange(rows)[:, None]
        hidden = torch.zeros(rows, columns, dtype=torch.bool)
        if causal:
            hidden |= distance > 0
        if window is not None:
            hidden |= (distance < -window[0]) if window[0] >= 0 else False
            hidden |= (distance > window[1]) if window[1] >= 0 else False
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(heads, rows, 1)], -1)
        p = scores.softmax(-1)[..., :columns]
        if factors is not None:
            p = p * factors.view(tokens, heads, -1)[queries, :, :columns].permute(1, 0, 2)
        pieces.append(torch.einsum("hqk,khd->qhd", p, v[keys]))
    return torch.cat(pieces) if pieces else q


def slices(starts: list[int]) -> list[slice]:
    return [slice(begin, end) for begin, end in itertools.pairwise(starts)]


def distance(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def split(leaves, heads, kv_heads, size, layout="blocks"):
    """q, k and v from one tensor, or from one of q and one of k and v."""
    if layout == "heads":
        return leaves[0].unflatten(1, (heads, 3, size)).unbind(2)
    if len(leaves) == 1:
        return leaves[0].unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], 1)
    return leaves[0].unflatten(1, (heads, size)), *leaves[1].unflatten(1, (-1, size)).split(kv_heads, 1)


def check(
    lengths,
    heads,
    kv_heads,
    size,
    *,
    key_lengths=None,
    dtype=torch.float32,
    p=0.0,
    bias=False,
    rotary=None,
    sinks=False,
    relative="",
    layout="blocks",
    packed=True,
    seed=0,
    **options,
):
    """`rotary`: how many dimensions are rotated. `key_lengths`: cross attention. `relative`: the tables, as "q", "k" or "qk"."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    cross = key_lengths is not None
    tokens, key_tokens = sum(lengths), sum(key_lengths) if cross else 0
    longest, longest_key = max(lengths, default=0), max(key_lengths if cross else lengths, default=0)
    starts = list(itertools.accumulate(lengths, initial=0))
    key_starts = list(itertools.accumulate(key_lengths, initial=0)) if cross else None
    if cross:
        leaves = [draw(tokens, heads * size), draw(key_tokens, 2 * kv_heads * size)]
    else:
        leaves = [draw(tokens, (heads + 2 * kv_heads) * size)]
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    grad = draw(tokens, heads, size).to(dtype)
    extra = {"bias": draw(heads, longest + 2, longest_key + 2 + cross).requires_grad_()} if bias else {}
    if sinks:
        extra["sinks"] = draw(heads).requires_grad_()
    rows_of = None
    if relative:
        # distances beyond 20 share a row with their neighbours
        rows_of = torch.arange(-longest - 1, longest + 2).clamp(-20, 20).add(20)
        tables = {f"position_{name}": draw(41, heads, size).to(dtype).requires_grad_() for name in relative}
        extra.update(tables)
    turns = None
    if rotary:
        angles = draw(tokens, rotary // 2)
        turns = (angles.cos(), angles.sin())

    given = {name: value for name, value in extra.items() if not name.startswith("position_")}
    if relative:
        given["relative"] = extra.get("position_q"), extra.get("position_k"), rows_of
    torch.manual_seed(seed)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    if packed and not cross:
        given = {"dropout_p": p, "rotary": turns, "layout": layout, **given, **options}
        out = attention_packed(leaves[0], cu_seqlens, heads, kv_heads, **given)
    else:
        given = {"dropout_p": p, "rotary": turns, **given, **options}
        cu_seqlens_k = torch.tensor(key_starts, dtype=torch.int32) if cross else None
        out = attention(*split(leaves, heads, kv_heads, size), cu_seqlens, cu_seqlens_k=cu_seqlens_k, **given)
    out.backward(grad.view_as(out))

    torch.manual_seed(seed)
    factors = registry.reference_factors(registry.draw_key(), tokens * heads, longest_key, p).double() if p else None
    leaves2 = [leaf.detach().double().requires_grad_() for leaf in leaves]
    extra2 = {name: tensor.detach().double().requires_grad_() for name, tensor in extra.items()}
    turns2 = tuple(t.double() for t in turns) if rotary else None
    parts = split(leaves2, heads, kv_heads, size, layout)
    more = {"key_starts": key_starts, "rotary": turns2, "factors": factors, "rows_of": rows_of}
    want = formula(*parts, starts, **more, **extra2, **options)
    want.backward(grad.double())

    tolerance = FP32 if dtype == torch.float32 else BF16
    assert out.dtype == dtype
    assert distance(out, want.view_as(out)) < tolerance
    for got, expected in zip(leaves, leaves2, strict=True):
        assert got.grad.dtype == got.dtype
        assert distance(got.grad, expected.grad) < tolerance
    for name, got in extra.items():
        assert got.grad.dtype == got.dtype
        # the rows of a table are sums over all pairs of a distance, which may nearly cancel
        times = 5 if name.startswith("position_") else 1
        assert distance(got.grad, extra2[name].grad) < times * tolerance, name


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
        {"rotary": 16, "p": 0.2},
        {"rotary": 16, "window": (16, 16)},
        {"rotary": 6, "causal": True},
        {"scale": 0.5},
        {"softcap": 0.7, "p": 0.1},
        {"softcap": 2.0, "window": (20, 0)},
        {"softcap": 1.5, "bias": True, "causal": True},
        {"sinks": True},
        {"sinks": True, "causal": True, "window": (24, 0)},
        {"sinks": True, "softcap": 1.0, "bias": True, "p": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_options_equal_the_formula(options, kv_heads):
    check([60, 1, 33, 170, 12, 9], 4, kv_heads, 16, **options)
    check([60, 1, 33], 4, kv_heads, 16, packed=False, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"p": 0.1},
        {"bias": True},
        {"window": (700, 20), "rotary": 8},
        {"causal": True},
        {"causal": True, "window": (600, 0), "softcap": 1.0, "sinks": True, "rotary": 4},
    ],
    ids=str,
)
def test_long_sequences_are_blocked(options):
    check([2500, 100], 2, 1, 8, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_relative_positions_equal_the_formula(lengths, p, dtype):
    # The softmax of a single key is 1: no score has a gradient, to which no error could be relative.
    check([2 if n == 1 else n for n in lengths], 3, 3, 24, relative="qk", p=p, dtype=dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"relative": "q"},
        {"relative": "k", "p": 0.1},
        {"relative": "qk", "causal": True},
        {"relative": "qk", "window": (30, 5)},
        {"relative": "qk", "softcap": 1.5, "bias": True, "p": 0.1},
        {"relative": "qk", "sinks": True, "scale": 0.1, "layout": "heads"},
    ],
    ids=str,
)
def test_relative_positions_combine_with_other_options(options):
    check([60, 2, 33, 170, 12, 9], 4, 4, 16, **options)
    if "layout" not in options:
        check([60, 2, 33], 4, 4, 16, packed=False, **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 20), "p": 0.1}], ids=str)
def test_relative_positions_in_long_sequences(options):
    check([1100, 100], 2, 2, 8, relative="qk", **options)
    check([2300], 1, 1, 4, relative="qk", **options)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5).filter(lambda lengths: max(lengths) > 1),
    heads=st.integers(1, 3),
    size=st.integers(1, 40),
    relative=st.sampled_from(["q", "k", "qk"]),
    window=st.none() | st.tuples(st.integers(1, 70), st.integers(-1, 70)),
    seed=st.integers(0, 2**16),
)
def test_random_shapes_with_relative_positions(lengths, heads, size, relative, window, seed):
    check(lengths, heads, heads, size, relative=relative, window=window, seed=seed)


def test_frozen_tables_of_positions_get_no_gradient():
    qkv = torch.randn(9, 3 * 8, requires_grad=True)
    tables = torch.randn(17, 2, 4, requires_grad=True), torch.randn(17, 2, 4)
    attention_packed(qkv, torch.tensor([0, 9]), 2, relative=(*tables, torch.arange(17))).sum().backward()
    assert tables[0].grad is not None
    assert tables[1].grad is None


@pytest.mark.parametrize("size", [1, 7, 8, 20, 32, 64, 80, 96, 128, 256])
def test_any_head_size(size):
    check([50, 70], 2, 2, size, p=0.1)
    check([1, 70], 2, 1, size, causal=True, softcap=2.0, sinks=True, rotary=size // 4 * 2)
    check([9, 70], 2, 2, size, relative="qk")


DECODERS = {
    "softcap, window, grouped heads": {"softcap": 1.0, "causal": True, "window": (40, 0)},
    "sinks, causal, window": {"sinks": True, "causal": True, "window": (16, 0)},
    "partial rotary, layout by heads": {"rotary": 10, "layout": "heads", "kv_heads": 4, "causal": True},
    "layout by heads, dropout, bias": {"layout": "heads", "kv_heads": 4, "bias": True},
    "softcap, bias": {"softcap": 1.0, "bias": True},
    "everything": {"softcap": 2.0, "sinks": True, "bias": True, "rotary": 8, "causal": True, "window": (100, 0)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("options", DECODERS.values(), ids=DECODERS.keys())
def test_options_of_decoders_combine(options, p, dtype):
    options = {"kv_heads": 2, **options}
    # The bias of a single key has a gradient of 0, to which no error is relative.
    for lengths in ([2 if "bias" in options else 1], [130, 1, 70], [530]):
        check(lengths, 4, size=20, p=p, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"bias": True, "p": 0.1}, {"softcap": 1.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cross_attention_equals_the_formula(kv_heads, options, dtype):
    check([1, 70, 9], 4, kv_heads, 12, key_lengths=[33, 5, 600], dtype=dtype, **options)
    check([600, 1], 4, kv_heads, 12, key_lengths=[3, 1], dtype=dtype, **options)


@pytest.mark.parametrize("options", [{"p": 0.1}, {"bias": True}], ids=str)
def test_cross_attention_over_many_keys(options):
    check([5, 90], 2, 1, 8, key_lengths=[2100, 4200], **options)


def test_cross_attention_with_the_same_lengths_equals_self_attention():
    q, k, v = (torch.randn(90, 2, 8) for _ in range(3))
    starts = torch.tensor([0, 20, 90])
    assert torch.equal(attention(q, k, v, starts, cu_seqlens_k=starts.clone()), attention(q, k, v, starts))


@pytest.mark.parametrize("lengths", [[3, 0, 4], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("key_lengths", [[0, 5, 6], [0, 0, 0]], ids=str)
def test_without_keys_the_output_is_zero_and_without_queries_the_gradient(lengths, key_lengths):
    starts, key_starts = (list(itertools.accumulate(n, initial=0)) for n in (lengths, key_lengths))
    q = torch.randn(sum(lengths), 2, 4, requires_grad=True)
    k, v = (torch.randn(sum(key_lengths), 2, 4, requires_grad=True) for _ in range(2))
    bias = torch.zeros(2, 8, 8, requires_grad=True)
    out = attention(q, k, v, torch.tensor(starts), cu_seqlens_k=torch.tensor(key_starts), bias=bias)
    out.sum().backward()
    want = torch.zeros_like(out)
    for queries, keys in zip(slices(starts), slices(key_starts), strict=True):
        alone = queries.start == queries.stop
        assert not alone or not (k.grad[keys].any() or v.grad[keys].any())
        if keys.start == keys.stop:
            assert not q.grad[queries].any()
        else:
            want[queries] = formula(q[queries], k[keys], v[keys], [0, queries.stop - queries.start],
                                    key_starts=[0, keys.stop - keys.start])  # fmt: skip
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 50.0, 1e6])
def test_capped_scores_saturate_without_nan(softcap):
    """Scores of 1e-3 to 1e8, all with a key that differs."""
    size = torch.logspace(-3, 8, 12)
    q = torch.ones(12, 1, 1, requires_grad=True)
    k = (size * torch.tensor([1.0, -1.0]).repeat(6))[:, None, None].requires_grad_()
    v = torch.linspace(-1, 1, 12)[:, None, None]
    q2, k2 = (t.detach().double().requires_grad_() for t in (q, k))
    out = attention(q, k, v, torch.tensor([0, 12]), softcap=softcap)
    want = formula(q2, k2, v.double(), [0, 12], softcap=softcap)
    out.sum().backward()
    want.sum().backward()
    # A score of 1e6 has an error of 0.06 in fp32 already.
    tolerance = max(2e-5, 1e-7 * softcap)
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(k.grad.double(), k2.grad, rtol=1e-3, atol=tolerance)
    assert q.grad.isfinite().all()


def test_sinks_of_minus_infinity_change_nothing_and_huge_ones_take_all():
    q, k, v = (torch.randn(70, 2, 8) for _ in range(3))
    starts = torch.tensor([0, 70])
    none = torch.full((2,), -math.inf, requires_grad=True)
    out = attention(q, k, v, starts, sinks=none)
    assert torch.equal(out, attention(q, k, v, starts))
    out.sum().backward()
    assert torch.equal(none.grad, torch.zeros(2))
    assert torch.equal(attention(q, k, v, starts, sinks=torch.full((2,), 1e4)), torch.zeros(70, 2, 8))


def test_a_query_that_sees_no_key_sees_the_sink():
    q, k, v = (torch.randn(6, 1, 8, requires_grad=True) for _ in range(3))
    sinks = torch.zeros(1, requires_grad=True)
    bias = torch.full((1, 6, 6), -math.inf)
    out = attention(q, k, v, torch.tensor([0, 6]), bias=bias, sinks=sinks)
    out.sum().backward()
    for tensor in (out, q.grad, k.grad, v.grad, sinks.grad):
        assert torch.equal(tensor, torch.zeros_like(tensor))


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
        sinks = torch.zeros(2, requires_grad=True)
        tables = [torch.randn(41, 2, 16, generator=torch.Generator().manual_seed(2)).requires_grad_() for _ in range(2)]
        if options.pop("relative", False):
            longest = max(lengths)
            options["relative"] = (*tables, torch.arange(-longest, longest + 1).clamp(-20, 20).add(20))
        out = attention_packed(qkv, cu_seqlens, 2, dropout_p=0.1, sinks=sinks, **options)
        out.sum().backward()
        return out.detach(), qkv.grad, sinks.grad, *(table.grad for table in tables if table.grad is not None)
    finally:
        torch.set_num_threads(previous)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 1.0, "causal": True, "layout": "heads"}, {"relative": True}], ids=str
)
def test_the_number_of_threads_changes_no_bit(options):
    one = run(1, **options)
    for threads in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(run(threads, **options), one, strict=True))


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
    numbers = (2**62, 2**62, 0.5, 1.0, 0.0)
    plain = (torch.tensor([0, 3, 5]), *(None,) * 9, *numbers)
    qkv = torch.randn(5, 3 * 8, requires_grad=True)
    sinks, bias = torch.randn(2, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)
    packed = torch.ops.stoker.attention_packed.default
    torch.library.opcheck(packed, (qkv, 2, 2, "blocks", *plain))
    torch.library.opcheck(packed, (qkv, 2, 2, "heads", plain[0], None, None, sinks, *(None,) * 6, *numbers))
    tables = [torch.randn(4, 2, 4, requires_grad=True) for _ in range(2)]
    relative = (*tables, torch.tensor([0, 1, 2, 3, 3]))
    torch.library.opcheck(packed, (qkv, 2, 2, "blocks", plain[0], *(None,) * 3, *relative, *(None,) * 3, *numbers))
    q, k, v = (torch.randn(5, 2, 4, requires_grad=True) for _ in range(3))
    torch.library.opcheck(torch.ops.stoker.attention.default, (q, k, v, *plain))
    cross = (plain[0], torch.tensor([0, 1, 5]), bias, sinks, *(None,) * 6, *numbers)
    torch.library.opcheck(torch.ops.stoker.attention.default, (q, k, v, *cross))


RELATIVE = (torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), torch.zeros(11, dtype=torch.int64))


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_outside_of_the_tables_of_positions_are_refused(row):
    rows = RELATIVE[2].clone()
    rows[4] = row
    q, k, v = (torch.zeros(6, 2, 4) for _ in range(3))
    with pytest.raises(IndexError, match="rows of the tables, 0 to 2"):
        attention(q, k, v, torch.tensor([0, 6]), relative=(*RELATIVE[:2], rows))


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
        ({"rotary": (torch.zeros(6, 3), torch.zeros(6, 3))}, "at most the head size, 4"),
        ({"rotary": (torch.zeros(6, 2), torch.zeros(6, 1))}, "sin has shape"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"softcap": math.nan}, "softcap is nan"),
        ({"sinks": torch.zeros(3)}, "sinks has shape"),
        ({"sinks": torch.zeros(2, dtype=torch.bfloat16)}, "sinks has dtype bfloat16"),
        ({"sinks": torch.zeros(2, device="meta")}, "sinks is on meta"),
        ({"cu_seqlens_k": torch.tensor([0, 6]), "causal": True}, "does not go with causal"),
        ({"cu_seqlens_k": torch.tensor([0, 6]), "window": (3, -1)}, "does not go with causal, window"),
        ({"cu_seqlens_k": torch.tensor([0, 6]), "rotary": (torch.zeros(6, 2),) * 2}, "window, rotary or relative"),
        ({"cu_seqlens_k": torch.tensor([0, 6]), "relative": RELATIVE}, "window, rotary or relative"),
        ({"relative": RELATIVE, "rotary": (torch.zeros(6, 2),) * 2}, "relative does not go with rotary"),
        ({"relative": RELATIVE, "k": torch.zeros(6, 1, 4), "v": torch.zeros(6, 1, 4)}, "fewer key/value heads"),
        ({"relative": (None, None, RELATIVE[2])}, "one table or two of equal size"),
        ({"relative": (torch.zeros(2, 2, 4), *RELATIVE[1:])}, r"tables of \[2, 3\] rows"),
        ({"relative": (None, torch.zeros(3, 2, 5), RELATIVE[2])}, "position_k has shape"),
        ({"relative": (torch.zeros(3, 2, 4).double(), *RELATIVE[1:])}, "position_q has dtype float64"),
        ({"relative": (*RELATIVE[:2], torch.zeros(9, dtype=torch.int64))}, "rows has 9 elements"),
        ({"relative": (*RELATIVE[:2], torch.zeros(12, dtype=torch.int64))}, "rows has 12 elements"),
        ({"relative": (*RELATIVE[:2], torch.zeros(11))}, "rows has dtype float32"),
        ({"relative": (*RELATIVE[:2], RELATIVE[2].to("meta"))}, "rows is on meta"),
        ({"cu_seqlens_k": torch.tensor([0, 5])}, "cu_seqlens_k runs from 0 to 5"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 6])}, "cu_seqlens_k has 2 sequences; it must have as many as"),
        ({"cu_seqlens_k": torch.tensor([0, 6]), "bias": torch.zeros(2, 6, 5)}, "n_k at least 6"),
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


@pytest.mark.parametrize(
    ("kv_heads", "layout", "words"),
    [(2, "rows", "layout is 'rows'"), (1, "heads", "as many key/value heads as heads, 2, not 1")],
)
def test_wrong_layouts_are_named(kv_heads, layout, words):
    with pytest.raises(ValueError, match=words):
        attention_packed(torch.zeros(4, (2 + 2 * kv_heads) * 4), torch.tensor([0, 4]), 2, kv_heads, layout=layout)
