"""Stoker: transformer training on CPUs, as fast as the hardware allows, with the commands people already know."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stoker.after_import import after_import

if TYPE_CHECKING:
    from stoker.hf.arguments import TrainingArguments as TrainingArguments
    from stoker.hf.trainer import Trainer as Trainer
    from stoker.machine import Machine as Machine
    from stoker.model import optimize as optimize
    from stoker.model import report as report
    from stoker.model import restore as restore

__version__ = "0.1.0.dev0"
__all__ = ["Machine", "Trainer", "TrainingArguments", "__version__", "optimize", "report", "restore"]

# Public name -> its module, which is imported when the name is first used: `import stoker` must stay cheap, and
# `stoker --help` must not wait for torch.
_MODULES: dict[str, str] = {
    "Machine": "stoker.machine",
    "Trainer": "stoker.hf.trainer",
    "TrainingArguments": "stoker.hf.arguments",
    "optimize": "stoker.model",
    "report": "stoker.model",
    "restore": "stoker.model",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def _register_attention() -> None:
    try:
        from stoker.model.attention_interface import register
    except ImportError:  # an incomplete installation must not keep transformers from being imported
        return
    register()


# transformers' `attn_implementation="stoker"` works as soon as both are imported, in either order.
after_import("transformers.modeling_utils", _register_attention)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_MODULES))
