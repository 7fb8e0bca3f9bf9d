"""The override of a causal language model: in training, its loss is computed from the labelled tokens only.

The hidden states stay packed between the base model and the head, only rows with a label are multiplied with the head's
weight, a block at a time, and the (tokens, vocabulary) matrix never exists. Logits are computed if somebody reads them.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from stoker.kernels.embedding import shares_gradient
from stoker.kernels.frozen_parameter import stored_values
from stoker.kernels.loss import linear_cross_entropy
from stoker.kernels.tracing import stock_wanted
from stoker.model import precision
from stoker.model.class_swap import Optimized, cached, child, named, plain, stock_class
from stoker.model.heads import IGNORED
from stoker.model.label_smoothing import DeferredLoss, labels_are_expected
from stoker.model.lazy_output import lazy_output
from stoker.model.sequences import HeadCall, Sequences, running

__all__ = ["CausalLMModel", "has_common_head"]

log = logging.getLogger("stoker")

_HEAD = "lm_head"
_warned: WeakSet[nn.Module] = WeakSet()


class CausalLMModel(Optimized):
    """Override of a causal language model. In evaluation, with a loss of its own, and without labels unless they are to
    follow, it runs as stock does."""

    stoker_part = "language-model loss"
    stoker_model = True

    def stoker_read(self) -> list[nn.Module]:
        """The modules whose weights a training step reads instead of calling them; none if the head cannot be read."""
        return [child(self, _HEAD)] if _is_plain(self) else []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = named(self, args, kwargs)
        if not self._fusable(call):
            return super().forward(*args, **kwargs)
        items, ignored = call.get("num_items_in_batch"), call.pop("ignore_index", IGNORED)
        given, shifted = call.pop("labels", None), call.pop("shift_labels", None)
        head_call = HeadCall(packed=True)
        with running(head_call):
            outputs = child(self, str(self.base_model_prefix))(**{**call, "return_dict": True})
        hidden, sequences = outputs[0], head_call.sequences
        head, cap = child(self, _HEAD), _softcap(self)

        def loss(labels: Tensor, ignored: int, items: Tensor | int | None, smoothing: float = 0.0) -> Tensor:
            labels = _shifted(labels, ignored, call.get("attention_mask"), shifted, self)
            result = linear_cross_entropy(
                hidden.to(precision.activations(self.stoker_settings.dtype, hidden.dtype)),
                stored_values(head.weight),
                head.bias,
                labels if sequences is None else sequences.pack(labels),
                ignored,
                "mean" if items is None else "sum",
                softcap=cap,
                label_smoothing=smoothing,
                divisor=items,
            )
            shares_gradient(result, head.weight)  # with the input embeddings, if they are tied
            return result

        return lazy_output(
            _output_class(type(self)),
            DeferredLoss(True, loss) if given is None else loss(given, ignored, items),
            lambda: _logits(head, hidden, sequences, cap),
            hidden_states=outputs.get("hidden_states"),
            attentions=outputs.get("attentions"),
        )

    def _fusable(self, call: dict[str, Any]) -> bool:
        if not (self.training and torch.is_grad_enabled()):
            return False
        if not (isinstance(call.get("labels"), Tensor) or ("labels" not in call and labels_are_expected())):
            return False
        keep = call.pop("logits_to_keep", 0)
        if isinstance(keep, Tensor) or keep != 0 or call.get("use_cache") or "past_key_values" in call:
            return False
        if not call.get("return_dict", getattr(self.config, "return_dict", True)):
            return False
        return not stock_wanted() and _is_plain(self)


def has_common_head(module: nn.Module) -> bool:
    """Whether a model outside of the table computes logits and loss as Llama does.

    The code of many classes of transformers is generated from Llama's. A scale or soft cap of the logits, or an auxiliary
    loss, would be a difference.
    """
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    forward = stock_class(type(module)).forward
    return hasattr(module, _HEAD) and _instructions(forward) == _instructions(LlamaForCausalLM.forward)


def _instructions(function: Any) -> tuple[Any, ...]:
    """What a function does, without its annotations and docstring."""
    code = inspect.unwrap(function).__code__
    values = tuple(value for value in code.co_consts if not (isinstance(value, str) and "\n" in value))
    return code.co_code, code.co_names, code.co_varnames, values


def _shifted(labels: Tensor, ignored: int, mask: Any, shifted: Tensor | None, model: nn.Module) -> Tensor:
    """The label of each position: the next token's. Labels at padding do not count, as if there were no padding."""
    given = labels if shifted is None else shifted
    if isinstance(mask, Tensor) and mask.shape == given.shape:
        padding = mask == 0
        if bool((padding & (given != ignored)).any()):
            _warn_once(model)
            given = given.masked_fill(padding, ignored)
    return given if shifted is not None else nn.functional.pad(given, (0, 1), value=ignored)[..., 1:].contiguous()


def _warn_once(model: nn.Module) -> None:
    if model not in _warned:
        _warned.add(model)
        log.warning(
            "%s: labels at padding are ignored, as if there were no padding; set them to -100 (logged once)",
            stock_class(type(model)).__name__,
        )


def _is_plain(model: Any) -> bool:
    """Whether the loss is transformers' own and reading the head's weights is equivalent to calling it."""
    head = child(model, _HEAD)
    loss = model.loss_function
    return (
        getattr(loss, "__name__", "") == "ForCausalLMLoss"
        and getattr(loss, "__module__", "") == "transformers.loss.loss_utils"
        and plain(head, nn.Linear)
        and head.weight.device.type == "cpu"
        and head.weight.dtype in (torch.float32, torch.bfloat16)
    )


def _softcap(model: Any) -> float | None:
    cap = getattr(model.config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def _logits(head: Any, hidden: Tensor, sequences: Sequences | None, cap: float | None) -> Tensor:
    logits: Tensor = head(hidden if sequences is None else sequences.unpack(hidden))
    return logits if cap is None else cap * torch.tanh(logits / cap)


@cached
def _output_class(cls: type[nn.Module]) -> str:
    """The name of the output class that the stock forward declares."""
    declared = inspect.signature(stock_class(cls).forward).return_annotation
    name = getattr(declared, "__name__", str(declared)).rpartition(".")[2]
    return name if name.startswith("CausalLMOutput") else "CausalLMOutputWithPast"
