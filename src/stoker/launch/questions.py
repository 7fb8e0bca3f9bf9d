"""The questionnaire of `stoker config`: the questions people know from accelerate, with answers proposed from the machine.

Data and pure functions; `stoker.launch.ask` does the talking. Every question is also a flag of `stoker config`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker.launch import network
from stoker.launch.config import Config
from stoker.launch.placement import place
from stoker.machine import Machine
from stoker.machine.verdicts import processes_and_threads

__all__ = ["QUESTIONS", "Answers", "Question", "to_config"]

Answers = dict[str, Any]


@dataclass(frozen=True)
class Question:
    name: str
    """The flag, and the key of the answer."""
    text: str
    kind: str
    """choice, yes, number or text."""
    default: Callable[[Answers, Machine], Any]
    choices: tuple[tuple[str, str], ...] = ()
    """(answer, what is shown)."""
    when: Callable[[Answers], bool] = lambda answers: True
    optional: bool = False
    """An empty answer stands for "not given"."""
    flag: bool = True


def _several(answers: Answers) -> bool:
    return bool(answers["distributed_type"] == "MULTI_CPU")


def _machines(answers: Answers) -> bool:
    return _several(answers) and answers.get("num_machines", 1) > 1


def _by_mpi(answers: Answers) -> bool:
    return answers.get("launcher") in ("impi", "mpich", "openmpi")


def _by_hand(answers: Answers) -> bool:
    return _machines(answers) and answers.get("launcher") == "torchrun"


def _threads(answers: Answers, machine: Machine) -> int:
    local = max(answers.get("num_processes", 1) // max(answers.get("num_machines", 1), 1), 1)
    return place(machine, local, oversubscribe=True)[0].threads


QUESTIONS: tuple[Question, ...] = (
    Question(
        "compute_environment",
        "In which compute environment are you running?",
        "choice",
        lambda answers, machine: "LOCAL_MACHINE",
        (("LOCAL_MACHINE", "This machine, or machines I can reach"),),
    ),
    Question(
        "distributed_type",
        "Which type of machine are you using?",
        "choice",
        lambda answers, machine: "MULTI_CPU" if processes_and_threads(machine)[0] > 1 else "NO",
        (("NO", "No distributed training"), ("MULTI_CPU", "multi-CPU")),
    ),
    Question(
        "num_machines", "How many different machines will you use?", "number", lambda answers, machine: 1, when=_several
    ),
    Question(
        "launcher",
        "What shall start the processes?",
        "choice",
        lambda answers, machine: "torchrun",
        (
            ("torchrun", "torchrun (stoker launch on each machine)"),
            ("impi", "Intel MPI (from one machine, over ssh)"),
            ("mpich", "MPICH (from one machine, over ssh)"),
            ("openmpi", "Open MPI (from one machine, over ssh)"),
            ("slurm", "Slurm"),
        ),
        when=_several,
    ),
    Question(
        "mpirun_hostfile",
        "Where is the hostfile?",
        "text",
        lambda answers, machine: "~/hostfile",
        when=lambda answers: _machines(answers) and _by_mpi(answers),
    ),
    Question("machine_rank", "What is the rank of this machine?", "number", lambda answers, machine: 0, when=_by_hand),
    Question(
        "main_process_ip",
        "What is the IP address of the machine that will host the main process?",
        "text",
        lambda answers, machine: network.own_address() if answers.get("machine_rank", 0) == 0 else "",
        when=_by_hand,
    ),
    Question(
        "main_process_port",
        "What is the port you will use to communicate with the main process?",
        "number",
        lambda answers, machine: 29500,
        when=_by_hand,
    ),
    Question(
        "same_network",
        "Are all the machines on the same local network?",
        "yes",
        lambda answers, machine: True,
        when=_machines,
    ),
    Question("use_cpu", "Do you want to run your training on CPU only?", "yes", lambda answers, machine: True),
    Question(
        "ipex",
        "Do you want to use Stoker's optimisations (what Intel Extension for PyTorch, IPEX, was for)?",
        "yes",
        lambda answers, machine: True,
    ),
    Question(
        "dynamo",
        "Do you wish to optimize your script with torch dynamo?",
        "yes",
        lambda answers, machine: False,
    ),
    Question(
        "num_processes",
        "How many processes should be used in all?",
        "number",
        lambda answers, machine: answers.get("num_machines", 1) * max(processes_and_threads(machine)[0], 1),
        when=_several,
    ),
    Question(
        "num_cpu_threads_per_process",
        "How many threads should each process use? (empty: one per core, on whatever machine it runs)",
        "number",
        lambda answers, machine: _threads(answers, machine),
        optional=True,
    ),
    Question(
        "mixed_precision",
        "Do you wish to use mixed precision?",
        "choice",
        lambda answers, machine: "no",  # the same on every machine: precision is what the person asks for
        (("no", "no"), ("bf16", "bf16"), ("fp16", "fp16")),
    ),
)


def to_config(answers: Answers) -> Config:
    several = answers.get("distributed_type") == "MULTI_CPU"
    return Config(
        distributed_type="MULTI_CPU" if several else "NO",
        num_machines=answers.get("num_machines", 1) if several else 1,
        num_processes=answers.get("num_processes", 1) if several else 1,
        machine_rank=answers.get("machine_rank") or 0,
        main_process_ip=answers.get("main_process_ip") or None,
        main_process_port=answers.get("main_process_port"),
        mixed_precision=answers.get("mixed_precision", "no"),
        same_network=answers.get("same_network", True),
        use_cpu=answers.get("use_cpu", True),
        ipex=answers.get("ipex", True),
        dynamo_backend="inductor" if answers.get("dynamo") else "no",
        hostfile=answers.get("mpirun_hostfile") or None,
        threads=answers.get("num_cpu_threads_per_process"),
        launcher=answers.get("launcher", "auto"),
    )
