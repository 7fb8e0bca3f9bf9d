"""Removes tokens and passwords from a command line before it is stored, shown or published."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

__all__ = ["HIDDEN", "is_secret", "without_secrets"]

HIDDEN = "hidden"
_SECRET = re.compile(r"--(\w+_)?(token|password|secret|api_key)")
_SECRET_VARIABLE = re.compile(
    r"(.*_)?(token|password|passwd|secret|credentials?|api_?key|access_key|private_key)(_.*)?", re.IGNORECASE
)
_SET_VARIABLE = ("-genv", "--genv")
_MPI_OPTIONS = ("--extra_mpi_params", "--extra-mpi-params")
"""Options of `stoker launch`. The value of these is a line of options for mpirun, which may set variables too."""


def is_secret(variable: str) -> bool:
    """Whether an environment variable is a secret by its name: HF_TOKEN, WANDB_API_KEY, ..."""
    return _SECRET_VARIABLE.fullmatch(variable) is not None


def without_secrets(command: Sequence[str], instead: str | None = HIDDEN) -> list[str]:
    """`command` with `instead` in place of the value of each secret option or variable; None removes such an option."""
    kept: list[str] = []
    value_follows = False
    rest = iter(command)
    for argument in rest:
        option, equals, value = argument.partition("=")
        if option in _SET_VARIABLE:
            kept += _without_secret_variable(option, value if equals else None, rest, instead)
        elif option in _MPI_OPTIONS:
            typed = [argument] if equals else [argument, *(() if (value := next(rest, "")) == "" else (value,))]
            hidden = value == HIDDEN or any(is_secret(name) for name in re.split(r"[\s=,'\"]+", value))
            kept += typed if not hidden else [] if instead is None else [option, instead]
        elif _SECRET.fullmatch(option.replace("-", "_").replace("__", "--", 1)):
            value_follows = not equals
            kept += [] if instead is None else [f"{option}={instead}" if equals else option]
        elif value_follows and not argument.startswith("--"):
            value_follows = False
            kept += [] if instead is None else [instead]
        else:
            value_follows = False
            kept.append(argument)
    return kept


def _without_secret_variable(option: str, given: str | None, rest: Iterator[str], instead: str | None) -> list[str]:
    """`-genv NAME=VALUE`, `-genv NAME VALUE` or `-genv=NAME=VALUE`, as `stoker launch` reads them."""
    value = next(rest, None) if given is None else given
    if value is None:
        return [option]
    name, equals, _ = value.partition("=")
    more = [next(rest, "")] if not equals else []
    if not is_secret(name):
        return [option, value, *more] if given is None else [f"{option}={value}", *more]
    return [] if instead is None else [option, f"{name}={instead}"]
