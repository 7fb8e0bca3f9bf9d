"""`stoker launch`: its options, by the names that accelerate, mpirun and ipexrun gave them, each with one meaning here."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from stoker.cli import parsing
from stoker.distributed.settings import COMPRESSIONS, DistributedSettings
from stoker.errors import UserError
from stoker.launch.config.config_file import LAUNCHERS, PRECISIONS
from stoker.launch.options import Options
from stoker.launch.placement.divide_cores import parse_nodes
from stoker.launch.rank import allocators
from stoker.requires import require

__all__ = ["main", "parse"]

_EXAMPLES = """examples:
  stoker launch run_qa.py --model_name_or_path ...          one process, all cores
  stoker launch -n 2 nlp_example.py                         two processes on this machine
  stoker launch -f hostfile -n 16 -ppn 4 nlp_example.py     sixteen on four machines, by mpirun
  mpirun -f hostfile -n 16 -ppn 4 stoker launch nlp_example.py    the same, started by hand
  stoker launch --dry-run -n 2 nlp_example.py               show what would run, and where

Options stand before the script; everything after it belongs to the script. docs/launch.md says more.
"""


def main(argv: list[str]) -> int:
    from stoker.launch.start import start

    return start(parse(argv))


def parse(argv: list[str]) -> Options:
    parser = build_parser()
    head, script, arguments = _split(parser, argv)
    found = vars(parser.parse_args(head))
    if script is None:
        raise UserError(
            "stoker launch: which script? Write it after the options: stoker launch [options] script.py ..."
        )
    notes = [line for name, line in _WITHOUT_EFFECT.items() if found.pop(name) and line]
    return _options(found, script, arguments, notes)


def _options(found: dict[str, Any], script: str, arguments: list[str], notes: list[str]) -> Options:
    processes = found["num_processes"]
    per_machine = found["ppn"]
    if found["ninstances"] is not None:
        if per_machine is not None and per_machine != found["ninstances"]:
            raise UserError(
                f"-ppn {per_machine} and --ninstances {found['ninstances']} contradict each other; give one"
            )
        per_machine = found["ninstances"]
    least, machines = found["num_machines"] or (None, None)
    address, port = found["rdzv_endpoint"] or (None, None)
    nodes = parse_nodes(found["nodes_list"]) if found["nodes_list"] is not None else None
    emit = {key: found[f"emit_{key}"] for key in ("image", "time", "partition", "name") if found[f"emit_{key}"]}
    return Options(
        script=script,
        arguments=arguments,
        module=found["module"],
        config_file=found["config_file"],
        cpu=found["cpu"],
        ipex=found["ipex"],
        compat=not found["no_compat"],
        mixed_precision=found["mixed_precision"],
        dynamo_backend=found["dynamo_backend"],
        backend=found["backend"],
        processes=processes,
        per_machine=per_machine,
        machines=machines,
        least_machines=least,
        machine_rank=found["machine_rank"],
        main_process_ip=found["main_process_ip"] or address,
        main_process_port=found["main_process_port"] if found["main_process_port"] is not None else port,
        hostfile=found["mpirun_hostfile"],
        launcher=found["launcher"],
        threads=found["num_cpu_threads_per_process"],
        workers=found["mpirun_ccl"],
        cores_per_process=found["ncores_per_instance"],
        nodes=nodes,
        logical=found["use_logical_cores"],
        efficiency=found["use_e_cores"],
        oversubscribe=found["oversubscribe"],
        bind=found["bind"],
        allocator=found["memory_allocator"],
        max_restarts=found["max_restarts"],
        wait=found["rdzv_timeout"],
        log_dir=found["log_dir"],
        prefix=not found["no_prefix"],
        check_hosts=not found["no_host_check"],
        genv=(*found["genv"], *_training_words(found)),
        extra_mpi=found["extra_mpi_params"],
        dry_run=found["dry_run"],
        emit=found["emit"],
        emit_options=emit,
        notes=tuple(notes),
    )


def _training_words(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What Trainer and Accelerator() are told through the environment of the ranks."""
    names = ("gradient_compression", "local_sgd", "local_sgd_outer_lr", "local_sgd_outer_momentum")
    try:
        DistributedSettings(**{name: found[name] for name in names if found[name] is not None})
    except ValueError as error:
        raise UserError(f"stoker launch: {error}") from None
    return [(f"STOKER_{name.upper()}", str(found[name])) for name in names if found[name] is not None]


_WITHOUT_EFFECT = {
    "enable_cpu_affinity": "--enable_cpu_affinity: every process has its own cores anyway",
    "same_network": "--same_network: nothing depends on it any more",
    "debug": "--debug: set ACCELERATE_DEBUG_MODE=true for accelerate's checks of collectives",
    "multi_gpu": "--multi_gpu: Stoker trains on CPUs; the number of processes is followed",
    "use_xpu": "--use_xpu: Stoker trains on CPUs",
    "quiet": "",
    "latency_mode": "--latency-mode: meant inference with one process per core; give -n and --ncores-per-instance",
    "throughput_mode": "--throughput-mode: meant inference with one process per node; give -n",
}


def build_parser() -> parsing.Parser:
    parser = parsing.Parser("launch", "run a script on the CPUs of this machine, or of many", examples=_EXAMPLES)
    parser.usage = "stoker launch [options] script.py [script arguments]"
    everyone = parser.add_argument_group("for everyone")
    _add(everyone, "-m", "--module", action="store_true", help="the script is a module name, as in python -m")
    _add(
        everyone,
        "--config_file",
        type=parsing.path,
        metavar="FILE",
        help="made by `stoker config` or `accelerate config`, of any age",
    )
    _add(everyone, "--mixed_precision", choices=PRECISIONS, help="what Accelerator() uses; bf16 works on every CPU")
    _add(everyone, "--ipex", action="store_true", default=None, help="Stoker's optimisations; on unless --no-ipex")
    _add(everyone, "--no_ipex", action="store_false", dest="ipex", help="leave models and optimizers as they are")
    _add(everyone, "--no_compat", action="store_true", help="install no hooks at all: retired words stay retired")
    _add(everyone, "--log_dir", type=parsing.path, metavar="DIR", help="one file per rank in DIR, beside the screen")
    _add(
        everyone,
        "--dry_run",
        action="store_true",
        help="print ranks, cores, threads, environment and command; run nothing",
    )
    _add(
        everyone,
        "--num_cpu_threads_per_process",
        type=parsing.count,
        metavar="N",
        help="threads; without it, one per core",
    )
    _add(everyone, "--cpu", action="store_true", help="as accelerate has it; this is always the CPU")

    several = parser.add_argument_group("for several processes")
    _add(
        several,
        "-n",
        "-np",
        "--num_processes",
        type=parsing.count,
        metavar="N",
        help="processes on all machines together",
    )
    _add(
        several,
        "-ppn",
        "-perhost",
        "--nprocs_per_node",
        type=parsing.count,
        dest="ppn",
        metavar="N",
        help="processes per machine",
    )
    _add(several, "--launcher", choices=LAUNCHERS, help="auto: mpirun with a hostfile, else torchrun's elastic agent")
    _add(several, "--backend", choices=("gloo", "ccl", "mpi"), help="what Accelerator() communicates with")
    _add(several, "--max_restarts", type=parsing.whole, metavar="N", help="start all again after a failure, so often")
    _add(several, "--gradient_compression", choices=COMPRESSIONS, help="how gradients travel; bf16 halves the bytes")
    _add(
        several,
        "--local_sgd",
        type=parsing.whole,
        metavar="K",
        help="average weights every K steps, not gradients at each",
    )
    _add(several, "--local_sgd_outer_lr", type=parsing.number, metavar="X", help="of the averages (1.0; DiLoCo: 0.7)")
    _add(
        several,
        "--local_sgd_outer_momentum",
        type=parsing.number,
        metavar="X",
        help="of the averages (0.0; DiLoCo: 0.9)",
    )
    _add(several, "--oversubscribe", action="store_true", help="allow more threads than cores")
    _add(several, "--no_prefix", action="store_true", help="no [rank] before each line")

    machines = parser.add_argument_group("for several machines")
    _add(machines, "-f", "-hostfile", "-machinefile", "--hostfile", "--mpirun_hostfile", dest="mpirun_hostfile",
         type=parsing.path, metavar="FILE", help="hosts for mpirun: one per line, optionally :N or slots=N")  # fmt: skip
    _add(machines, "--num_machines", "--nnodes", type=_machines, dest="num_machines", metavar="N",
         help="without a hostfile; 2:4 goes on with what is left, down to 2")  # fmt: skip
    _add(
        machines,
        "--machine_rank",
        "--node_rank",
        type=parsing.whole,
        dest="machine_rank",
        metavar="N",
        help="0 is the first",
    )
    _add(machines, "--main_process_ip", "--master_addr", dest="main_process_ip", metavar="HOST", help="of machine 0")
    _add(machines, "--main_process_port", "--master_port", type=parsing.port, dest="main_process_port", metavar="PORT",
         help="free on machine 0")  # fmt: skip
    _add(
        machines,
        "--rdzv_endpoint",
        type=_endpoint,
        metavar="HOST[:PORT]",
        help="the two above in one, as torchrun has it",
    )
    _add(
        machines,
        "--rdzv_timeout",
        type=parsing.seconds,
        default=600.0,
        metavar="S",
        help="how long machines wait for each other",
    )
    _add(machines, "--no_host_check", action="store_true", help="do not try ssh and compare versions first")
    _add(
        machines, "--emit", choices=("slurm", "kubernetes"), help="print a batch script or manifests instead of running"
    )
    for name, text in (("image", "Kubernetes: container image"), ("time", "Slurm: limit, such as 04:00:00"),
                       ("partition", "Slurm: partition"), ("name", "name of the job")):  # fmt: skip
        _add(machines, f"--emit_{name}", metavar=name.upper(), help=text)

    placing = parser.add_argument_group("placement, by the words of ipexrun")
    _add(placing, "--ninstances", type=parsing.count, metavar="N", help="processes per machine")
    _add(placing, "--ncores_per_instance", type=parsing.count, metavar="N", help="cores per process")
    _add(placing, "--nodes_list", metavar="LIST", help="NUMA nodes to use, such as 0,1")
    _add(placing, "--use_logical_cores", action="store_true", help="use SMT siblings too")
    _add(placing, "--use_e_cores", action="store_true", help="use the efficiency cores of a hybrid CPU too")
    _add(
        placing,
        "--bind",
        choices=("auto", "keep", "none"),
        default="auto",
        help="own placement, the launcher's, or none",
    )
    _add(placing, "--memory_allocator", choices=allocators.ALLOCATORS, default="default", help="preload this malloc")
    _add(placing, "--mpirun_ccl", "--ccl_worker_count", type=parsing.whole, dest="mpirun_ccl", metavar="N",
         help="cores per process to keep for communication workers")  # fmt: skip

    mpi = parser.add_argument_group("for mpirun")
    _add(
        mpi,
        "-genv",
        "--genv",
        type=_pair,
        action="append",
        default=[],
        metavar="K=V",
        help="set a variable in all ranks",
    )
    _add(mpi, "--extra_mpi_params", type=_shell_words, default=(), metavar="WORDS", help="more words for mpirun")

    _add(parser, "--dynamo_backend", help=argparse.SUPPRESS)
    _add(
        parser,
        "--rdzv_backend",
        "--rdzv_id",
        "--main_training_function",
        "--gpu_ids",
        dest="_unused",
        help=argparse.SUPPRESS,
    )
    for name in _WITHOUT_EFFECT:
        _add(parser, f"--{name}", action="store_true", help=argparse.SUPPRESS)
    return parser


def _add(parser: Any, *names: str, **rest: Any) -> None:
    """Each long name in both spellings, --num_processes and --num-processes; the help shows one."""
    if "dest" not in rest:
        rest["dest"] = next(name for name in names if name.startswith("--")).lstrip("-").replace("-", "_")
    action = parser.add_argument(*names, **rest)
    require("option names")
    for name in names:
        if name.startswith("--"):
            parser._option_string_actions.setdefault(name.replace("_", "-"), action)


def _split(parser: parsing.Parser, argv: list[str]) -> tuple[list[str], str | None, list[str]]:
    """Options, script, script arguments. argparse would look into the script's arguments for its own."""
    takes = {name: action.nargs != 0 for name, action in parser._option_string_actions.items()}
    head: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            return head, *_first(words)
        if not word.startswith("-") or word == "-":
            return head, word, words
        head.append(word)
        name, equals, _ = word.partition("=")
        if takes.get(name, False) and not equals and words:
            value = words.pop(0)
            if name in ("-genv", "--genv") and "=" not in value and words:
                value = f"{value}={words.pop(0)}"  # `-genv K V`, as Hydra has it
            head.append(value)
    return head, None, []


def _first(words: list[str]) -> tuple[str | None, list[str]]:
    return (words[0], words[1:]) if words else (None, [])


def _machines(text: str) -> tuple[int | None, int]:
    """`4`, or the least and the most, `2:4`."""
    least, colon, most = text.rpartition(":")
    if not colon:
        return None, parsing.count(most)
    fewest, all_of_them = parsing.count(least), parsing.count(most)
    if fewest > all_of_them:
        raise argparse.ArgumentTypeError(
            f"{text!r} has the larger number first; write the least and the most, such as 1:2"
        )
    return (fewest, all_of_them) if fewest < all_of_them else (None, all_of_them)


def _endpoint(text: str) -> tuple[str, int | None]:
    host, colon, port = text.rpartition(":")
    return (host.strip("[]"), parsing.port(port)) if colon and port.isdecimal() else (text.strip("[]"), None)


def _shell_words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be cut into words: {str(error).lower()}") from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.replace("_", "").isalnum():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
