"""Asks the questions: menus and typed answers in a terminal; from a pipe, the answers to any release of accelerate's dialogue."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from stoker.errors import UserError
from stoker.launch.config.questions import QUESTIONS, RELEASES, Answers, Question, Release
from stoker.machine import Machine
from stoker.numbers import whole_number

__all__ = ["ask_all", "move", "take_defaults", "understand"]

_LONGEST = 64 << 10
"""Characters of all answers together."""


def ask_all(
    given: Answers, machine: Machine, source: TextIO | None = None, screen: TextIO | None = None, *, more: bool = False
) -> Answers:
    """Answers to all questions that apply: those given as flags, the rest asked; `more` asks Stoker's own too."""
    source, screen = source or sys.stdin, screen or sys.stdout
    if not source.isatty():
        return _from_pipe(given, machine, source, screen, more)

    def ask(question: Question, default: Any) -> Any:
        if screen.isatty() and question.kind == "choice":
            return _pick(question, default, screen)
        return _type(question, default, source, screen)

    answers = _collect(given, machine, lambda question: Release().asks(question, more), ask)
    _warn_unneeded(given, answers)
    return answers


def take_defaults(given: Answers, machine: Machine) -> Answers:
    """Answers without asking: those given as flags, and the defaults."""
    answers = _collect(
        given, machine, lambda question: True, lambda question, default: None if question.meaning else default
    )
    _warn_unneeded(given, answers)
    return answers


def _collect(
    given: Answers, machine: Machine, asks: Callable[[Question], bool], answer: Callable[[Question, Any], Any]
) -> Answers:
    """`answer(question, default)` for each question that applies, is to be asked, and is not given."""
    answers: Answers = {}
    for question in QUESTIONS:
        if not question.when(answers):
            continue
        if given.get(question.name) is not None:
            answers[question.name] = given[question.name]
        elif asks(question):
            answers[question.name] = answer(question, question.propose(answers, machine))
    return answers


def _from_pipe(given: Answers, machine: Machine, source: TextIO, screen: TextIO, more: bool) -> Answers:
    """Finds the release whose dialogue the lines fit: each one understood, none missing, none left over."""
    try:
        text = source.read(_LONGEST + 1)
    except UnicodeDecodeError:
        raise UserError("the answers are not UTF-8 text; convert them") from None
    if len(text) > _LONGEST:
        raise UserError(f"the answers are longer than {_LONGEST:,} characters")
    fits = [_Fit(release, text.splitlines(), given, machine, more) for release in RELEASES]
    # A file may contain the first answers only; the others are then the defaults.
    partial = [fit for fit in fits if fit.error is None and not fit.left]
    if not partial:
        furthest = max(fits, key=lambda fit: len(fit.shown))
        if furthest.error is not None:
            raise furthest.error
        raise UserError(f"all questions are answered, and {furthest.left[0]!r} is one line too many; remove it")
    chosen = next((fit for fit in partial if not fit.missing), partial[0])
    screen.write("".join(chosen.shown))
    screen.flush()
    _warn_unneeded(given, chosen.answers)
    return chosen.answers


class _Fit:
    """How the lines of a pipe fit the dialogue of one release."""

    def __init__(self, release: Release, lines: Sequence[str], given: Answers, machine: Machine, more: bool) -> None:
        self.answers: Answers = {}
        self.shown: list[str] = []
        self.missing = False
        """Whether a question had no line."""
        self.error: UserError | None = None
        self._rest = [line.strip() for line in lines]
        try:
            self.answers = _collect(given, machine, lambda question: release.asks(question, more), self._answer)
        except UserError as error:
            self.error = error
        self.left = [line for line in self._rest if line]
        """Lines that answer no question; empty ones do not count."""

    def _answer(self, question: Question, default: Any) -> Any:
        self.missing = self.missing or not self._rest
        line = self._rest.pop(0) if self._rest else ""
        answer = understand(question, line, default)
        self.shown.append(f"{_prompt(question, default)}{line}\n")
        return answer


def _warn_unneeded(given: Answers, answers: Answers) -> None:
    """A line for each flag whose question does not apply."""
    for name, value in given.items():
        if value is not None and name not in answers:
            print(f"stoker: {name}={value} is ignored: it is not needed with the other answers", file=sys.stderr)


def _type(question: Question, default: Any, source: TextIO, screen: TextIO) -> Any:
    while True:
        screen.write(_prompt(question, default))
        screen.flush()
        try:
            return understand(question, source.readline().strip(), default)
        except UserError as error:
            screen.write(f"  {error}\n")


def _prompt(question: Question, default: Any) -> str:
    options = ""
    if question.kind == "choice":
        options = "".join(f"\n  {number}: {shown}" for number, (_, shown) in enumerate(question.choices)) + "\n"
    shown = default
    if question.kind == "yes":
        shown = "YES/no" if default else "yes/NO"
    elif question.meaning:
        shown = f"{question.meaning}: {default} on this machine"
    return f"{question.text}{options} [{shown}]: "


def understand(question: Question, text: str, default: Any) -> Any:
    """The answer that a typed line means; an empty line is the default."""
    if not text:
        return None if question.meaning else default
    if question.kind == "yes":
        word = text.lower()
        if word in ("y", "yes", "true", "1", "no", "n", "false", "0"):
            return word in ("y", "yes", "true", "1")
        raise UserError(f"{text!r}: answer yes or no")
    if question.kind == "number":
        number = whole_number(text)
        if question.name == "main_process_port" and (number is None or not 1 <= number <= 65535):
            raise UserError(f"{question.text} {text!r}: answer with a port, 1 to 65535")
        if number is None or not question.least <= number <= 65536:
            raise UserError(f"{question.text} {text!r}: answer with a whole number, {question.least} or more")
        return number
    if question.kind == "choice":
        names = [name for name, _ in question.choices]
        number = whole_number(text)
        if number is not None and 0 <= number < len(names):
            return names[number]
        matches = [name for name, shown in question.choices if text.lower() in (name.lower(), shown.lower())]
        if matches:
            return matches[0]
        raise UserError(f"{question.text} {text!r}: answer with one of {', '.join(names)}, or its number")
    return text


def _pick(question: Question, default: Any, screen: TextIO) -> Any:
    choices = question.choices
    position = [name for name, _ in choices].index(default)
    screen.write(f"{question.text}\n")
    with _keys() as keys:
        while True:
            for number, (_, shown) in enumerate(choices):
                mark = "➔" if number == position else " "
                screen.write(f"\r\x1b[K {mark} {shown}\r\n")
            screen.flush()
            key = next(keys)
            screen.write(f"\x1b[{len(choices)}A\x1b[J")
            if key == "enter":
                break
            position = move(key, position, len(choices))
    screen.write(f" ➔ {choices[position][1]}\n")
    screen.flush()
    return choices[position][0]


def move(key: str, position: int, count: int) -> int:
    """The selected line after a key press: arrows, j and k, digits. The ends wrap around."""
    if key in ("up", "k"):
        return (position - 1) % count
    if key in ("down", "j"):
        return (position + 1) % count
    number = whole_number(key)
    if number is not None and 0 <= number < count:
        return number
    return position


_ARROWS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down"}


@contextlib.contextmanager
def _keys() -> Iterator[Iterator[str]]:
    """The key presses, one by one; the terminal's mode is restored in every case."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read() -> Iterator[str]:
        while True:
            data = os.read(descriptor, 8)
            if data in (b"\x03", b""):
                raise KeyboardInterrupt
            if data in (b"\r", b"\n"):
                yield "enter"
            else:
                yield _ARROWS.get(data, data.decode("utf-8", "replace"))

    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        yield read()
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
