"""Every command in the documentation is executed with tiny local stand-ins, or says that it needs the hub or a cluster.

Not executed here, but checked: targets of make (they exist), scripts of benchmarks/ (they exist and have the options),
`pip install` (the extras exist), and commands in the running text (the command has the options).
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from doc_commands import PAGES, ROOT, DocCommand, block_commands, inline_commands, lay_out
from rig import warm
from stoker.cli import main
from stoker.launch import options

MAKEFILE = (ROOT / "Makefile").read_text()
QA = "--model_name_or_path bert-base-uncased --train_file train-v1.1.json --validation_file dev-v1.1.json --do_train"
FINE_TUNE = "stoker train {} --model_name_or_path bert-base-uncased --do_train --train_file {} --output_dir out/{}"
# What a page takes for granted, because another page has it.
BEFORE = {
    "train.md": [
        f"stoker train qa {QA} --output_dir out/squad",
        FINE_TUNE.format("ner", "train.conll", "ner"),
        FINE_TUNE.format("embed", "pairs.jsonl", "embed"),
        FINE_TUNE.format("rerank", "pairs.jsonl", "rerank"),
        FINE_TUNE.format("mlm", "'texts/*.txt'", "mlm"),
    ],
    "export.md": [FINE_TUNE.format("classify", "train.tsv", "mrpc") + " --validation_file dev.tsv"],
    "report.md": [f"stoker train qa {QA} --output_dir out/squad"],
}
# Added to a command, so that it takes seconds.
SHORTER = {
    "bench": ["--quick", "--case", "host"],
    "demo": ["--questions", "36", "--no-compare"],
    "tune": ["--trials", "2"],
    "train": ["--max_steps", "2"],
    "plan": [
        "--step",
        "1.9",
        "--parameters",
        "109e6",
    ],  # instead of measuring steps of BERT-base; --cores predicts them
}
# Executed by another test, and why not here.
ELSEWHERE = {
    "stoker demo --sft": "tests/tasks/test_demo_sft.py",  # needs SmolLM2's weights
    "stoker chat --model SmolLM2-135M-Instruct.Q4_1.gguf": "tests/tasks/test_export_language_models.py",  # the same
    "stoker config": "tests/launch/test_config.py",  # asks questions in a terminal
}
RUN_PAGES = [
    page
    for page in PAGES
    if page.name != "install.md" and any(one.words[0] == "stoker" for one in block_commands(page))
]


def test_commands_that_other_tests_execute_are_still_there() -> None:
    for text in ELSEWHERE:
        assert any(command.text.startswith(text) for page in PAGES for command in block_commands(page)), text


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand-ins")
    lay_out(folder)
    return folder


@pytest.mark.part("docs")
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_run_one_after_the_other(
    page: Path, stand_ins: Path, tmp_path: Path, recorded_root: Callable[[str], Path]
) -> None:
    folder, cache = tmp_path / "work", stand_ins.with_name("cache")  # rates are measured for the first page only
    shutil.copytree(stand_ins, folder)
    (folder / "DIR").symlink_to(recorded_root("genoa"))
    if "sft" in page.read_text():
        shutil.copy(folder / "chat.jsonl", folder / "dev.jsonl")
    for text in BEFORE.get(page.name, []):
        execute(DocCommand(page.name, 0, text), folder, cache)
    if (folder / "out" / "squad").exists():
        shutil.copy(folder / "out" / "squad" / "recipe.yaml", folder / "recipe.yaml")
    for command in block_commands(page):
        if command.words[0] == "stoker" and not any(map(command.text.startswith, ELSEWHERE)):
            execute(command, folder, cache)


def execute(command: DocCommand, folder: Path, cache: Path) -> None:
    name, *words = command.words[1:]
    if command.mark:
        check_options(command)
        return
    if "..." in words:
        where = words.index("...")
        words[where : where + 1] = QA.split() if name == "train" else []
    shorter = [] if name == "plan" and "--cores" in words else SHORTER.get(name, [])
    line = [sys.executable, "-m", "stoker", name, *words, *shorter]
    variables = os.environ | {"STOKER_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1"}
    if name == "watch":
        serve(line, folder, variables)
        return
    typed = "Who are you?" if name == "chat" else ""
    done = warm.run(line, cwd=folder, env=variables, input=typed, capture_output=True, text=True, timeout=600)
    # An export of a model that was trained for two steps may well lose a point, which is exit code 1.
    allowed = (0, 1) if name == "export" else (0,)
    assert done.returncode in allowed, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def serve(line: list[str], folder: Path, variables: dict[str, str]) -> None:
    with warm.Popen(line, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True) as server:
        assert "http://127.0.0.1:" in server.stdout.readline()
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_not_executed_name_what_exists(page: Path) -> None:
    for command in [*block_commands(page), *inline_commands(page)]:
        program = command.words[0]
        if program == "make":
            targets = [word for word in command.words[1:] if "=" not in word]
            assert all(re.search(rf"^{target}:", MAKEFILE, re.M) for target in targets), command
        elif "benchmarks/" in command.text:
            check_benchmark(command)
        elif program == "pip" and (extras := re.search(r"\[([\w,]+)\]", command.text)):
            declared = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
            assert {*extras[1].split(",")} <= {*declared}, command
        elif program == "mpirun" and command in block_commands(page):
            assert command.mark == "a cluster", command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_running_text_have_the_options(page: Path) -> None:
    for command in inline_commands(page):
        check_options(command)


def check_options(command: DocCommand) -> None:
    """Fails for an option of Stoker that the command does not have."""
    words = command.text.split()
    if words[0] not in ("stoker", "mpirun") or "stoker" not in words:
        return
    after = words[words.index("stoker") + 1 :]
    name = " ".join(after[:2]) if after[0] in ("train", "tune") and not after[1].startswith("-") else after[0]
    if name == "launch":  # what follows the script belongs to the script
        after = after[: next((n for n, word in enumerate(after) if word.endswith(".py") or word == "-m"), len(after))]
    asked = {word.partition("=")[0].replace("-", "_") for word in after if re.match("--?[a-zA-Z]", word)}
    assert asked <= known_options(name), f"{command}: {asked - known_options(name)}"


@functools.cache
def known_options(name: str) -> set[str]:
    """All that `stoker NAME --help` and --help-all list."""
    command, task = [*name.replace("TASK", "qa").split(), "qa"][:2]
    helps = {
        "train": [["train", task, "--help"], ["train", task, "--help-all"]],
        "tune": [["tune", "--help"], ["train", task, "--help"], ["train", task, "--help-all"]],
    }.get(command, [[command, "--help"]])
    text = options.table() if command == "launch" else ""
    for words in helps:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            assert main(words) == 0, words
        text += shown.getvalue()
    return {option.replace("-", "_") for option in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text)}


def check_benchmark(command: DocCommand) -> None:
    script = ROOT / next(word for word in command.words if word.startswith("benchmarks/"))
    assert script.exists(), command
    code = script.read_text()
    for module in set(re.findall(r"^(?:from|import) (\w+)", code, re.M)):
        other = script.with_name(f"{module}.py")
        code += other.read_text() if other.exists() else ""
    options = [word.partition("=")[0] for word in command.words if word.startswith("--")]
    assert [option for option in options if f'"{option}"' not in code] == [], command
