"""The options of `stoker launch`, each declared once.

A declaration holds the flags, the help, the key in a config file and the environment variable for the script, as far as an
option has them. The command line (`stoker.cli.launch`), the config file (`Config`), what a rank receives (`Settings`), the
scripts of `--emit` and the table in docs/launch.md (printed by `python -m stoker.launch.options`) are derived from it. Options
that `TrainingArguments` has as well are declared in `stoker.distributed.settings` and only named here.

The class says who needs the option: `RankOptions` are sent to every rank, `LaunchOptions` stay with the launcher. Flags that
have no field of their own are in `OTHER_FLAGS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.distributed.settings import DistributedSettings, variable
from stoker.hf.secrets import is_secret
from stoker.launch.rank.allocators import ALLOCATORS
from stoker.numbers import whole_number
from stoker.option_values import count, number, path, port, seconds, whole

__all__ = ["GROUPS", "OTHER_FLAGS", "LaunchOptions", "Option", "Options", "RankOptions", "command_line", "declared",
           "parse_nodes", "table", "to_flags", "to_variables", "truth"]  # fmt: skip

GENERAL = "general"
PROCESSES = "for several processes"
MACHINES = "for several machines"
PLACEMENT = "placement, with the option names of ipexrun"
MPIRUN = "for mpirun"
HIDDEN = ""
_LAST_NODE = 1023  # Linux is built for at most 2^10 NUMA nodes
GROUPS = (GENERAL, PROCESSES, MACHINES, PLACEMENT, MPIRUN)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One declaration. A switch takes no value; any other option has a `convert`."""

    flags: tuple[str, ...] = ()
    off: str = ""
    """The flag that sets a switch to False."""
    group: str = HIDDEN
    help: str = ""
    off_help: str = ""
    convert: Callable[[str], Any] | None = None
    choices: Collection[str] = ()
    """The permitted values. A mapping also holds the description of each, for `stoker config`."""
    metavar: str | None = None
    repeated: bool = False
    """May be given several times; the value is a tuple."""
    config: str = ""
    """Its key in a config file, such as `mpirun_config.mpirun_ccl`."""
    unset: Any = None
    """The value in a config file that means the same as no value at all."""
    variable: str = ""
    """The environment variable that the script finds it in."""
    write: Callable[[Any], Any] = lambda value: value
    """The reverse of `convert`, where str() is not."""
    convert_flag: Callable[[str], Any] | None = None
    """Reads the value on the command line, where it has another form than in a config file."""
    sets: tuple[str, ...] = ()
    """The fields that the flag sets, if not only its own; the value is then a tuple with a value for each."""
    ignored: str | None = None
    """Why the flag has no effect, for the note to the user; empty: without a note."""

    def read(self, value: Any) -> Any:
        """The value that a config file holds; raises argparse.ArgumentTypeError."""
        if self.convert is None:
            return truth(value)
        text = "no" if value is False else str(value)  # `mixed_precision: no` without quotes is False in yaml
        if self.choices and text.lower() not in self.choices:
            raise argparse.ArgumentTypeError(f"{value!r} must be one of {', '.join(self.choices)}")
        return self.convert(text.lower() if self.choices else text)

    @property
    def note(self) -> str:
        """The sentence for a user who gives a flag that is ignored."""
        return f"{self.flags[0]} is ignored: {self.ignored}" if self.ignored else ""


def option(
    usage: str, group: str, help: str, convert: Callable[[str], Any] = str, default: Any = None, **rest: Any
) -> Any:
    """A field for an option with a value. `usage` has its flags and the name of the value, such as `-n --num_processes N`."""
    return dataclasses.field(default=default, metadata={"option": declare(usage, group, help, convert, **rest)})


def switch(usage: str, group: str, help: str, default: bool | None = False, **rest: Any) -> Any:
    """A field for an option without a value."""
    return dataclasses.field(default=default, metadata={"option": declare(usage, group, help, None, **rest)})


_CONVERTERS: dict[type, Callable[[str], Any]] = {str: str, int: whole, float: number}


def distributed(name: str) -> Any:
    """A field for an option that `DistributedSettings` declares; None means that the script decides."""
    setting = DistributedSettings.__dataclass_fields__[name]
    about = dict(setting.metadata)
    convert = _CONVERTERS[type(setting.default)]
    usage = f"--{name} {about.pop('metavar', '')}"
    return option(usage, PROCESSES, about.pop("help"), convert, variable=variable(name), **about)


def declare(usage: str, group: str, help: str, convert: Callable[[str], Any] | None, **rest: Any) -> Option:
    words = usage.split()
    flags = tuple(word for word in words if word.startswith("-"))
    metavar = next((word for word in words if not word.startswith("-")), None)
    return Option(flags=flags, metavar=metavar, group=group, help=help, convert=convert, **rest)


def truth(value: Any) -> bool:
    word = str(value).strip().lower()
    if word in ("yes", "true", "1", "y", "on"):
        return True
    if word in ("no", "false", "0", "n", "off", "none", ""):
        return False
    raise argparse.ArgumentTypeError(f"{value!r} must be true or false")


AUTOMATIC = 0
"""As a number of processes: as many as suit the machine that runs them (`stoker.machine.processes`)."""


def count_or_auto(text: str) -> int:
    return AUTOMATIC if text.strip().lower() == "auto" else count(text)


def parse_nodes(text: str) -> tuple[int, ...]:
    """`0,2-3`, the format of ipexrun's --nodes-list."""
    found: list[int] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        begin, end = whole_number(first), whole_number(last if dash else first)
        if begin is None or end is None or not 0 <= begin <= end:
            raise argparse.ArgumentTypeError(f"{part!r} is neither a number nor a range such as 0-3")
        if end > _LAST_NODE:
            raise argparse.ArgumentTypeError(
                f"{part!r} is too large; no machine has more than {_LAST_NODE + 1:,} NUMA nodes"
            )
        found += range(begin, end + 1)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no NUMA node; write numbers and ranges, such as 0,2-3")
    return tuple(dict.fromkeys(found))


def machine_range(text: str) -> tuple[int | None, int]:
    """`4`, or the least and the most, `2:4`."""
    least, colon, most = text.rpartition(":")
    if not colon:
        return None, count(most)
    low, high = count(least), count(most)
    if low > high:
        raise argparse.ArgumentTypeError(
            f"{text!r} has the larger number first; write the least and the most, such as 1:2"
        )
    return (low, high) if low < high else (None, high)


def _endpoint(text: str) -> tuple[str, int | None]:
    host, colon, number = text.rpartition(":")
    return (host.strip("[]"), port(number)) if colon and number.isdecimal() else (text.strip("[]"), None)


def _shell_words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be split as a shell would split it: {str(error).lower()}"
        ) from None


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.replace("_", "").isalnum():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=VALUE")
    return key, value


def _ignored(flag: str, reason: str) -> Option:
    return declare(flag, HIDDEN, "", None, ignored=reason)


_LAUNCHERS = {
    "auto": "automatic: mpirun with a hostfile, otherwise torchrun",
    "torchrun": "torchrun (stoker launch on each machine)",
    "impi": "Intel MPI (from one machine, over ssh)",
    "mpich": "MPICH (from one machine, over ssh)",
    "openmpi": "Open MPI (from one machine, over ssh)",
    "slurm": "Slurm",
}


# fmt: off
@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Options that hold inside a rank, whatever starts it. They are sent to every rank and written into emitted scripts."""

    module: bool = switch("-m --module", GENERAL, "the script is a module name, as in python -m")
    mixed_precision: str | None = option(
        "--mixed_precision", GENERAL, "what Accelerator() uses; bf16 works on every CPU", choices=("no", "fp16", "bf16", "fp8"),
        config="mixed_precision", unset="no", variable="ACCELERATE_MIXED_PRECISION")
    ipex: bool | None = switch(
        "--ipex", GENERAL, "Stoker's optimisations; on unless --no_ipex", None, off="--no_ipex",
        off_help="leave models and optimizers as they are", config="ipex_config.ipex", unset=True)
    """The old name, which people have in their commands and files."""
    compat: bool = switch(
        "", GENERAL, "", True, off="--no_compat", off_help="install no import hooks: retired arguments stay errors")
    log_dir: str | None = option("--log_dir DIR", GENERAL, "also write one log file per rank to DIR", path)
    threads: int | None = option(
        "--num_cpu_threads_per_process N", GENERAL, "threads per process; default: one per core", count,
        config="stoker_config.num_cpu_threads_per_process")
    backend: str | None = option(
        "--backend", PROCESSES, "what Accelerator() communicates with", choices=("gloo", "ccl", "mpi"))
    gradient_compression: str | None = distributed("gradient_compression")
    local_sgd: int | None = distributed("local_sgd")
    local_sgd_outer_lr: float | None = distributed("local_sgd_outer_lr")
    local_sgd_outer_momentum: float | None = distributed("local_sgd_outer_momentum")
    local_sgd_warmup_steps: int | None = distributed("local_sgd_warmup_steps")
    heal: bool = switch(
        "--heal", PROCESSES, "replace a rank that is killed in training by a new process, and let the others go on")
    oversubscribe: bool = switch("--oversubscribe", PROCESSES, "allow more threads than cores")
    prefix: bool = switch("", PROCESSES, "", True, off="--no_prefix", off_help="no [rank] before each line")
    cores_per_process: int | None = option("--ncores_per_instance N", PLACEMENT, "cores per process", count)
    nodes: tuple[int, ...] | None = option(
        "--nodes_list LIST", PLACEMENT, "NUMA nodes to use, such as 0,1", parse_nodes,
        write=lambda nodes: ",".join(map(str, nodes)))
    logical: bool = switch("--use_logical_cores", PLACEMENT, "use SMT siblings too")
    efficiency: bool = switch("--use_e_cores", PLACEMENT, "use the efficiency cores of a hybrid CPU too")
    bind: str = option(
        "--bind", PLACEMENT, "auto: pin to Stoker's placement; keep: as the launcher has pinned; none: do not pin",
        default="auto", choices=("auto", "keep", "none"))
    allocator: str = option(
        "--memory_allocator", PLACEMENT, "preload this malloc library", default="default", choices=ALLOCATORS)
    ccl_workers: int | None = option(
        "--mpirun_ccl --ccl_worker_count N", PLACEMENT, "cores per process to keep for communication workers", whole,
        config="mpirun_config.mpirun_ccl", unset=0)
    genv: tuple[tuple[str, str], ...] = option(
        "-genv --genv K=V", MPIRUN, "set a variable in all ranks", _assignment, (), repeated=True, write="=".join)
    dynamo_backend: str | None = option(
        "--dynamo_backend", HIDDEN, "", str.lower, config="dynamo_config.dynamo_backend", unset="no", write=str.upper,
        variable="ACCELERATE_DYNAMO_BACKEND")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(RankOptions):
    """All options; those declared here only matter to the launcher."""

    config_file: str | None = option(
        "--config_file FILE", GENERAL, "made by any version of `stoker config` or `accelerate config`", path)
    dry_run: bool = switch("--dry_run", GENERAL, "print ranks, cores, threads, environment and command; run nothing")
    cpu: bool = switch("--cpu", GENERAL, "accepted as in accelerate; Stoker always uses the CPU")
    num_processes: int | None = option(
        "-n -np --num_processes N", PROCESSES, "processes on all machines together", count, config="num_processes")
    """-1, only from a config file: to be given on the command line."""
    per_machine: int | None = option(
        "-ppn -perhost --nproc_per_node --nprocs_per_node N", PROCESSES,
        "processes per machine; auto: as many as its NUMA nodes suggest", count_or_auto)
    launcher: str | None = option(
        "--launcher", PROCESSES, "auto: mpirun with a hostfile, otherwise torchrun's elastic agent",
        choices=_LAUNCHERS, config="stoker_config.launcher", unset="auto")
    max_restarts: int | None = option("--max_restarts N", PROCESSES, "restart all ranks after a failure, up to N times", whole)
    """What was asked for; `allowed_restarts` has the default."""
    hostfile: str | None = option(
        "-f -hostfile -machinefile --hostfile --mpirun_hostfile FILE", MACHINES,
        "hosts for mpirun: one per line, optionally :N or slots=N", path, config="mpirun_config.mpirun_hostfile")
    num_machines: int | None = option(
        "--num_machines --nnodes N", MACHINES, "machines without a hostfile; 2:4 continues with fewer, down to 2", count,
        config="num_machines", unset=1, convert_flag=machine_range, sets=("min_machines", "num_machines"))
    min_machines: int | None = None
    """2 after `--nnodes 2:4`, where `num_machines` is 4."""
    machine_rank: int | None = option(
        "--machine_rank --node_rank N", MACHINES, "number of this machine; 0 is the first", whole, config="machine_rank", unset=0)
    main_process_ip: str | None = option(
        "--main_process_ip --master_addr HOST", MACHINES, "address of machine 0", config="main_process_ip")
    main_process_port: int | None = option(
        "--main_process_port --master_port PORT", MACHINES, "a free port on machine 0", port, config="main_process_port")
    rdzv_timeout: float = option(
        "--rdzv_timeout S", MACHINES, "seconds that machines wait for each other (default 600)", seconds, 600.0)
    check_hosts: bool = switch(
        "", MACHINES, "", True, off="--no_host_check", off_help="do not try ssh and compare versions first")
    emit: str | None = option(
        "--emit", MACHINES, "print a batch script or manifests instead of running",
        choices=("slurm", "kubernetes", "trainjob", "pytorchjob", "mpijob"))
    emit_image: str | None = option("--emit_image IMAGE", MACHINES, "Kubernetes: container image")
    emit_cpus: int | None = option(
        "--emit_cpus N", MACHINES, "Kubernetes: CPUs of each pod, from which threads follow; default: its threads", count)
    emit_memory: str | None = option("--emit_memory SIZE", MACHINES, "Kubernetes: memory of each pod, such as 64Gi")
    emit_cache: str | None = option(
        "--emit_cache CLAIM", MACHINES, "Kubernetes: volume claim for caches and checkpoints, mounted at /cache")
    emit_node_selector: tuple[tuple[str, str], ...] = option(
        "--emit_node_selector K=V", MACHINES, "Kubernetes: label of the nodes to use", _label, (), repeated=True)
    emit_time: str | None = option("--emit_time TIME", MACHINES, "Slurm: time limit, such as 04:00:00")
    emit_partition: str | None = option("--emit_partition PARTITION", MACHINES, "Slurm: partition")
    emit_name: str | None = option("--emit_name NAME", MACHINES, "name of the job")
    extra_mpi: tuple[str, ...] = option("--extra_mpi_params ARGUMENTS", MPIRUN, "more arguments for mpirun", _shell_words, ())
    # fmt: on

    @property
    def allowed_restarts(self) -> int:
        """Three by default where ranks or machines may be lost without ending the job."""
        if self.max_restarts is not None:
            return self.max_restarts
        fewer_machines = self.min_machines is not None and self.min_machines < (self.num_machines or 1)
        return 3 if self.heal or fewer_machines else 0


@dataclass(frozen=True, kw_only=True)
class Options(LaunchOptions):
    """A command line: options, script and the script's arguments. What was not given has its default, mostly None."""

    script: str
    arguments: list[str]
    notes: tuple[str, ...] = ()
    """One sentence for each option that is accepted but ignored."""


# fmt: off
OTHER_FLAGS = {
    "rdzv_endpoint": declare(
        "--rdzv_endpoint HOST[:PORT]", MACHINES, "--main_process_ip and --main_process_port in one, as in torchrun", _endpoint,
        sets=("main_process_ip", "main_process_port")),
    "ninstances": declare(
        "--ninstances N", PLACEMENT, "processes per machine", lambda text: (count(text),), sets=("per_machine",)),
    "unused": declare("--rdzv_backend --rdzv_id --main_training_function --gpu_ids", HIDDEN, "", str, ignored=""),
    "quiet": _ignored("--quiet", ""),
    "enable_cpu_affinity": _ignored("--enable_cpu_affinity", "every process has its own cores anyway"),
    "same_network": _ignored("--same_network", "nothing depends on it any more"),
    "debug": _ignored("--debug", "set ACCELERATE_DEBUG_MODE=true for accelerate's checks of collectives"),
    "multi_gpu": _ignored("--multi_gpu", "Stoker trains on CPUs; use -n to set the number of processes"),
    "use_xpu": _ignored("--use_xpu", "Stoker trains on CPUs"),
    "latency_mode": _ignored("--latency_mode", "it is for inference; use -n and --ncores_per_instance"),
    "throughput_mode": _ignored("--throughput_mode", "it is for inference; use -n"),
}
# fmt: on
"""Flags without a field of their own: they set those of other options, or are accepted for old commands and ignored."""


@functools.cache
def declared(owner: type[RankOptions]) -> Mapping[str, Option]:
    """The options of a class, by the names of their fields."""
    fields = dataclasses.fields(owner)
    return {field.name: field.metadata["option"] for field in fields if "option" in field.metadata}


def command_line() -> dict[str, Option]:
    """Everything that `stoker launch` takes, in the order of its --help."""
    own = {name: one for name, one in declared(LaunchOptions).items() if name not in declared(RankOptions)}
    return {**OTHER_FLAGS, **own, **declared(RankOptions)}


def to_flags(options: RankOptions) -> list[str]:
    """The part of a command line that sets the rank options again; `-m` is left to whoever writes the script's name,
    and secret variables are left out.
    """
    words = []
    for field in dataclasses.fields(RankOptions):
        one, value = declared(RankOptions)[field.name], getattr(options, field.name)
        if field.name == "module" or value == field.default:
            continue
        if one.convert is None:
            words.append(one.flags[-1] if value else one.off)
            continue
        for each in value if one.repeated else [value]:
            if not (field.name == "genv" and is_secret(each[0])):
                words += [one.flags[0], str(one.write(each))]
    return words


def to_variables(options: RankOptions) -> dict[str, str]:
    """The environment variables by which scripts, Trainer and Accelerator() find these options."""
    values = {
        one.variable: (one, getattr(options, name)) for name, one in declared(RankOptions).items() if one.variable
    }
    return {name: str(one.write(value)) for name, (one, value) in values.items() if value is not None}


def table() -> str:
    """All options as Markdown, for docs/launch.md."""
    lines = ["| option | meaning | key in a config file |", "|---|---|---|"]
    for group in GROUPS:
        lines.append(f"| **{group}** | | |")
        for one in command_line().values():
            value = one.metavar or r"\|".join(one.choices)
            for flags, text in ((one.flags, one.help), ((one.off,), one.off_help)):
                if one.group == group and text:
                    names = [*flags[:-1], f"{flags[-1]} {value}".strip()]
                    key = f"`{one.config}`" if one.config else ""
                    lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {text} | {key} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
