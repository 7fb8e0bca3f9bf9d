"""One training step of embeddings, a cross-encoder, named entities and a masked language model: stock against Stoker.

    python benchmarks/tasks.py                                  every case, about a quarter of an hour on two cores
    python benchmarks/tasks.py --case embeddings --steps 3      one of them

Embeddings and cross-encoder: MiniLM on the same 64 pairs of question and context from SQuAD, with the models, tokenizing and
losses of sentence-transformers, as its trainers call them. Entities: MiniLM on 16 sentences of WNUT17, padded to the longest or
to 256 tokens. Masked language model: the architecture of BERT-base on four full rows of 512 (benchmarks/train_step.py), also
against the time of its matrix products alone. Fails if losses differ without dropout, or a ratio is below its bar.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import train_step
from bars import Bar, Case, main
from minilm import pretrained
from sides import Step
from training_step import LossOf, optimized_step, stock_step

PAIRS, SENTENCES, BATCHES = 64, 16, 4
Pairs = list[tuple[str, str]]


def side(
    build: Callable[..., tuple[Any, LossOf]], stoker: bool, data: Path, dropout: bool = True, **options: Any
) -> Step:
    """The step of a side. Both begin with the same weights and see the same batches."""
    import torch

    from stoker.tasks.loading import quiet

    quiet()
    torch.manual_seed(0)
    model, loss_of = build(data, {} if dropout else train_step.NO_DROPOUT, **options)
    torch.manual_seed(0)
    return optimized_step(model, loss_of) if stoker else stock_step(model, loss_of)


def read_pairs(data: Path) -> list[Pairs]:
    """Batches of questions with their contexts, no context twice in a batch: it would be a negative of itself."""
    import random

    from stoker.tasks.qa.data import read_questions

    questions = read_questions(data / "squad" / "train-v1.1.json.gz", training=True)
    random.Random(0).shuffle(questions)
    contexts = {one.context: (one.question.strip(), one.context) for one in questions}
    pairs = list(contexts.values())
    return [pairs[first : first + PAIRS] for first in range(0, BATCHES * PAIRS, PAIRS)]


def embeddings(data: Path, config: dict[str, Any]) -> tuple[Any, LossOf]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model = SentenceTransformer(pretrained(), device="cpu", config_kwargs=config, local_files_only=True)
    loss = MultipleNegativesRankingLoss(model)
    batches = read_pairs(data)

    def loss_of(model: Any, number: int) -> Any:
        texts = zip(*batches[number % len(batches)], strict=True)
        return loss([model.preprocess(list(column)) for column in texts], None)

    return model, loss_of


def cross_encoder(data: Path, config: dict[str, Any]) -> tuple[Any, LossOf]:
    import torch
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    model = CrossEncoder(pretrained(), num_labels=1, device="cpu", config_kwargs=config, local_files_only=True)
    loss = BinaryCrossEntropyLoss(model)
    batches = read_pairs(data)
    labels = (torch.arange(PAIRS) % 2).float()  # any will do: only speed and equality are measured

    def loss_of(model: Any, number: int) -> Any:
        texts = zip(*batches[number % len(batches)], strict=True)
        return loss([list(column) for column in texts], labels)

    return model, loss_of


def read_tagged(data: Path, split: str) -> Any:
    from stoker.tasks.faults import Faults
    from stoker.tasks.ner.data import Columns, read_sentences

    file = data / "ner" / f"wnut17-{split}.conll"
    return read_sentences(file, Columns(), Faults(str(file)), labelled=True)[1]


def entities(data: Path, config: dict[str, Any], pad_to: int | None = None) -> tuple[Any, LossOf]:
    import random

    from transformers import AutoModelForTokenClassification, AutoTokenizer

    from stoker.tasks.collate import Collator
    from stoker.tasks.ner.features import make_rows

    sentences = read_tagged(data, "train")
    labels = sorted({tag for sentence in sentences for tag in sentence.tags or ()})
    random.Random(0).shuffle(sentences)
    tokenizer = AutoTokenizer.from_pretrained(pretrained())
    rows = make_rows(sentences, tokenizer, labels, max_seq_length=256, doc_stride=0)
    collate = Collator.of(tokenizer, pad_to)
    model = AutoModelForTokenClassification.from_pretrained(pretrained(), num_labels=len(labels), **config)

    def loss_of(model: Any, number: int) -> Any:
        first = number * SENTENCES
        return model(**collate([rows[index % len(rows)] for index in range(first, first + SENTENCES)])).loss

    return model, loss_of


def case(
    title: str, build: Callable[..., tuple[Any, LossOf]], bar: float, repeat: int = 1, **options: Any
) -> Callable[[Path], Case]:
    def of(data: Path) -> Case:
        stock, stoker = (functools.partial(side, build, optimized, data, **options) for optimized in (False, True))
        return Case(title, stock, stoker, (Bar(bar),), repeat=repeat)

    return of


def masked_lm(data: Path) -> Case:
    part, name = functools.partial, "bert-mlm"
    return Case(
        train_step.CASES[name].title,
        part(train_step.stock, name),
        part(train_step.stoker, name),
        (Bar(2.5), Bar(0.85, "products alone")),
        part(train_step.products_alone, name),
    )


CASES = {
    "embeddings": case("Embeddings, MiniLM, 64 pairs of question and context from SQuAD", embeddings, 3.0),
    "cross-encoder": case("Cross-encoder, MiniLM, the same 64 pairs", cross_encoder, 2.2),
    "ner": case("Named entities, MiniLM, WNUT17, batch 16, padded to the longest", entities, 2.0, 5),
    "ner-256": case("Named entities, MiniLM, WNUT17, batch 16, padded to 256", entities, 3.0, 2, pad_to=256),
    "mlm": masked_lm,
}

if __name__ == "__main__":
    main(CASES, __doc__)
