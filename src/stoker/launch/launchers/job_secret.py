"""The secret by which the machines of a launch know each other: STOKER_SECRET, else a file in the user's cache directory.

The file is made when it is first needed. Machines that share a home directory share it too; others need a copy of it, or the
variable.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from stoker.distributed.job_store import SECRET
from stoker.errors import UserError
from stoker.machine.cache_directory import cache_directory, make_directory, open_file

__all__ = ["advice", "job_secret"]

_FILE = "job_secret"


def job_secret() -> str:
    """The same on all machines that take part in a job."""
    if given := os.environ.get(SECRET):
        return given
    try:
        with open_file(make_directory() / _FILE, make=True) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another launch may be making it
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise UserError(
                    f"others may read {file.name}, the secret of your jobs; delete it, and a new one is made"
                )
            found = file.read().decode("ascii", "replace").strip()
            if not found:
                found = secrets.token_hex(32)
                file.write(found.encode() + b"\n")
            return found
    except OSError as error:
        raise UserError(
            f"the secret by which machines know each other cannot be read or written ({error.strerror or error}); set {SECRET} "
            "to the same random text on all of them"
        ) from None


def advice() -> str:
    """How to give all machines the same secret."""
    directory = cache_directory() or Path("~/.cache/stoker")
    return f"copy {directory / _FILE} from there to this machine, or set {SECRET} to the same random text on both"
