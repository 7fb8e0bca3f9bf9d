"""Options of `stoker train classify` that no run can have. Imports no torch: they are checked before it is loaded."""

from __future__ import annotations

from typing import Any

from stoker.errors import UserError
from stoker.tasks.classify.data import GLUE

__all__ = ["check_rules"]


def check_rules(args: Any, options: Any) -> None:
    if options.task_name is not None and options.task_name.lower() not in GLUE:
        raise UserError(f"--task_name {options.task_name.lower()} is not a GLUE task; choose one of {', '.join(GLUE)}")
