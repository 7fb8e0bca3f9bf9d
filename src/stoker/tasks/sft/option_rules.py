"""Options of `stoker train sft` that contradict each other. Imports no torch: they are checked before it is loaded."""

from __future__ import annotations

from typing import Any

from stoker.errors import UserError

__all__ = ["check_rules"]


def check_rules(args: Any, options: Any) -> None:
    if args.do_predict:
        raise UserError(
            "stoker train sft does not predict a test file; `stoker chat --model DIR --prompt ...` answers prompts"
        )
    if not args.do_train:
        raise UserError("stoker train sft always trains; leave out --do_train False")
    if options.full and options.merge:
        raise UserError("--merge adds an adapter to the model, and with --full there is none; give only one of them")
    if options.full and options.frozen_weights:
        raise UserError(
            f"--frozen_weights {options.frozen_weights} is for weights that are not trained, and --full trains all of them; "
            "give only one of them"
        )
    if options.dpo and options.loss_on not in (None, "completions"):
        raise UserError(f"--loss_on {options.loss_on} is not possible with --dpo, which compares whole answers")
    if args.max_length is not None and args.max_length < 8:
        raise UserError(f"--max_length {args.max_length} leaves no room for a text; use 256 to 2048")
