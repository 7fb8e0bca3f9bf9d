"""The task of `stoker demo --sft`: answers about the invented world as JSON with three keys, and how they are scored.

A training row is a chat about one text with several questions, so that the text is read once for all of them. A model is
examined on single questions about texts that it has not seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from stoker.tasks.demo.world import Asked
from stoker.tasks.sft.chat_template import ensure_template, render
from stoker.tasks.sft.samples import Sample, Samples, answers

__all__ = ["Exam", "Verdict", "chats", "expected", "judge", "prompt"]

_KEYS = ("about", "kind", "answer")
_INSTRUCTION = 'Answer as JSON with the keys "about", "kind" and "answer".'
_MOST_TOKENS = 40
"""The longest right answers have 32 with the tokenizer of SmolLM2."""


def prompt(asked: Asked) -> str:
    return f"{_INSTRUCTION}\n\n{asked.question.context}\n\n{asked.question.question}"


def expected(asked: Asked) -> str:
    values = (asked.subject, asked.kind, asked.question.answers[0])
    return json.dumps(dict(zip(_KEYS, values, strict=True)), ensure_ascii=False)


def chats(world: Sequence[Asked]) -> list[dict[str, Any]]:
    """A chat for each text: the first turn has the instruction and the text, the others only a question."""
    found: dict[str, list[dict[str, str]]] = {}
    for asked in world:
        messages = found.setdefault(asked.question.context, [])
        messages.append({"role": "user", "content": asked.question.question if messages else prompt(asked)})
        messages.append({"role": "assistant", "content": expected(asked)})
    return [{"messages": messages} for messages in found.values()]


@dataclass(frozen=True)
class Verdict:
    form: bool
    """The answer is a JSON object with the three keys, each with a text, and nothing else."""
    right: bool
    """It also has the right values."""
    named: bool
    """The right value occurs somewhere in the answer, whatever its form."""


def judge(text: str, asked: Asked) -> Verdict:
    named = asked.question.answers[0].casefold() in text.casefold()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return Verdict(False, False, named)
    form = isinstance(found, dict) and set(found) == set(_KEYS) and all(isinstance(one, str) for one in found.values())
    return Verdict(form, form and found == json.loads(expected(asked)), named)


@dataclass
class Exam(Samples):
    """Questions about texts that are not in the training data, asked and scored before and after training."""

    world: Sequence[Asked] = ()
    shown: int = 6
    """Of the answers, in the report."""
    console: Console = field(default_factory=Console)
    verdicts: list[list[Verdict]] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)
    """The verdicts and scores of each time."""

    @classmethod
    def of(cls, world: Sequence[Asked], tokenizer: Any, name: str, **options: Any) -> Exam:
        ensure_template(tokenizer, name)
        return cls([_sample(one, tokenizer) for one in world], world=world, **options)

    @property
    def purpose(self) -> str:
        return "to questions about texts that are not trained on"

    def ask(self, model: Any, tokenizer: Any) -> dict[str, float]:
        with self.console.status("") as status:
            progress = lambda done: status.update(f"{done} of {len(self.samples)} answered")  # noqa: E731
            self.answered.append(
                answers(model, tokenizer, self.samples, max_new_tokens=_MOST_TOKENS, progress=progress)
            )
        self.verdicts.append([judge(text, one) for text, one in zip(self.answered[-1], self.world, strict=True)])
        form, right, named = (
            100 * sum(getattr(one, name) for one in self.verdicts[-1]) / len(self.world)
            for name in ("form", "right", "named")
        )
        when = "after training: " if self.scores else "before training:"
        self.console.print(
            f"  {when} {form:3.0f}% in the form, {right:3.0f}% right; {named:.0f}% name the right value in any form"
        )
        self.scores.append({"eval_form": form, "eval_right": right, "eval_named": named})
        return self.scores[-1]

    def rows(self) -> list[dict[str, Any]]:
        rows = [
            {**row, "question": one.question.question, "texts": [one.question.context], "right": verdict.right}
            for row, one, verdict in zip(super().rows(), self.world, self.verdicts[-1], strict=True)
        ]
        return rows[:: max(len(rows) // self.shown, 1)][: self.shown]


def _sample(asked: Asked, tokenizer: Any) -> Sample:
    text = render(tokenizer, [{"role": "user", "content": prompt(asked)}], add_generation_prompt=True)
    return Sample(asked.question.question, text, False, expected(asked))
