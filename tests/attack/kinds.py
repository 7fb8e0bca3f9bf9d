"""The generators of cases, and how often each is drawn. Add a new generator as a row here."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attack import (
    adapter_folders,
    chat_templates,
    command_lines,
    data_files,
    environments,
    finished_folders,
    hostfiles,
    model_cases,
    parquet_files,
    run_logs,
    yaml_files,
)
from attack.case import Case

__all__ = ["KINDS", "Kind", "stand_in"]


@dataclass(frozen=True)
class Kind:
    make: Callable[[random.Random, Path], Case]
    share: int
    """Its share, in percent, of the cases of `make attack`."""


KINDS: dict[str, Kind] = {
    "config": Kind(lambda r, base: yaml_files.config_file(r), 14),
    "answers": Kind(lambda r, base: yaml_files.answers(r), 6),
    "hostfile": Kind(lambda r, base: hostfiles.hostfile(r), 8),
    "command": Kind(command_lines.any_command, 12),
    "launch": Kind(command_lines.launch, 10),
    "variables": Kind(command_lines.rank_variables, 6),
    "train": Kind(command_lines.train, 10),
    "data": Kind(data_files.data_file, 12),
    "runlog": Kind(
        lambda r, base: Case(["report", "."], {"run.jsonl": run_logs.random_log(r)}, writes=("report.html",)), 6
    ),
    "model": Kind(model_cases.model_folder, 8),
    "adapter": Kind(adapter_folders.adapter_folder, 6),
    "template": Kind(chat_templates.chat_template, 6),
    "parquet": Kind(parquet_files.parquet_file, 4),
    "finished": Kind(finished_folders.finished_folder, 4),
    "environment": Kind(environments.odd_environment, 10),
}


def stand_in() -> None:
    """Replaces what takes long once input has been accepted, so that a case ends there.

    That is: the start of ranks, the measurements of `stoker plan`, the demos, and all but two steps of a training run. Chat
    templates are stopped sooner.
    """
    import os
    from types import SimpleNamespace

    import stoker.bounded
    import stoker.hf.measured_rates
    import stoker.hf.trainer
    import stoker.launch.launchers.mpirun
    import stoker.launch.launchers.torchrun
    import stoker.plan.link_rates
    import stoker.tasks.demo.demo_run
    import stoker.tasks.demo.sft_demo
    import stoker.tasks.training_run
    from stoker.plan.cost_model import Collectives, Node

    os.execv = os.execve = lambda *rest: os._exit(0)  # type: ignore[assignment]
    stoker.launch.launchers.elastic.launch = lambda *rest, **named: 0
    stoker.launch.launchers.mpi.launch = lambda *rest, **named: 0
    stoker.launch.launchers.remote_hosts.check_hosts = lambda names, *rest, **named: None
    stoker.tasks.demo.demo_run.run_demo = stoker.tasks.demo.sft_demo.run_sft_demo = lambda options: 0
    stoker.tasks.training_run.machine_rates = lambda log_line: None  # type: ignore[assignment,return-value]
    rates = SimpleNamespace(threads=2, fp32_all=100.0, bandwidth_all=20.0)
    stoker.hf.measured_rates.machine_rates = lambda log_line: rates  # type: ignore[assignment,return-value]
    collectives = Collectives(1e9, 2e9, 0.1, 0.1, 0.1)
    stoker.plan.link_rates.measure_collectives = lambda **named: collectives
    stoker.plan.link_rates.measure_node = lambda subject, batch, processes, *rest, **named: Node(
        step=1.0, processes=processes, parameters=1000, collectives=collectives, cores=2
    )
    stoker.bounded.SECONDS = 0.5
    _stop_after_two_steps(stoker.hf.trainer.Trainer)


def _stop_after_two_steps(trainer: type) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: object, state: object, control: object, **rest: object) -> None:
            if state.global_step >= 2:  # type: ignore[attr-defined]
                control.should_training_stop = True  # type: ignore[attr-defined]

    original = trainer.train  # type: ignore[attr-defined]

    def train(self: object, *rest: object, **named: object) -> object:
        self.add_callback(Stop())  # type: ignore[attr-defined]
        return original(self, *rest, **named)

    trainer.train = train  # type: ignore[attr-defined]
