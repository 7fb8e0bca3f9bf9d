"""Overrides of heads: question answering, sequence classification and masked LM. Others work on the output with padding.

Question answering: logits at padding are set so low that the softmax ignores them, as if there were no padding. Sequence
classification: the last layer computes what follows attention for the first token alone, which is all the head reads. Masked LM:
the loss is computed from the labelled rows only, without the (tokens, vocabulary) matrix; logits are computed on demand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stoker.kernels.activation import bias_activation
from stoker.kernels.frozen_parameter import stored_values, stored_weight
from stoker.kernels.linear import linear
from stoker.kernels.loss import linear_cross_entropy
from stoker.kernels.tracing import stock_wanted
from stoker.model.class_swap import Optimized, child, named, ordinary, plain, stock_class, unhooked
from stoker.model.families import Family, MaskedLM
from stoker.model.label_smoothing import DeferredLoss, labels_are_expected
from stoker.model.lazy_output import lazy_output
from stoker.model.leaf_modules import activation_kind
from stoker.model.sequences import HeadCall, running, seen_by_head

__all__ = ["IGNORED", "FirstTokenModel", "MaskedLMModel", "QuestionAnsweringModel", "SpanLogits"]

NEVER = -1.0e4
"""A logit whose exponential is zero beside any other; a label that points to it still gives a finite loss."""

IGNORED = -100
"""The label of positions that have none."""


class QuestionAnsweringModel(Optimized):
    """Override of a question-answering model: gives its span logits access to the sequences of the base model's call."""

    stoker_part = "question-answering head"
    stoker_model = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with running(HeadCall(masks_padding=True)):
            return super().forward(*args, **kwargs)


class SpanLogits(Optimized):
    """Override of the module that computes start and end logits (batch, length, 2)."""

    stoker_part = "span logits"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits = super().forward(*args, **kwargs)
        sequences = seen_by_head()
        if sequences is None or sequences.mask is None:
            return logits
        return logits.masked_fill(~sequences.mask.unsqueeze(-1), NEVER)


class FirstTokenModel(Optimized):
    """Override of a sequence-classification model: asks the base model for the first token of each row only."""

    stoker_part = "first token only"
    stoker_model = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with running(HeadCall(first_token=self.stoker_first_token())):
            return super().forward(*args, **kwargs)

    def stoker_first_token(self) -> bool:
        """Whether the head is stock's: no module of it has a hook or was replaced by one that may read other tokens."""
        if getattr(self.config, "classifier_pooling", "cls") != "cls":
            return False
        base = child(self, str(self.base_model_prefix))
        outside = [module for module in self.children() if module is not base]
        pooler = getattr(base, "pooler", None)
        parts = [part for module in (*outside, pooler) if module is not None for part in module.modules()]
        source = stock_class(type(self)).__module__
        return unhooked(base) and all(unhooked(part) and _by_token(part, source) for part in parts)


_BY_TOKEN = (
    nn.Linear,
    nn.Dropout,
    nn.Identity,
    nn.LayerNorm,
    nn.Tanh,
    nn.ReLU,
    nn.GELU,
    nn.ModuleDict,
    nn.ParameterDict,
)


def _by_token(module: nn.Module, source: str) -> bool:
    """Whether the module is defined by the model's file, or is one that computes each token by itself."""
    kind = stock_class(type(module))
    return kind in _BY_TOKEN or kind.__module__ == source or kind.__module__.startswith(("transformers.activ", "peft."))


class MaskedLMModel(Optimized):
    """Override of a masked-LM model: in training with labels, computes the loss from the labelled rows only."""

    stoker_part = "masked-LM loss"
    stoker_model = True

    def stoker_read(self) -> list[nn.Module]:
        """The modules whose weights a training step reads instead of calling them; none if the head cannot be read."""
        head = _head(self)
        if head is None or not _stock_loss(self, head) or not _is_plain(self, head):
            return []
        # a table is called by the embeddings
        paths = (head.dense, head.activation, None if head.table_bias else head.decoder)
        return [child(self, path) for path in paths if path is not None]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = named(self, args, kwargs)
        head = _head(self)
        if head is None or not self._fusable(call, head):
            return super().forward(*args, **kwargs)
        given = call.pop("labels", None)
        items = call.get("num_items_in_batch") if head.counts_items else None
        outputs = child(self, str(self.base_model_prefix))(**{**call, "return_dict": True})
        hidden = outputs[0]

        def loss(labels: Tensor, ignored: int, items: Tensor | int | None, smoothing: float = 0.0) -> Tensor:
            labels = labels.reshape(-1)
            labelled = (labels != ignored).nonzero().squeeze(1)
            weight, bias = _decoder(self, head)
            return linear_cross_entropy(
                _features(self, head, hidden.flatten(0, 1).index_select(0, labelled)),
                stored_values(weight),
                bias,
                labels.index_select(0, labelled),
                ignored,
                "mean" if items is None else "sum",
                label_smoothing=smoothing,
                divisor=items,
            )

        return lazy_output(
            "MaskedLMOutput",
            DeferredLoss(False, loss) if given is None else loss(given, IGNORED, items),
            lambda: nn.functional.linear(_features(self, head, hidden), *_decoder(self, head)),
            hidden_states=outputs.get("hidden_states"),
            attentions=outputs.get("attentions"),
        )

    def _fusable(self, call: dict[str, Any], head: MaskedLM) -> bool:
        if not (self.training and torch.is_grad_enabled() and ("labels" in call or labels_are_expected())):
            return False
        if "ignore_index" in call or not _stock_loss(self, head):
            return False
        if not call.get("return_dict", getattr(self.config, "return_dict", True)):
            return False
        if stock_wanted() or not _is_plain(self, head):
            return False
        return "labels" not in call or bool((call["labels"] != IGNORED).any())


def _head(model: Any) -> MaskedLM | None:
    """Where this model keeps the parts of its head; None if the table does not say."""
    row: Family = model.stoker_row
    heads = (head for head in (row.masked_lm, row.other_masked_lm) if head is not None)
    return next((head for head in heads if hasattr(model, (head.dense or head.decoder).partition(".")[0])), None)


def _decoder(model: nn.Module, head: MaskedLM) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the last product."""
    module = child(model, head.decoder)
    return module.weight, child(model, head.table_bias) if head.table_bias else module.bias


def _stock_loss(model: Any, head: MaskedLM) -> bool:
    """Whether the loss is transformers' own: the mean cross entropy of the labelled tokens."""
    if getattr(model.config, "sparse_prediction", False) or hasattr(model, "_loss_function"):
        return False
    if head.counts_items and getattr(model, "loss_type", "ForMaskedLM") != "ForMaskedLM":
        return False
    own = getattr(model, "mlm_loss_fct", None)
    return own is None or (
        plain(own, nn.CrossEntropyLoss)
        and own.weight is None
        and (own.ignore_index, own.reduction, own.label_smoothing) == (IGNORED, "mean", 0.0)
    )


def _is_plain(model: nn.Module, head: MaskedLM) -> bool:
    """Whether reading the head's weights is equivalent to calling it."""
    decoder = child(model, head.decoder)
    return (
        all(unhooked(child(model, path)) for path in head.containers())
        and (head.dense is None or plain(child(model, head.dense), nn.Linear))
        and (head.norm is None or plain(child(model, head.norm), nn.LayerNorm))
        and (ordinary(decoder) if head.table_bias else plain(decoder, nn.Linear))
        and (head.activation is None or activation_kind(child(model, head.activation)) is not None)
        and decoder.weight.device.type == "cpu"
        and decoder.weight.dtype in (torch.float32, torch.bfloat16)
    )


def _features(model: nn.Module, head: MaskedLM, hidden: Tensor) -> Tensor:
    """norm(activation(dense(hidden))), as far as the head has these parts"""
    if head.dense is not None:
        dense = child(model, head.dense)
        kind = "gelu" if head.activation is None else activation_kind(child(model, head.activation))
        hidden = bias_activation(linear(hidden, stored_weight(dense.weight)), dense.bias, kind or "gelu")
    return hidden if head.norm is None else child(model, head.norm)(hidden)
