"""Options of `stoker train mlm` that no run can have. Imports no torch: they are checked before it is loaded."""

from __future__ import annotations

from typing import Any

from stoker.errors import UserError

__all__ = ["check_rules"]


def check_rules(args: Any, options: Any) -> None:
    if args.do_predict:
        raise UserError("stoker train mlm does not predict a test file; leave out --do_predict")
    if not 0 < options.mlm_probability < 1:
        raise UserError(f"--mlm_probability is {options.mlm_probability}; it must be above 0 and below 1")
    if not 0 <= options.validation_split_percentage < 100:
        raise UserError(
            f"--validation_split_percentage is {options.validation_split_percentage}; it must be at least 0 and below 100"
        )
