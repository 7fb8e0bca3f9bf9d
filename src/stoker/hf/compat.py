"""Support for unmodified scripts: what `stoker launch` installs in the script's process before the script runs.

Import hooks replace the Trainer and TrainingArguments of transformers and the Accelerator of accelerate by Stoker's
subclasses; nothing inside their classes is changed. Versions that were never tested are refused, and `--no-compat` installs
nothing. What the subclasses rely on is listed in `stoker.requires`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

from stoker.after_import import ImportHook
from stoker.errors import UserError
from stoker.hf import imports, trl_head
from stoker.requires import VERSIONS, release, supported

__all__ = ["check_version", "install"]


def install(*, optimise: bool = True, backend: str | None = None, first: bool = True, off: str = "--no-ipex") -> Layer:
    """Installs the hooks in this process. `first`: this is rank 0, which prints for all ranks; `off`: what switches them off."""
    for package in ("transformers", "accelerate"):
        check_version(package)
    layer = Layer(optimise, backend, first, off)
    sys.meta_path.insert(0, layer)
    imports.install(layer.print_once)
    for name in _HOOKS:
        if name in sys.modules:
            layer.imported(name)
    return layer


def check_version(package: str, version: str | None = None) -> None:
    """Raises UserError for a version outside the supported range."""
    if version is None:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            return
    if not VERSIONS[package].include(release(version)):
        raise UserError(
            f"unmodified scripts are not supported with {package} {version}; run `pip install "
            f"'{package}{VERSIONS[package].range}'`, or use --no-compat to run the script without any hooks"
        )


class Layer(ImportHook):
    """An import hook that replaces classes as soon as their modules have been imported."""

    def __init__(self, optimise: bool, backend: str | None, first: bool, off: str) -> None:
        super().__init__()
        self.names = _HOOKS
        self.optimise = optimise
        self.backend = backend
        self.off = off
        self._first = first
        self._printed: set[str] = set()
        self._trained_plainly: bool | None = None
        """Whether no model was optimised when an optimizer first stepped; None before that."""

    def stepped(self, *_: Any) -> None:
        # torch iterates over its hooks while it calls them, so this one must not remove itself.
        if self._trained_plainly is None:
            self._trained_plainly = not _any_optimized()

    def print_hint_if_nothing_was_optimised(self) -> None:
        """Called when the script ends: a training loop of its own cannot be optimised from outside."""
        if self._trained_plainly and not _any_optimized():
            self.print_once(
                "nothing was optimised, because this script has a training loop of its own; to speed it up, add `import stoker; "
                "model, optimizer = stoker.optimize(model, optimizer)` before the loop"
            )

    def print_once(self, line: str) -> None:
        """Prints `line` once, on rank 0 only."""
        if self._first and line not in self._printed:
            self._printed.add(line)
            print(f"stoker: {line}", file=sys.stderr)

    def imported(self, name: str) -> None:
        for replace in _HOOKS[name]:
            replace(self)


def _arguments(layer: Layer) -> None:
    stock = _ready("transformers.training_args", "TrainingArguments")
    ours = stock and _ready("stoker.hf.arguments", "TrainingArguments", load=True)
    if not ours or issubclass(stock, ours) or not supported("TrainingArguments"):
        return

    class TrainingArguments(ours):  # type: ignore[misc, valid-type]
        """The TrainingArguments of a script that was started by `stoker launch`."""

        def __post_init__(self) -> None:
            if not layer.optimise:
                if getattr(self, "use_ipex", None):
                    layer.print_once(f"use_ipex is ignored because of {layer.off}")
                self.use_ipex = False
            super().__post_init__()

    _replace(sys.modules["transformers.training_args"], TrainingArguments)


def _trainer(layer: Layer) -> None:
    _arguments(layer)
    stock = _ready("transformers.trainer", "Trainer")
    ours = stock and _ready("stoker.hf.trainer", "Trainer", load=True)
    if not ours or issubclass(stock, ours):
        return
    module = sys.modules["transformers.trainer"]
    accelerator = getattr(module, "Accelerator", None)
    if accelerator is not None and accelerator.__module__ == "accelerate.accelerator" and hasattr(accelerator, "stock"):
        module.Accelerator = accelerator.stock  # type: ignore[attr-defined]  # the Trainer optimises models itself
    _replace(module, type("Trainer", (ours,), {"__doc__": ours.__doc__}))
    if layer.optimise and supported("Trainer: optimisation"):
        layer.print_once(f"Trainer: models are optimised before training; {layer.off} leaves them as they are")


def _accelerator(layer: Layer) -> None:
    stock = _ready("accelerate.accelerator", "Accelerator")
    if stock is None or hasattr(stock, "stock") or not supported("Accelerator"):
        return
    distributed = any(os.environ.get(name) for name in ("STOKER_LOCAL_SGD", "STOKER_GRADIENT_COMPRESSION"))
    if not layer.optimise and layer.backend is None and not distributed:
        return
    ours = _ready("stoker.hf.accelerator", "Accelerator", load=True)
    if not ours:
        return
    members: dict[str, Any] = {"__doc__": ours.__doc__, "backend_wanted": layer.backend, "stock": stock}
    if layer.optimise:

        def prepare(self: Any, *args: Any, **named: Any) -> Any:
            layer.print_once(f"Accelerator: models are optimised in prepare; {layer.off} leaves them as they are")
            return ours.prepare(self, *args, **named)

        members["prepare"] = prepare
    else:
        members["prepare"] = lambda self, *args, **named: self._prepare_for_several(args, named)
    _replace(sys.modules["accelerate.accelerator"], type("Accelerator", (ours,), members))


_KEPT: list[Any] = []


def _groups(_: Layer) -> None:
    """Keeps destroyed process groups alive until the process ends.

    Releasing the last reference to a gloo group joins its threads while holding the GIL. If one of them is releasing a tensor, it
    waits for the GIL, and a script whose model goes out of scope after `end_training` never ends.
    """
    if not supported("destroyed groups"):
        return
    module: Any = sys.modules["torch.distributed.distributed_c10d"]
    stock = module.destroy_process_group
    if hasattr(stock, "stock"):
        return

    @functools.wraps(stock)
    def destroy_process_group(group: Any = None) -> None:
        _KEPT.append(group or module.GroupMember.WORLD)
        stock(group)

    destroy_process_group.stock = stock  # type: ignore[attr-defined]
    module.destroy_process_group = destroy_process_group
    package: Any = sys.modules.get("torch.distributed")
    if getattr(package, "destroy_process_group", None) is stock:
        package.destroy_process_group = destroy_process_group


def _any_optimized() -> bool:
    report = sys.modules.get("stoker.model.optimization_report")  # if it is not imported, nothing was optimised
    return report is not None and bool(report.any_optimized())


def _optimizers(layer: Layer) -> None:
    """Records the first step of any optimizer."""
    if layer.optimise:
        sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(layer.stepped)


def _trl_head(layer: Layer) -> None:
    if layer.optimise:
        trl_head.install()


_HOOKS: dict[str, tuple[Callable[[Layer], None], ...]] = {
    "transformers.training_args": (_arguments,),
    "transformers.trainer": (_trainer,),
    "accelerate.accelerator": (_accelerator,),
    "torch.distributed.distributed_c10d": (_groups,),
    "torch.optim.optimizer": (_optimizers,),
    trl_head.MODULE: (_trl_head,),
    # If a script imports Stoker first, the modules above are imported while these are still incomplete.
    "stoker.hf.arguments": (_arguments,),
    "stoker.hf.trainer": (_trainer,),
    "stoker.hf.accelerator": (_accelerator,),
}


def _ready(module: str, name: str, *, load: bool = False) -> Any:
    """A class of a module; None if the module is not imported, or not as far as that class."""
    found = sys.modules.get(module)
    if found is None and load:
        found = importlib.import_module(module)
    return getattr(found, name, None)


def _replace(module: ModuleType, ours: type) -> None:
    """Replaces a class under its own name, so that pickles of it (training_args.bin) open without Stoker."""
    stock = getattr(module, ours.__name__)
    ours.__module__, ours.__qualname__ = stock.__module__, stock.__qualname__
    setattr(module, ours.__name__, ours)
    package = sys.modules.get(module.__name__.partition(".")[0])
    if package is not None and package.__dict__.get(ours.__name__) is stock:
        setattr(package, ours.__name__, ours)
