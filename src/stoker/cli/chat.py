"""`stoker chat`: talks to a language model in the terminal, or answers one prompt for scripts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from stoker.cli import parsing
from stoker.errors import UserError
from stoker.tasks.model_folder import check_folder_exists, check_language_model, gguf_file
from stoker.user_files import MIB, read_standard_input

if TYPE_CHECKING:
    from stoker.tasks.sft.chat_session import ChatSession

__all__ = ["main"]

_EXAMPLES = """examples:
  stoker chat --model out/chat                                talks until an empty line, Ctrl-D or Ctrl-C
  stoker chat --model out/chat --prompt "Who wrote it?"       prints one answer
  cat question.txt | stoker chat --model out/chat             the same, from standard input
"""


def main(argv: list[str]) -> int:
    parser = parsing.Parser("chat", "talk to a language model, or answer one prompt", examples=_EXAMPLES)
    parser.add_argument(
        "--model", required=True, type=parsing.path, metavar="DIR",
        help="folder of a model or an adapter, GGUF file, or hub name",
    )  # fmt: skip
    parser.add_argument("--prompt", help="print the answer to this, and end")
    parser.add_argument("--system", help="instructions that precede the conversation")
    parser.add_argument(
        "--max_new_tokens",
        "--max-new-tokens",
        type=parsing.count,
        default=512,
        metavar="N",
        help="length of an answer (512)",
    )
    parser.add_argument(
        "--temperature", type=parsing.number, default=0.0, metavar="T",
        help="0 (the default) always chooses the most likely token; 0.7 varies answers",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if not 0 <= options.temperature <= 100:
        raise UserError(f"--temperature is {options.temperature:g}; it must be 0 to 100")
    prompt = options.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = read_standard_input("the prompt from standard input", limit=MIB)
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt is empty; give it with --prompt, or through standard input")
    parsing.require_installed("stoker chat", ["transformers"], parsing.TRANSFORMERS, extra="sft")
    if gguf_file(options.model) is None:
        check_language_model(options.model, "--model")
        check_folder_exists(options.model, "--model")
    parsing.announce(f"loading {options.model} ...", terminals_only=True)
    parsing.require_transformers("stoker chat", extra="sft")
    from stoker.tasks.loading import quiet

    quiet()
    from stoker.tasks.sft.chat_session import ChatSession

    session = ChatSession.load(
        options.model, system=options.system, max_new_tokens=options.max_new_tokens, temperature=options.temperature
    )
    if prompt is None:
        return _converse(session)
    session.reply(prompt)
    print()
    return 0


def _converse(session: ChatSession) -> int:
    console = Console(highlight=False)
    console.print("Type a message; an empty line, Ctrl-D or Ctrl-C ends the conversation.", style="dim")
    try:
        while (said := console.input("[bold]> [/bold]")).strip():
            session.reply(said)
            print("\n")
    except (EOFError, KeyboardInterrupt):
        print()
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt is not UTF-8 text (byte {error.start} of standard input)") from None
    return 0
