"""Outputs of masked and causal language models whose logits are computed only if somebody reads them.

A training step reads the loss, and the logits (tokens, vocabulary) would take more memory than all the rest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from stoker.model.label_smoothing import DeferredLoss

__all__ = ["lazy_output"]


def lazy_output(kind: str, loss: Tensor | DeferredLoss, logits: Callable[[], Tensor], **others: Any) -> Any:
    """An output of this class of transformers.modeling_outputs whose logits are computed when they are first accessed."""
    deferred = isinstance(loss, DeferredLoss)
    output = _lazy_output_class(kind)(loss=None if deferred else loss, **others)
    object.__setattr__(output, "_compute_logits", logits)
    if deferred:
        object.__setattr__(output, "_deferred_loss", loss)
    return output


@functools.cache
def _lazy_output_class(kind: str) -> type[Any]:
    from transformers import modeling_outputs

    stock: Any = getattr(modeling_outputs, kind)

    class LazyOutput(stock):  # type: ignore[misc]
        """Reading the loss computes nothing; anything that would show the logits computes them first."""

        def _complete(self) -> None:
            compute = self.__dict__.pop("_compute_logits", None)
            if compute is not None:
                self["logits"] = compute()
                for field in dataclasses.fields(self)[2:]:  # loss and logits come first
                    if OrderedDict.__contains__(self, field.name):
                        self.move_to_end(field.name)

        @property
        def logits(self) -> Tensor | None:
            self._complete()
            return self.__dict__.get("logits")

        @logits.setter
        def logits(self, value: Tensor | None) -> None:
            self.__dict__["logits"] = value

        def __getitem__(self, key: Any) -> Any:
            if key in ("loss", 0) and OrderedDict.__contains__(self, "loss"):
                return OrderedDict.__getitem__(self, "loss")
            self._complete()
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            return key == "logits" or OrderedDict.__contains__(self, key)

        def __iter__(self) -> Any:
            self._complete()
            return super().__iter__()

        def __len__(self) -> int:
            self._complete()
            return OrderedDict.__len__(self)

        def keys(self) -> Any:
            self._complete()
            return super().keys()

        def values(self) -> Any:
            self._complete()
            return super().values()

        def items(self) -> Any:
            self._complete()
            return super().items()

        def __reduce__(self) -> Any:
            """Copied and pickled as the stock class with its logits, because the function that computes them cannot be."""
            return stock, tuple(dict(self.items()).get(field.name) for field in dataclasses.fields(self))

        def get(self, key: Any, default: Any = None) -> Any:
            return self[key] if key == "logits" or OrderedDict.__contains__(self, key) else default

    LazyOutput.__name__ = LazyOutput.__qualname__ = kind
    return LazyOutput
