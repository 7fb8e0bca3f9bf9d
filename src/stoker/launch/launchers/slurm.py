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
from stoker.launch.options import Options, to_flags
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
        variables = handed_over(replace(plan, settings=replace(plan.settings, is_one_of_several=True)), options)
        program = handover.command(secrets.token_hex(8), options.script)
        return become([srun, *_srun(plan, program, variables, os.environ)[1:]], variables)


def _srun(plan: Plan, program: list[str], variables: Collection[str], environment: Mapping[str, str]) -> list[str]:
    # An allocation made with --export=NONE or a list of names would not let the variables through.
    exported = environment.get("SLURM_EXPORT_ENV") or "ALL"
    exported = ",".join([*([exported] if exported not in ("NONE", "NIL") else []), *variables])
    sizes = ["-N", str(plan.machines), "-n", str(plan.size), "--ntasks-per-node", str(plan.size // plan.machines)]
    return ["srun", *sizes, f"--export={exported}", "--kill-on-bad-exit=1", *program]


def batch_script(options: Options, name: str) -> str:
    total, local, machines = counts(options)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={machines}",
        f"#SBATCH --ntasks={total}",
        f"#SBATCH --ntasks-per-node={local}",
        f"#SBATCH --cpus-per-task={options.threads}" if options.threads else "#SBATCH --exclusive",
    ]
    for key, value in (("time", options.emit_time), ("partition", options.emit_partition)):
        if value:
            if not re.fullmatch(r"[\w:.,-]+", value):
                raise UserError(f"--emit_{key} {value!r} is not a value that Slurm accepts")
            lines.append(f"#SBATCH --{key}={value}")
    lines += ["#SBATCH --output=%x-%j.log", "", "set -euo pipefail", ""]
    if not options.threads:
        lines += [
            "# All cores of a node, divided over its tasks.",
            f"export SRUN_CPUS_PER_TASK=$(( SLURM_CPUS_ON_NODE / {local} ))",
            "",
        ]
    script = ["-m"] * options.module + [options.script, *options.arguments]
    program = ["stoker", "launch", *to_flags(options), *script]
    if ":" in program:  # srun would start what follows as another program
        program = ["sh", "-c", "exec " + shlex.join(program)]
    lines.append(shlex.join(["srun", "--kill-on-bad-exit=1", "--hint=nomultithread", *program]))
    return "\n".join(lines) + "\n"
