"""stoker.optimize and stoker.restore: which module gets which override.

`optimize` gives modules a subclass of their own class (`swap_class`); `restore` gives the original class back.
"""

from __future__ import annotations

import logging
import sys
from itertools import islice
from typing import Any, TypeVar, overload

import torch
from torch import nn

from stoker.english import with_article
from stoker.kernels import native
from stoker.kernels.frozen_parameter import Form
from stoker.model import attention_interface, optimizers, precision
from stoker.model import memory as allocator
from stoker.model.any_model import ANY, base_models, restore_attention, use_attention, why_no_base_model
from stoker.model.causal_lm import CausalLMModel, has_common_head
from stoker.model.class_swap import Optimized, Settings, child, restore_class, stock_class, swap_class
from stoker.model.families import Family, Role, find, unresolved
from stoker.model.frozen_weights import check_form, store_frozen, widen_frozen
from stoker.model.fused_layer import FusedEmbeddings, FusedLayer, RelativeBias, RelativeDistances
from stoker.model.heads import FirstTokenModel, MaskedLMModel, QuestionAnsweringModel, SpanLogits
from stoker.model.known_parts import known_part
from stoker.model.leaf_modules import kernel_for
from stoker.model.optimization_report import Notes, forget, note, report
from stoker.model.padding_free import PaddingFreeModel
from stoker.requires import supported

__all__ = ["optimize", "restore", "restore_classes"]

log = logging.getLogger("stoker")

Model = TypeVar("Model", bound=nn.Module)

_IPEX_KEYWORDS = {
    "inplace": "the model is always optimized in place, so that the optimizer keeps its parameters; use copy.deepcopy first",
    "conv_bn_folding": "ignored, because folding is for inference",
    "linear_bn_folding": "ignored, because folding is for inference",
    "weights_prepack": "ignored: the kernels pack weights on the fly, so that checkpoints stay stock",
    "replace_dropout_with_identity": "ignored, because dropout costs nothing in eval mode",
    "optimize_lstm": "ignored: LSTMs run as in stock PyTorch",
    "split_master_weight_for_bf16": "ignored: parameters stay fp32 and are the master weights",
    "auto_kernel_selection": "ignored: the fastest engine is always chosen by measurement",
    "sample_input": "ignored: no sample is needed",
    "graph_mode": "ignored: nothing is traced; call torch.compile afterwards if you want it",
    "concat_linear": "ignored: q, k and v are always computed together",
}
"""Keywords of ipex.optimize that are accepted, and what the log says about each."""


@overload
def optimize(model: Model, optimizer: None = None, dtype: precision.DtypeOption = None, **switches: Any) -> Model: ...
@overload
def optimize(model: Model, optimizer: Any, dtype: Any = None, **switches: Any) -> Any: ...
def optimize(
    model: Any,
    optimizer: Any = None,
    dtype: Any = None,
    *,
    unpad: bool = True,
    fuse: bool = True,
    fuse_loss: bool = True,
    memory: bool = True,
    keep_activations: bool = False,
    level: str = "O1",
    fuse_update_step: bool = True,
    frozen_weights: Form | None = None,
    **ipex: Any,
) -> Any:
    """Makes `model` train faster on this CPU, in place; returns it, or (model, optimizer) if an optimizer is given.

    Parameters keep their names, identity and storage. `dtype`: None keeps the model's own precision, or follows
    torch.autocast where that is active; torch.bfloat16 uses bf16 activations with fp32 master weights; torch.float32 stays
    fp32 even inside autocast; "auto" uses whichever of the two was measured to be faster on this machine. Switches: `unpad`
    (skip padding), `fuse` (native kernels), `fuse_loss` (language-model losses without logits), `memory` (allocator settings of
    the process), `fuse_update_step` (fused optimizer), `keep_activations` (where the model is checkpointed: keep activations all
    the same if they fit in a quarter of the free memory). `frozen_weights`: "bfloat16", "int8" or "nf4" stores the weights that
    are not trained in that form, embeddings and head in bf16; None leaves them as they are. Other keywords of ipex.optimize
    are accepted, and the log says what becomes of each. `stoker.report(model)` lists what was done, `stoker.restore(model)`
    undoes it.
    """
    if isinstance(optimizer, (torch.dtype, str)) or isinstance(dtype, torch.optim.Optimizer):
        optimizer, dtype = dtype, optimizer  # ipex.optimize(model, dtype, optimizer)
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize: model is {with_article(type(model).__name__)}; it must be a torch.nn.Module")
    _explain(ipex)
    if level not in ("O0", "O1"):
        raise ValueError(f"optimize: level is {level!r}; it must be 'O0' (everything off) or 'O1'")
    check_form(frozen_weights)
    if level == "O0":
        log.info("optimize: level='O0' switches every part off")
        unpad = fuse = fuse_loss = memory = fuse_update_step = False
        frozen_weights = None
    if not supported("optimize"):
        unpad = fuse = False
    activations, why = precision.choose(dtype)
    settings = Settings(
        unpad=unpad, fuse=fuse, fuse_loss=fuse_loss, dtype=activations, keep_activations=keep_activations
    )
    if unpad or fuse or frozen_weights:
        native.library()  # raises if it is missing, before anything is changed
    restore_classes(model)  # a second call starts from the stock model, so that its own switches apply
    # before the allocator is told to keep freed memory
    left_as_they_are = store_frozen(model, frozen_weights)
    if unpad or fuse:
        _swap_classes(model, settings)
    notes = Notes(
        precision=_actual_precision(model, settings) or why,
        memory=allocator.keep_mapped() if memory else "switched off",
        optimizer=_fuse_optimizer(model, optimizer, fuse_update_step),
        left_alone=tuple(left_as_they_are),
        switches=settings,
    )
    note(model, notes)
    log.info("%s", report(model))
    return model if optimizer is None else (model, optimizer)


def restore(model: Model, optimizer: Any = None) -> Model:
    """Undoes `optimize`: gives every module its class back, and `optimizer`, if given, its own flags; returns the model.

    Frozen weights become ordinary parameters, with the values that they were trained with. The allocator settings apply to the
    whole process and stay.
    """
    restore_classes(model)
    widen_frozen(model)
    if optimizer is not None:
        optimizers.unfuse(optimizer)
    forget(model, optimizer=optimizer is not None)
    return model


def restore_classes(model: nn.Module) -> None:
    """Gives every module its class back. Frozen weights stay stored as they are; stock modules compute with them too."""
    restore_attention(model)
    for module in model.modules():
        restore_class(module)


def _explain(ipex: dict[str, Any]) -> None:
    for name, value in ipex.items():
        if name not in _IPEX_KEYWORDS:
            raise TypeError(f"optimize: unknown keyword {name!r} (value {value!r}); see help(stoker.optimize)")
        log.info("optimize: %s=%r: %s", name, value, _IPEX_KEYWORDS[name])


def _swap_classes(model: nn.Module, settings: Settings) -> None:
    """Gives every module that there is an override for its optimized class."""
    found = [(module, *match) for module in model.modules() if (match := find(type(module))) is not None]
    found = [one for one in found if one[1].part is None or supported(one[1].part)]
    if found and not supported("padding-free models"):
        found = []
    known = bool(found)
    found = _resolved(model, found)
    overrides: dict[Role, type[Optimized]] = {
        "base": PaddingFreeModel,
        "layer": FusedLayer,
        "relative_bias_class": RelativeBias,
        "distances_class": RelativeDistances,
        "question_answering": QuestionAnsweringModel,
    }
    if settings.fuse:
        overrides["embeddings"] = FusedEmbeddings
        overrides["first_token_model"] = FirstTokenModel
    if settings.fuse and settings.fuse_loss and found and supported("masked-LM loss"):
        overrides["masked_lm_model"] = MaskedLMModel
    if settings.fuse and settings.fuse_loss and found:
        overrides["causal_lm"] = CausalLMModel
    # Without transformers' own module there is no model of transformers.
    interface = not known and "transformers.modeling_utils" in sys.modules and attention_interface.available()
    others = list(base_models(model)) if interface and settings.unpad else []
    if interface and settings.unpad and not others and (why := why_no_base_model(model)) is not None:
        log.warning("%s keeps its padding, as in stock transformers, because %s", type(model).__name__, why)
    fuse_head = interface and settings.fuse and settings.fuse_loss
    heads = [module for module in model.modules() if has_common_head(module)] if fuse_head else []
    for module in list(model.modules()):
        if settings.fuse and (leaf := kernel_for(module)) is not None:
            swap_class(module, leaf, settings)
    if interface:
        use_attention(model)
        for module in list(model.modules()) if settings.fuse else ():
            if (part := known_part(module)) is not None:
                swap_class(module, part[0], settings, part[1])
    for module in others:
        swap_class(module, PaddingFreeModel, settings, ANY)
    for module in heads:
        swap_class(module, CausalLMModel, settings, ANY)
    for module, row, role in found:
        if role in overrides:
            swap_class(module, overrides[role], settings, row)
        if role == "question_answering":
            swap_class(child(module, row.span_logits), SpanLogits, settings, row)


def _resolved(model: nn.Module, found: list[tuple[nn.Module, Family, Role]]) -> list[tuple[nn.Module, Family, Role]]:
    """The modules whose family is as the table says; all modules of another family stay stock, with a warning."""
    missing = {}
    for module, row, role in found:
        if row.name not in missing and (path := unresolved(module, row, role)) is not None:
            missing[row.name] = path
            log.warning(
                "%s runs as stock transformers does, because %s has no %s, where the table of families expects it; "
                "a part was replaced or renamed",
                stock_class(type(model)).__name__,
                stock_class(type(module)).__name__,
                path,
            )
    return [one for one in found if one[1].name not in missing]


def _actual_precision(model: nn.Module, settings: Settings) -> str | None:
    """What the report says about precision where it is not what was requested."""
    stored = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    bases = [module for module in model.modules() if isinstance(module, PaddingFreeModel)]
    in_bases = {parameter.dtype for base in bases for parameter in islice(base.parameters(), 1)}
    # a base model whose parameters are not fp32 computes in their type, whatever was requested
    follows_parameters = settings.dtype is None or not bases or in_bases != {torch.float32}
    if stored - {torch.float32} and follows_parameters:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in stored)
        return f"{' and '.join(names)}, as the parameters are stored"
    if not (settings.unpad or settings.fuse):
        return "unchanged: unpad and fuse are switched off"
    if settings.dtype is not None and not bases:
        return "fp32: the model is of no family in the table; bf16 applies inside torch.autocast('cpu', torch.bfloat16)"
    return None


def _fuse_optimizer(model: nn.Module, optimizer: Any, requested: bool) -> str:
    if optimizer is None:
        return ""
    if not requested:
        return "left alone: fuse_update_step is switched off"
    tables = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    return optimizers.fuse(optimizer, sparse={table.weight for table in tables if table.sparse})
