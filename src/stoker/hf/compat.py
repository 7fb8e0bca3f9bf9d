"""Unmodified scripts: what `stoker launch` installs in a script's own process before the script runs.

One layer, in one place, switched off by `--no-compat`. When transformers or accelerate has been imported, its Trainer,
TrainingArguments and Accelerator are replaced by Stoker's subclasses of them, by import hooks; nothing inside their
classes is touched. A version that does not fit is refused, never half-patched.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

from stoker.errors import UserError
from stoker.hf import imports

__all__ = ["SUPPORTED", "check_version", "install"]

SUPPORTED = {"transformers": ((4, 57), (6, 0)), "accelerate": ((1, 3), (2, 0))}
"""From this version on, below that one. The first and the newest of each are run by the tests."""

# What the subclasses build on; a class without one of these is not the class they were written for.
_EXPECTED = {
    "Trainer": (
        "create_optimizer",
        "_wrap_model",
        "training_step",
        "compute_loss",
        "get_train_dataloader",
        "evaluation_loop",
    ),
    "TrainingArguments": ("__post_init__", "_setup_devices", "ddp_timeout_delta", "process_index"),
    "Accelerator": ("prepare", "mixed_precision", "device"),
}


def install(*, optimise: bool = True, backend: str | None = None, first: bool = True) -> Layer:
    """Installs the layer in this process; `first`: this is rank 0, which speaks for all."""
    for package in SUPPORTED:
        check_version(package)
    layer = Layer(optimise, backend, first)
    sys.meta_path.insert(0, layer)
    imports.install(layer.say)
    for name in _HOOKS:
        if name in sys.modules:
            layer.after_import(name)
    return layer


def check_version(package: str, version: str | None = None) -> None:
    """Refuses a version that the layer was not written for."""
    if version is None:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            return
    lowest, below = SUPPORTED[package]
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not lowest <= numbers < below:
        wanted = f"{package}>={'.'.join(map(str, lowest))},<{'.'.join(map(str, below))}"
        raise UserError(
            f"{package} {version} is not one that unmodified scripts are known to work with; `pip install '{wanted}'`, or "
            "give --no-compat to run the script without any hooks"
        )


class Layer(importlib.abc.MetaPathFinder):
    """Watches for the modules whose classes are replaced."""

    def __init__(self, optimise: bool, backend: str | None, first: bool) -> None:
        self.optimise = optimise
        self.backend = backend
        self._first = first
        self._said: set[str] = set()
        self._busy: set[str] = set()
        self._trained_plainly: bool | None = None
        """Whether no model was optimised when an optimizer first stepped; None before that."""

    def stepped(self, *_: Any) -> None:
        # It stays among the hooks: torch goes through them while it calls them, so none may remove itself.
        if self._trained_plainly is None:
            self._trained_plainly = not _any_optimized()

    def say_if_nothing_was_optimised(self) -> None:
        """At the end of a script: its own loop is the one thing that cannot be sped up from outside."""
        if self._trained_plainly and not _any_optimized():
            self.say(
                "nothing was optimised, because this script has a training loop of its own; to speed it up, add `import stoker; "
                "model, optimizer = stoker.optimize(model, optimizer)` before the loop"
            )

    def say(self, line: str) -> None:
        """One line once, by rank 0."""
        if self._first and line not in self._said:
            self._said.add(line)
            print(f"stoker: {line}", file=sys.stderr)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _HOOKS or name in self._busy:
            return None
        self._busy.add(name)  # the others on the list are asked for the real one
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, lambda: self.after_import(name))
        return spec

    def after_import(self, name: str) -> None:
        for replace in _HOOKS[name]:
            replace(self)


class _Then(importlib.abc.Loader):
    """A loader that does something once its module is there."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _arguments(layer: Layer) -> None:
    stock = _ready("transformers.training_args", "TrainingArguments")
    ours = stock and _ready("stoker.hf.arguments", "TrainingArguments", load=True)
    if not ours or issubclass(stock, ours):
        return
    _check_shape(stock, "transformers")

    class TrainingArguments(ours):  # type: ignore[misc, valid-type]
        """transformers' arguments, as `stoker launch` gives them to a script."""

        def __post_init__(self) -> None:
            if not layer.optimise:
                if getattr(self, "use_ipex", None):
                    layer.say("use_ipex: left out, because of --no-ipex")
                self.use_ipex = False
            super().__post_init__()

    _replace(sys.modules["transformers.training_args"], TrainingArguments)


def _trainer(layer: Layer) -> None:
    _arguments(layer)
    stock = _ready("transformers.trainer", "Trainer")
    ours = stock and _ready("stoker.hf.trainer", "Trainer", load=True)
    if not ours or issubclass(stock, ours):
        return
    _check_shape(stock, "transformers")
    module = sys.modules["transformers.trainer"]
    accelerator = getattr(module, "Accelerator", None)
    if accelerator is not None and accelerator.__module__ == "accelerate.accelerator" and hasattr(accelerator, "stock"):
        module.Accelerator = accelerator.stock  # type: ignore[attr-defined]  # the Trainer optimises by itself
    _replace(module, type("Trainer", (ours,), {"__doc__": ours.__doc__}))
    if layer.optimise:
        layer.say("Trainer: models are optimised before training; --no-ipex leaves them as they are")


def _accelerator(layer: Layer) -> None:
    stock = _ready("accelerate.accelerator", "Accelerator")
    if stock is None or hasattr(stock, "stock"):
        return
    _check_shape(stock, "accelerate")
    told = any(os.environ.get(name) for name in ("STOKER_LOCAL_SGD", "STOKER_GRADIENT_COMPRESSION"))
    if not layer.optimise and layer.backend is None and not told:
        return
    ours = _ready("stoker.hf.accelerator", "Accelerator", load=True)
    if not ours:
        return
    members: dict[str, Any] = {"__doc__": ours.__doc__, "backend_wanted": layer.backend, "stock": stock}
    if layer.optimise:

        def prepare(self: Any, *args: Any, **named: Any) -> Any:
            layer.say("Accelerator: models are optimised in prepare; --no-ipex leaves them as they are")
            return ours.prepare(self, *args, **named)

        members["prepare"] = prepare
    else:
        members["prepare"] = lambda self, *args, **named: self._prepare_for_several(args, named)
    _replace(sys.modules["accelerate.accelerator"], type("Accelerator", (ours,), members))


_KEPT: list[Any] = []


def _groups(_: Layer) -> None:
    """A process group that was destroyed is kept until the process ends.

    The last one to let go of gloo's joins its threads while holding Python's lock. A thread that is just giving back a tensor
    waits for that lock, and a script whose model goes out of scope after `end_training` then never ends.
    """
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
    report = sys.modules.get("stoker.model.optimization_report")  # not imported: nobody has asked for it
    return report is not None and bool(report.any_optimized())


def _optimizers(layer: Layer) -> None:
    """Notices the first step of an optimizer."""
    if layer.optimise:
        sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(layer.stepped)


_HOOKS: dict[str, tuple[Callable[[Layer], None], ...]] = {
    "transformers.training_args": (_arguments,),
    "transformers.trainer": (_trainer,),
    "accelerate.accelerator": (_accelerator,),
    "torch.distributed.distributed_c10d": (_groups,),
    "torch.optim.optimizer": (_optimizers,),
    # A script that imports Stoker first gets here while the module above is still waiting for this one.
    "stoker.hf.arguments": (_arguments,),
    "stoker.hf.trainer": (_trainer,),
    "stoker.hf.accelerator": (_accelerator,),
}


def _ready(module: str, name: str, *, load: bool = False) -> Any:
    """A class of a module that is loaded as far as that; None if it is not."""
    found = sys.modules.get(module)
    if found is None and load:
        found = importlib.import_module(module)
    return getattr(found, name, None)


def _check_shape(stock: Any, package: str) -> None:
    missing = [name for name in _EXPECTED[stock.__name__] if not hasattr(stock, name)]
    if missing:
        raise UserError(
            f"{package} {metadata.version(package)}: its {stock.__name__} has no {', '.join(missing)}, which Stoker builds on; "
            "install a version of the range in docs/launch.md, or give --no-compat"
        )


def _replace(module: ModuleType, ours: type) -> None:
    """Under the stock name, so that what a script pickles (training_args.bin) opens without Stoker."""
    stock = getattr(module, ours.__name__)
    ours.__module__, ours.__qualname__ = stock.__module__, stock.__qualname__
    setattr(module, ours.__name__, ours)
    package = sys.modules.get(module.__name__.partition(".")[0])
    if package is not None and package.__dict__.get(ours.__name__) is stock:
        setattr(package, ours.__name__, ours)
