"""Fits the classifier to the embeddings of the training examples as SetFit does, and measures it on other texts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers.base.evaluation import BaseEvaluator

from stoker.tasks.classify.metrics import measure
from stoker.tasks.fewshot.classifier_head import Head

__all__ = ["METRICS", "HeadEvaluator", "HeadFit", "predict", "predicted_classes"]

METRICS = ("f1", "accuracy")
"""The last one is the main one."""
_ITERATIONS = 1000
"""scikit-learn's default, 100, is sometimes too few to converge; the optimum is the same."""


@dataclass(frozen=True)
class HeadFit:
    """The training examples. Called with an embedding model, it fits the classifier to its embeddings."""

    texts: Sequence[str]
    classes: Sequence[int]
    labels: Sequence[str]

    def __call__(self, model: Any) -> Head:
        from setfit import SetFitModel
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression

        whole = SetFitModel(model, LogisticRegression(max_iter=_ITERATIONS))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            whole.fit(list(self.texts), list(self.classes), num_epochs=1)
        return Head.of_regression(whole.model_head, self.labels)


HeadOf = Callable[[Any], Head]
"""The classifier for an embedding model: fitted to it, or one that was loaded with it."""


def predict(model: Any, head: Head, texts: Sequence[str], batch_size: int = 32) -> NDArray[Any]:
    """The probabilities of the classes, (texts, classes)."""
    return head.probabilities(
        model.encode(list(texts), batch_size=batch_size, show_progress_bar=False, convert_to_numpy=True)
    )


def predicted_classes(model: Any, head: Head, texts: Sequence[str]) -> list[tuple[str, float]]:
    """The most likely class of each text, with its probability."""
    return [(head.labels[int(row.argmax())], float(row.max())) for row in predict(model, head, texts)]


class HeadEvaluator(BaseEvaluator):  # type: ignore[misc]
    """Accuracy and F1 on labelled texts, for sentence-transformers' trainer."""

    def __init__(self, head_of: HeadOf, texts: Sequence[str], classes: Sequence[int], batch_size: int) -> None:
        super().__init__()
        self.primary_metric = METRICS[-1]
        self.head_of, self.texts, self.classes, self.batch_size = head_of, texts, np.array(classes), batch_size

    def __call__(self, model: Any, *args: Any, **named: Any) -> dict[str, float]:
        found = predict(model, self.head_of(model), self.texts, self.batch_size)
        scores = measure(METRICS, found, self.classes, regression=False)
        return {name: scores[name] for name in METRICS}
