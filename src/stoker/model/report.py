"""What `optimize` did to a model, what it left alone, and why: read off the modules as they are now."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from stoker.model.door import Door, stock_calls
from stoker.model.families import find
from stoker.model.layer import FusedLayer
from stoker.model.swap import Optimized, stock_class

__all__ = ["Notes", "Report", "forget", "note", "report"]


@dataclass(frozen=True)
class Notes:
    """What cannot be read off the modules."""

    precision: str
    memory: str
    optimizer: str


_NOTES: WeakKeyDictionary[nn.Module, Notes] = WeakKeyDictionary()
"""Cache of the notes of each model that `optimize` was called on."""


def note(model: nn.Module, notes: Notes) -> None:
    _NOTES[model] = notes


def forget(model: nn.Module, *, optimizer: bool) -> None:
    """Drops the notes that a restored model no longer bears out; the one on the optimizer only if it was restored too."""
    if (notes := _NOTES.get(model)) is not None:
        _NOTES[model] = Notes("", notes.memory, "" if optimizer else notes.optimizer)


@dataclass(frozen=True)
class Report:
    """See `stoker.report`."""

    model: str
    applied: tuple[tuple[str, str, int], ...]
    """(part, stock class, how many modules)."""
    left_alone: tuple[tuple[str, str], ...]
    """(what, why)."""
    precision: str
    memory: str
    optimizer: str

    def __str__(self) -> str:
        lines = [f"Stoker on {self.model}"]
        lines += [f"  {part:<24} {count:>4} x {cls}" for part, cls, count in self.applied] or ["  nothing applied"]
        settings = (("precision", self.precision), ("memory", self.memory), ("optimizer", self.optimizer))
        lines += [f"  {name:<24} {value}" for name, value in settings if value]
        lines += [f"  left alone: {what}: {why}" for what, why in self.left_alone]
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """What `stoker.optimize` applied to `model`, what it left alone, and why. `print` shows it as a table."""
    counts: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        if isinstance(module, Optimized):
            counts[type(module).stoker_part, stock_class(type(module)).__name__] += 1
    notes = _NOTES.get(model, Notes("", "", ""))
    return Report(
        model=stock_class(type(model)).__name__,
        applied=tuple((part, cls, count) for (part, cls), count in counts.items()),
        left_alone=tuple(dict.fromkeys(_left_alone(model))),
        precision=notes.precision,
        memory=notes.memory,
        optimizer=notes.optimizer,
    )


def _left_alone(model: nn.Module) -> list[tuple[str, str]]:
    modules = list(model.modules())
    left: list[tuple[str, str]] = []
    if not any(isinstance(module, FusedLayer) for module in modules):
        known = any(find(type(module)) for module in modules)
        why = "switched off, or not optimised" if known else "no row for this architecture in the table of families"
        left.append(("padding, attention, fused layers", why))
    for module in modules:
        if isinstance(module, Door):
            left += [(f"a call of {stock_class(type(module)).__name__}", reason) for reason in stock_calls(module)]
        elif not isinstance(module, Optimized) and not list(module.children()) and list(module.parameters(False)):
            left.append((type(module).__name__, "no kernel for this kind of module, or switched off"))
    return left
