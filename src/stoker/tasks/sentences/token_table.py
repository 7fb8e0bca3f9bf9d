"""The tokens of all texts of a data set, made once by the model's own preprocessing and stored in the cache.

sentence-transformers tokenizes each batch when it is needed, every epoch again. Here the collator of its trainers looks the
tokens up; it gives the same features. The lengths of rows come from the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.tasks.cache import Arrays, cached, fingerprint
from stoker.tasks.collate import Collator
from stoker.tasks.tokens import Ragged

__all__ = ["TokenTable"]

_KNOWN = {"input_ids", "attention_mask", "token_type_ids", "modality"}
"""Features that the table can reproduce. A model with others, such as images, preprocesses each batch itself."""
_BATCH = 1024


@dataclass(frozen=True)
class TokenTable:
    """Looks up what `preprocess(texts, prompt=prompt)` would compute."""

    preprocess: Callable[..., dict[str, Any]]
    rows: dict[tuple[str, Any], int]
    """The row of each text, by prompt and text. A text of a cross-encoder is a pair."""
    ids: Ragged
    types: Ragged | None
    """Token types; None if the model takes none."""
    collator: Collator | None
    """None if the model has features that the table does not know."""
    modality: Any
    prompt_lengths: dict[str, int]

    @classmethod
    def build(cls, model: Any, texts: Iterable[tuple[str | None, Any]], *, fresh: bool = False) -> TokenTable:
        """The table of `texts`, each with the prompt that is put before it."""
        rows: dict[tuple[str, Any], int] = {}
        for prompt, text in texts:
            rows.setdefault((prompt or "", text), len(rows))
        one_each = dict(rows.keys())  # of each prompt one text
        samples = {prompt: model.preprocess([text], prompt=prompt or None) for prompt, text in one_each.items()}
        found, _ = cached("sentences", _key(model, rows), lambda: _tokenize(model, rows), fresh=fresh)
        sample: dict[str, Any] = next(iter(samples.values()), {})
        tokenizer = model.tokenizer
        known = _KNOWN | {"prompt_length"}
        return cls(
            preprocess=model.preprocess,
            rows=rows,
            ids=Ragged(found["ids"], found["ends"]),  # type: ignore[arg-type]
            types=Ragged(found["types"], found["ends"]) if "types" in found else None,  # type: ignore[arg-type]
            collator=Collator.of(tokenizer) if all(one.keys() <= known for one in samples.values()) else None,
            modality=sample.get("modality"),
            prompt_lengths={prompt: one["prompt_length"] for prompt, one in samples.items() if "prompt_length" in one},
        )

    def __call__(self, inputs: Sequence[Any], prompt: str | None = None, **more: Any) -> dict[str, Any]:
        """The features of a batch of texts; those that the table does not have are tokenized."""
        numbers = [self.rows.get((prompt or "", _hashable(text))) for text in inputs]
        others = any(value is not None for value in more.values())
        if self.collator is None or others or None in numbers or not numbers:
            return self.preprocess(inputs, prompt=prompt, **more)
        items: list[dict[str, Any]] = [{"input_ids": self.ids[number]} for number in numbers if number is not None]
        if self.types is not None:
            for item, number in zip(items, numbers, strict=True):
                item["token_type_ids"] = self.types[number]  # type: ignore[index]
        features: dict[str, Any] = dict(self.collator(items))
        if self.modality is not None:
            features["modality"] = self.modality
        if (prompt or "") in self.prompt_lengths:
            features["prompt_length"] = self.prompt_lengths[prompt or ""]
        return features

    def lengths(self, texts: Iterable[tuple[str | None, Any]]) -> NDArray[np.int64]:
        """The number of tokens of each text."""
        numbers = np.fromiter((self.rows[prompt or "", text] for prompt, text in texts), np.int64)
        return self.ids.lengths[numbers]


def _hashable(text: Any) -> Any:
    return tuple(text) if isinstance(text, list) else text


def _key(model: Any, rows: dict[tuple[str, Any], int]) -> str:
    """Everything that the tokens depend on."""
    tokenizer = model.tokenizer
    settings = [str(model.max_seq_length), tokenizer.backend_tokenizer.to_str(), *map(repr, model)]
    texts = (part for prompt, text in rows for part in (prompt, *(text if isinstance(text, tuple) else (text,))))
    return fingerprint(settings, texts)


def _tokenize(model: Any, rows: dict[tuple[str, Any], int]) -> Arrays:
    """Texts of similar length together, so that little is padded on the way."""
    order = sorted(rows, key=lambda one: (one[0], len(str(one[1]))))
    ids: list[Any] = [None] * len(rows)
    types: list[Any] = [None] * len(rows)
    for begin in range(0, len(order), _BATCH):
        part = order[begin : begin + _BATCH]
        for prompt in dict.fromkeys(prompt for prompt, _ in part):
            texts = [text for own, text in part if own == prompt]
            features = model.preprocess(texts, prompt=prompt or None)
            real = features["attention_mask"].bool().numpy()
            for number, text in enumerate(texts):
                row = rows[prompt, text]
                ids[row] = features["input_ids"][number].numpy()[real[number]].astype(np.int32)
                if "token_type_ids" in features:
                    types[row] = features["token_type_ids"][number].numpy()[real[number]].astype(np.int32)
    ends = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
    arrays: Arrays = {"ids": np.concatenate(ids) if ids else np.empty(0, np.int32), "ends": ends}
    if types and types[0] is not None:
        arrays["types"] = np.concatenate(types)
    return arrays
