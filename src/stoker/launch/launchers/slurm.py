"""Slurm: `srun` inside an allocation, and the batch script that `--emit slurm` prints."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace

from stoker.errors import UserError
from stoker.launch.launch_plan import Plan, PlannedRank, counts, handed_over
from stoker.launch.launchers.local import become
from stoker.launch.options import Options, RankOptions, to_flags
from stoker.launch.rank import handover
from stoker.launch.rank.rank_settings import Settings
from stoker.machine import Machine

__all__ = ["Slurm", "batch_script"]


class Slurm:
    name, stays = "slurm", False

    def accepts(self, options: Options) -> bool:
        return options.launcher == "slurm"

    def plan(self, options: Options, settings: Settings, machine: Machine, environment: Mapping[str, str]) -> Plan:
        total, local, machines = counts(options)
        ranks = tuple(PlannedRank(rank, "by Slurm", rank % local, None) for rank in range(total))
        return Plan(launcher=self.name, program="srun", settings=settings, ranks=ranks, size=total, machines=machines)

    def command(self, plan: Plan, options: Options, environment: Mapping[str, str]) -> list[str]:
        return _srun(plan, handover.command("JOB", options.script), handed_over(plan, options), environment)

    def run(self, plan: Plan, options: Options) -> int:
        if "SLURM_JOB_ID" not in os.environ:
            raise UserError(
                "--launcher slurm works inside an allocation (salloc, sbatch); `stoker launch --emit slurm ...` writes a batch "
                "script"
            )
        srun = shutil.which("srun")
        if srun is None:
            raise UserError("this is a Slurm allocation, but srun is not on PATH; add its directory to PATH")
        settings = replace(plan.settings, is_one_of_several=True, secret=secrets.token_hex(16))
        variables = handed_over(replace(plan, settings=settings), options)
        program = handover.command(secrets.token_hex(8), options.script)
        return become([srun, *_srun(plan, program, variables, os.environ)[1:]], variables)


def _srun(plan: Plan, program: list[str], variables: Collection[str], environment: Mapping[str, str]) -> list[str]:
    # An allocation made with --export=NONE or a list of names would not let the variables through.
    exported = environment.get("SLURM_EXPORT_ENV") or "ALL"
    exported = ",".join([*([exported] if exported not in ("NONE", "NIL") else []), *variables])
    sizes = ["-N", str(plan.machines), "-n", str(plan.size), "--ntasks-per-node", str(plan.size // plan.machines)]
    return ["srun", *sizes, f"--export={exported}", *_common(plan.settings), *program]


def _common(options: RankOptions) -> list[str]:
    """Ranks pin themselves, each on its own node, so nodes may differ; srun pins tasks to the same number of CPUs everywhere."""
    return [*["--cpu-bind=none"] * (options.bind != "keep"), "--kill-on-bad-exit=1"]


def batch_script(options: Options, name: str) -> str:
    total, local, machines = counts(options)
    script = ["-m"] * options.module + [options.script, *options.arguments]
    program = ["stoker", "launch", *to_flags(options), *script]
    if ":" in program:  # srun would start what follows as another program
        program = ["sh", "-c", "exec " + shlex.join(program)]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={machines}",
        f"#SBATCH --ntasks={total}",
        f"#SBATCH --ntasks-per-node={local}",
        *([f"#SBATCH --cpus-per-task={options.threads}"] if options.threads else _WHOLE_NODES),
        *_given("time", options.emit_time),
        *_given("partition", options.emit_partition),
        "#SBATCH --output=%x-%j.log",
        "# When a node fails, the job is queued again; Trainer then resumes from its last checkpoint. The log is continued.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "",
        "set -euo pipefail",
        "",
        *_restarts(options.max_restarts or 0),
        shlex.join(["srun", *_common(options), *program]),
    ]
    return "\n".join(lines) + "\n"


_WHOLE_NODES = ("#SBATCH --exclusive", "#SBATCH --mem=0")
"""All cores and all memory of each node."""


def _given(option: str, value: str | None) -> list[str]:
    if value and not re.fullmatch(r"[\w:.,-]+", value, re.ASCII):
        raise UserError(f"--emit_{option} {value!r} is not a value that Slurm accepts")
    return [f"#SBATCH --{option}={value}"] if value else []


def _restarts(most: int) -> list[str]:
    """A job whose ranks have failed is queued again, up to this many times."""
    if not most:
        return []
    return [
        f'again() {{ if (( ${{SLURM_RESTART_COUNT:-0}} < {most} )); then scontrol requeue "$SLURM_JOB_ID"; fi; }}',
        "trap again ERR",
        "",
    ]
