"""`stoker launch --emit slurm|kubernetes`: the same launch as a batch script, or as manifests, printed instead of run.

Every argument of the user is quoted for where it is written: the shell of the batch script, or Kubernetes' own $(NAME) expansion.
"""

from __future__ import annotations

import re

from stoker.launch.launchers.kubernetes import manifests
from stoker.launch.launchers.slurm import batch_script
from stoker.launch.options import Options

__all__ = ["emit"]

_WRITERS = {"slurm": batch_script, "kubernetes": manifests}


def emit(options: Options) -> str:
    assert options.emit is not None
    given = options.emit_name or options.script.rsplit("/", 1)[-1].removesuffix(".py")
    name = re.sub(r"[^a-z0-9-]+", "-", given.lower()).strip("-")[:50].strip("-")
    return _WRITERS[options.emit](options, name or "stoker")
