"""Answers a question about a text with a trained model, and shows the sentence that contains the answer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from stoker.errors import UserError
from stoker.tasks.collate import Collator
from stoker.tasks.files import is_unicode
from stoker.tasks.loading import load_pretrained, most_tokens
from stoker.tasks.qa.answers import Answer, choose_answers
from stoker.tasks.qa.data import Question
from stoker.tasks.qa.features import make_windows

__all__ = ["QuestionAnswerer", "sentence_around", "show"]


@dataclass(frozen=True)
class QuestionAnswerer:
    """A loaded question-answering model."""

    model: Any
    tokenizer: Any
    max_seq_length: int
    doc_stride: int

    @classmethod
    def load(cls, name: str, *, max_seq_length: int = 384, doc_stride: int = 128) -> QuestionAnswerer:
        from transformers import AutoModelForQuestionAnswering

        from stoker.model import optimize

        if os.path.isdir(name) and not os.path.exists(os.path.join(name, "config.json")):
            raise UserError(f"{name} does not contain a model: it has no config.json")
        kind = "question-answering model"
        tokenizer, model, untrained = load_pretrained(AutoModelForQuestionAnswering, name, what=kind)
        if untrained:
            raise UserError(
                f"{name} is not trained for question answering (it has no {', '.join(untrained[:2])}); "
                "train it with `stoker train qa`"
            )
        model = model.eval()
        length = min(max_seq_length, most_tokens(max_seq_length, tokenizer, model.config))
        return cls(optimize(model, dtype=torch.float32), tokenizer, length, min(doc_stride, length // 3))

    def ask(self, question: str, text: str, *, no_answer: bool = False) -> Answer:
        """The best answer; empty if there is none, or if `no_answer` is set and "no answer" scores better."""
        for value, what in ((question, "question"), (text, "text")):
            if not value.strip():
                raise UserError(f"the {what} is empty")
            if not is_unicode(value):
                raise UserError(f"the {what} is not UTF-8 text; convert it")
        length = len(self.tokenizer(question, add_special_tokens=False)["input_ids"])
        if length > self.max_seq_length - self.doc_stride - 8:  # leaves a few for special tokens and the text
            raise UserError(
                f"the question has {length} tokens, which leaves too few of {self.max_seq_length} for the text; shorten it"
            )
        windows = make_windows(
            [Question("asked", question, text, (), ())],
            self.tokenizer,
            max_seq_length=self.max_seq_length,
            doc_stride=self.doc_stride,
            training=False,
        )
        collate = Collator.of(self.tokenizer)
        logits = []
        with torch.no_grad():
            for begin in range(0, len(windows), 8):
                batch = collate([windows[i] for i in range(begin, min(begin + 8, len(windows)))])
                output = self.model(**batch)
                for row in range(len(batch["input_ids"])):
                    real = batch["attention_mask"][row].bool()
                    logits.append((output.start_logits[row][real].numpy(), output.end_logits[row][real].numpy()))
        answer = choose_answers(windows, logits, no_answer=no_answer)[0]
        if answer.text and answer.chosen.end == 0:  # "empty", which stands for no valid pair of tokens
            return replace(answer, text="", probability=0.0)
        return answer


def sentence_around(text: str, begin: int, end: int) -> tuple[int, int]:
    """Begin and end of the sentence that contains text[begin:end], by punctuation."""
    ends = [match.end() for match in re.finditer(r"[.!?](?=[\s\"')\]]|$)|\n{2,}", text)]
    first = max((at for at in ends if at <= begin), default=0)
    last = min((at for at in ends if at >= end), default=len(text))
    while first < begin and text[first].isspace():
        first += 1
    return first, last


def show(console: Console, answer: Answer, text: str) -> None:
    """Prints the answer, its score, and its sentence with the answer highlighted."""
    if not answer.text and not answer.probability:
        console.print(Text("no answer found", style="bold"))
        return
    if not answer.text:
        console.print(
            Text.assemble(("the text does not contain an answer", "bold"), f"  (score {answer.probability:.2f})")
        )
        return
    console.print(Text.assemble((answer.text, "bold green"), f"  (score {answer.probability:.2f})"))
    chosen = answer.chosen
    begin, end = sentence_around(text, chosen.begin, chosen.end)
    sentence = Text("  ")
    sentence.append(text[begin : chosen.begin])
    sentence.append(text[chosen.begin : chosen.end], style="bold reverse")
    sentence.append(text[chosen.end : end])
    console.print(sentence)
