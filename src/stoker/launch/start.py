"""`stoker launch`, from the options to the exit code: config file, choice of a launcher, plan, run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from stoker import streams
from stoker.errors import UserError
from stoker.hf.checkpointing import command as resume_command
from stoker.hf.secrets import is_secret, without_secrets
from stoker.launch.config.config_file import Config, find, with_config
from stoker.launch.config.torchrun_variables import with_torchrun_variables
from stoker.launch.launch_plan import Launcher, Plan, show
from stoker.launch.launchers.local import Single, become
from stoker.launch.launchers.mpirun import MpirunLauncher
from stoker.launch.launchers.slurm import Slurm
from stoker.launch.launchers.torchrun import Torchrun
from stoker.launch.options import AUTOMATIC, Options
from stoker.launch.rank import handover
from stoker.launch.rank.environment import Rank, discover
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine
from stoker.machine.processes import best_division

__all__ = ["LAUNCHERS", "make_plan", "start", "with_launch_command"]

LAUNCHERS: tuple[Launcher, ...] = (Slurm(), MpirunLauncher(), Torchrun(), Single())
"""In this order: the first that accepts the options is used."""
_NO_HEALING = (
    "--heal is ignored because {}; it needs several ranks under torchrun's agent, which `stoker launch -n 2` starts"
)


def start(options: Options) -> int:
    """Runs the script with these options; does not return if this process is replaced by the script's."""
    config, path = find(options.config_file)
    requested = options.num_processes
    rank = None if options.emit else discover(os.environ)
    if not options.emit and rank is None:
        options = with_torchrun_variables(options, os.environ)
    notes = _notes(options, config, path)
    options = with_config(options, config)
    if options.emit:
        return _emit(options)
    if rank is None or rank.rank == 0:
        _print_notes(notes)
    if not options.module and not os.path.isfile(options.script):
        raise UserError(f"there is no script {options.script!r}; for a module, use -m")
    if rank is not None:
        return _run_as_rank(options, rank, requested)
    if not options.dry_run:
        streams.keep_running()
    launcher, plan = make_plan(options, Machine.read(), os.environ)
    if options.dry_run:
        print(show(plan, options, launcher.command(plan, options, os.environ)))
        return 0
    _print_notes(plan.notes)
    plan = replace(plan, settings=with_launch_command(plan.settings, options, launcher_prints=launcher.stays))
    code = launcher.run(plan, options)
    resume = None
    if code not in (0, 2):  # 2: the command itself was wrong
        resume = resume_command.after_failed_launch(plan.settings.launch_command, options.arguments)
    if resume is not None:
        print(f"stoker: to resume from the last checkpoint:\n{resume}", file=sys.stderr, flush=True)
    return code


def make_plan(options: Options, machine: Machine, environment: Mapping[str, str]) -> tuple[Launcher, Plan]:
    """The launcher for these options, and what it would do."""
    if options.per_machine == AUTOMATIC and not options.hostfile and options.launcher != "slurm":
        options = replace(options, per_machine=best_division(machine, options.nodes).processes)
    launcher = next(one for one in LAUNCHERS if one.accepts(options))
    elastic = launcher.name == "torchrun" and options.launcher in (None, "auto", "torchrun")
    if options.min_machines is not None and not elastic:
        raise UserError(
            f"--nnodes {options.min_machines}:{options.num_machines}: only torchrun's agent continues without a machine; start "
            "`stoker launch --launcher torchrun --nnodes ...` on each, or give one number"
        )
    settings = Settings.from_options(options)
    notes = []
    if options.heal and launcher.name != "torchrun":
        settings = replace(settings, heal=False)
        notes.append(
            _NO_HEALING.format(
                "there is one process" if launcher.name == "single" else f"{launcher.name} starts the ranks"
            )
        )
    plan = launcher.plan(options, settings, machine, {**environment, **dict(options.genv)})
    return launcher, replace(plan, notes=(*plan.notes, *notes))


def with_launch_command(
    settings: Settings, options: Options, *, launcher_prints: bool = False, outer: str | None = None
) -> Settings:
    """Adds what a rank needs in order to print the command that resumes the run, or to leave that to the launcher."""
    prints = launcher_prints and resume_command.output_of(options.arguments) is not None
    typed = sys.argv[1 : len(sys.argv) - len(options.arguments)]
    if typed[:1] != ["launch"] or [*typed, *options.arguments] != sys.argv[1:]:  # called from Python
        typed = ["launch", *["-m"] * options.module, options.script]
    command = (*resume_command.program(), *without_secrets(typed))
    return replace(settings, launch_command=command, launcher_prints_resume=prints, outer_launcher=outer)


def _emit(options: Options) -> int:
    from stoker.launch.launchers.emit import emit

    for name in [name for name, _ in options.genv if is_secret(name)]:
        print(
            f"stoker: -genv {name} is left out, because others may read what is printed here; export it before sbatch, or "
            "add a Kubernetes Secret",
            file=sys.stderr,
        )
    print(emit(options), end="")
    return 0


def _notes(options: Options, config: Config, path: object) -> list[str]:
    default_file = [f"config file {path}"] if path is not None and not options.config_file else []
    return [*options.notes, *default_file, *(f"{path}: {note}" for note in config.notes)]


def _print_notes(notes: list[str] | tuple[str, ...]) -> None:
    for note in notes:
        print(f"stoker: {note}", file=sys.stderr)


def _run_as_rank(options: Options, rank: Rank, requested: int | None) -> int:
    """Another launcher has started this process as one of its ranks: there is nothing to launch."""
    if rank.rank == 0 and requested not in (None, rank.size):
        print(
            f"stoker: -n {requested} is ignored because {rank.launcher} has started {rank.size} processes",
            file=sys.stderr,
        )
    if options.dry_run:
        if rank.rank == 0:
            print(f"launcher: {rank.launcher}, already running; {rank.size} processes, this is rank {rank.rank}")
        return 0
    if options.heal and rank.rank == 0:
        _print_notes([_NO_HEALING.format(f"{rank.launcher} has started the ranks")])
    settings = replace(Settings.from_options(options), is_one_of_several=True, heal=False)
    settings = with_launch_command(settings, options, outer=rank.launcher)
    return become(*handover.rank_command(settings, options.script, options.arguments))
