"""`stoker launch`, from the options to the end: the plan, the checks, and the launcher that the plan names."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace

from stoker import streams
from stoker.errors import UserError
from stoker.hf.checkpointing import command
from stoker.hf.secrets import is_secret, without_secrets
from stoker.launch import plan as planning
from stoker.launch.config import config_file
from stoker.launch.launchers import elastic, mpi, remote_hosts
from stoker.launch.launchers.elastic_job import silence
from stoker.launch.options import Options
from stoker.launch.rank import handover
from stoker.launch.rank.environment import Rank, discover
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine

__all__ = ["start", "with_launch"]


def start(options: Options) -> int:
    """Runs the script as asked; does not return where this very process becomes the script's."""
    config, path = config_file.find(options.config_file)
    if options.emit:
        from stoker.launch.launchers.emit import emit

        for name in [name for name, _ in options.genv if is_secret(name)]:
            print(
                f"stoker: -genv {name} is left out, because others may read what is printed here; export it before sbatch, or "
                "add a Kubernetes Secret",
                file=sys.stderr,
            )
        print(emit(options, config), end="")
        return 0
    rank = discover(os.environ)
    first = rank is None or rank.rank == 0
    if first:
        _say(options, config, path)
    if not options.module and not os.path.isfile(options.script):
        raise UserError(f"there is no script {options.script!r}; for a module, use -m")
    if rank is not None:
        return _inside(options, config, rank)
    if options.dry_run:
        plan = planning.make(options, config, Machine.read(), os.environ)
        print(planning.show(plan, options, os.environ))
        return 0
    streams.keep_running()
    plan = planning.make(options, config, Machine.read(), os.environ)
    for note in plan.notes:
        print(f"stoker: {note}", file=sys.stderr)
    stays = plan.launcher == "torchrun" or plan.mpirun is not None  # this process does not become a rank
    plan = replace(plan, settings=with_launch(plan.settings, options, tells=stays))
    if plan.launcher == "single":
        return _become(*handover.rank_command(plan.settings, options.script, options.arguments))
    if plan.launcher == "slurm":
        return _slurm(plan, options)
    if plan.mpirun is not None:
        return _mpirun(plan, options)
    restarts = options.max_restarts if options.max_restarts is not None else 3 if plan.least < plan.machines else 0
    job = elastic.Job(
        local_size=len(plan.ranks),
        machines=plan.machines,
        least=plan.least,
        machine_rank=plan.machine_rank,
        address=plan.address,
        port=plan.port,
        max_restarts=restarts,
        wait=options.wait,
        silence=silence(),
    )
    return _then_tell(plan, options, elastic.launch(job, plan.settings, options.script, options.arguments))


def _then_tell(plan: planning.Plan, options: Options, code: int) -> int:
    """How to go on, unless all is done or the command itself was wrong."""
    how = command.after_failed_launch(plan.settings.launched, options.arguments) if code not in (0, 2) else None
    if how is not None:
        print(f"stoker: to resume from the last checkpoint:\n{how}", file=sys.stderr, flush=True)
    return code


def with_launch(settings: Settings, options: Options, *, tells: bool = False, outer: str | None = None) -> Settings:
    """The settings with what a rank needs in order to print the command, or to leave that to this process (`tells`)."""
    tells = tells and command.output_of(options.arguments) is not None
    return replace(settings, launched=_launch_words(options), tells=tells, outer=outer)


def _launch_words(options: Options) -> tuple[str, ...]:
    """This command line up to the script, as it was typed; its secrets are hidden."""
    typed = sys.argv[1 : len(sys.argv) - len(options.arguments)]
    if typed[:1] != ["launch"] or [*typed, *options.arguments] != sys.argv[1:]:  # called from Python
        typed = ["launch", *["-m"] * options.module, options.script]
    return (*command.program(), *without_secrets(typed))


def _say(options: Options, config: config_file.Config, path: object) -> None:
    lines = list(options.notes)
    if path is not None and not options.config_file:
        lines.append(f"config file {path}")
    lines += [f"{path}: {note}" for note in config.notes]
    for line in lines:
        print(f"stoker: {line}", file=sys.stderr)


def _inside(options: Options, config: config_file.Config, rank: Rank) -> int:
    """Another launcher has started this as one of its ranks: there is nothing left to launch."""
    if rank.rank == 0 and options.processes not in (None, rank.size):
        print(
            f"stoker: {rank.launcher} has started {rank.size} processes; -n {options.processes} has no effect",
            file=sys.stderr,
        )
    settings = planning.settings_for(options, config)
    if options.dry_run:
        if rank.rank == 0:
            print(f"launcher: {rank.launcher}, already running; {rank.size} processes, this is rank {rank.rank}")
        return 0
    settings = with_launch(replace(settings, several=True), options, outer=rank.launcher)
    return _become(*handover.rank_command(settings, options.script, options.arguments))


def _become(words: list[str], carried: Mapping[str, str]) -> int:
    """The script's process is this one: same pid, same parent, no fork."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(words[0], words, {**os.environ, **carried})


def _mpirun(plan: planning.Plan, options: Options) -> int:
    assert plan.mpirun is not None
    if options.max_restarts:
        print(
            "stoker: --max_restarts: mpirun cannot restart; give it to torchrun (--launcher torchrun)", file=sys.stderr
        )
    if options.check_hosts:
        remote_hosts.check_hosts([host.name for host, _ in plan.counts])
    job = secrets.token_hex(8)
    told = replace(plan, settings=replace(plan.settings, several=True, report="stderr", job=job))
    environment = {**os.environ, **planning.handed_over(told, options)}
    code = mpi.launch(
        plan.mpirun, plan.counts, handover.command(job, options.script), environment, options.extra_mpi, job=job,
        with_hostfile=plan.with_hostfile,
    )  # fmt: skip
    return _then_tell(plan, options, code)


def _slurm(plan: planning.Plan, options: Options) -> int:
    if "SLURM_JOB_ID" not in os.environ:
        raise UserError(
            "--launcher slurm works inside an allocation (salloc, sbatch); `stoker launch --emit slurm ...` writes a batch script"
        )
    import shutil

    srun = shutil.which("srun")
    if srun is None:
        raise UserError("this is a Slurm allocation, but there is no srun on PATH")
    told = replace(plan, settings=replace(plan.settings, several=True))
    carried = planning.handed_over(told, options)
    words = planning.srun_command(told, handover.command(secrets.token_hex(8), options.script), carried, os.environ)
    return _become([srun, *words[1:]], carried)
