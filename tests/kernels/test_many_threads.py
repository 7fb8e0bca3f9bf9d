"""Kernels are cut into enough pieces for machines with many cores, and the cuts change no bit. Counts of pieces, no times."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from stoker.kernels import native, products
from stoker.kernels.activation import bias_activation, gated
from stoker.kernels.attention import attention_packed
from stoker.kernels.embedding import embedding_layer_norm_dropout
from stoker.kernels.linear import linear
from stoker.kernels.norm import dropout_add_layer_norm
from stoker.kernels.virtual_threads import Region, cost_of_region, virtual_threads

QUESTIONS = (213, 161, 212, 134, 234, 164, 109, 134, 363, 145, 131, 225)  # tokens of a batch of SQuAD
INSTRUCTIONS = (65, 335, 54, 208, 348, 427, 339, 212)  # of Alpaca
TOKENS = sum(QUESTIONS)
MANY = (56, 112)


def _regions(count: int, run: Callable[[], object]) -> list[Region]:
    with virtual_threads(count) as regions:
        run()
    return regions()


def _check(regions: list[Region], *functions: str) -> None:
    """Each of these functions of the C++ source has two pieces for each thread that it uses."""
    for function in functions:
        found = [region for region in regions if region.place.partition("<")[0].partition(":")[0] == function]
        assert found, f"{function} is not among {[region.place for region in regions]}"
        for region in found:
            assert region.fewest >= 2 * region.threads, region


def _attention(
    lengths: tuple[int, ...], heads: int, kv_heads: int, size: int = 16, **options: object
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(sum(lengths), (heads + 2 * kv_heads) * size, generator=generator).requires_grad_()
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    torch.manual_seed(2)  # of the dropout
    out = attention_packed(qkv, starts, heads, kv_heads, **options)  # type: ignore[arg-type]
    out.backward(out.detach().cos())
    assert qkv.grad is not None
    return [out.detach(), qkv.grad]


@pytest.mark.parametrize("count", MANY)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "causal"), [(QUESTIONS, 12, 12, False), (INSTRUCTIONS, 9, 3, True)]
)
def test_attention_has_pieces_for_all_threads(
    count: int, lengths: tuple[int, ...], heads: int, kv_heads: int, causal: bool
) -> None:
    regions = _regions(count, lambda: _attention(lengths, heads, kv_heads, causal=causal))
    _check(regions, "forward", "backward")
    assert {region.threads for region in regions} == {count}


@pytest.mark.parametrize("count", MANY)
@pytest.mark.parametrize("kind", ["nt", "nn", "tn"])
def test_products_have_pieces_for_all_threads(count: int, kind: str) -> None:
    x, weight = torch.ones(TOKENS, 768), torch.ones(768, 768)
    a, b = {"nt": (x, weight.t()), "nn": (x, weight), "tn": (x.t(), x)}[kind]
    out = torch.empty(a.shape[0], b.shape[1])
    regions = _regions(count, lambda: products.multiply([(a, b)], out, None, "stoker"))
    _check(regions, "pack", "tiles_of")
    assert max(region.threads for region in regions) == count


def test_few_rows_and_columns_are_packed_for_all_threads_together() -> None:
    """A stripe of columns for each task would leave all threads but a few without work."""
    x, weight = torch.ones(200, 900), torch.ones(576, 900)
    out = torch.empty(200, 576)
    _check(_regions(32, lambda: products.multiply([(x, weight.t())], out, None, "stoker")), "pack", "tiles_of")
    wide, logits = torch.ones(60 * 256, 64), torch.empty(200, 60 * 256)
    regions = _regions(56, lambda: products.multiply([(torch.ones(200, 64), wide.t())], logits, None, "stoker"))
    _check(regions, "few_rows")


def test_a_small_product_of_many_tokens_is_cut_in_their_number() -> None:
    """The gradient of LoRA's A: as few rows as its rank."""
    dh, x, out = torch.ones(TOKENS, 16), torch.ones(TOKENS, 576), torch.empty(16, 576)
    regions = _regions(32, lambda: products.multiply([(dh.t(), x)], out, None, "stoker"))
    _check(regions, "parts_of_depth")
    assert out.eq(TOKENS).all()


@pytest.mark.parametrize("count", MANY)
def test_sums_over_rows_have_pieces_for_all_threads(count: int) -> None:
    rows = [torch.ones(TOKENS, 768, requires_grad=True) for _ in range(2)]
    columns = [torch.ones(768, requires_grad=True) for _ in range(3)]
    half = torch.ones(TOKENS, 384)

    def run() -> None:
        dropout_add_layer_norm(rows[0], rows[1], columns[0], columns[1], x_bias=columns[2]).sum().backward()
        bias_activation(rows[0], columns[0], "gelu").sum().backward()
        products.column_sums(rows[0].detach())

    regions = _regions(count, run)
    _check([region for region in regions if region.threads > 1], "backward", "column_sums")
    # of a narrow matrix, for which one piece each has to do
    narrow = _regions(count, lambda: products.column_sums(half))
    assert {region.fewest >= region.threads for region in narrow} == {True}


def _many(threads: int, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def _sums(rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    leaves = [
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((rows, 96), (rows, 96), (96,), (96,), (96,))
    ]
    x, residual, weight, bias, x_bias = leaves
    torch.manual_seed(4)
    y = dropout_add_layer_norm(x, residual, weight, bias, x_bias=x_bias, p=0.1)
    y = bias_activation(gated(y, x), x_bias, "gelu")
    y.backward(y.detach().cos())
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None), products.column_sums(x.detach())]


def _embeddings(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tables = [torch.randn(rows, 64, generator=generator).requires_grad_() for rows in (50, 2)]
    weight, bias = torch.ones(64, requires_grad=True), torch.zeros(64, requires_grad=True)
    ids = [torch.randint(0, rows, (tokens,), generator=generator) for rows in (50, 2)]
    torch.manual_seed(6)
    y = embedding_layer_norm_dropout(ids[0], None, ids[1], tables[0], None, tables[1], weight, bias, eps=1e-5, p=0.1)
    y.backward(y.detach().cos())
    return [y.detach(), *(leaf.grad for leaf in (*tables, weight, bias) if leaf.grad is not None)]


def _products(dtype: torch.dtype, engine: str) -> list[torch.Tensor]:
    results = []
    for rows in (70, 500):
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(rows, 900, generator=generator).to(dtype).requires_grad_()
        weight = torch.randn(330, 900, generator=generator).requires_grad_()
        y = linear(x, weight, engine=engine)
        y.backward(y.detach())
        assert x.grad is not None
        assert weight.grad is not None
        results += [y.detach(), x.grad, weight.grad]
    small = torch.zeros(16, 200)
    products.multiply([(results[0].t()[:16], results[1][:, :200].to(dtype))] * 20, small, None, engine)
    return [*results, small]


def _cases() -> Iterator[object]:
    for lengths in ((600, 300, 17), (2100, 65), (1, 64, 129)):
        for kv_heads, options in ((1, {"causal": True, "dropout_p": 0.1}), (4, {"window": (100, 30)}), (2, {})):
            yield pytest.param(
                lambda lengths=lengths, kv_heads=kv_heads, options=options: _attention(
                    lengths, 4, kv_heads, 8, **options
                ),
                id=f"attention {lengths} {kv_heads} {options}",
            )
    for rows in (1, 9, 333, 2100):
        yield pytest.param(lambda rows=rows: _sums(rows), id=f"sums {rows}")
    yield pytest.param(lambda: _embeddings(700), id="embeddings")
    for dtype in (torch.float32, torch.bfloat16):
        for engine in ("stoker", "onednn"):
            if engine in products.available(dtype, dtype):
                yield pytest.param(
                    lambda dtype=dtype, engine=engine: _products(dtype, engine), id=f"products {dtype} {engine}"
                )


@pytest.mark.parametrize("run", [*_cases()])
def test_cuts_for_many_threads_change_no_bit(run: Callable[[], list[torch.Tensor]]) -> None:
    one = _many(1, run)
    for threads in (3, 24):  # more than there are cores, so that tasks end in any order
        for got, want in zip(_many(threads, run), one, strict=True):
            assert torch.equal(got, want)
    with virtual_threads(112):
        for got, want in zip(run(), one, strict=True):
            assert torch.equal(got, want)


def test_waking_more_threads_costs_more() -> None:
    assert cost_of_region(1) == 0.0
    assert 0.0 < cost_of_region(2) < cost_of_region(56) < cost_of_region(112)
    with virtual_threads(4), pytest.raises(RuntimeError, match="before or after virtual_threads"):
        cost_of_region(4)
    assert native.threads is torch.get_num_threads


def test_a_region_uses_one_thread_or_all() -> None:
    """OpenMP ends the threads that a smaller team leaves idle, and creates them again for the next large one."""

    def run() -> None:
        for rows in (1, 60, 600, 6000):
            bias_activation(torch.ones(rows, 96), torch.ones(96), "gelu")

    threads = {region.threads for region in _regions(56, run)}
    assert threads == {1, 56}


def test_threads_stay_the_same_from_one_region_to_the_next() -> None:
    """By their numbers, in a process of its own with eight threads."""
    code = """
import os, torch
torch.set_num_threads(8)
from stoker.kernels.activation import bias_activation
large, small, bias = torch.ones(6000, 96), torch.ones(500, 96), torch.ones(96)
bias_activation(large, bias, "gelu")
before = set(os.listdir("/proc/self/task"))
for _ in range(50):
    bias_activation(small, bias, "gelu")
    bias_activation(large, bias, "gelu")
print(len(set(os.listdir("/proc/self/task")) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
