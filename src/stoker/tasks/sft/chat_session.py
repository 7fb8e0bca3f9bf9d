"""A conversation with a language model: keeps the turns, writes them by the chat template, and streams each answer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import TextStreamer

from stoker.errors import UserError
from stoker.tasks.files import is_unicode
from stoker.tasks.loading import most_tokens
from stoker.tasks.sft.chat_template import render
from stoker.tasks.sft.data import Message, Unusable
from stoker.tasks.sft.language_model import load_for_chat
from stoker.tasks.sft.samples import answer, greedy

__all__ = ["ChatSession"]

Write = Callable[[str], None]


class _Streamer(TextStreamer):  # type: ignore[misc]
    """Hands on each piece of text when it is complete."""

    def __init__(self, tokenizer: Any, write: Write) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


def to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@dataclass
class ChatSession:
    """Turns so far, and how answers are generated."""

    model: Any
    tokenizer: Any
    max_new_tokens: int
    temperature: float
    """0: always the most likely token."""
    messages: list[Message] = field(default_factory=list)

    @classmethod
    def load(cls, name: str, *, system: str | None, max_new_tokens: int, temperature: float) -> ChatSession:
        found = load_for_chat(name)
        session = cls(found.model, found.tokenizer, max_new_tokens, temperature)
        if system is not None:
            if not session.has_template:
                raise UserError(f"--system needs a chat template, and the tokenizer of {name} has none")
            session.messages.append({"role": "system", "content": _checked(system, "--system")})
        return session

    @property
    def has_template(self) -> bool:
        """Without a template, the model continues the text as it is, and remembers no turns."""
        return bool(self.tokenizer.chat_template)

    def reply(self, said: str, write: Write = to_stdout) -> str:
        """The model's answer to a turn of the user; `write` gets it piece by piece."""
        turn: Message = {"role": "user", "content": _checked(said, "the prompt")}
        prompt = self._prompt([*self.messages, turn]) if self.has_template else said
        self._check_length(prompt)
        how = {"do_sample": True, "temperature": self.temperature} if self.temperature else greedy()
        text = answer(
            self.model, self.tokenizer, prompt, special=not self.has_template, streamer=_Streamer(self.tokenizer, write),
            max_new_tokens=self.max_new_tokens, **how,
        )  # fmt: skip
        if self.has_template:
            self.messages += [turn, {"role": "assistant", "content": text}]
        return text

    def _prompt(self, messages: list[Message]) -> str:
        try:
            return render(self.tokenizer, messages, add_generation_prompt=True)
        except Unusable as error:
            raise UserError(f"the conversation cannot be continued: {error}") from None

    def _check_length(self, prompt: str) -> None:
        most = most_tokens(1 << 30, self.tokenizer, self.model.config)
        length = len(self.tokenizer(prompt, add_special_tokens=not self.has_template)["input_ids"])
        if not length:
            cause = "its chat template writes nothing" if self.has_template else "its tokenizer makes no token of it"
            raise UserError(f"the model cannot answer this prompt: {cause}")
        if length >= most:
            raise UserError(
                f"the conversation has {length:,} tokens, and the model takes {most:,}; shorten the prompt, or start again"
            )


def _checked(text: str, what: str) -> str:
    if not text.strip():
        raise UserError(f"{what} is empty")
    if not is_unicode(text):
        raise UserError(f"{what} is not UTF-8 text; convert it")
    return text
