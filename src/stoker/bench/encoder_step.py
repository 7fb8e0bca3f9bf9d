"""Batches and losses of encoders with random weights and real token counts: question answering, classification, masked LM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.bench.trainer_step import LossOf

__all__ = ["HEADS", "MASKED", "MORE", "NO_DROPOUT", "Case", "batch", "build_model", "loss_of"]


@dataclass(frozen=True)
class Case:
    """A model and a stream of batches."""

    title: str
    hidden: int
    layers: int
    task: str
    lengths: tuple[tuple[int, ...], ...]
    pad_to: int | None
    """What stock pads to; None: the longest of the batch."""
    family: str = "Bert"
    """The prefix of its classes in transformers."""


HEADS = 12
MASK_TOKEN = 103
MORE: dict[str, dict[str, Any]] = {
    "Bert": {"vocab_size": 30522},
    "DebertaV2": {  # as microsoft/deberta-v3-small has it
        "vocab_size": 128100,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 256,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
}
"""What the configuration of a family has beside its size."""


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
"""What makes the losses of all sides equal."""
HEAD_OF_TASK = {"qa": "QuestionAnswering", "classify": "SequenceClassification", "mlm": "MaskedLM"}
MASKED = 0.15
"""The share of tokens that a masked language model is trained to predict."""


def build_model(case: Case, dropout: bool = True) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{case.family}Config")(
        **MORE[case.family],
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=HEADS,
        intermediate_size=4 * case.hidden,
        num_labels=2,
        **({} if dropout else NO_DROPOUT),
    )
    return getattr(transformers, f"{case.family}For{HEAD_OF_TASK[case.task]}")(config)


def batch(case: Case, number: int, pad_to: int | None) -> dict[str, Any]:
    """Random tokens of real lengths."""
    import torch

    lengths = case.lengths[number % len(case.lengths)]
    width = pad_to or max(lengths)
    generator = torch.Generator().manual_seed(number)
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    ids = torch.randint(1000, MORE[case.family]["vocab_size"], (len(lengths), width), generator=generator) * mask
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    if case.family == "Bert":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    if case.task == "qa":
        spots = torch.tensor([length // 2 for length in lengths])
        return {**inputs, "start_positions": spots, "end_positions": spots}
    if case.task == "mlm":
        masked = torch.rand(ids.shape, generator=generator) < MASKED
        labels = ids.masked_fill(~masked | ~mask, -100)
        return {**inputs, "input_ids": ids.masked_fill(masked & mask, MASK_TOKEN), "labels": labels}
    return {**inputs, "labels": torch.arange(len(lengths)) % 2}


def loss_of(case: Case, pad_to: int | None) -> LossOf:
    return lambda model, number: model(**batch(case, number, pad_to)).loss
