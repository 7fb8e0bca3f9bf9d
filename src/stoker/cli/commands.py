"""The table of subcommands. A new one is a row here and a module beside this one with `main(argv) -> int`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMMANDS", "Command"]


@dataclass(frozen=True)
class Command:
    name: str
    group: str
    """The heading it stands under in `stoker --help`."""
    summary: str
    module: str
    """Imported only when the command is used."""


COMMANDS: tuple[Command, ...] = (
    Command("doctor", "Know your machine", "what this computer can do, and what holds it back", "stoker.cli.doctor"),
    Command("selftest", "Know your machine", "check that the native library works here", "stoker.cli.selftest"),
    Command("demo", "Train", "see it all in about four minutes, without a network", "stoker.cli.demo"),
    Command("train", "Train", "fine-tune a model: question answering, classification", "stoker.cli.train"),
    Command("ask", "Train", "ask a trained model about a text", "stoker.cli.ask"),
    Command("report", "Train", "make the page about a run from its log", "stoker.cli.report"),
    Command("config", "Launch", "answer a few questions once, and launch by them", "stoker.cli.config"),
    Command("launch", "Launch", "run a script on the CPUs of this machine, or of many", "stoker.cli.launch"),
    Command("plan", "Launch", "predict what more machines would bring, and cost", "stoker.cli.plan"),
    Command("env", "Launch", "exports for a shell that wants them", "stoker.cli.env"),
)
