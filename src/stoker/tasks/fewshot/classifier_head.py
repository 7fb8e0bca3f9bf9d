"""The classifier of a few-shot model: a linear layer over embeddings, stored as safetensors, with its labels in JSON.

SetFit itself stores it as a pickle (model_head.pkl), which can run any code when it is loaded. Stoker neither writes nor reads
that file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UserError, one_line
from stoker.tasks.model_folder import HEAD_FILE, broken_file

__all__ = ["Head", "has_head", "has_pickled_head"]

_HEAD, _LABELS = HEAD_FILE, "config_setfit.json"
_PICKLE = "model_head.pkl"


@dataclass(frozen=True)
class Head:
    weight: NDArray[Any]
    """(classes, size of an embedding)"""
    bias: NDArray[Any]
    labels: tuple[str, ...]

    @classmethod
    def of_regression(cls, regression: Any, labels: Sequence[str]) -> Head:
        """That of a fitted LogisticRegression of scikit-learn. Of two classes it has one row, whose score is the second's."""
        weight, bias = regression.coef_, regression.intercept_
        if len(weight) == 1:
            weight, bias = np.concatenate([0 * weight, weight]), np.concatenate([0 * bias, bias])
        return cls(weight, bias, tuple(labels))

    def probabilities(self, embeddings: NDArray[Any]) -> NDArray[Any]:
        """(texts, classes)"""
        scores = embeddings @ self.weight.T + self.bias
        scores = np.exp(scores - scores.max(1, keepdims=True))
        found: NDArray[Any] = scores / scores.sum(1, keepdims=True)
        return found

    def save(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        save_file({"weight": np.ascontiguousarray(self.weight), "bias": self.bias}, folder / _HEAD)
        settings = {"labels": list(self.labels), "normalize_embeddings": False}
        (folder / _LABELS).write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, size: int) -> Head:
        """The head in a model folder whose embeddings have this `size`; raises UserError if it cannot be used."""
        if not has_head(folder):
            reason = (
                f"its classifier is in {_PICKLE}; a pickle can run any code when it is loaded, so it is not opened"
                if has_pickled_head(folder)
                else f"it has no {_HEAD}"
            )
            raise UserError(f"{folder} cannot classify: {reason}; train it with `stoker train fewshot`")
        if (broken := broken_file(folder, [_HEAD, _LABELS])) is not None:
            raise UserError(f"the classifier of {folder} cannot be loaded: {broken}")
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            tensors = load_file(folder / _HEAD)
            labels = json.loads((folder / _LABELS).read_text(encoding="utf-8"))["labels"]
        except (SafetensorError, KeyError, OSError, ValueError) as error:
            raise UserError(f"the classifier of {folder} cannot be loaded: {one_line(error)}") from None
        weight, bias = tensors.get("weight"), tensors.get("bias")
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise UserError(f"the classifier of {folder} cannot be loaded: {_LABELS} does not list its labels")
        if weight is None or bias is None or weight.shape != (len(labels), size) or bias.shape != (len(labels),):
            raise UserError(
                f"the classifier of {folder} does not fit: {len(labels)} labels and embeddings of {size} numbers need a weight "
                f"of {len(labels)} x {size} and a bias of {len(labels)} in {_HEAD}"
            )
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise UserError(f"the classifier of {folder} cannot be used: {_HEAD} contains NaN or infinite values")
        return cls(weight, bias, tuple(labels))


def has_head(folder: Path) -> bool:
    return (folder / _HEAD).is_file()


def has_pickled_head(folder: Path) -> bool:
    """Whether SetFit itself has saved the model."""
    return (folder / _PICKLE).exists()
