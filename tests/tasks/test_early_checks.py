"""Mistakes in a command line are found before torch is imported, and nothing else is taken for a mistake."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker.cli.task_names import TASKS
from stoker.errors import UserError
from stoker.tasks import early_checks
from stoker.tasks.declared_options import Undeclared, declared, undeclared_fields
from stoker.tasks.early_checks import early_parser
from stoker.tasks.files import first_row, read_rows

COMMANDS = [*((task, ()) for task in TASKS), ("sft", ("--dpo",))]
IDS = [" ".join([task, *more]) for task, more in COMMANDS]


def real_parser(task: str, argv: tuple[str, ...]) -> Any:
    from stoker.tasks.option_parser import OptionParser

    module = importlib.import_module(f"stoker.tasks.{task}.fine_tune")
    arguments = {"arguments": module.arguments_of(argv)} if hasattr(module, "arguments_of") else {}
    return OptionParser(f"train {task}", getattr(module, f"{task.capitalize()}Options"), **arguments)


def actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [one for one in parser._actions if one.dest != "help"]


@pytest.mark.parametrize(("task", "more"), COMMANDS, ids=IDS)
def test_the_early_parser_has_the_options_of_the_real_one(task: str, more: tuple[str, ...]) -> None:
    early, real = early_parser(task, more), real_parser(task, more)
    assert early is not None
    assert len(early.unknown) <= 1  # parallelism_config, whose type is a class of accelerate
    shown = ("option_strings", "dest", "nargs", "const", "required", "choices")
    assert {str([getattr(one, name) for name in shown]) for one in actions(early) if one.dest not in early.unknown} == {
        str([getattr(one, name) for name in shown]) for one in actions(real) if one.dest not in early.unknown
    }
    assert set(early.option_names) == set(real.option_names)
    switches = {one.dest: one.default for one in actions(real) if isinstance(one.default, bool)}
    assert {one.dest: one.default for one in actions(early) if one.dest in switches} == switches


WORDS = ([], ["1"], ["-1"], ["0.5"], ["abc"], ["true"], ["no"], ["a", "b"], ['{"a": 1}'], [""], ["steps"], ["linear"])


@pytest.mark.parametrize(("task", "more"), COMMANDS, ids=IDS)
def test_every_option_with_right_and_wrong_values_is_parsed_alike(task: str, more: tuple[str, ...]) -> None:
    early, real = early_parser(task, more), real_parser(task, more)
    common = set() if (task, more) == ("qa", ()) else {one.dest for one in actions(early_parser("qa"))}

    def parsed(parser: Any, words: list[str], name: str) -> Any:
        try:
            values, rest = parser.parse_known_args([*words, "--model_name_or_path", "m"])
            parser.refuse(rest)
            return str(getattr(values, name))
        except UserError as error:
            return str(error)

    for action in actions(real):
        if action.dest in common or action.dest in early.unknown:
            continue
        for option in action.option_strings[:1] + action.option_strings[-1:]:
            chosen = [[str(one)] for one in action.choices or ()]
            for words in (*WORDS, *chosen):
                assert parsed(early, [option, *words], action.dest) == parsed(real, [option, *words], action.dest)
            assert parsed(early, [f"{option}=1"], action.dest) == parsed(real, [f"{option}=1"], action.dest)
            assert parsed(early, [option[:-1]], action.dest) == parsed(
                real, [option[:-1]], action.dest
            )  # no abbreviations


WRONG = [
    "train qa --model_name_or_path x --trian_file y",
    "train qa --model_name_or_path x --max_steps abc",
    "train qa --model_name_or_path x --max_steps 0",
    "train qa --model_name_or_path x --learning_rate -1 --do_train",
    "train qa --model_name_or_path x --bf16 maybe",
    "train qa --model_name_or_path x --eval_strategy never",
    "train qa --model_name_or_path x --max_steps 3 5",
    "train qa --max_steps 3",
    "train qa --model_name_or_path x",
    "train qa --model_name_or_path x --do_train --train_file t.json",
    "train qa --model_name_or_path x --do_train --output_dir o",
    "train qa --model_name_or_path x --do_train --output_dir o --train_file missing.json",
    "train qa --model_name_or_path x --do_eval --validation_file missing.json",
    "train qa --model_name_or_path ./missing --do_train --output_dir o --train_file {squad}",
    "train qa wrong.yaml",
    "train classify --model_name_or_path x --do_train --output_dir o --train_file {foo}",
    "train classify --model_name_or_path x --do_train --output_dir o --train_file {lines} --label_column_name c",
    "train fewshot --model_name_or_path x --output_dir o --train_file {foo}",
    "train ner --model_name_or_path x --do_train --output_dir o --train_file {foo}",
    "train mlm --model_name_or_path x --do_train --output_dir o --train_file {foo}",
    "train mlm --model_name_or_path x --do_train --output_dir o --train_file missing*.txt",
    "train embed --model_name_or_path x --output_dir o --train_file {foo}",
    "train rerank --model_name_or_path x --output_dir o --train_file {foo}",
    "train rerank --model_name_or_path x --los y",
    "train sft --model x --train_file {foo}",
    "train sft --model x --train_file {lines} --dpo",
    "train sft --model missing.gguf --train_file {lines}",
    "train sft --model x --beta abc --dpo",
    "train sft --model x --train_file {lines} --full --merge",
    "train mlm --model x --do_train --train_file {lines} --output_dir o --mlm_probability 2",
    "train classify --model x --do_train --train_file {lines} --output_dir o --task_name mprc",
    "tune classify --model_name_or_path x --train_file {lines} --validation_file {lines} --output_dir o "
    "--search per_device_train_batch_size=0|8",
    "tune qa --model_name_or_path x --trian_file y --output_dir o",
    "tune classify --model_name_or_path x --train_file {lines} --validation_file missing.csv --output_dir o",
    "use --model ./missing --text a",
    "use --model x --file missing.txt",
    "ask --model ./missing --text a --question b",
    "ask --model x --file missing.txt --question b",
    "chat --model ./missing --prompt a",
    "chat --model missing.gguf --prompt a",
    "export missing --to onnx",
    "export . --to onnx --validation_file missing.csv",
    "plan --model ./missing",
]
ALL = """
import json, sys
from stoker.cli import main
for command in json.load(sys.stdin):
    print(f"> {command}", file=sys.stderr)
    code = main(command.split())
    loaded = [name for name in ("torch", "transformers") if name in sys.modules]
    print(f"exit code {code}, imported {loaded}", file=sys.stderr)
    if loaded:
        break
"""


def answered(commands: list[str], folder: Path) -> dict[str, list[str]]:
    """The lines that a fresh process prints about each command."""
    done = subprocess.run(
        [sys.executable, "-c", ALL], input=json.dumps(commands), cwd=folder, capture_output=True, text=True, check=True
    )
    parts = [part.splitlines() for part in done.stderr.split("> ")[1:]]
    return {command: lines for command, *lines in parts}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "foo.csv").write_text("foo,bar\na,1\nb,2\n")
    (tmp_path / "lines.jsonl").write_text('{"text": "a", "label": "1"}\n{"text": "b", "label": "2"}\n')
    (tmp_path / "squad.csv").write_text("id,question,context,answers\n1,a,b,{}\n")
    (tmp_path / "wrong.yaml").write_text("model_name_or_path: x\nnum_train_epoch: 3\n")
    return tmp_path


def test_mistakes_get_one_sentence_without_importing_torch_or_transformers(folder: Path) -> None:
    files = {"foo": "foo.csv", "lines": "lines.jsonl", "squad": "squad.csv"}
    commands = [command.format(**files) for command in WRONG]
    found = answered(commands, folder)
    assert {
        command: lines for command, lines in found.items() if lines[1:] != ["exit code 2, imported []"]
    } == {}  # one line before it
    assert list(found) == commands


@pytest.mark.parametrize(
    "words",
    [
        "--trian_file y",
        "--max_steps abc",
        "--max_steps 0",
        "--seed -1",
        "--bf16 maybe",
        "--eval_strategy never",
        "--max_steps 3 5",
        "--num_train_epochs nan",
        "--train-file= --do_train",
        "--do_train --train_file t",
        "--no_do_train",
    ],
)
def test_the_sentence_is_that_of_the_real_parser(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "qa", "--model_name_or_path", "m", *words.split()]
    assert main(command) == 2
    early = capsys.readouterr().err
    assert "loading" not in early
    monkeypatch.setattr(early_checks, "check", lambda task, argv: None)
    assert main(command) == 2
    assert capsys.readouterr().err == "loading m ...\n" + early


RIGHT = [
    ("qa", "--do_train --output_dir o --train_file squad.csv --overwrite_output_dir --use_ipex --no_cuda"),
    ("qa", "--do_train --output_dir o --train-file=squad.csv --evaluation_strategy no --warmup_ratio 0.1"),
    ("qa", "--do_train True --output_dir=o --train_file squad.csv --no_stop_on_nan --no-balance-tokens --bf16=yes"),
    ("qa", "--do_train --output_dir o --train_file squad.csv --per_device_train_batch_size 0 "
           "--per_gpu_train_batch_size 2"),
    ("qa", '--do_train --output_dir o --train_file squad.csv --lr_scheduler_kwargs {"num_cycles":2}'),
    ("qa", "--do_train --output_dir o --train_file squad.csv --validation_file missing.json --test_file missing.json"),
    ("qa", "--do_predict --output_dir o --test_file squad.csv --train_file missing.json --ddp_backend ccl"),
    ("classify", "--do_train --output_dir o --task_name MRPC --train_file lines.jsonl --metric_name accuracy f1"),
    ("classify", "--do_train --output_dir o --task_name mrpc"),
    ("classify", "--do_predict --output_dir o --test_file plain.csv"),
    ("ner", "--do_train --output_dir o --train_file words.conll"),
    ("mlm", "--do_train --output_dir o --train_file foo.csv --text_column_name bar"),
    ("mlm", "--do_train --output_dir o --train_file plain* lines.jsonl --do_eval"),
    ("embed", "--output_dir o --train_file foo.csv --column_names text label"),
    ("embed", "--output_dir o --train_file foo.csv --text_column_names foo --label_column_name bar"),
    ("sft", "--train_file lines.jsonl --packing --dpo=False"),
    ("sft", "--train_file whole.json --max_length 64"),
    ("fewshot", "--output_dir o --train_file lines.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "words"), RIGHT)
def test_nothing_is_refused_that_the_run_would_accept(
    task: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "plain.csv").write_text("text\na\n")
    (folder / "words.conll").write_text("a O\n\n")
    (folder / "whole.json").write_text('{"version": 1, "data": [{"prompt": "a", "completion": "b"}]}')
    monkeypatch.chdir(folder)
    argv = ["--model_name_or_path", "owner/name", *words.split()]
    early_checks.check(task, argv)
    real_parser(task, tuple(argv)).read(argv)


def test_a_release_whose_declarations_cannot_be_read_is_left_to_the_real_parser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(module: str, name: str) -> Any:
        raise Undeclared(module)

    monkeypatch.setattr(early_checks, "declared", fail)
    early_checks._parser_of.cache_clear()
    try:
        early_checks.check("qa", ["--trian_file", "y"])
    finally:
        early_checks._parser_of.cache_clear()


def test_options_whose_type_is_not_known_take_any_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "strange_options"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('must not be imported')")
    (package / "kinds.py").write_text(
        "from dataclasses import dataclass, field\n"
        "from enum import Enum\n"
        "import nowhere\n"
        "if nowhere.fast():\n    DEFAULT = nowhere.value\nelse:\n    DEFAULT = 3\n"
        "class Colour(str, Enum):\n    RED = 'red'\n    def paint(self):\n        return nowhere.paint(self)\n"
        "@nowhere.decorated\n@dataclass\nclass Options:\n"
        "    size: int = field(default=DEFAULT)\n"
        "    colour: 'Colour | str' = 'red'\n"
        "    shape: nowhere.Shape = nowhere.Shape()\n"
        "    def area(self):\n        return nowhere.area(self)\n"
        "@dataclass\nclass More(nowhere.Base):\n    depth: int = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = declared("strange_options.kinds", "Options")
    assert {one.name: one.default for one in dataclasses.fields(found)} == {"size": 3, "colour": "red", "shape": None}
    assert undeclared_fields(found) == ["shape"]
    with pytest.raises(Undeclared):
        declared("strange_options.kinds", "More")
    monkeypatch.setattr(early_checks, "declared", lambda module, name: _with_shape(declared(module, name), found))
    early_checks._parser_of.cache_clear()
    try:
        early_checks.check("qa", ["--model_name_or_path", "m", "--shape", "a", "b", "--do_train", "--output_dir", "o",
                                  "--dataset_name", "d"])  # fmt: skip
        with pytest.raises(UserError, match="unknown option --shap "):
            early_checks.check("qa", ["--model_name_or_path", "m", "--shap", "a"])
    finally:
        early_checks._parser_of.cache_clear()


def _with_shape(kind: type, more: type) -> type:
    return dataclasses.make_dataclass("Both", [], bases=(more, kind)) if kind.__name__ == "QaOptions" else kind


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text,label\nx,1\ny,2\n"),
        ("a.csv", "\ufefftext;label\nx;1\n"),
        ("a.tsv", "text\tlabel\nx\t1\textra\ny\t2\n"),
        ("a.jsonl", '\nnot JSON\n{"text": "x"}\n{"text": "y"}\n'),
        ("a.json", '[{"text": "x"}, {"other": 1}]'),
        ("a.json", '{"data": [{"text": "x"}]}'),
        ("a.json", '{"text": "x"}\n{"text": "y"}\n'),
        ("a.csv", "text\n" + "x" * (1 << 20) + "\n"),
        ("a.json", '[{"text": "' + "x" * (1 << 20) + '"}]'),
    ],
)
def test_the_first_row_is_that_of_the_whole_file(tmp_path: Path, name: str, content: str) -> None:
    from stoker.tasks.faults import Faults

    path = tmp_path / name
    path.write_text(content)
    first = next(iter(read_rows(path, Faults(name))))
    found = first_row(path)
    assert found in (first, None)
    assert (found is None) == (len(content) > 1 << 20)


def test_a_single_json_object_is_not_taken_for_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"version": "1", "data": [{"text": "x"}]}')
    assert first_row(path) is None


def test_the_first_line_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    from stoker.cli.task_names import announce_loading

    announce_loading(["--model_name_or_path", "a\x1b[2Jb"])
    assert capsys.readouterr().err == "loading a\\x1b[2Jb ...\n"


def test_the_first_line_comes_before_torch_is_imported(folder: Path) -> None:
    command = "train classify --model_name_or_path owner/name --do_train --output_dir o --train_file lines.jsonl"
    code = (
        "import sys\n"
        "from stoker.cli import main, train\n"
        "from stoker.errors import UserError\n"
        "def stop(command, task):\n"
        '    raise UserError(f\'imported {[n for n in ("torch", "transformers") if n in sys.modules]}\')\n'
        "train.require_task = stop\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *command.split()], cwd=folder, capture_output=True, text=True)
    assert done.stderr.splitlines() == ["loading owner/name ...", "stoker: imported []"]
