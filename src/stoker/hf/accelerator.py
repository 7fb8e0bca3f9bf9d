"""`Accelerator`: accelerate's own, on the CPU, with `stoker.optimize` applied in `prepare`.

Imports nothing of transformers: it is loaded while accelerate itself is, which transformers may be waiting for.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from accelerate.accelerator import Accelerator as _Stock
from torch import nn

from stoker.hf.backend import choose

__all__ = ["Accelerator"]

log = logging.getLogger("stoker")


class Accelerator(_Stock):  # type: ignore[misc]
    """Use it wherever accelerate.Accelerator was used."""

    backend_wanted: str | None = None
    """What to communicate with, if the script does not say; the launcher sets it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        if _several_processes() and not torch.accelerator.is_available():
            self._join(named.get("kwargs_handlers") or [])
        super().__init__(*args, **named)

    def _join(self, handlers: list[Any]) -> None:
        """Joins the processes before accelerate does, which knows gloo and mpi only and forgets the timeout on CPUs."""
        from accelerate import PartialState
        from accelerate.utils import InitProcessGroupKwargs, get_cpu_distributed_information

        handler = next((one for one in handlers if isinstance(one, InitProcessGroupKwargs)), None)
        asked = (getattr(handler, "backend", None) if handler else None) or self.backend_wanted
        choice = choose(asked)
        named = {"timeout": handler.timeout} if handler is not None and handler.timeout is not None else {}
        if handler is not None:
            handler.backend = None  # accelerate takes the group that exists, but refuses a name it does not know
        if torch.distributed.is_initialized():
            return
        here = get_cpu_distributed_information()
        if choice.note and here.rank == 0:
            log.warning("%s", choice.note)
        torch.distributed.init_process_group(choice.name, rank=here.rank, world_size=here.world_size, **named)
        PartialState(cpu=True)

    def prepare(self, *args: Any, **named: Any) -> Any:
        if self.device.type == "cpu":
            _optimize(args, self.mixed_precision)
        return super().prepare(*args, **named)


def _several_processes() -> bool:
    names = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")
    return "LOCAL_RANK" in os.environ or any(int(os.environ.get(name) or 1) > 1 for name in names)


def _optimize(prepared: tuple[Any, ...], precision: str) -> None:
    """In place, models and optimizers as they stand; what is optimised already is left."""
    from stoker.model import optimize
    from stoker.model.swap import Optimized

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
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
