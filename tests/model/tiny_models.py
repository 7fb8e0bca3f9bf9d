"""Tiny random fp32 models of every family and head, padded batches for them, and the truth: stock, one example at a time."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

import stoker
from stoker.model.families import FAMILIES as TABLE
from stoker.model.families import transformers_major

VOCABULARY = 99
HIDDEN = 32

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_ROBERTA = {**_COMMON, "type_vocab_size": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_DEBERTA_V3 = {
    "relative_attention": True,
    "position_buckets": 6,  # so few that the sequences of the tests reach the logarithmic ones, and the last
    "max_relative_positions": -1,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}

CONFIGS = {
    "Bert": lambda: transformers.BertConfig(**_COMMON),
    "Roberta": lambda: transformers.RobertaConfig(**_ROBERTA),
    "XLMRoberta": lambda: transformers.XLMRobertaConfig(**_ROBERTA),
    "Camembert": lambda: transformers.CamembertConfig(**_ROBERTA),
    "Electra": lambda: transformers.ElectraConfig(**_COMMON, embedding_size=24),
    "RemBert": lambda: transformers.RemBertConfig(**_COMMON, input_embedding_size=24, output_embedding_size=20),
    "DistilBert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=HIDDEN, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64
    ),
    "MPNet": lambda: transformers.MPNetConfig(**_COMMON),
    "DebertaV2": lambda: transformers.DebertaV2Config(**_COMMON, **_DEBERTA_V3),
    "Albert": lambda: transformers.AlbertConfig(**_COMMON, embedding_size=24),
    "ModernBert": lambda: transformers.ModernBertConfig(
        **_COMMON,
        local_attention=8,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        attention_dropout=0.1,
        mlp_dropout=0.1,
    ),
    "NomicBert": lambda: transformers.NomicBertConfig(**_COMMON),
    "Gte": lambda: transformers.GteConfig(**_COMMON, type_vocab_size=2),
    "JinaEmbeddingsV3": lambda: transformers.JinaEmbeddingsV3Config(**_COMMON, type_vocab_size=2),
    "EuroBert": lambda: transformers.EuroBertConfig(
        **_COMMON, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3
    ),
}
# With STOKER_TEST_BRIEF (the same tests on another instruction set) five families stand for all: plain, learned biases on scores,
# relative positions, shared layers, and rotary positions with windows and gated layers.
BRIEF = bool(os.environ.get("STOKER_TEST_BRIEF"))


def supported(*families: str) -> tuple[str, ...]:
    """Those of these families that the table supports with the installed transformers."""
    since = {row.base.removesuffix("Model"): row.since for row in TABLE}
    return tuple(family for family in families if since[family] <= transformers_major())


FAMILIES = supported(*(("Bert", "MPNet", "DebertaV2", "Albert", "ModernBert") if BRIEF else CONFIGS))
HEADS = ("QuestionAnswering", "SequenceClassification", "TokenClassification", "MaskedLM", "MultipleChoice")
TYPED = (
    "Bert",
    "Roberta",
    "XLMRoberta",
    "Camembert",
    "Electra",
    "RemBert",
    "Albert",
    "NomicBert",
    "Gte",
    "JinaEmbeddingsV3",
)


def heads(family: str) -> list[str]:
    """The heads that transformers has for this family."""
    return [head for head in HEADS if hasattr(transformers, f"{family}For{head}")]


def token_head(family: str) -> str:
    """A head that every position contributes to."""
    return "QuestionAnswering" if "QuestionAnswering" in heads(family) else "TokenClassification"


DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "classifier_dropout_prob",
    "dropout",
    "attention_dropout",
    "qa_dropout",
    "seq_classif_dropout",
    "mlp_dropout",
    "embedding_dropout",
    "summary_last_dropout",
    "pooler_dropout",
)


def config(family: str, dropout: float | None = 0.0, **changes: object):
    made = CONFIGS[family]()
    for name, value in changes.items():
        setattr(made, name, value)
    for name in DROPOUTS:
        if dropout is not None and hasattr(made, name):
            setattr(made, name, dropout)
    return made


def model(family: str, head: str = "Model", dropout: float | None = 0.0, seed: int = 0, **changes: object) -> nn.Module:
    """`changes`: of its configuration."""
    torch.manual_seed(seed)
    name = f"{family}Model" if head == "Model" else f"{family}For{head}"
    made = getattr(transformers, name)(config(family, dropout, **changes))
    with torch.no_grad():  # stock initialization is so uniform that errors would stay small
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made.train()


@dataclass(frozen=True)
class Batch:
    """A padded batch and, per row, where its real tokens are."""

    inputs: dict[str, Tensor]
    labels: dict[str, Tensor]
    spans: tuple[tuple[int, int], ...]

    @property
    def kwargs(self) -> dict[str, Tensor]:
        return {**self.inputs, **self.labels}


def batch(
    family: str, head: str, side: str = "right", lengths: tuple[int, ...] = (7, 12, 1, 9), seed: int = 1
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    padding = 1 if family in ("Roberta", "XLMRoberta", "Camembert", "MPNet", "Gte", "JinaEmbeddingsV3") else 0
    width, rows = max(lengths) + 2, len(lengths)
    ids = torch.full((rows, width), padding)
    mask = torch.zeros(rows, width, dtype=torch.long)
    types = torch.zeros(rows, width, dtype=torch.long)
    tokens = torch.full((rows, width), -100)
    spans = []
    for row, length in enumerate(lengths):
        offset = {"right": 0, "left": width - length, "both": 1}[side]
        spans.append((offset, offset + length))
        real = slice(offset, offset + length)
        ids[row, real] = torch.randint(5, VOCABULARY, (length,), generator=generator)
        mask[row, real] = 1
        types[row, real] = torch.randint(0, 2, (length,), generator=generator)
        tokens[row, real] = torch.randint(0, 2, (length,), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family in TYPED:
        inputs["token_type_ids"] = types
    starts = torch.tensor([offset for offset, _ in spans])
    ends = torch.tensor([end - 1 for _, end in spans])
    if head == "QuestionAnswering":
        labels = {"start_positions": (starts + ends) // 2, "end_positions": ends}
    elif head == "SequenceClassification":
        labels = {"labels": torch.arange(rows) % 2}
    elif head == "MaskedLM":
        chosen = (torch.rand(rows, width, generator=generator) < 0.5) & (tokens >= 0)
        chosen[0, spans[0][0]] = True
        labels = {"labels": torch.where(chosen, ids, torch.tensor(-100))}
    elif head == "TokenClassification":
        labels = {"labels": tokens}
    elif head == "MultipleChoice":
        inputs = {name: value.view(rows // 2, 2, width) for name, value in inputs.items()}
        labels = {"labels": torch.arange(rows // 2) % 2}
    else:
        labels = {}
    return Batch(inputs, labels, tuple(spans))


def optimized(family: str = "Bert", head: str = "QuestionAnswering", dropout: float = 0.0) -> nn.Module:
    """In fp32."""
    return stoker.optimize(model(family, head, dropout), dtype=torch.float32)


def with_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    made = model("Bert", "QuestionAnswering")
    return made, torch.optim.AdamW(made.parameters(), lr=1e-3)


def loss(made: nn.Module, family: str = "Bert", head: str = "QuestionAnswering") -> Tensor:
    return made(**batch(family, head).kwargs).loss


def truth(stock: nn.Module, head: str, full: Batch) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Loss, logits per example and gradients of the stock model, run example by example without padding."""
    stock = copy.deepcopy(stock)
    rows = len(full.spans)
    logits: list[Tensor] = []
    losses: list[Tensor] = []
    weights: list[float] = []
    examples = range(0, rows, 2) if head == "MultipleChoice" else range(rows)
    for row in examples:
        if head == "MultipleChoice":
            pair = [_example(full, head, index) for index in (row, row + 1)]
            scores = torch.cat([stock(**inputs).logits for inputs, _ in pair], dim=1)
            logits.append(scores)
            losses.append(nn.functional.cross_entropy(scores, full.labels["labels"][row // 2].view(1)))
            weights.append(1.0)
            continue
        inputs, labels = _example(full, head, row)
        output = stock(**inputs, **labels)
        logits.append(_logits(output, head))
        counted = labels["labels"].ne(-100).sum().item() if head in ("MaskedLM", "TokenClassification") else 1.0
        if counted:
            losses.append(output.loss)
            weights.append(float(counted))
    loss = sum(value * weight for value, weight in zip(losses, weights, strict=True)) / sum(weights)
    loss.backward()
    return loss.detach(), logits, gradients(stock)


def _example(full: Batch, head: str, row: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    start, end = full.spans[row]
    flat = {name: value.view(-1, value.shape[-1]) for name, value in full.inputs.items()}
    inputs = {name: value[row : row + 1, start:end] for name, value in flat.items()}
    if head == "MultipleChoice":
        return {name: value.unsqueeze(0) for name, value in inputs.items()}, {}
    if head == "QuestionAnswering":
        return inputs, {name: value[row : row + 1] - start for name, value in full.labels.items()}
    if head == "SequenceClassification":
        return inputs, {"labels": full.labels["labels"][row : row + 1]}
    return inputs, {"labels": full.labels["labels"][row : row + 1, start:end]}


def _logits(output, head: str) -> Tensor:
    if head == "QuestionAnswering":
        return torch.stack([output.start_logits, output.end_logits], -1).detach()
    return output.logits.detach()


def rows_of(output, head: str, full: Batch) -> list[Tensor]:
    """The logits of a padded batch, cut down to what the examples alone would give."""
    logits = _logits(output, head)
    if head in ("SequenceClassification", "MultipleChoice"):
        return [logits[row : row + 1] for row in range(logits.shape[0])]
    return [logits[row : row + 1, start:end] for row, (start, end) in enumerate(full.spans)]


def gradients(made: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    """Each tensor's error, relative to the norm of that tensor's gradient.

    The floor is for gradients that are zero but for rounding, as that of a key bias, which shifts all scores alike.
    """
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name in sorted(actual.keys() | expected.keys()):
        wanted = expected.get(name, torch.zeros(()))
        error = float((actual.get(name, torch.zeros(())) - wanted).norm())
        assert error <= tolerance * float(wanted.norm()) + 1e-6 * largest, (name, error, float(wanted.norm()))
