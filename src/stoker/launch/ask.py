"""Asking: arrow keys in a terminal, plain answers when piped; the same questions either way."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from stoker.errors import UserError
from stoker.launch.questions import QUESTIONS, Answers, Question
from stoker.machine import Machine
from stoker.numbers import whole_number

__all__ = ["ask_all", "move", "tell_unneeded", "understand"]


def ask_all(given: Answers, machine: Machine, source: TextIO | None = None, screen: TextIO | None = None) -> Answers:
    """Answers to all questions that apply: those given as flags, the rest asked."""
    source, screen = source or sys.stdin, screen or sys.stdout
    answers: Answers = {}
    for question in QUESTIONS:
        if not question.when(answers):
            continue
        if given.get(question.name) is not None:
            answers[question.name] = given[question.name]
        elif source.isatty() and screen.isatty() and question.kind in ("choice", "yes"):
            answers[question.name] = _pick(question, question.default(answers, machine), screen)
        else:
            answers[question.name] = _type(question, question.default(answers, machine), source, screen)
    tell_unneeded(given, answers)
    return answers


def tell_unneeded(given: Answers, answers: Answers) -> None:
    """A line for each flag whose question does not apply."""
    for name, value in given.items():
        if value is not None and name not in answers:
            print(f"stoker: {name} {value}: not needed with the other answers, left out", file=sys.stderr)


def _type(question: Question, default: Any, source: TextIO, screen: TextIO) -> Any:
    options = ""
    if question.kind == "choice":
        options = "".join(f"\n  {number}: {shown}" for number, (_, shown) in enumerate(question.choices)) + "\n"
    shown = {True: "yes", False: "no", None: ""}.get(default, default) if question.kind == "yes" else default
    while True:
        screen.write(f"{question.text}{options} [{shown}]: ")
        screen.flush()
        try:
            line = source.readline()
        except UnicodeDecodeError:
            raise UserError(
                f"{question.text} The answer is not UTF-8 text; answer in plain letters and digits"
            ) from None
        if not source.isatty():
            screen.write(f"{line.strip()}\n")
        try:
            return understand(question, line.strip(), default)
        except UserError as error:
            if not source.isatty():  # nobody is there to try again
                raise
            screen.write(f"  {error}\n")


def understand(question: Question, text: str, default: Any) -> Any:
    """The answer that a typed line stands for; nothing typed is the default."""
    if not text:
        return None if question.optional else default
    if question.kind == "yes":
        word = text.lower()
        if word in ("y", "yes", "true", "1", "no", "n", "false", "0"):
            return word in ("y", "yes", "true", "1")
        raise UserError(f"{text!r}: answer yes or no")
    if question.kind == "number":
        number = whole_number(text)
        if question.name == "main_process_port" and (number is None or not 1 <= number <= 65535):
            raise UserError(f"{question.text} {text!r}: answer with a port, 1 to 65535")
        if number is None or not (question.name != "machine_rank") <= number <= 65536:
            raise UserError(f"{question.text} {text!r}: answer with a whole number")
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
    choices = question.choices if question.kind == "choice" else (("yes", "yes"), ("no", "no"))
    start = default if question.kind == "choice" else "yes" if default else "no"
    position = [name for name, _ in choices].index(start)
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
    answer = choices[position][0]
    return answer if question.kind == "choice" else answer == "yes"


def move(key: str, position: int, count: int) -> int:
    """Where the mark stands after a key: arrows, j and k, digits; round at the ends."""
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
    """The keys of the terminal, one by one; it is put back as it was in every case."""
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
