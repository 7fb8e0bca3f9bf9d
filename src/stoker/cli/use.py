"""`stoker use`: tries a trained model: classify, tag, search, rerank, fill masked words, answer questions, chat."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from stoker.cli import ask, chat, parsing
from stoker.errors import UserError
from stoker.tasks.model_folder import check_folder_exists, check_language_model
from stoker.user_files import MIB, read_standard_input, read_text, require_existing

if TYPE_CHECKING:
    from stoker.tasks.use.uses import Use

__all__ = ["main"]

_FILE = 256 * MIB
_EXAMPLES = """examples:
  stoker use --model out/mrpc --text "The first sentence.\\tThe second."       classify a pair of texts
  stoker use --model out/ner --file mails.txt --json                           entities of each line, as JSON
  stoker use --model out/embed --file notes.txt --query "leaking roof"         the notes that are nearest in meaning
  stoker use --model out/rerank --file notes.txt                               prompts for queries, orders the notes
  stoker use --model out/squad --file letter.txt --query "Who wrote it?"       the same as stoker ask
"""
_WORDS = ("answer", "classify", "tag", "embed", "rerank", "fill", "chat")


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "use", "try a trained model on texts; what it does follows from the model", examples=_EXAMPLES
    )
    parser.add_argument(
        "--model", required=True, type=parsing.path, metavar="DIR", help="folder or hub name of a model"
    )
    parser.add_argument("--as", dest="kind", choices=_WORDS, help="what to do, if the model does not tell")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", help="one text")
    source.add_argument("--file", type=parsing.path, metavar="FILE", help="a text per line; - for standard input")
    parser.add_argument("--query", help="what to search the texts for, or the question about a text")
    parser.add_argument("--top", type=parsing.count, default=5, metavar="N", help="results to show (5)")
    parser.add_argument("--json", action="store_true", help="print a JSON object per text or query")
    options = parser.parse_args(argv)
    parsing.require_installed("stoker use", ["transformers"], parsing.TRANSFORMERS, extra="hf")
    if options.file not in (None, "-"):
        require_existing(options.file, "--file")
    if options.model.endswith(".gguf"):
        check_language_model(options.model, "--model")
    check_folder_exists(options.model, "--model")
    parsing.announce(f"loading {options.model} ...", terminals_only=True)
    parsing.require_transformers("stoker use", extra="hf")
    from stoker.tasks.loading import quiet

    quiet()
    from stoker.tasks.fewshot.classifier_head import has_head
    from stoker.tasks.use.model_kind import recognise

    options.model, kind = recognise(options.model, options.kind)
    if kind == "answer":
        return ask.main(_ask_arguments(options))
    if kind == "chat":
        return chat.main(["--model", options.model, *_given("--prompt", options.query or _one_text(options))])
    searches = kind in ("embed", "rerank")
    if searches or has_head(Path(options.model)):
        parsing.require_packages("stoker use", ["sentence_transformers"], "sentence-transformers", extra="embed")
    if searches:
        return _search(kind, options)
    if options.query:
        raise UserError(f"--query is for models that search texts; this one ({kind}) takes --text or --file")
    from stoker.tasks.use.uses import load_use

    use = load_use(kind, options.model, (), options.top)
    if options.text is None and options.file is None:
        return _converse(use, options.json)
    for text in _texts(options):
        _answer(use, text, options.json)
    return 0


def _ask_arguments(options: object) -> list[str]:
    given = vars(options)
    flags = [*_given("--text", given["text"]), *_given("--file", given["file"]), *_given("--question", given["query"])]
    return ["--model", given["model"], *flags, *(["--json"] if given["json"] else [])]


def _given(flag: str, value: str | None) -> list[str]:
    return [] if value is None else [f"{flag}={value}"]


def _one_text(options: object) -> str | None:
    given = vars(options)
    return "\n".join(_texts(options)) if given["file"] is not None else given["text"]


def _texts(options: object) -> list[str]:
    given = vars(options)
    if given["text"] is not None:
        texts = [given["text"]]
    elif given["file"] == "-":
        texts = read_standard_input("--file -", limit=_FILE).splitlines()
    else:
        texts = read_text(given["file"], "--file", limit=_FILE).splitlines()
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UserError(f"{'--text is' if given['file'] is None else '--file ' + given['file'] + ' is'} empty")
    return texts


def _search(kind: str, options: object) -> int:
    given = vars(options)
    if given["text"] is None and given["file"] is None:
        raise UserError("--file is missing: it contains the texts to search, one per line")
    if given["query"] is None and given["file"] == "-":
        raise UserError("--file - reads the texts from standard input; add --query, which cannot be prompted for")
    from stoker.tasks.use.uses import load_use

    use = load_use(kind, given["model"], _texts(options), given["top"])
    if given["query"] is None:
        return _converse(use, given["json"])
    _answer(use, given["query"], given["json"])
    return 0


def _converse(use: Use, as_json: bool) -> int:
    """Answers what is typed until an empty line or the end; of a file or pipe, every line that is not empty."""
    console = Console(highlight=False, markup=False)
    terminal, answered = sys.stdin.isatty(), 0
    while True:
        try:
            said = console.input(use.prompt) if terminal else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            return 0
        except UnicodeDecodeError as error:
            raise UserError(f"what was typed is not UTF-8 text (byte {error.start} of standard input)") from None
        if not said and not terminal and not answered:
            raise UserError(_nothing_given(use))
        if not said or (terminal and not said.strip()):
            return 0
        if not said.strip():
            continue
        try:
            answered += 1
            _answer(use, said.strip(), as_json)
        except UserError as error:
            if not terminal:
                raise
            console.print(str(error))


def _nothing_given(use: Use) -> str:
    if use.searches:
        return "this model searches texts, and was given no query; give one with --query, or one per line of standard input"
    return "there is no text; give one with --text, a file with --file, or one per line of standard input"


def _answer(use: Use, said: str, as_json: bool) -> None:
    from stoker.tasks.files import is_unicode

    if not is_unicode(said):
        raise UserError("the text is not UTF-8; convert it")
    found = use(said)
    if as_json:
        print(json.dumps({"input": said, "found": found}, ensure_ascii=False), flush=True)
        return
    for row in found:
        print(use.shown(row), flush=True)
    if not found:
        print("nothing found", flush=True)
