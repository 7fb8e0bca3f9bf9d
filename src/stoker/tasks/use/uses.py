"""What each kind of model does with what a person types: a pipeline of transformers, Stoker's tagger, or a model of
sentence-transformers.

A use is called with a text (or a query, where it searches texts) and returns what it found as rows for JSON; `shown` is how a
row is printed for a person.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from stoker.errors import UserError
from stoker.model import optimize
from stoker.tasks.fewshot.classifier_head import Head, has_head
from stoker.tasks.loading import load_pretrained, loaded, most_tokens
from stoker.tasks.ner.tagger import Tagger
from stoker.tasks.sentences.st_models import Loader

__all__ = ["SEARCHES", "Use", "load_use"]

Found = list[dict[str, Any]]

SEARCHES = ("embed", "rerank")
"""Kinds that search texts for a query."""


class Use:
    prompt = "text: "
    searches = False
    """Whether it takes queries instead of texts."""

    def __call__(self, said: str) -> Found:
        raise NotImplementedError

    def shown(self, row: dict[str, Any]) -> str:
        raise NotImplementedError


def load_use(kind: str, name: str, texts: Sequence[str], top: int) -> Use:
    """The use of the model `name`. `texts` are searched by the kinds in SEARCHES; `top` limits what each call returns."""
    if kind == "embed":
        return _Embed(name, texts, top)
    if kind == "rerank":
        return _Rerank(name, texts, top)
    if kind == "classify" and has_head(Path(name)):
        return _FewShot(name, top)
    if kind == "tag":
        return _Tag(name)
    kinds: dict[str, type[_Pipeline]] = {"classify": _Classify, "fill": _Fill}
    return kinds[kind](name, top)


class _Pipeline(Use):
    """A pipeline of transformers on the optimised model."""

    task = ""
    kind = ""
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str, top: int) -> None:
        import transformers

        model, tokenizer = _loaded_model(getattr(transformers, self.kind), name)
        tokenizer.model_max_length = most_tokens(tokenizer.model_max_length, tokenizer, model.config)
        self.top = top
        self.pipeline = transformers.pipeline(self.task, model=model, tokenizer=tokenizer, **self.options)


class _Classify(_Pipeline):
    task = "text-classification"
    kind = "AutoModelForSequenceClassification"
    options: ClassVar[dict[str, Any]] = {"truncation": True}

    def __call__(self, said: str) -> Found:
        # In a shell's double quotes, "\t" remains a backslash and a t.
        first, tab, second = said.partition("\t" if "\t" in said else "\\t")  # a pair of texts
        inputs = {"text": first, "text_pair": second} if tab else said
        return [_rounded(row) for row in self.pipeline(inputs, top_k=self.top)]

    def shown(self, row: dict[str, Any]) -> str:
        return _shown_class(row)


class _FewShot(Use):
    """A classifier over embeddings, of `stoker train fewshot`."""

    def __init__(self, name: str, top: int) -> None:
        from sentence_transformers import SentenceTransformer

        self.model, self.top = _optimized(SentenceTransformer, "embedding model", name), top
        self.head = Head.load(Path(name), int(self.model.get_embedding_dimension()))

    def __call__(self, said: str) -> Found:
        (found,) = self.head.probabilities(self.model.encode([said], show_progress_bar=False, convert_to_numpy=True))
        best = (-found).argsort(kind="stable")[: self.top]
        return [_rounded({"label": self.head.labels[n], "score": found[n]}) for n in best.tolist()]

    def shown(self, row: dict[str, Any]) -> str:
        return _shown_class(row)


def _shown_class(row: dict[str, Any]) -> str:
    return f"{row['score']:.3f}  {row['label']}"


class _Tag(Use):
    def __init__(self, name: str) -> None:
        import transformers

        self.tagger = Tagger(*_loaded_model(transformers.AutoModelForTokenClassification, name))

    def __call__(self, said: str) -> Found:
        return [
            {"label": one.label, "text": said[one.begin : one.end], "begin": one.begin, "end": one.end,
             **_rounded({"score": one.score})}
            for one in self.tagger(said)
        ]  # fmt: skip

    def shown(self, row: dict[str, Any]) -> str:
        return f"{row['score']:.3f}  {row['label']:12} {row['text']}"


class _Fill(_Pipeline):
    task = "fill-mask"
    kind = "AutoModelForMaskedLM"

    def __init__(self, name: str, top: int) -> None:
        super().__init__(name, top)
        self.prompt = f"text with {self.pipeline.tokenizer.mask_token}: "

    def __call__(self, said: str) -> Found:
        mask = self.pipeline.tokenizer.mask_token
        if mask not in said:
            raise UserError(f"the text {_begin(said)!r} has no masked word; write {mask} in its place")
        found = self.pipeline(said, top_k=self.top)
        masks = found if isinstance(found[0], list) else [found]
        return [
            _rounded({"mask": number, "word": one["token_str"].strip(), "score": one["score"]})
            for number, rows in enumerate(masks, 1)
            for one in rows
        ]

    def shown(self, row: dict[str, Any]) -> str:
        return f"{row['score']:.3f}  {row['word']}"


class _Search(Use):
    """Texts that are searched for a query, each result with its number (from 1), text and score."""

    prompt = "query: "
    searches = True

    def __init__(self, name: str, texts: Sequence[str], top: int) -> None:
        self.texts, self.top = texts, top
        self.model = self.load(name)

    def load(self, name: str) -> Any:
        raise NotImplementedError

    def scores(self, query: str) -> Sequence[tuple[int, float]]:
        """Numbers of texts (from 0) with their scores, the best first."""
        raise NotImplementedError

    def __call__(self, said: str) -> Found:
        return [
            _rounded({"score": score, "number": number + 1, "text": self.texts[number]})
            for number, score in self.scores(said)
        ]

    def shown(self, row: dict[str, Any]) -> str:
        return f"{row['score']:.3f}  {row['number']:>5}  {row['text']}"


class _Embed(_Search):
    def load(self, name: str) -> Any:
        from sentence_transformers import SentenceTransformer

        model = _optimized(SentenceTransformer, "embedding model", name)
        self.vectors = model.encode_document(list(self.texts), convert_to_tensor=True, normalize_embeddings=True)
        return model

    def scores(self, query: str) -> Sequence[tuple[int, float]]:
        vector = self.model.encode_query(query, convert_to_tensor=True, normalize_embeddings=True)
        best = (self.vectors @ vector).topk(min(self.top, len(self.texts)))
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


class _Rerank(_Search):
    def load(self, name: str) -> Any:
        from sentence_transformers import CrossEncoder

        return _optimized(CrossEncoder, "reranker", name)

    def scores(self, query: str) -> Sequence[tuple[int, float]]:
        found = self.model.rank(query, list(self.texts), top_k=self.top)
        return [(one["corpus_id"], float(one["score"])) for one in found]


def _begin(text: str, most: int = 40) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _loaded_model(loader: Any, name: str) -> tuple[Any, Any]:
    """The optimised model of transformers and its tokenizer."""
    import torch

    tokenizer, model, untrained = load_pretrained(loader, name)
    if untrained:
        raise UserError(
            f"{name} is not trained for this: it has no {', '.join(untrained[:2])}; train it with `stoker train`"
        )
    return optimize(model.eval(), dtype=torch.float32), tokenizer


def _optimized(kind: Any, what: str, name: str) -> Any:
    model = loaded(Loader(kind, name), what, name, flag="--model", device="cpu", local_files_only=os.path.isdir(name))
    return optimize(model.eval())


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "score": round(float(row["score"]), 4)}
