"""`stoker config`: the questionnaire, and show, check and migrate for the files it writes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from stoker.cli import parsing
from stoker.errors import UserError
from stoker.launch.config import config_file, migrate
from stoker.launch.config.check_config import check
from stoker.launch.config.prompts import ask_all, take_defaults, understand
from stoker.launch.config.questions import QUESTIONS, Question, to_config
from stoker.machine import Machine

__all__ = ["main"]

_EXAMPLES = """examples:
  stoker config                                   ask questions, and write the default file
  stoker config --distributed_type NO --yes       no questions: flags, and defaults for this machine
  stoker config show                              what a launch would read
  stoker config check old.yaml                    report contradictions
  stoker config migrate old.yaml                  explain retired keys, write a file for today
"""


def main(argv: list[str]) -> int:
    commands = {"show": _show, "check": _check, "migrate": _migrate}
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    if argv and argv[0] == "default":
        argv = ["--yes", *argv[1:]]
    return _ask(argv)


def _ask(argv: list[str]) -> int:
    parser = parsing.Parser("config", "answer a few questions once; later launches use the answers", examples=_EXAMPLES)
    parser.add_argument(
        "--config_file", type=parsing.path, metavar="FILE", help=f"where to write; default {config_file.own_path()}"
    )
    parser.add_argument(
        "--yes", action="store_true", help="ask nothing: use the flags and the defaults for this machine"
    )
    parser.add_argument("--more", action="store_true", help="also ask what accelerate does not: launcher and threads")
    group = parser.add_argument_group("answers")
    for question in QUESTIONS:
        names = {f"--{question.name}", f"--{question.name.replace('_', '-')}"}
        group.add_argument(
            *sorted(names), dest=question.name, metavar=_metavar(question), type=_typed(question), help=question.text
        )
    options = parser.parse_args(argv)
    given = {question.name: getattr(options, question.name) for question in QUESTIONS}
    if given["use_mpirun"] is None and (given["mpirun_hostfile"] or given["launcher"] in ("impi", "mpich", "openmpi")):
        given["use_mpirun"] = True
    if given["dynamo"] is None and given["dynamo_backend"]:
        given["dynamo"] = True
    if given["distributed_type"] is None and max(given["num_processes"] or 1, given["num_machines"] or 1) > 1:
        given["distributed_type"] = "MULTI_CPU"  # nothing else can be meant
    machine = Machine.read()
    answers = take_defaults(given, machine) if options.yes else ask_all(given, machine, more=options.more)
    config = to_config(answers)
    path = options.config_file or config_file.own_path()
    config.write(path)
    print(
        f"written to {path}; `stoker launch script.py` reads it"
        + (" with --config_file" if options.config_file else "")
    )
    for finding in check(config, machine):
        print(f"stoker: {finding.severity}: {finding.text}", file=sys.stderr)
    return 0


def _metavar(question: Question) -> str:
    if question.kind == "choice":
        return "|".join(name for name, _ in question.choices)
    return {"yes": "yes|no", "number": "N"}.get(question.kind, "TEXT")


def _typed(question: Question) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return understand(question, text, None)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _found(path: str | None) -> Path:
    chosen = Path(path) if path else config_file.default_path()
    if chosen is None:
        raise UserError("there is no config file yet; `stoker config` makes one")
    return chosen


def _show(argv: list[str]) -> int:
    parser = parsing.Parser("config show", "what a launch would read")
    parser.add_argument("file", nargs="?", type=parsing.path, help="default: the file that a launch would read")
    path = _found(parser.parse_args(argv).file)
    config = config_file.Config.read(path)
    print(f"# {path}")
    print(yaml.safe_dump(config.to_mapping(), sort_keys=True), end="")
    for note in config.notes:
        print(f"# {note}")
    return 0


def _check(argv: list[str]) -> int:
    parser = parsing.Parser("config check", "report contradictions in a config file, or with this machine")
    parser.add_argument("file", nargs="?", type=parsing.path, help="default: the file that a launch would read")
    path = _found(parser.parse_args(argv).file)
    findings = check(config_file.Config.read(path), Machine.read())
    for finding in findings:
        print(f"{finding.severity}: {finding.text}")
    if not findings:
        print(f"{path}: no problems found")
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _migrate(argv: list[str]) -> int:
    parser = parsing.Parser(
        "config migrate", "explain each retired key of an old file, and write one that today's accelerate accepts too"
    )
    parser.add_argument("file", type=parsing.path, metavar="OLD.yaml")
    parser.add_argument(
        "-o",
        "--output",
        type=parsing.path,
        metavar="NEW.yaml",
        help="default: OLD.migrated.yaml beside the old file",
    )
    options = parser.parse_args(argv)
    old = config_file.load(options.file)
    config = config_file.Config.from_mapping(old, options.file)
    stem, _ = os.path.splitext(options.file)
    target = options.output or f"{stem}.migrated.yaml"
    for line in migrate.explain(old, config):
        print(line)
    config_file.write_mapping(migrate.for_accelerate(config), target)
    print(f"written to {target}")
    return 0
