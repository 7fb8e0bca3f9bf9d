"""The cost of a training step: arithmetic and traffic as counted by hand, for every family of language models, LoRA and full."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from stoker.hf import step_cost
from stoker.hf.core_scaling import efficiency, host_seconds
from stoker.hf.meter import Work
from stoker.hf.step_cost import Rows, Speed, StepCost

VOCABULARY, LAYERS, WIDTH, INNER, HEADS, KV_HEADS = 50, 3, 32, 48, 4, 2
SIZE = WIDTH // HEADS
GROUPED = 2 * WIDTH * WIDTH + 2 * WIDTH * KV_HEADS * SIZE
"""Weights of q and o, and of k and v with fewer heads."""
ALIKE = 4 * WIDTH * WIDTH
GATED, PLAIN = 3 * WIDTH * INNER, 2 * WIDTH * INNER
FAMILIES = {
    "llama": GROUPED + GATED, "qwen2": GROUPED + GATED, "qwen3": GROUPED + GATED, "mistral": GROUPED + GATED,
    "gemma2": GROUPED + GATED, "gemma3_text": GROUPED + GATED, "phi3": GROUPED + GATED, "olmo2": GROUPED + GATED,
    "gpt2": ALIKE + PLAIN, "gpt_neox": ALIKE + PLAIN,
}  # fmt: skip
"""Weights of the linear layers of one layer, by hand."""


def build(kind: str) -> Any:
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, intermediate_size=INNER, head_dim=SIZE, tie_word_embeddings=False,
        pad_token_id=0, **({"n_inner": INNER} if kind == "gpt2" else {}),
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", FAMILIES)
def test_products_of_each_family_are_those_counted_by_hand(kind: str) -> None:
    model, weights = build(kind), LAYERS * FAMILIES[kind]
    pair = LAYERS * 2 * 2 * WIDTH * 3 / 2  # scores and sum, forward and twice backward, half of the pairs
    assert Work.of(model) == Work(6 * weights, pair, 6 * VOCABULARY * WIDTH)
    cost = StepCost.of(model)
    assert (cost.weights, cost.head) == (weights, VOCABULARY * WIDTH)
    assert cost.trained == sum(one.numel() for one in model.parameters())


def test_adapters_are_all_that_is_updated_and_exchanged() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        build("llama"), peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    )
    weights = LAYERS * FAMILIES["llama"]
    kv = KV_HEADS * SIZE
    ends = (
        2 * (WIDTH + WIDTH) + 2 * (WIDTH + kv) + 3 * (WIDTH + INNER)
    )  # inputs and outputs of q, o, k, v and the three others
    adapters = LAYERS * 4 * ends
    cost = StepCost.of(model)
    assert cost.work.per_token == 4 * weights + 6 * adapters
    assert cost.adapters == 6 * adapters
    assert cost.work.per_label == 4 * VOCABULARY * WIDTH
    assert cost.trained == adapters
    frozen = weights + 2 * VOCABULARY * WIDTH + (2 * LAYERS + 1) * WIDTH  # with embeddings, head and norms
    assert cost.moved_per_batch == step_cost._FROZEN * frozen + step_cost._TRAINED * adapters
    assert cost.moved_per_update == step_cost._UPDATED * adapters
    assert cost.moved_per_token == 4 * step_cost._PASSES * LAYERS * ends


def test_seconds_are_the_sum_of_products_attention_traffic_and_calls() -> None:
    cost = StepCost(
        work=Work(per_token=1e6, per_pair=1e3, per_label=1e7), weights=0.0, head=0.0, adapters=1e5, moved_per_token=1e3,
        moved_per_batch=1e7, moved_per_update=1e8, trained=1, calls=100,
    )  # fmt: skip
    rows = Rows.of([100, 300], labelled=0.5)
    assert (rows.tokens, rows.pairs, rows.labelled) == (400, 100_000, 200)
    layers = 400 * 9e5 / step_cost._LAYERS + 400 * 1e5 / step_cost._ADAPTERS + 200 * 1e7 / step_cost._HEAD
    attention = 100_000 * 1e3 / step_cost._ATTENTION
    traffic = (400 * 1e3 + 1e7 + 1e8) / 1e10
    expected = (layers + attention) / 1e9 + traffic + host_seconds(100, 1)
    assert cost.seconds(rows, Speed(flops=1e9, bytes=1e10)) == pytest.approx(expected)
    # Many cores compute no faster than they are kept busy, and share neither the memory nor the host's time.
    expected = (layers + attention) / (1e9 * efficiency(56, 400)) + traffic + host_seconds(100, 56)
    assert cost.seconds(rows, Speed(flops=1e9, bytes=1e10, cores=56)) == pytest.approx(expected)


def test_attention_computes_in_fp32_whatever_is_stored() -> None:
    cost = StepCost(
        work=Work(per_token=1e6, per_pair=1e3, per_label=0.0), weights=0.0, head=0.0, adapters=0.0, moved_per_token=0.0,
        moved_per_batch=0.0, moved_per_update=0.0, trained=1, calls=0,
    )  # fmt: skip
    rows = Rows.of([100])
    products, attention = 100 * 1e6 / step_cost._LAYERS, 100 * 100 * 1e3 / step_cost._ATTENTION
    expected = products / 8e9 + attention / 1e9 + host_seconds(0, 1)
    assert cost.seconds(rows, Speed(flops=8e9, bytes=1e10, fp32=1e9)) == pytest.approx(expected)


def test_another_forward_pass_costs_two_operations_per_weight() -> None:
    cost = StepCost.of(build("llama"))
    more = cost.with_forward()
    assert more.work.per_token == pytest.approx(8 / 6 * cost.work.per_token)
    assert more.work.per_label == pytest.approx(8 / 6 * cost.work.per_label)
    assert more.work.per_pair == pytest.approx(8 / 6 * cost.work.per_pair)


def test_a_process_has_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: Any = SimpleNamespace(threads=8, fp32_all=800.0, bf16_all=2400.0, bandwidth_all=80.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert Speed.of(rates) == Speed(200e9, 20e9, cores=2)
    assert Speed.of(rates, bf16=True) == Speed(600e9, 20e9, cores=2, fp32=200e9)
