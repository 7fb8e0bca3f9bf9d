"""What `optimize` did to a model, what it left alone, and why, read from the modules as they are now.

Only modules that a training step calls are counted. A fused layer reads the weights of the modules inside it instead of
calling them, so those are part of it; a linear layer or a norm is listed only where it is called, or has LoRA adapters.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from weakref import WeakKeyDictionary

from torch import nn

from stoker.model.any_model import uses_attention, why_no_base_model
from stoker.model.causal_lm import CausalLMModel
from stoker.model.class_swap import Optimized, Settings, stock_class
from stoker.model.families import FAMILIES, find, in_table, transformers_major, unresolved
from stoker.model.frozen_weights import describe
from stoker.model.fused_layer import FusedEmbeddings, FusedLayer, RelativeBias, RelativeDistances
from stoker.model.heads import FirstTokenModel, MaskedLMModel, QuestionAnsweringModel, SpanLogits
from stoker.model.known_parts import KnownPart
from stoker.model.leaf_modules import LeafDropout, kernel_for
from stoker.model.padding_free import PaddingFreeModel, always_stock, stock_calls

__all__ = ["Notes", "Report", "any_optimized", "forget", "keep_switches", "note", "report", "switches"]


@dataclass(frozen=True)
class Notes:
    """What cannot be read from the modules."""

    precision: str = ""
    memory: str = ""
    optimizer: str = ""
    left_alone: tuple[tuple[str, str], ...] = ()
    """(frozen weights, why they were not stored as requested)."""
    switches: Settings | None = None


_NOTES: WeakKeyDictionary[nn.Module, Notes] = WeakKeyDictionary()
"""The notes of each model that `optimize` was called on."""


def note(model: nn.Module, notes: Notes) -> None:
    _NOTES[model] = notes


def switches(model: nn.Module) -> Settings | None:
    """The switches that a script called `optimize` with on this model; None if it did not, or if that was undone."""
    return (_NOTES.get(model) or Notes()).switches


def keep_switches(model: nn.Module, own: Settings | None) -> None:
    """Makes `switches` return the script's own ones again after another call of `optimize`."""
    _NOTES[model] = replace(_NOTES[model], switches=own)


def any_optimized() -> bool:
    """Whether `optimize` was called on a model that still exists."""
    return bool(_NOTES)


def forget(model: nn.Module, *, optimizer: bool) -> None:
    """Drops the notes that do not apply to a restored model; the one on the optimizer only if that was restored too."""
    if (notes := _NOTES.get(model)) is not None:
        _NOTES[model] = Notes(memory=notes.memory, optimizer="" if optimizer else notes.optimizer)


@dataclass(frozen=True)
class Report:
    """The result of `stoker.report`."""

    model: str
    applied: tuple[tuple[str, str, int], ...]
    """(part, stock class, number of modules)."""
    left_alone: tuple[tuple[str, str], ...]
    """(what, why)."""
    precision: str
    memory: str
    optimizer: str
    frozen_weights: str = ""
    """What is stored in bf16 or in few bits, and what that saves."""

    @property
    def settings(self) -> dict[str, str]:
        """The lines about the whole model."""
        return {
            "precision": self.precision,
            "frozen weights": self.frozen_weights,
            "memory": self.memory,
            "optimizer": self.optimizer,
        }

    @property
    def _rows(self) -> list[tuple[str, str]]:
        """What the table says in its two columns."""
        width = max((len(str(count)) for _, _, count in self.applied), default=1)
        rows = [(part, f"{count:>{width}} x {cls}") for part, cls, count in self.applied] or [("nothing applied", "")]
        rows += [(name, value) for name, value in self.settings.items() if value]
        return rows + [("left alone", f"{what}: {why}") for what, why in self.left_alone]

    def __str__(self) -> str:
        rows = self._rows
        width = max(len(name) for name, _ in rows)
        return "\n".join([f"Stoker on {self.model}", *(f"  {name:<{width}}  {value}".rstrip() for name, value in rows)])

    def _repr_html_(self) -> str:
        """A table, for notebooks."""
        cells = "".join(
            f"<tr><td style='text-align:left'>{escape(name)}</td><td style='text-align:left'>{escape(value)}</td></tr>"
            for name, value in self._rows
        )
        return f"<table><caption>Stoker on {escape(self.model)}</caption>{cells}</table>"


def report(model: nn.Module) -> Report:
    """What `stoker.optimize` applied to `model`, what it left alone, and why. `print` shows it as a table."""
    called = list(_called(model, any(map(_runs_padding_free, model.modules()))))
    counts = Counter(
        (_part(module), stock_class(type(module)).__name__) for module in called if isinstance(module, Optimized)
    )
    layers = [module for module in called if isinstance(module, (FusedLayer, KnownPart))]
    counts.update(
        ("LoRA linear", stock_class(type(one)).__name__) for layer in layers for one in layer.stoker_adapted()
    )
    counts.update(
        ("attention implementation", stock_class(type(module)).__name__)
        for module in model.modules()
        if uses_attention(module)
    )
    notes = _NOTES.get(model, Notes())
    settings = notes.switches or next((m.stoker_settings for m in model.modules() if isinstance(m, Optimized)), None)
    return Report(
        model=stock_class(type(model)).__name__,
        applied=tuple((part, cls, count) for (part, cls), count in counts.items()),
        left_alone=(*_left_alone(model, called, settings), *notes.left_alone),
        precision=notes.precision,
        memory=notes.memory,
        optimizer=notes.optimizer,
        frozen_weights=describe(model),
    )


def _runs_padding_free(module: nn.Module) -> bool:
    return isinstance(module, PaddingFreeModel) and always_stock(module) is None


def _called(module: nn.Module, padding_free: bool, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """`module` and those inside it that a training step calls, each once. `padding_free`: whether the base model is."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    inside: list[nn.Module] = list(module.children())
    runs = True
    if isinstance(module, PaddingFreeModel):
        runs = padding_free = _runs_padding_free(module)
    elif isinstance(module, (FusedLayer, FusedEmbeddings)):
        inside = module.stoker_called() if padding_free else inside
        runs = padding_free and not (isinstance(module, FusedEmbeddings) and inside)
    elif isinstance(module, KnownPart):
        runs = padding_free or not module.stoker_needs_sequences
        inside = module.stoker_called() if runs else inside
    elif isinstance(module, (RelativeBias, RelativeDistances, QuestionAnsweringModel, SpanLogits)):
        runs = padding_free
        inside = module.stoker_called() if isinstance(module, RelativeDistances) else inside
    elif isinstance(module, FirstTokenModel):
        runs = padding_free and module.stoker_first_token()
    elif isinstance(module, (MaskedLMModel, CausalLMModel)):
        read = module.stoker_read()
        seen.update(read)
        runs = bool(read)
    elif isinstance(module, LeafDropout):
        runs = module.p > 0.0
    if runs:
        yield module
    for one in inside:
        yield from _called(one, padding_free, seen)


def _part(module: Optimized) -> str:
    if isinstance(module, PaddingFreeModel) and not module.stoker_settings.unpad:
        return "base model"
    if isinstance(module, FusedLayer) and not module.stoker_settings.fuse:
        return "attention over sequences"
    return module.stoker_part


def _left_alone(model: nn.Module, called: list[nn.Module], switches: Settings | None) -> Iterator[tuple[str, str]]:
    if switches is None:
        yield "everything", "stoker.optimize was not called on this model, or it was undone"
        return
    if not switches.unpad and not switches.fuse:
        yield "everything but memory and optimizer", "unpad=False and fuse=False"
        return
    yield from _whole_parts(model, switches)
    why = {}
    for module in called:
        if not isinstance(module, Optimized) and (switches.fuse or kernel_for(module) is None) and _computes(module):
            missing = kernel_for(module) is None
            why[module] = (
                "there is no kernel for this class" if missing else "added after the last call of stoker.optimize"
            )
    for (cls, reason), count in Counter((type(module).__name__, reason) for module, reason in why.items()).items():
        yield f"{count} x {cls}", reason


def _whole_parts(model: nn.Module, switches: Settings) -> Iterator[tuple[str, str]]:
    bases = [module for module in model.modules() if isinstance(module, PaddingFreeModel)]
    if not bases:
        stays = (
            "padding, fused layers" if any(map(uses_attention, model.modules())) else "padding, attention, fused layers"
        )
        yield stays, _why_no_base_model(model)
    for base in bases:
        name, always = stock_class(type(base)).__name__, always_stock(base)
        if always is not None:
            yield f"every call of {name}", always
        yield from ((f"a call of {name}", reason) for reason in stock_calls(base) if reason != always)
    if bases and not switches.unpad:
        yield "batches with padding", "unpad=False: their attention and layers run as in stock transformers"
    if not switches.fuse:
        yield "kernels", "fuse=False"
    roles = {found[1] for module in model.modules() if (found := find(type(module)))}
    if not switches.fuse_loss and roles & {"masked_lm_model", "causal_lm"}:
        yield "masked-LM loss" if "masked_lm_model" in roles else "language-model loss", "fuse_loss=False"


def _why_no_base_model(model: nn.Module) -> str:
    matches = [(module, *match) for module in model.modules() if (match := in_table(type(module)))]
    found = [row for _, row, _ in matches]
    if not found:
        families = ", ".join(family.name for family in FAMILIES)
        own = f"{stock_class(type(model)).__name__} is of no family in the table ({families})"
        other = why_no_base_model(model) if "transformers.modeling_utils" in sys.modules else None
        return f"{own}, and cannot run without padding otherwise: {other or 'it takes no tokens'}"
    if missing := [(module, path) for module, row, role in matches if (path := unresolved(module, row, role))]:
        return f"{stock_class(type(missing[0][0])).__name__} has no {missing[0][1]}, where the table expects it"
    if supported := [row for row in found if row.since <= transformers_major()]:
        return f"layers of {supported[0].name} are fused only inside its base model"
    return f"{found[0].name} needs transformers {found[0].since} or later"


def _computes(module: nn.Module) -> bool:
    """Whether a module has weights of its own to multiply or look up, and does not only pass them to other modules."""
    own = list(module.parameters(recurse=False))
    return bool(own) and (not list(module.children()) or any(parameter.dim() > 1 for parameter in own))
