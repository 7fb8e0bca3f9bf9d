"""Exports encoders (classification, entities, question answering, masked words, embeddings, rerankers) and checks the result."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stoker.english import counted
from stoker.errors import UserError
from stoker.tasks.export.comparison import (
    BATCH,
    Comparison,
    Figures,
    agreement,
    differs,
    latencies,
    padded,
    rows_of,
    scores,
    size_of,
)
from stoker.tasks.export.export_source import Source
from stoker.tasks.export.exported_model import Inputs, load_exported, recorded_inputs
from stoker.tasks.export.graph_module import example_rows, model_inputs
from stoker.tasks.fewshot.classifier_head import Head
from stoker.tasks.loading import load_pretrained, loaded, most_tokens
from stoker.tasks.model_folder import HEAD_FILE
from stoker.tasks.sentences.st_models import Loader, transformer_of

__all__ = ["Encoder", "export_encoder", "export_safetensors", "load_encoder"]

_CLASSES = {
    "answer": "AutoModelForQuestionAnswering",
    "classify": "AutoModelForSequenceClassification",
    "tag": "AutoModelForTokenClassification",
    "fill": "AutoModelForMaskedLM",
}
_EXACT = 0.01
"""How much outputs of an export in fp32 may differ, as a share of the largest: far above rounding, far below a wrong operator."""

Write = Callable[[Any, Inputs, Path], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Encoder:
    tokenizer: Any
    model: Any
    """The transformer with its head, as PyTorch runs it."""
    whole: Any
    """The model of sentence-transformers around it; None if there is none."""
    head: Head | None = None
    """The classifier of a few-shot model, which stays as it is."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return model_inputs(self.model, self.tokenizer)

    def random_rows(self, *lengths: int) -> Inputs:
        """A batch of rows of random tokens, padded; with fewer tokens where the model takes no more."""
        longest = most_tokens(max(lengths), self.tokenizer, self.model.config)
        return example_rows(self.inputs, self.tokenizer, [min(one, longest) for one in lengths])

    def save(self, folder: Path) -> Path:
        """Writes all files, with the weights as safetensors; returns the folder of the transformer."""
        if self.whole is not None:
            self.whole.save_pretrained(str(folder), create_model_card=False)
            if self.head is not None:
                self.head.save(folder)
            return transformer_of(folder)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        return folder


def load_encoder(source: Source) -> Encoder:
    if source.of_sentences:
        import sentence_transformers

        kind = (
            sentence_transformers.CrossEncoder if source.task == "rerank" else sentence_transformers.SentenceTransformer
        )
        local = os.path.isdir(source.name)
        whole = (
            loaded(Loader(kind, source.name), "model", source.name, flag="RUN", device="cpu", local_files_only=local)
            .eval()
            .float()
        )
        if whole.transformers_model is None:
            raise UserError(f"{source.name} contains no transformer, and cannot be exported")
        head = Head.load(source.folder, int(whole.get_embedding_dimension())) if source.task == "fewshot" else None
        return Encoder(whole.tokenizer, whole.transformers_model, whole, head)
    import transformers

    tokenizer, model, untrained = load_pretrained(getattr(transformers, _CLASSES[source.kind]), source.name)
    if untrained:
        raise UserError(
            f"{source.name} is not trained: it has no {', '.join(untrained[:2])}; train it with `stoker train`"
        )
    model.config.architectures = [type(model).__name__]
    return Encoder(tokenizer, model.eval(), None)


def export_encoder(source: Source, to: str, int8: bool, folder: Path, write: Write, say: Say) -> Comparison:
    """Writes the export into `folder` by `write`, and compares it with the original."""
    encoder = load_encoder(source)
    inner = encoder.save(folder)
    for path in [*inner.glob("*.safetensors*"), *inner.glob("pytorch_model*")]:
        if path.name != HEAD_FILE:
            path.unlink()
    say(f"writing {to}{' in int8' if int8 else ''}")
    write(encoder.model, encoder.random_rows(24, 40), inner)
    exported = load_exported(inner, encoder.model.config)
    difference = differs(encoder.model, exported, encoder.random_rows(3, 17, 60, 31))
    if not int8 and not difference <= _EXACT:  # also if it is NaN; int8 is judged by its score
        raise UserError(
            f"{type(encoder.model).__name__} cannot be exported to {to}: the exported model computes other values (up to "
            f"{difference:.0%} of the largest); use --to safetensors"
        )
    first, second, batches = _scores(source, folder, say)
    rows = _rows(encoder, batches)
    one, batch = rows[len(rows) // 2], padded(rows, encoder.tokenizer.pad_token_id or 0)
    say("measuring latency")
    single, several = (latencies(encoder.model, exported, inputs) for inputs in (one, batch))
    note = (
        f"Latency with {counted(torch.get_num_threads(), 'thread')}: a row of {one['input_ids'].shape[1]} tokens, and "
        f"{len(rows)} rows of {sum(row['input_ids'].shape[1] for row in rows):,} tokens, padded to "
        f"{batch['input_ids'].shape[1]}, from {'the validation data' if batches else 'random tokens'}. Before is PyTorch "
        "without Stoker, in fp32."
    )
    before = Figures(size_of(source.folder), first, single[0], several[0])
    after = Figures(size_of(folder), second, single[1], several[1])
    return Comparison(to, int8, before, after, agreement(encoder.model, exported, batch), note)


def _scores(source: Source, folder: Path, say: Say) -> tuple[dict[str, float], dict[str, float], list[Inputs]]:
    """The scores before and after, and the inputs of the model on the way; all are empty without validation data."""
    if source.evaluation is None:
        return {}, {}, []
    say("evaluating the model before and after")
    before = scores(source.task, source.name, source.evaluation)
    with recorded_inputs() as batches:
        after = scores(source.task, str(folder), source.evaluation)
    return before, after, batches


def _rows(encoder: Encoder, batches: list[Inputs]) -> list[Inputs]:
    """Rows to measure with, one by one, from the shortest to the longest."""
    found = rows_of(batches or [encoder.random_rows(*range(8, 8 + 4 * BATCH, 4))])
    rows = [{name: row[name] for name in encoder.inputs} for row in found]
    return sorted(rows, key=lambda row: row["input_ids"].shape[1])


def export_safetensors(source: Source, folder: Path, say: Say) -> Comparison:
    """Writes a plain model of transformers or sentence-transformers."""
    say("writing safetensors")
    encoder = load_encoder(source)
    encoder.save(folder)
    again = load_encoder(replace(source, name=str(folder), evaluation=None))
    probe = encoder.random_rows(3, 17, 60, 31)
    before = Figures(size_of(source.folder))
    return Comparison(
        "safetensors", False, before, Figures(size_of(folder)), agreement(encoder.model, again.model, probe)
    )
