"""Embedding lookups and the gradients of their tables equal the plain formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kernels.plain import DTYPES, assert_near, check, factors_of_next_call, leaf, random_cases
from stoker.kernels.embedding import embedding, embedding_layer_norm_dropout


def some_ids(shape, rows: int, seed: int = 0) -> torch.Tensor:
    """Ids of which a few are frequent, as words are."""
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return (uniform**3 * rows).long().clamp_max(rows - 1)


def compare(shape, words, width, dtype, p=0.0, position=True, types=True, bias=True, padding=None):
    ids = some_ids(shape, words)
    positions, kinds = some_ids(shape, 40, 1), some_ids(shape, 2, 2)
    factors = factors_of_next_call(ids.numel(), width, p).view(*ids.shape, width) if p else 1.0
    leaves = [
        leaf(words, width, dtype=dtype),
        leaf(40, width, dtype=dtype, seed=1) if position else None,
        leaf(2, width, dtype=dtype, seed=2) if types else None,
        leaf(width, seed=3),
        leaf(width, seed=4) if bias else None,
    ]

    def operator(word, place, kind, w, b):
        return embedding_layer_norm_dropout(
            ids,
            positions if position else None,
            kinds if types else None,
            word,
            place,
            kind,
            w,
            b,
            eps=1e-5,
            p=p,
            padding_idx=padding,
        )

    def formula(word, place, kind, w, b):
        z = F.embedding(ids, word, padding_idx=padding)
        z = z if place is None else z + F.embedding(positions, place)
        z = z if kind is None else z + F.embedding(kinds, kind)
        return F.layer_norm(z, (width,), w, b, 1e-5) * factors

    check(operator, formula, leaves)


@pytest.mark.parametrize("trained", range(1, 32))
def test_frozen_parameters_get_no_gradient_and_change_no_other(trained):
    def gradients(trained: int):
        torch.manual_seed(7)
        sizes = ((40, 33), (20, 33), (2, 33), (33,), (33,))
        leaves = [leaf(*size, seed=i).requires_grad_(bool(trained >> i & 1)) for i, size in enumerate(sizes)]
        ids = torch.arange(50) * 7 % 40
        y = embedding_layer_norm_dropout(ids, ids % 20, ids % 2, *leaves, eps=1e-5, p=0.2)
        y.square().sum().backward()
        return [one.grad for one in leaves]

    for i, (got, want) in enumerate(zip(gradients(trained), gradients(31), strict=True)):
        assert (got is None) == (not trained >> i & 1)
        assert got is None or torch.equal(got, want)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 50), (700,)], ids=str)
def test_values_and_gradients_are_those_of_the_formula(shape, dtype, p):
    compare(shape, 60, 70, dtype, p)


@pytest.mark.parametrize("parts", range(8))
def test_tables_and_bias_may_be_missing(parts):
    compare((90,), 30, 40, torch.float32, 0.1, bool(parts & 1), bool(parts & 2), bool(parts & 4))


@pytest.mark.parametrize("padding", [0, 5, -1])
def test_the_padding_row_gets_no_gradient(padding):
    compare((200,), 20, 40, torch.float32, padding=padding)
    table = leaf(20, 8)
    embedding(some_ids((200,), 20), table, padding).sum().backward()
    assert not table.grad[padding].any()
    assert table.grad.any()


@random_cases(80)
@given(
    tokens=st.integers(0, 300),
    words=st.integers(1, 100),
    width=st.integers(17, 130),
    dtype=st.sampled_from(DTYPES),
    p=st.sampled_from([0.0, 0.2]),
    parts=st.integers(0, 7),
)
def test_random_shapes(tokens, words, width, dtype, p, parts):
    compare((tokens,), words, width, dtype, p, bool(parts & 1), bool(parts & 2), bool(parts & 4))


@random_cases(60)
@given(tokens=st.integers(0, 400), words=st.integers(1, 50), width=st.integers(1, 200), dtype=st.sampled_from(DTYPES))
def test_random_plain_lookups(tokens, words, width, dtype):
    ids = some_ids((tokens,), words)
    check(lambda table: embedding(ids, table), lambda table: F.embedding(ids, table), [leaf(words, width, dtype=dtype)])


def test_lookup_is_exact_and_takes_any_shape_and_int32():
    table = torch.randn(50, 33)
    ids = some_ids((2, 3, 5), 50)
    assert torch.equal(embedding(ids, table), table[ids])
    assert torch.equal(embedding(ids.int(), table), table[ids])


def test_positions_are_broadcast_over_the_batch():
    word, place, weight = torch.randn(50, 32), torch.randn(12, 32), torch.ones(32)
    ids, positions = some_ids((4, 12), 50), torch.arange(12)[None]
    got = embedding_layer_norm_dropout(ids, positions, None, word, place, None, weight, eps=1e-5)
    assert_near(got, F.layer_norm(word[ids] + place, (32,), weight, None, 1e-5), 1e-6)


def test_output_may_be_bf16_while_the_tables_are_fp32():
    word, weight = leaf(50, 32), leaf(32, seed=1)
    ids = some_ids((20,), 50)
    y = embedding_layer_norm_dropout(ids, None, None, word, None, None, weight, eps=1e-5, dtype=torch.bfloat16)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert word.grad.dtype == torch.float32
    assert_near(y, F.layer_norm(word[ids], (32,), weight, None, 1e-5), 1e-2)


@pytest.mark.parametrize("value", [-1, 50, 2**40])
def test_an_id_outside_its_table_is_named(value):
    ids = torch.tensor([3, value, 4])
    word, weight = torch.randn(50, 16), torch.ones(16)
    with pytest.raises(IndexError, match=f"ids has {value} at position 1; the table has 50 rows"):
        embedding(ids, word)
    with pytest.raises(IndexError, match=f"positions has {value} at position 1; the table has 50 rows"):
        embedding_layer_norm_dropout(ids * 0, ids, None, word, word, None, weight, eps=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": torch.zeros(3)}, "ids has dtype float32"),
        ({"word": torch.ones(5, 8, dtype=torch.float64)}, "word has dtype float64"),
        ({"position": None}, "positions and position go together"),
        ({"position": torch.ones(5, 7)}, r"position has shape \(5, 7\)"),
        ({"weight": torch.ones(7)}, r"weight has shape \(7,\)"),
        ({"padding_idx": 5}, "padding_idx is 5"),
        ({"dtype": torch.float16}, "dtype is torch.float16"),
        ({"p": 2.0}, "p is 2.0"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    ids = torch.zeros(3, dtype=torch.int64)
    table = torch.ones(5, 8)
    arguments = {"ids": ids, "positions": ids, "types": None, "word": table, "position": table, "type": None}
    with pytest.raises(ValueError, match=words):
        embedding_layer_norm_dropout(**(arguments | {"weight": torch.ones(8), "eps": 1e-5} | change))
