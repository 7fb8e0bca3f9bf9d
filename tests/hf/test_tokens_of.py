"""The real tokens of rows and batches are found however they are stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hf.tiny import tiny_model
from stoker.hf import ranks
from stoker.hf.meter import Meter, Work
from stoker.hf.ranks import tokens_of

LENGTHS = [3, 1, 7, 5]


class Rows:
    def __init__(self, *, masked: bool) -> None:
        self.masked = masked

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = LENGTHS[index]
        if not self.masked:
            return {"input_ids": [1] * length}
        return {"input_ids": [1] * 8, "attention_mask": [1] * length + [0] * (8 - length)}


class Columns:
    """As the datasets library has it: slices of columns, formats, names."""

    column_names = ("input_ids", "attention_mask")

    def __len__(self) -> int:
        return len(LENGTHS)

    def with_format(self, kind: str, columns: list[str]) -> Columns:
        assert (kind, columns) == ("numpy", ["attention_mask"])
        return self

    def __getitem__(self, part: slice) -> dict[str, Any]:
        return {"attention_mask": np.array([[1] * n + [0] * (8 - n) for n in LENGTHS[part]])}


@pytest.mark.parametrize(
    "dataset", [Rows(masked=True), Rows(masked=False), Columns()], ids=["padded", "plain", "columns"]
)
def test_tokens_are_counted_without_padding(dataset: Any) -> None:
    found = tokens_of(dataset, "length")
    assert found is not None
    assert found.tolist() == LENGTHS


def test_a_large_dataset_is_not_read_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LENGTHS_READ", 3)
    assert tokens_of(Rows(masked=True), "length") is None


def _figures(**inputs: torch.Tensor) -> dict[str, float]:
    meter = Meter(Work(1.0, 0.0), peak=None)
    meter.batch(inputs)
    return {"tokens": meter.tokens, "rows": meter.rows, "flops": meter.flops}


def test_tokens_of_batches_with_several_texts_are_counted() -> None:
    """As sentence-transformers and preference trainers have them."""
    ids, mask = torch.ones(2, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    pair = {"sentence_0_input_ids": ids, "sentence_0_attention_mask": mask, "sentence_1_input_ids": ids}
    assert _figures(input_ids=ids, attention_mask=mask) == {"tokens": 6, "rows": 2, "flops": 6.0}
    assert _figures(**pair) == {"tokens": 14, "rows": 2, "flops": 14.0}
    assert _figures(input_ids=ids, decoder_input_ids=ids, not_input_ids=torch.ones(3)) == {
        "tokens": 8, "rows": 2, "flops": 8.0
    }  # fmt: skip


def test_tokens_of_texts_that_the_loss_tokenizes_are_counted() -> None:
    """Cross-encoders tokenize raw texts inside their loss."""
    meter = Meter(Work(1.0, 2.0), peak=1e9)
    meter.batch({"text": ["a b"], "label": torch.ones(1)})
    meter.positions.given, meter.positions.computed, meter.positions.pairs = 10, 6, 18
    figures = meter.take()
    assert figures["tokens_per_second"] > 0
    assert figures["padding_avoided"] == 0.4
    assert figures["share_of_peak"] == pytest.approx((6 + 2 * 18) / 6 * figures["tokens_per_second"] / 1e9, abs=1e-4)
    assert "samples_per_second" not in figures
    assert meter.take() == {}


def test_the_work_of_a_transformer_inside_a_model_includes_its_attention() -> None:
    inner = tiny_model().bert
    assert Work.of(torch.nn.Sequential(inner)) == Work.of(inner)
    assert Work.of(inner).per_pair > 0


def test_packed_rows_are_counted_by_their_own_lengths_and_the_head_by_labels() -> None:
    meter = Meter(Work(per_token=10.0, per_pair=1.0, per_label=100.0), peak=None)
    packed = {
        "input_ids": torch.ones(1, 5, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 2, 0, 1]]),
        "labels": torch.tensor([[-100, 4, 5, -100, 6]]),
    }
    meter.batch(packed)
    assert (meter.rows, meter.tokens, meter.flops) == (2, 5, 10 * 5 + (9 + 4) + 100 * 3)
    padded = Meter(meter.work, peak=None)
    padded.batch(
        {
            "input_ids": torch.ones(2, 3, dtype=torch.long),
            "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
            "labels": torch.tensor([[-100, 4, 5], [-100, 6, -100]]),
        }
    )
    assert (padded.rows, padded.tokens, padded.flops) == (meter.rows, meter.tokens, meter.flops)


def test_frozen_weights_of_a_language_model_have_no_gradient_product() -> None:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.LlamaForCausalLM(config)
    layers = sum(p.numel() for name, p in model.model.layers.named_parameters() if "proj" in name)
    assert Work.of(model) == Work(6.0 * layers, 6.0 * 2 * 16, 6.0 * 50 * 16)  # half the pairs: attention is causal
    model.requires_grad_(False)
    assert Work.of(model) == Work(4.0 * layers, 6.0 * 2 * 16, 4.0 * 50 * 16)
