"""`stoker launch --emit slurm|kubernetes|trainjob|pytorchjob|mpijob`: the same launch as a batch script, or as manifests,
printed instead of run.

Every argument of the user is quoted for where it is written: the shell of the batch script, or yaml and Kubernetes' own $(NAME)
expansion.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from stoker.errors import UserError
from stoker.launch.launchers.kubeflow import mpijob, pytorchjob, trainjob
from stoker.launch.launchers.kubernetes import job_manifests
from stoker.launch.launchers.slurm import batch_script
from stoker.launch.options import Options

__all__ = ["emit"]

_WRITERS: dict[str, Callable[[Options, str], str]] = {
    "slurm": batch_script,
    "kubernetes": job_manifests,
    "trainjob": trainjob,
    "pytorchjob": pytorchjob,
    "mpijob": mpijob,
}
_ELASTIC = ("kubernetes", "pytorchjob")


def emit(options: Options) -> str:
    assert options.emit is not None
    if options.min_machines is not None and options.emit not in _ELASTIC:
        raise UserError(
            f"--nnodes {options.min_machines}:{options.num_machines}: a job of --emit {options.emit} has all of its machines or "
            f"none; give one number, or use --emit {' or '.join(_ELASTIC)}"
        )
    return _WRITERS[options.emit](options, _name(options))


def _name(options: Options) -> str:
    """A DNS label, as Kubernetes wants for what becomes part of a host name; pods add up to 13 characters to it."""
    given = options.emit_name or options.script.rsplit("/", 1)[-1].removesuffix(".py")
    name = re.sub(r"[^a-z0-9-]+", "-", given.lower()).strip("-")[:50].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")
