"""`stoker export` as a whole: finds the model, writes the export into its place, and reports how it compares."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from stoker import __version__
from stoker.errors import UserError
from stoker.run_report.log import NAME, RunLog, read_run
from stoker.tasks.export.comparison import Comparison
from stoker.tasks.export.export_folder import staged, write_facts
from stoker.tasks.export.export_source import Source, find_source

__all__ = ["export"]

Say = Callable[[str], None]


def export(name: str, to: str, int8: bool, target: Path, validation_file: str | None, say: Say) -> Comparison:
    """Writes the model `name` in the format `to` into the folder `target`."""
    source = find_source(name, validation_file)
    _check_format(source, to, int8)
    with staged(target) as folder:
        found = _write(source, to, int8, folder, say)
        facts = {"stoker": __version__, "source": name, "task": source.task, "comparison": found.as_json()}
        write_facts(folder, facts)
    _add_to_report(source, found)
    return found


def _write(source: Source, to: str, int8: bool, folder: Path, say: Say) -> Comparison:
    if source.kind == "chat":
        from stoker.tasks.export.decoders import export_language_model

        return export_language_model(source, to, int8, folder, say)
    from stoker.tasks.export.encoders import export_encoder, export_safetensors

    if to == "safetensors":
        return export_safetensors(source, folder, say)
    writer = getattr(importlib.import_module(f"stoker.tasks.export.{to}_format"), f"write_{to}")
    return export_encoder(source, to, int8, folder, lambda *rest: writer(*rest, int8=int8), say)


def _check_format(source: Source, to: str, int8: bool) -> None:
    if to == "safetensors" and int8:
        raise UserError("--int8 is for onnx, openvino and gguf; transformers reads safetensors in fp32")
    if source.of_sentences and importlib.util.find_spec("sentence_transformers") is None:
        raise UserError(f"{source.name} needs sentence-transformers: pip install 'stoker[embed]'")
    if source.task == "fewshot" and source.evaluation is not None and importlib.util.find_spec("setfit") is None:
        raise UserError(f"{source.name} needs setfit to be evaluated: pip install 'stoker[fewshot]'")
    if source.kind == "chat" and to in ("onnx", "openvino"):
        raise UserError(f"{source.name} is a language model; --to {to} is for encoders, use --to gguf or safetensors")
    if source.kind != "chat" and to == "gguf":
        raise UserError(f"{source.name} is not a language model, which --to gguf is for; use --to onnx or openvino")


def _add_to_report(source: Source, found: Comparison) -> None:
    """Adds the table to the log of the run, in place of an earlier export of the same kind, and writes the page again."""
    folder = source.folder
    if not (folder / NAME).is_file():
        return
    table = found.for_report()
    earlier = read_run(folder).others.get("exports", {}).get("tables") or []
    RunLog(folder).write("exports", tables=[*(one for one in earlier if one["title"] != table["title"]), table])
    try:
        from stoker.run_report.page import write_report
    except ImportError:  # without the extra `report` there is no page
        return
    write_report(folder)
