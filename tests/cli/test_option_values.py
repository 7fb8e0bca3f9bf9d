"""Options of all commands: numbers must be finite and not too large, names must be UTF-8; otherwise one sentence says so."""

from __future__ import annotations

import argparse
import importlib
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main, parsing
from stoker.cli.commands import COMMANDS

NUMBERS = ["inf", "-inf", "nan", "NaN", "1e999", "9" * 5000, "-" + "9" * 5000, "0x" + "f" * 20, str(2**64)]
NAMES = ["\udcff", "a\0b"]
CALLS = [[command.name] for command in COMMANDS if command.name not in ("train", "tune")]
CALLS += [["config", "show"], ["config", "check"], ["config", "migrate"], ["tune", "qa"]]


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def parsers() -> list[argparse.ArgumentParser]:
    """The parser of every command, caught when it is about to parse."""
    found: list[argparse.ArgumentParser] = []

    def catch(self: argparse.ArgumentParser, *rest: Any, **named: Any) -> None:
        found.append(self)
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing.Parser, "parse_args", catch)
        patch.setattr(parsing.Parser, "parse_known_args", catch)
        for words in CALLS:
            module = importlib.import_module(next(one.module for one in COMMANDS if one.name == words[0]))
            with pytest.raises(Stop):
                module.main([*words[1:], "script.py"] if words == ["launch"] else words[1:])
    return [*found, *_train_parsers()]


def _train_parsers() -> Iterator[argparse.ArgumentParser]:
    from stoker.tasks.classify.fine_tune import ClassifyOptions
    from stoker.tasks.mlm.fine_tune import MlmOptions
    from stoker.tasks.ner.fine_tune import NerOptions
    from stoker.tasks.option_parser import OptionParser
    from stoker.tasks.qa.fine_tune import QaOptions

    yield OptionParser("train qa", QaOptions)
    yield OptionParser("train classify", ClassifyOptions)
    yield OptionParser("train ner", NerOptions)
    yield OptionParser("train mlm", MlmOptions)


def _taken(parser: argparse.ArgumentParser, action: argparse.Action, word: str) -> Any:
    """What an option makes of a word; None if it is refused."""
    try:
        return parser._get_value(action, word)
    except argparse.ArgumentError:
        return None


def test_no_option_accepts_a_number_that_is_not_finite_or_beyond_64_bits(
    parsers: list[argparse.ArgumentParser],
) -> None:
    assert len(parsers) == len(CALLS) + 4
    numeric = 0
    for parser in parsers:
        for action in parser._actions:
            if action.nargs == 0:
                continue
            numeric += isinstance(_taken(parser, action, "2"), int | float)
            for word in NUMBERS:
                value = _taken(parser, action, word)
                wrong = isinstance(value, int | float) and not abs(value) < (
                    2**63 if isinstance(value, int) else math.inf
                )
                assert not wrong, (parser.prog, action.option_strings, word)
    assert numeric > 60


def test_no_option_accepts_text_that_is_not_utf8(parsers: list[argparse.ArgumentParser]) -> None:
    actions = [(parser, action) for parser in parsers for action in parser._actions if action.nargs != 0]
    assert len(actions) > 100
    for parser, action in actions:
        assert [_taken(parser, action, word) for word in NAMES] == [None, None], (parser.prog, action.dest)


@pytest.mark.parametrize(
    "words",
    [
        ["launch", "-n", "9" * 5000, "s.py"],
        ["launch", "-n", "99999999", "--oversubscribe", "s.py"],
        ["launch", "-f", "~nobody-of-that-name/x", "s.py"],
        ["launch", "-f", "/dev/zero", "s.py"],
        ["launch", "-f", "", "s.py"],
        ["launch", "--config_file", "/dev/zero", "s.py"],
        ["launch", "--nodes-list", "0-99999999999", "s.py"],
        ["launch", "--nodes-list", "9" * 5000, "s.py"],
        ["launch", "--rdzv_timeout", "1e300", "s.py"],
        ["launch", "--nnodes", "9" * 5000 + ":" + "9" * 5000, "s.py"],
        ["launch", "--rdzv_endpoint", "h:" + "9" * 5000, "s.py"],
        ["config", "--yes", "--num_processes", "9" * 5000],
        ["config", "--yes", "--main_process_port", "-1"],
        ["config", "--yes", "--config_file", "/dev/null"],
        ["config", "--yes", "--config_file", "/"],
        ["config", "show", "/dev/zero"],
        ["config", "migrate", "/dev/zero"],
        ["config", "check", "a\0b"],
        ["report", "/dev/null"],
        ["report", ""],
        ["plan", "--nodes", "1.." + "9" * 5000],
        ["plan", "--network", "9" * 5000 + "gbit"],
        ["plan", "--step", "nan", "--parameters", "inf"],
        ["plan", "--out", "/dev/null"],
        ["demo", "--seconds", "inf"],
        ["demo", "--seed", "9" * 5000],
        ["demo", "--output_dir", ""],
        ["ask", "--model", "m", "--file", "/dev/zero"],
        ["ask", "--model", "m", "--file", "~nobody-of-that-name/x"],
        ["doctor", "--root", "a\0b"],
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_a_bad_value_gets_one_short_sentence_and_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert len(message) < 500
    assert [path.name for path in tmp_path.iterdir()] == ["s.py"]


def test_a_slots_number_of_5000_digits_is_reported_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.py").touch()
    for line in (f"localhost slots={'9' * 5000}", f"localhost:{'9' * 5000}", "localhost slots=99999999", "local\0host"):
        (tmp_path / "hosts").write_text(line + "\n")
        assert main(["launch", "-f", str(tmp_path / "hosts"), str(tmp_path / "s.py")]) == 2
        message = capsys.readouterr().err
        assert "hosts" in message
        assert message.count("\n") == 1
        assert len(message) < 500


def test_a_file_size_limit_is_reported_in_one_sentence(tmp_path: Path) -> None:
    code = "import sys; from stoker.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ["bash", "-c", 'ulimit -f 0; exec "$@" > out', "bash", sys.executable, "-c", code]
    done = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "stoker: the output would exceed the maximum file size; raise the limit (ulimit -f)\n",
    )
