"""torchrun's PET_* variables, by which Kubeflow's operators say how many machines and processes there are, and where they meet.

They hold where the command line says nothing, and before a config file: the operator knows the job, a file in an image does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from stoker.errors import UserError
from stoker.launch.options import OTHER_FLAGS, LaunchOptions, Option, Options, declared

__all__ = ["with_torchrun_variables"]

_VARIABLES = {
    "PET_NNODES": "num_machines",
    "PET_NPROC_PER_NODE": "per_machine",
    "PET_NODE_RANK": "machine_rank",
    "PET_RDZV_ENDPOINT": "rdzv_endpoint",
    "PET_MASTER_ADDR": "main_process_ip",
    "PET_MASTER_PORT": "main_process_port",
    "PET_MAX_RESTARTS": "max_restarts",
}
"""The options they stand for, in this order: the rendezvous has precedence over the address of machine 0, as in torchrun."""
_BY_HARDWARE = ("auto", "cpu", "gpu", "xpu")


def with_torchrun_variables(options: Options, environment: Mapping[str, str]) -> Options:
    """Adds what the variables say to what the command line leaves open."""
    if options.hostfile or options.launcher not in (None, "auto", "torchrun"):
        return options
    found: dict[str, Any] = {}
    notes: list[str] = []
    for variable, name in _VARIABLES.items():
        text = environment.get(variable, "").strip()
        if variable == "PET_NPROC_PER_NODE" and text.lower() in _BY_HARDWARE:
            notes.append(f"{variable}={text} is one process, which uses all cores; set a number to have more")
            text = "1"
        if text:
            for field, value in _read(variable, text, name).items():
                found.setdefault(field, value)
    given = {name: value for name, value in found.items() if value is not None and getattr(options, name) is None}
    if options.num_processes is not None:  # which the command line gives for all machines together
        given.pop("per_machine", None)
    if options.num_machines is not None:
        given.pop("min_machines", None)
    if not given:
        return options
    options = replace(options, **given, notes=(*options.notes, *notes))
    if options.num_processes is None and "per_machine" in given:  # a config file must not give another number
        options = replace(options, num_processes=(options.num_machines or 1) * given["per_machine"])
    return options


def _read(variable: str, text: str, name: str) -> dict[str, Any]:
    option: Option = OTHER_FLAGS[name] if name in OTHER_FLAGS else declared(LaunchOptions)[name]
    convert: Callable[[str], Any] | None = option.convert_flag or option.convert
    assert convert is not None
    try:
        value = convert(text)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise UserError(
            f"{variable} is set for torchrun, but {error or repr(text)}; correct it, unset it, or give {option.flags[-1]}"
        ) from None
    return dict(zip(option.sets, value, strict=True)) if option.sets else {name: value}
