"""`stoker launch`: the command line, made from the options that `stoker.launch.options` declares."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from stoker.cli import parsing
from stoker.distributed.settings import DistributedSettings
from stoker.errors import UserError
from stoker.launch.options import GROUPS, OTHER_FLAGS, Option, Options, command_line
from stoker.requires import require

__all__ = ["main", "parse"]

_EXAMPLES = """examples:
  stoker launch run_qa.py --model_name_or_path ...          one process, all cores
  stoker launch -n 2 nlp_example.py                         two processes on this machine
  stoker launch -f hostfile -n 16 -ppn 4 nlp_example.py     sixteen on four machines, with mpirun
  mpirun -f hostfile -n 16 -ppn 4 stoker launch nlp_example.py    the same, with your own mpirun
  stoker launch --dry-run -n 2 nlp_example.py               show what would run, and where

Options come before the script; everything after it belongs to the script. More in docs/launch.md.
"""


def main(argv: list[str]) -> int:
    from stoker.launch.start import start

    return start(parse(argv))


def parse(argv: list[str]) -> Options:
    parser = build_parser()
    head, script, arguments = _split(parser, argv)
    found = vars(parser.parse_args(head))
    if script is None:
        raise UserError(
            "stoker launch: no script was given; write it after the options: stoker launch [options] script.py ..."
        )
    found |= {name: tuple(found[name]) for name, option in command_line().items() if option.repeated}
    _set_fields(found)
    options = Options(script=script, arguments=arguments, **found)
    names = [field.name for field in dataclasses.fields(DistributedSettings)]
    try:
        DistributedSettings(**{name: found[name] for name in names if found[name] is not None})
    except ValueError as error:
        raise UserError(f"stoker launch: {error}") from None
    return options


def _set_fields(found: dict[str, Any]) -> None:
    """Turns the values of flags into the fields of `Options`. The flag of a field itself overrides others that set it."""
    per_machine, instances = found["per_machine"], found["ninstances"]
    if per_machine is not None and instances and (per_machine,) != instances:
        raise UserError(f"-ppn {per_machine or 'auto'} and --ninstances {instances[0]} contradict each other; give one")
    ignored = [option for name, option in OTHER_FLAGS.items() if option.ignored is not None and found.pop(name)]
    found["notes"] = tuple(option.note for option in ignored if option.note)
    for name, option in command_line().items():
        if option.sets:
            values = found.pop(name) or [None] * len(option.sets)
            for field, value in zip(option.sets, values, strict=True):
                if found.get(field) in (None, ""):
                    found[field] = value


def build_parser() -> parsing.Parser:
    parser = parsing.Parser("launch", "run a script on the CPUs of this machine, or of many", examples=_EXAMPLES)
    parser.usage = "stoker launch [options] script.py [script arguments]"
    groups: dict[str, Any] = {title: parser.add_argument_group(title) for title in GROUPS}
    defaults = {name: field.default for name, field in Options.__dataclass_fields__.items()}
    for name, option in command_line().items():
        group = groups.get(option.group, parser)
        default = [] if option.repeated else defaults.get(name)
        _add_option(group, name, option, default)
    return parser


def _add_option(group: Any, name: str, option: Option, default: Any) -> None:
    if option.flags:
        text = option.help or argparse.SUPPRESS
        if option.convert is None:
            _add(group, *option.flags, dest=name, action="store_true", default=default, help=text)
        else:
            action = "append" if option.repeated else "store"
            _add(group, *option.flags, dest=name, action=action, type=option.convert_flag or option.convert,
                 choices=option.choices or None, default=default, metavar=option.metavar, help=text)  # fmt: skip
    if option.off:
        _add(group, option.off, dest=name, action="store_false", default=default, help=option.off_help)


def _add(parser: Any, *names: str, **rest: Any) -> None:
    """Accepts each long name in both spellings, --num_processes and --num-processes; the help shows one."""
    action = parser.add_argument(*names, **rest)
    require("option names")
    for name in names:
        if name.startswith("--"):
            parser._option_string_actions.setdefault(name.replace("_", "-"), action)


def _split(parser: parsing.Parser, argv: list[str]) -> tuple[list[str], str | None, list[str]]:
    """Options, script, script arguments. argparse would look for its own options among the script's arguments."""
    takes_value = {name: action.nargs != 0 for name, action in parser._option_string_actions.items()}
    head: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return head, rest[0] if rest else None, rest[1:]
        if not word.startswith("-") or word == "-":
            return head, word, rest
        head.append(word)
        name, equals, _ = word.partition("=")
        if takes_value.get(name, False) and not equals and rest:
            value = rest.pop(0)
            if name in ("-genv", "--genv") and "=" not in value and rest:
                value = f"{value}={rest.pop(0)}"  # Hydra's form, `-genv K V`
            head.append(value)
    return head, None, []
