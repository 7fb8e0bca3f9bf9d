"""The table of subcommands. To add one, add a row and a module in this package with `main(argv) -> int`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COMMANDS", "Command"]


@dataclass(frozen=True)
class Command:
    name: str
    group: str
    """Its heading in `stoker --help`."""
    summary: str
    module: str
    """Imported only when the command is used."""


COMMANDS: tuple[Command, ...] = (
    Command("doctor", "Know your machine", "what this computer can do, and what slows it down", "stoker.cli.doctor"),
    Command(
        "selftest", "Know your machine", "check that the native library works on this machine", "stoker.cli.selftest"
    ),
    Command(
        "bench", "Know your machine", "stock transformers against Stoker here: table, JSON and plot", "stoker.cli.bench"
    ),
    Command("demo", "Train", "train a small model in about four minutes, without a network", "stoker.cli.demo"),
    Command(
        "train", "Train", "fine-tune a model: question answering, classification, language models", "stoker.cli.train"
    ),
    Command("tune", "Train", "search learning rate, batch size, epochs and LoRA rank for a task", "stoker.cli.tune"),
    Command("use", "Train", "try a trained model: classify, tag, search, rerank, fill, answer, chat", "stoker.cli.use"),
    Command("ask", "Train", "ask a trained model about a text", "stoker.cli.ask"),
    Command("chat", "Train", "talk to a language model in the terminal", "stoker.cli.chat"),
    Command("watch", "Train", "show a run in the browser while it trains", "stoker.cli.watch"),
    Command("runs", "Train", "compare runs: settings that differ, scores, speed, curves", "stoker.cli.runs"),
    Command(
        "export", "Train", "write a model as ONNX, OpenVINO, GGUF or safetensors, to serve it", "stoker.cli.export"
    ),
    Command("report", "Train", "generate the report page of a run from its log", "stoker.cli.report"),
    Command("config", "Launch", "answer a few questions once; every launch uses the answers", "stoker.cli.config"),
    Command("launch", "Launch", "run a script on the CPUs of one machine or several", "stoker.cli.launch"),
    Command("plan", "Launch", "predict speed and cost of training on more machines", "stoker.cli.plan"),
    Command("env", "Launch", "print environment variables for the shell", "stoker.cli.env"),
)
