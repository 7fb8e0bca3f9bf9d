"""stoker.optimize, stoker.restore: which override goes where.

Everything happens by `swap_class`, module by module; `restore` gives every module its class back.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar, overload

import torch
from torch import nn

from stoker.english import with_article
from stoker.kernels import native
from stoker.model import memory as allocator
from stoker.model import optimizers, precision
from stoker.model.class_swap import Optimized, Settings, child, restore_class, swap_class
from stoker.model.families import Family, Role, find
from stoker.model.fused_layer import FusedEmbeddings, FusedLayer, RelativeBias
from stoker.model.heads import MaskedLMModel, QuestionAnsweringModel, SpanLogits
from stoker.model.leaf_modules import swap_leaf
from stoker.model.optimization_report import Notes, forget, note, report
from stoker.model.padding_free import PaddingFreeModel
from stoker.requires import supported

__all__ = ["optimize", "restore"]

log = logging.getLogger("stoker")

Model = TypeVar("Model", bound=nn.Module)

_IPEX_KEYWORDS = {
    "inplace": "the model is always optimised in place, so that the optimizer keeps its parameters; copy.deepcopy it before",
    "conv_bn_folding": "folding is for inference; nothing is folded",
    "linear_bn_folding": "folding is for inference; nothing is folded",
    "weights_prepack": "weights keep their storage, so that checkpoints stay stock; the kernels pack on the fly",
    "replace_dropout_with_identity": "dropout costs nothing in eval mode; it is left in place",
    "optimize_lstm": "LSTMs run as stock does",
    "split_master_weight_for_bf16": "parameters stay fp32 and are the master weights",
    "auto_kernel_selection": "the fastest engine is always chosen by measurement",
    "sample_input": "no sample is needed",
    "graph_mode": "nothing is traced; torch.compile may be called afterwards",
    "concat_linear": "q, k and v are always computed together",
}


@overload
def optimize(model: Model, optimizer: None = None, dtype: precision.Asked = None, **switches: Any) -> Model: ...
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
    level: str = "O1",
    fuse_update_step: bool = True,
    **ipex: Any,
) -> Any:
    """Makes `model` train faster on this CPU, in place; returns it, or (model, optimizer) if an optimizer is given.

    Parameters keep their names, identity and storage. `dtype`: None keeps the model's own precision, or autocast's inside
    torch.autocast; torch.bfloat16 gives bf16 activations with fp32 master weights; torch.float32 is fp32 inside autocast
    too; "auto" takes whichever of the two measures faster on this machine. Switches: `unpad` (padding stays outside the
    model), `fuse` (native kernels), `fuse_loss` (masked-LM loss without logits), `memory` (allocator settings,
    process-wide), `fuse_update_step` (the optimizer's fused form). The other keywords of ipex.optimize are accepted and
    explained in the log. `stoker.report(model)` tells what was done, `stoker.restore(model)` undoes it.
    """
    if isinstance(optimizer, (torch.dtype, str)) or isinstance(dtype, torch.optim.Optimizer):
        optimizer, dtype = dtype, optimizer  # ipex.optimize(model, dtype, optimizer)
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize: model is {with_article(type(model).__name__)}; it must be a torch.nn.Module")
    _explain(ipex)
    if level not in ("O0", "O1"):
        raise ValueError(f"optimize: level is {level!r}; it must be 'O0' (everything off) or 'O1'")
    if level == "O0":
        log.info("optimize: level='O0': every part is switched off")
        unpad = fuse = fuse_loss = memory = fuse_update_step = False
    if not supported("optimize"):
        unpad = fuse = False
    chosen, why = precision.choose(dtype)
    if unpad or fuse:
        native.library()  # if it is missing, here is where to say so
    settings = Settings(unpad=unpad, fuse=fuse, fuse_loss=fuse_loss, dtype=chosen)
    restore(model)  # a second call starts from stock, so that its switches count
    encoder = _apply(model, settings) if unpad or fuse else False
    stored = _stored_types(model)
    if stored - {torch.float32} and (chosen is None or _follows_parameters(model)):
        names = sorted(str(dtype).removeprefix("torch.") for dtype in stored)
        why = f"{' and '.join(names)}, as the parameters are stored"
    elif not (unpad or fuse):
        why = "left alone: unpad and fuse are switched off"
    elif chosen is not None and not encoder:
        why = "fp32: not a family of the table; bf16 applies inside torch.autocast('cpu', torch.bfloat16)"
    notes = Notes(
        precision=why,
        memory=allocator.keep_mapped() if memory else "switched off",
        optimizer=""
        if optimizer is None
        else optimizers.fuse(optimizer, _sparse_tables(model))
        if fuse_update_step
        else "left alone, as asked",
        switches=settings,
    )
    note(model, notes)
    log.info("%s", report(model))
    return model if optimizer is None else (model, optimizer)


def restore(model: Model, optimizer: Any = None) -> Model:
    """Undoes `optimize`: every module gets its class back, `optimizer` (if given) its own flags; returns the model.

    The allocator's settings belong to the process and stay.
    """
    for module in model.modules():
        restore_class(module)
    if optimizer is not None:
        optimizers.unfuse(optimizer)
    forget(model, optimizer=optimizer is not None)
    return model


def _explain(ipex: dict[str, Any]) -> None:
    for name, value in ipex.items():
        if name not in _IPEX_KEYWORDS:
            raise TypeError(f"optimize: unknown keyword {name!r} (value {value!r}); see help(stoker.optimize)")
        log.info("optimize: %s=%r: %s", name, value, _IPEX_KEYWORDS[name])


def _stored_types(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}


def _follows_parameters(model: nn.Module) -> bool:
    """Whether activations have the type of parameters that are not fp32, whatever was asked for (see `PaddingFreeModel`)."""
    doors = [module for module in model.modules() if isinstance(module, PaddingFreeModel)]
    first = [next(door.parameters(), None) for door in doors]
    return not doors or any(parameter is not None and parameter.dtype != torch.float32 for parameter in first)


def _sparse_tables(model: nn.Module) -> set[torch.Tensor]:
    """Weights whose gradients will be sparse."""
    return {
        module.weight
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }


def _apply(model: nn.Module, settings: Settings) -> bool:
    """Swaps what there is an override for; True if a base model of the table was among it."""
    modules = list(model.modules())
    found: list[tuple[nn.Module, Family, Role]] = [
        (module, *match) for module in modules if (match := find(type(module))) is not None
    ]
    if found and not supported("padding-free models"):
        found = []
    if settings.fuse:
        for module in modules:
            swap_leaf(module, settings)
    overrides: dict[Role, type[Optimized]] = {
        "base": PaddingFreeModel,
        "layer": FusedLayer,
        "relative_bias": RelativeBias,
    }
    if settings.fuse:
        overrides["embeddings"] = FusedEmbeddings
    if settings.fuse and settings.fuse_loss and found and supported("masked-LM loss"):
        overrides["masked_lm"] = MaskedLMModel
    overrides["question_answering"] = QuestionAnsweringModel
    for module, row, role in found:
        if role in overrides:
            swap_class(module, overrides[role], settings, row)
        if role == "question_answering":
            swap_class(child(module, row.span_logits), SpanLogits, settings, row)
    return any(role == "base" for _, _, role in found)
