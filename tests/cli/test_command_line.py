"""The `stoker` command: quick to answer, and every mistake gets one sentence and exit code 2."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from stoker.cli import main
from stoker.cli.commands import COMMANDS
from stoker.errors import UserError

STOKER = [sys.executable, "-m", "stoker"]


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STOKER, *arguments], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command_under_its_heading(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    for command in COMMANDS:
        assert f"{command.group}:" in text
        assert f"  {command.name} " in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["doctor", "--help"], ["nonsense"]])
def test_help_and_version_do_not_import_torch(argv: list[str]) -> None:
    code = f"import sys; from stoker.cli import main; main({argv!r}); sys.exit(99 if 'torch' in sys.modules else 0)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"stoker {stoker.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["doctr"], ["'doctr'", "did you mean doctor?"]),
        (["frobnicate"], ["'frobnicate'", "stoker --help"]),
        (["--vresion"], ["'--vresion'", "did you mean --version?"]),
        (["doctor", "--jsn"], ["--jsn", "did you mean --json?"]),
        (["doctor", "--js"], ["--js"]),  # no abbreviations
        (["doctor", "extra"], ["extra"]),
        (["doctor", "--root"], ["--root", "expected one argument"]),
        (["doctor", "--root", "/nonexistent"], ["/nonexistent"]),
        (["doctor", "--fresh", "--no-rates"], ["contradict"]),
        (["doctor", "--root", "/tmp", "--fresh"], ["/tmp"]),
        (["selftest", "--fast"], ["--fast"]),
        (["help", "doctr"], ["'doctr'"]),
        ([""], ["unknown command"]),
        (["doctor", "--=\n"], ["unknown option"]),
    ],
)
def test_an_invalid_request_gets_one_sentence_and_exit_code_2(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    for word in words:
        assert word in captured.err


def test_a_user_error_of_any_command_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise UserError("--batch 0 must be at least 1")

    monkeypatch.setattr("stoker.cli.selftest.main", fail)
    assert main(["selftest"]) == 2
    assert capsys.readouterr().err == "stoker: --batch 0 must be at least 1\n"


def test_messages_are_shortened_and_control_characters_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--\x1b]0;title\x07\u202e"]) == 2
    message = capsys.readouterr().err
    assert "\\x1b]0;title\\x07\\u202e" in message
    assert main(["doctor", "--" + "lon g" * 5000]) == 2
    assert len(capsys.readouterr().err) < 2000


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            "not enough memory",
        ),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (
            OSError(errno.EROFS, "Read-only file system", "out/x"),
            "out/x: Read-only file system; choose a place that can be written",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.EACCES, "Permission denied", "out/x"), "stoker: out/x: Permission denied; "),
    ],
)
def test_a_system_error_gets_one_sentence_and_exit_code_1(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("stoker.cli.selftest.main", fail)
    monkeypatch.setattr("stoker.cli.abandon_output", lambda: None)
    assert main(["selftest"]) == 1
    written = capsys.readouterr().err
    assert message in written
    assert len(written.splitlines()) == 1
    monkeypatch.setenv("STOKER_TRACEBACK", "1")
    with pytest.raises(type(error)):
        main(["selftest"])


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("stoker.cli.selftest.main", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["selftest"])


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("stoker.cli.selftest.main", interrupt)
    assert main(["selftest"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_a_help_page(command: object, capsys: pytest.CaptureFixture[str]) -> None:
    name = command.name  # type: ignore[attr-defined]
    assert main(["help", name]) == 0
    assert f"stoker {name}" in capsys.readouterr().out
    assert callable(importlib.import_module(command.module).main)  # type: ignore[attr-defined]


def test_a_reader_that_exits_is_not_an_error(tmp_path: Path) -> None:
    command = " ".join(STOKER) + " doctor --no-rates | head -1; exit ${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--no-rates"]])
def test_a_full_disk_is_reported_in_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*STOKER, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "stoker: no space left to write the output\n"


def test_a_closed_output_is_not_an_error() -> None:
    done = subprocess.run(["bash", "-c", " ".join(STOKER) + " --help >&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_public_names_are_lazy_and_listed() -> None:
    code = "import sys, stoker; dir(stoker); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert set(stoker.__all__) <= set(dir(stoker))
    for name in stoker.__all__:
        assert getattr(stoker, name) is not None
    with pytest.raises(AttributeError, match="optimise"):
        stoker.optimise  # noqa: B018


def test_a_terminal_without_unicode_works() -> None:
    done = run("doctor", "--no-rates", env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "40"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_a_failing_import_of_transformers_is_not_reported_as_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(error: ImportError) -> str:
        class Finder:
            @staticmethod
            def find_spec(name: str, *_: object) -> None:
                if name == "transformers":
                    raise error

        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "transformers", raising=False)
            patch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
            words = "--model_name_or_path m --dataset_name d --do_train --output_dir o"
            assert main(["train", "qa", *words.split()]) == 2
        return capsys.readouterr().err

    assert "pip install 'stoker[hf]'" in refuse(ModuleNotFoundError("No module named", name="transformers"))
    for error in (
        ImportError("cannot import name 'HfApi'"),
        ModuleNotFoundError("No module named 'regex'", name="regex"),
    ):
        assert f"transformers is installed but cannot be imported: {error}" in refuse(error)
