"""`stoker ask`: answers one question about a text, or several interactively."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from stoker.cli import parsing
from stoker.errors import UserError
from stoker.tasks.model_folder import check_folder_exists
from stoker.user_files import MIB, read_standard_input, read_text

if TYPE_CHECKING:
    from stoker.tasks.qa.question_answerer import QuestionAnswerer

__all__ = ["main"]

_TEXT = 16 * MIB
"""Maximum size of the text; the complete works of Shakespeare have 6 MB."""
_EXAMPLES = """examples:
  stoker ask --model out/squad --text "Ada wrote the letter." --question "Who wrote the letter?"
  stoker ask --model out/squad --file letter.txt              prompts for questions
  cat letter.txt | stoker ask --model out/squad --file - --question "Who wrote it?"
"""


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "ask", "answer a question about a text with a model made by `stoker train qa`", examples=_EXAMPLES
    )
    parser.add_argument(
        "--model",
        required=True,
        type=parsing.path,
        metavar="DIR",
        help="folder or hub name of a question-answering model",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="the text to answer from")
    source.add_argument("--file", type=parsing.path, metavar="FILE", help="a file with the text; - for standard input")
    parser.add_argument("--question", help="the question; without it, prompts for questions until an empty line")
    parser.add_argument("--no-answer", action="store_true", help="allow the answer that the text does not contain one")
    parser.add_argument(
        "--max-seq-length", type=parsing.count, default=384, metavar="N", help="window over long texts, in tokens"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    text = options.text if options.text is not None else _read(options.file)
    if not options.question and options.file == "-":
        raise UserError("--file - reads the text from standard input; add --question, which cannot be prompted for")
    parsing.require_installed("stoker ask", ["transformers"], parsing.TRANSFORMERS, extra="hf")
    check_folder_exists(options.model, "--model")
    parsing.announce(f"loading {options.model} ...", terminals_only=True)
    parsing.require_transformers("stoker ask", extra="hf")
    from stoker.tasks.loading import quiet

    quiet()
    from stoker.tasks.qa.question_answerer import QuestionAnswerer

    answerer = QuestionAnswerer.load(options.model, max_seq_length=options.max_seq_length)
    if options.question:
        _answer(answerer, options.question, text, options)
        return 0
    return _converse(answerer, text, options)


def _read(name: str) -> str:
    if name == "-":
        return read_standard_input("--file -", limit=_TEXT)
    return read_text(name, "--file", limit=_TEXT)


def _converse(answerer: QuestionAnswerer, text: str, options: object) -> int:
    console = Console(highlight=False)
    while True:
        try:
            question = console.input("question: ") if sys.stdin.isatty() else sys.stdin.readline().strip()
        except EOFError:
            return 0
        except UnicodeDecodeError as error:
            raise UserError(f"the question is not UTF-8 text (byte {error.start} of standard input)") from None
        if not question.strip():
            return 0
        _answer(answerer, question, text, options)


def _answer(answerer: QuestionAnswerer, question: str, text: str, options: object) -> None:
    answer = answerer.ask(question, text, no_answer=bool(getattr(options, "no_answer", False)))
    if getattr(options, "json", False):
        chosen = answer.chosen
        found = {"question": question, "answer": answer.text, "score": round(answer.probability, 4)}
        print(json.dumps({**found, "begin": chosen.begin, "end": chosen.end}, ensure_ascii=False))
        return
    from stoker.tasks.qa.question_answerer import show

    show(Console(highlight=False), answer, text)
