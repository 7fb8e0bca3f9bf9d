"""`Accelerator`: accelerate's own, on the CPU, with `stoker.optimize` applied in `prepare`.

Imports nothing of transformers, because it is loaded during the import of accelerate, which transformers may have started.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate.accelerator import Accelerator as _Stock
from torch import nn

from stoker.distributed.compression import compress_gradients
from stoker.distributed.local_sgd import LocalSGD
from stoker.distributed.settings import DistributedSettings
from stoker.hf.ddp_backend import choose, join, several_processes
from stoker.hf.ranks import NOT_IN_DDP, configure_ddp, warn_of_ignored_settings, without_ddp
from stoker.requires import drop_unsupported, supported

__all__ = ["Accelerator", "clip_in_one_pass", "step_directly"]

log = logging.getLogger("stoker")

_LOCAL_SGD_FILE = "stoker_local_sgd.pt"


@drop_unsupported
class Accelerator(_Stock):  # type: ignore[misc]
    """Use it wherever accelerate.Accelerator was used."""

    backend_wanted: str | None = None
    """The communication backend if the script names none; the launcher sets it."""
    _local_sgd: LocalSGD | None = None
    _loaded_from: str = ""

    def __init__(self, *args: Any, **named: Any) -> None:
        if several_processes() and not torch.accelerator.is_available():
            self._join(named.get("kwargs_handlers") or [])
        super().__init__(*args, **named)

    def _join(self, handlers: list[Any]) -> None:
        from accelerate.utils import InitProcessGroupKwargs, get_cpu_distributed_information

        handler = next((one for one in handlers if isinstance(one, InitProcessGroupKwargs)), None)
        choice = choose(getattr(handler, "backend", None) or self.backend_wanted)
        if handler is not None:
            handler.backend = None  # accelerate takes the group that exists, but refuses a name it does not know
        if choice.note and not torch.distributed.is_initialized() and get_cpu_distributed_information().rank == 0:
            log.warning("%s", choice.note)
        join(choice.name, getattr(handler, "timeout", None))

    def prepare(self, *args: Any, **named: Any) -> Any:
        if self.device.type == "cpu":
            _optimize(args, self.mixed_precision)
            clip_in_one_pass(self)
        return self._prepare_for_several(args, named)

    def _prepare_for_several(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Applies the options of `stoker launch` for several processes: gradient compression, or local SGD."""
        models = [one for one in args if isinstance(one, nn.Module)]
        settings = DistributedSettings.read({})
        if self.num_processes == 1 or self.device.type != "cpu" or not models:
            if models:
                warn_of_ignored_settings(settings)
            return super().prepare(*args, **named)
        if settings.local_sgd:
            without_ddp(self)
            prepared = super().prepare(*args, **named)
            self._start_local_sgd(LocalSGD.from_settings(models[0], settings), args)
            return prepared
        configure_ddp(self, None)
        prepared = super().prepare(*args, **named)
        found = prepared if isinstance(prepared, tuple) else (prepared,)
        wrapped = [one for one in found if isinstance(one, nn.parallel.DistributedDataParallel)]
        for one in wrapped:
            compress_gradients(one, settings.gradient_compression)
        if not wrapped and str(settings):
            log.warning(NOT_IN_DDP, settings)
        return prepared

    def _start_local_sgd(self, local: LocalSGD, prepared: tuple[Any, ...]) -> None:
        self._local_sgd = local
        # Not among accelerate's custom objects: it refuses a checkpoint that has more or fewer of them than are registered.
        self.register_save_state_pre_hook(self._save_local_sgd)
        self.register_load_state_pre_hook(self._note_folder)
        for optimizer in (one for one in prepared if isinstance(one, torch.optim.Optimizer)):
            inner: Any = getattr(optimizer, "optimizer", optimizer)
            inner.register_step_post_hook(lambda *about: local.step())
            return
        log.warning("local_sgd is ignored: no optimizer was prepared together with the model")

    def backward(self, loss: torch.Tensor, **named: Any) -> None:
        super().backward(loss, **named)
        if self._local_sgd is not None and self._local_sgd.warms_up and self.sync_gradients:
            self._local_sgd.average_gradients()

    def _save_local_sgd(self, models: Any, weights: Any, folder: str) -> None:
        if self.is_main_process and self._local_sgd is not None:  # after an average all ranks have the same state
            torch.save(self._local_sgd.state_dict(), Path(folder) / _LOCAL_SGD_FILE)

    def _note_folder(self, models: Any, folder: str) -> None:
        self._loaded_from = folder

    def load_state(self, *args: Any, **named: Any) -> Any:
        """Also restores local SGD, which `prepare` has started from the weights before loading."""
        result = super().load_state(*args, **named)
        if self._local_sgd is not None:
            path = Path(self._loaded_from) / _LOCAL_SGD_FILE
            if path.is_file():
                self._local_sgd.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
            else:
                self._local_sgd.restart_from_weights()
            self._local_sgd.follow_first_rank()
        return result

    def wait_for_everyone(self) -> None:
        """All ranks call it before they save: local SGD averages, so that they hold the same weights."""
        if self._local_sgd is not None and not self._local_sgd.agreed:
            self._local_sgd.average()
        super().wait_for_everyone()


def clip_in_one_pass(accelerator: _Stock) -> None:
    """Makes `accelerator`, Stoker's or the one of a Trainer, clip gradients with Stoker's kernel."""
    if "clip_grad_norm_" not in vars(accelerator) and supported("gradient clipping"):
        accelerator.clip_grad_norm_ = functools.partial(_clip, accelerator, accelerator.clip_grad_norm_)


def step_directly(optimizer: Any) -> None:
    """Makes accelerate's wrapper of an optimizer step without what can only concern others, on CPUs in fp32 or bf16.

    Call it before a scheduler is made for the optimizer.

    accelerate looks for an installed package of LOMO twice in each step, in all folders that Python imports from: on a slow
    file system that takes longer than the rest of the Trainer's step.
    """
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, is_lomo_available

    own = type(optimizer) is AcceleratedOptimizer and AcceleratedOptimizer.step.__module__ == "accelerate.optimizer"
    if not own or "step" in vars(optimizer) or optimizer.scaler is not None or is_lomo_available():
        return
    if optimizer.accelerator_state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        optimizer.step = MethodType(_step, optimizer)  # a method, which schedulers of torch wrap


def _step(optimizer: Any, closure: Any = None) -> None:
    if optimizer.gradient_state.sync_gradients:
        optimizer.optimizer.step(closure)


def _clip(accelerator: _Stock, stock: Any, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
    """Uses Stoker's clipping if every rank has whole gradients in memory; FSDP, DeepSpeed and others have their own."""
    from accelerate.utils import DistributedType

    from stoker.model import clip_grad_norm_

    if accelerator.device.type != "cpu" or accelerator.distributed_type not in (
        DistributedType.NO,
        DistributedType.MULTI_CPU,
    ):
        return stock(parameters, max_norm, norm_type)
    accelerator.unscale_gradients()
    return clip_grad_norm_(parameters, max_norm, norm_type)


def _optimize(prepared: tuple[Any, ...], precision: str) -> None:
    """Optimises the models, each with its optimizer, in place; those that are optimised already are skipped."""
    from stoker.model import optimize
    from stoker.model.class_swap import Optimized

    dtype = torch.bfloat16 if precision == "bf16" else None  # None: the script's autocast decides, if it uses one
    models = [one for one in prepared if isinstance(one, nn.Module)]
    optimizers = [one for one in prepared if isinstance(one, torch.optim.Optimizer)]
    for model in models:
        if any(isinstance(module, Optimized) for module in model.modules()):
            continue
        own = {id(parameter) for parameter in model.parameters()}
        theirs = [one for one in optimizers if any(id(p) in own for group in one.param_groups for p in group["params"])]
        if theirs:
            optimize(model, theirs[0], dtype=dtype)
        else:
            optimize(model, dtype=dtype)
