"""Which frozen weights of a model are stored in bf16 or in few bits, and what that saves.

Linear layers take the form that was asked for. The word embeddings and the head are stored in bf16 at most: they are one table
in many models, and every logit depends on it. Adapters, norms, biases and whatever is trained stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker.kernels.frozen_parameter import FORMS, Form, FrozenWeight, store, stored_bytes, why_not, widen
from stoker.kernels.quantized import read_params4bit
from stoker.model.class_swap import stock_class
from stoker.model.families import find
from stoker.model.leaf_modules import is_conv1d
from stoker.model.memory import return_freed
from stoker.requires import supported

__all__ = ["check_form", "describe", "store_frozen", "widen_frozen"]

_IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


def check_form(form: Any) -> None:
    if form is not None and form not in FORMS:
        raise ValueError(f"optimize: frozen_weights is {form!r}; choose one of {', '.join(FORMS)}, or None")


def store_frozen(model: nn.Module, form: Form | None, dtype: torch.dtype | None = None) -> list[tuple[str, str]]:
    """Stores the frozen weights of `model` in `form`, in place, one after another; returns (what, why) was left as it is.

    None keeps the form that they have. `dtype` is the type as which the weights are used, if not the one that they have.
    """
    left: Counter[tuple[str, str]] = Counter()
    found = False
    for module, table in _modules(model) if form is not None else ():
        parameter: Any = module._parameters.get("weight")
        wanted: Form = "bfloat16" if table else form  # type: ignore[assignment]
        if parameter is None or parameter.requires_grad:
            continue
        found = True
        if isinstance(parameter, FrozenWeight):
            if parameter.stored.form == wanted:
                continue
            widen(parameter)
        if (reason := why_not(parameter, wanted, dtype)) is None:
            store(parameter, wanted, transposed=is_conv1d(module), dtype=dtype)
        else:
            left[stock_class(type(module)).__name__, reason] += 1
    _exempt_from_ddp(model)
    if found:
        return_freed()
    if form is not None and not found:
        return [
            (f"frozen_weights={form!r}", "no weight is frozen; add adapters, or freeze weights, before stoker.optimize")
        ]
    return [(f"the weights of {count} x {name}", reason) for (name, reason), count in left.items()]


def widen_frozen(model: nn.Module) -> None:
    """Makes every stored weight an ordinary parameter again, in the type that it had."""
    for parameter in list(model.parameters()):
        widen(parameter)
    _exempt_from_ddp(model)


def _modules(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """The linear layers outside of adapters, and the word embeddings; and whether the weight is that of embeddings or head."""
    tables, fused = _tables(model)
    adapters = {inner for module in model.modules() for inner in _adapters(module)}
    for module in model.modules():
        parameter = module._parameters.get("weight")
        if module in adapters or id(parameter) in fused:
            continue
        if stock_class(type(module)) is nn.Linear or is_conv1d(module):
            yield module, id(parameter) in tables
        elif isinstance(module, nn.Embedding) and id(parameter) in tables and module.max_norm is None:
            yield module, True


def _adapters(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that peft has put beside a layer of the model."""
    if "base_layer" in module._modules:
        for name, inner in module._modules.items():
            if name != "base_layer" and inner is not None:
                yield from inner.modules()


def _tables(model: nn.Module) -> tuple[set[int], set[int]]:
    """The identities of the weights of word embeddings and heads, and of those that the fused embeddings read."""
    tables: set[int] = set()
    fused: set[int] = set()
    for module in model.modules():
        for name in ("get_input_embeddings", "get_output_embeddings"):
            try:
                table = getattr(module, name, lambda: None)()
            except NotImplementedError:
                continue
            while isinstance(table, nn.Module) and "base_layer" in table._modules:
                table = table._modules["base_layer"]
            if isinstance(table, nn.Module):
                tables.add(id(table._parameters.get("weight")))
        if (found := find(type(module))) is not None and found[1] == "embeddings":
            fused.update(map(id, module.parameters()))
    return tables, fused


def _exempt_from_ddp(model: nn.Module) -> None:
    """Tells DDP not to send stored weights to the other ranks: every rank has read the same files."""
    if not supported("frozen weights under DDP"):
        return
    names = [n for n, p in model.named_parameters(remove_duplicate=False) if isinstance(p, FrozenWeight)]
    before: Any = model.__dict__.pop(_IGNORED_BY_DDP, ())
    others = [name for name in before if name not in dict(model.named_parameters(remove_duplicate=False))]
    if names or others:
        setattr(model, _IGNORED_BY_DDP, [*others, *names])


@dataclass
class _Sum:
    count: int = 0
    stored: int = 0
    wide: int = 0

    def add(self, stored: int, wide: int) -> None:
        self.count, self.stored, self.wide = self.count + 1, self.stored + stored, self.wide + wide


def describe(model: nn.Module) -> str:
    """What is stored how, and what it saves; empty if every weight is an ordinary parameter."""
    sums: dict[str, _Sum] = {}
    for parameter in model.parameters():
        if isinstance(parameter, FrozenWeight):
            total = sums.setdefault(parameter.stored.form, _Sum())
            total.add(stored_bytes(parameter), parameter.numel() * parameter.element_size())
        elif (foreign := read_params4bit(parameter)) is not None:
            total = sums.setdefault("nf4 by bitsandbytes", _Sum())
            total.add(foreign.nbytes, 4 * foreign.shape[0] * foreign.shape[1])
    if not sums:
        return ""
    parts = [f"{one.count} in {form} ({_size(one.stored)} instead of {_size(one.wide)})" for form, one in sums.items()]
    saved = sum(one.wide - one.stored for one in sums.values())
    return f"{', '.join(parts)}: {_size(saved)} saved"


def _size(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count / 1e3:,.0f} kB"
