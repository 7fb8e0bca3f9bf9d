"""The questionnaire of `stoker config`: accelerate's questions, in its order, with defaults proposed from the machine. What
only Stoker asks is left for `--more`, so that notes on the old dialogue still apply.

Data and pure functions; `stoker.launch.config.prompts` asks. Every question is also a flag of `stoker config`. A question that
sets an option has the name of the option's key in a config file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError
from stoker.launch.config.config_file import IN_FILE, Config
from stoker.launch.placement.divide_cores import place
from stoker.machine import Machine, network
from stoker.machine.processes import processes_and_threads

__all__ = ["QUESTIONS", "RELEASES", "Answers", "Question", "Release", "to_config"]

Answers = dict[str, Any]


@dataclass(frozen=True)
class Question:
    name: str
    """The flag, and the key of the answer."""
    text: str
    kind: str
    """choice, yes, number or text."""
    default: Any
    """A value, or a function of the answers so far and the machine."""
    choices: tuple[tuple[str, str], ...] = ()
    """(answer, what is shown), in accelerate's order: notes may name them by number."""
    when: Callable[[Answers], bool] = lambda answers: True
    asked: str = "always"
    """always; more: only with --more; piped: some releases of accelerate asked it, so a pipe may contain an answer."""
    least: int = 1
    """The lowest number."""
    meaning: str = ""
    """What an empty answer means, if that is not the default but "not given"."""

    def propose(self, answers: Answers, machine: Machine) -> Any:
        return self.default(answers, machine) if callable(self.default) else self.default


@dataclass(frozen=True)
class Release:
    """How the dialogue of some releases of accelerate differs from Stoker's questions in a terminal."""

    more: frozenset[str] = frozenset()
    fewer: frozenset[str] = frozenset()

    def asks(self, question: Question, more: bool) -> bool:
        wanted = question.asked == "always" or (more and question.asked == "more") or question.name in self.more
        return wanted and question.name not in self.fewer


_DEEPSPEED, _DEBUG = frozenset({"deepspeed"}), frozenset({"deepspeed", "debug"})
RELEASES: tuple[Release, ...] = (
    Release(),  # Stoker's own, and that of accelerate's guide for IPEX
    Release(more=_DEEPSPEED),
    Release(more=_DEBUG),  # 0.28 on
    Release(more=_DEBUG | {"dynamo_use_regional_compilation"}),  # 1.7 on
    Release(more=_DEEPSPEED, fewer=frozenset({"use_mpirun"})),
    Release(more=_DEBUG, fewer=frozenset({"use_mpirun"})),  # before 0.28
    Release(fewer=frozenset({"use_mpirun"})),
    Release(more=_DEBUG | {"dynamo_use_regional_compilation"}, fewer=frozenset({"ipex", "mpirun_ccl"})),  # without IPEX
)
"""Tried in this order if the answers come from a pipe."""


def _is_distributed(answers: Answers) -> bool:
    return bool(answers["distributed_type"] == "MULTI_CPU")


def _machines(answers: Answers) -> bool:
    return _is_distributed(answers) and answers.get("num_machines", 1) > 1


def _by_mpi(answers: Answers) -> bool:
    return _is_distributed(answers) and bool(answers.get("use_mpirun"))


def _compiles(answers: Answers) -> bool:
    return bool(answers.get("dynamo"))


def _customized(answers: Answers) -> bool:
    return _compiles(answers) and bool(answers.get("dynamo_customized"))


def _threads(answers: Answers, machine: Machine) -> int:
    local = max(answers.get("num_processes", 1) // max(answers.get("num_machines", 1), 1), 1)
    return place(machine, local, oversubscribe=True)[0].threads


_DYNAMO = (
    "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt", "onnxrt", "tensorrt",
    "aot_torchxla_trace_once", "torhchxla_trace_once", "tvm",
)  # fmt: skip
"""accelerate's list, its spelling included: notes may name a backend by number."""
_MODES = ("default", "reduce-overhead", "max-autotune")


def _choices(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return tuple(names.items() if isinstance(names, Mapping) else ((name, name) for name in names))


def _choose(name: str, text: str, **rest: Any) -> Question:
    """A question about an option with a fixed set of values."""
    option = IN_FILE[name]
    return Question(name, text, "choice", option.unset, _choices(option.choices), **rest)


# fmt: off
QUESTIONS: tuple[Question, ...] = (
    Question("compute_environment", "In which compute environment are you running?", "choice", "LOCAL_MACHINE",
             (("LOCAL_MACHINE", "This machine"),)),
    Question("distributed_type", "Which type of machine are you using?", "choice",
             lambda answers, machine: "MULTI_CPU" if processes_and_threads(machine)[0] > 1 else "NO",
             (("NO", "No distributed training"), ("MULTI_CPU", "multi-CPU"))),
    Question("num_machines", "How many different machines will you use (use more than 1 for multi-node training)?", "number", 1,
             when=_is_distributed),
    Question("machine_rank", "What is the rank of this machine?", "number", 0, when=_machines, least=0),
    Question("main_process_ip", "What is the IP address of the machine that will host the main process?", "text",
             lambda answers, machine: network.own_address() if answers.get("machine_rank", 0) == 0 else "", when=_machines),
    Question("main_process_port", "What is the port you will use to communicate with the main process?", "number", 29500,
             when=_machines),
    Question("same_network", "Are all the machines on the same local network?", "yes", True, when=_machines),
    Question("rdzv_backend", "What rendezvous backend will you use? ('static', 'c10d', ...)", "text", "static",
             when=lambda answers: _machines(answers) and not answers["same_network"]),
    Question("debug", "Should distributed operations be checked while running for errors?", "yes", False,
             when=_is_distributed, asked="piped"),
    Question("use_cpu", "Do you want to run your training on CPU only?", "yes", True,
             when=lambda answers: not _is_distributed(answers)),
    Question("ipex", "Do you want to use Stoker's optimisations (what Intel PyTorch Extension, IPEX, was for)?", "yes", True),
    Question("use_mpirun", "Do you want Stoker to launch mpirun?", "yes", False, when=_is_distributed),
    Question("mpirun_hostfile", "Please enter the path to the hostfile to use with mpirun", "text", "~/hostfile", when=_by_mpi),
    Question("mpirun_ccl", "Enter the number of oneCCL worker threads (cores of each process kept for communication)", "number",
             0, when=_by_mpi, least=0),
    _choose("launcher", "What should start the processes?", when=_is_distributed, asked="more"),
    Question("dynamo", "Do you wish to optimize your script with torch dynamo?", "yes", False),
    Question("dynamo_backend", "Which dynamo backend would you like to use?", "choice", "inductor", _choices(_DYNAMO),
             when=_compiles),
    Question("dynamo_customized", "Do you want to customize the defaults sent to torch.compile?", "yes", False, when=_compiles),
    Question("dynamo_mode", "Which mode do you want to use?", "choice", "default", _choices(_MODES), when=_customized),
    Question("dynamo_use_fullgraph", "Do you want the fullgraph mode or it is ok to break model into several subgraphs?", "yes",
             False, when=_customized),
    Question("dynamo_use_dynamic", "Do you want to enable dynamic shape tracing?", "yes", False, when=_customized),
    Question("dynamo_use_regional_compilation", "Do you want to enable regional compilation?", "yes", False,
             when=_customized, asked="piped"),
    Question("deepspeed", "Do you want to use DeepSpeed?", "yes", False,
             when=lambda answers: not _is_distributed(answers), asked="piped"),
    Question("num_processes", "How many processes should be used for distributed training?", "number",
             lambda answers, machine: answers.get("num_machines", 1) * max(processes_and_threads(machine)[0], 1),
             when=_is_distributed),
    Question("num_cpu_threads_per_process", "How many threads should each process use?", "number", _threads, asked="more",
             meaning="one per core of the machine it runs on"),
    _choose("mixed_precision", "Do you wish to use mixed precision?"),
)
# fmt: on


def to_config(answers: Answers) -> Config:
    if answers.get("deepspeed"):
        raise UserError("Stoker does not launch DeepSpeed, because it trains on CPUs; answer no")
    compile_options = ("dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation")
    compiled = {name: answers[name] for name in compile_options if name in answers}
    other: dict[str, Any] = {"dynamo_config": compiled} if compiled else {}
    if answers.get("debug"):
        other["debug"] = True
    names = {name: option.config.rpartition(".")[2] for name, option in IN_FILE.items()}
    names |= {name: name for name in ("distributed_type", "rdzv_backend", "same_network", "use_cpu")}
    values = {name: answers[key] for name, key in names.items() if answers.get(key) not in (None, "")}
    return Config(**{"num_processes": 1, **values}, other=other)
