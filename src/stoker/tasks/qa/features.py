"""Questions as model inputs: overlapping windows over their contexts, labelled with the answer's first and last token.

Stored as a few flat arrays (tokens of each distinct text, one row of numbers per window); input ids are assembled when a
window is read. Windows and labels are those of run_qa.py: at most `max_seq_length` tokens, an overlap of `doc_stride`, and CLS
as the label of a window that does not contain the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.errors import UserError
from stoker.tasks.cache import Arrays, cached, fingerprint
from stoker.tasks.qa.data import Question
from stoker.tasks.tokens import Ragged, Template, distinct, pieces, tokenize, whole_texts

__all__ = ["Windows", "make_windows"]


@dataclass(frozen=True)
class Windows(torch.utils.data.Dataset[dict[str, Any]]):
    """A data set of windows; item i is a dictionary for the collator."""

    questions: Sequence[Question]
    question_tokens: Ragged
    context_tokens: Ragged
    spans: Ragged
    """Character begin and end of each context token."""
    rows: NDArray[np.int32]
    """(windows, 6): question, question text, context, first context token, end context token, position of CLS."""
    labels: NDArray[np.int32]
    """(windows, 2): first and last token of the answer in the window; CLS if it is not in it."""
    template: Template
    context_first: bool
    training: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        _, question, context, begin, end, _ = self.rows[index]
        texts = (self.question_tokens[question], self.context_tokens[context][begin:end])
        ids, types = self.template.join(*(reversed(texts) if self.context_first else texts))
        item: dict[str, Any] = {"input_ids": ids}
        if self.template.typed:
            item["token_type_ids"] = types
        if self.training:
            item["start_positions"], item["end_positions"] = (int(position) for position in self.labels[index])
        return item

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each window."""
        lengths: NDArray[np.int64] = (
            self.question_tokens.lengths[self.rows[:, 1]] + self.rows[:, 4] - self.rows[:, 3] + self.template.specials
        )
        return lengths

    def example_ids(self, indices: Sequence[int]) -> list[str]:
        """The ids of the questions that these windows belong to."""
        return [self.questions[self.rows[index, 0]].id for index in indices]

    def context_of(self, index: int) -> tuple[int, NDArray[np.int32]]:
        """Position at which a window's context begins, and the character spans of its tokens."""
        question, context, begin, end = self.rows[index, 1:5]
        length = len(self.question_tokens[question])
        at = self.template.text_begin(0) if self.context_first else self.template.text_begin(1, length)
        return at, self.spans[context][begin:end]


def make_windows(
    questions: Sequence[Question],
    tokenizer: Any,
    *,
    max_seq_length: int,
    doc_stride: int,
    training: bool,
    fresh: bool = False,
) -> Windows:
    """The windows of all questions. Tokens come from the cache if these texts were tokenized before."""
    # With padding on the left, run_qa.py puts the context first.
    context_first = tokenizer.padding_side == "left"
    template = Template.read(tokenizer, 2)
    texts, text_index = distinct([question.question for question in questions])
    contexts, context_index = distinct([question.context for question in questions])
    key = fingerprint(texts, contexts, [whole_texts(tokenizer).to_str()])

    def tokens() -> Arrays:
        question_ids, _ = tokenize(tokenizer, [text.lstrip() for text in texts], offsets=False)
        context_ids, spans = tokenize(tokenizer, contexts, offsets=True)
        assert spans is not None
        return {
            "question_ids": question_ids.values,
            "question_ends": question_ids.ends,
            "context_ids": context_ids.values,
            "context_ends": context_ids.ends,
            "spans": spans.values,
        }

    found, _ = cached("qa", key, tokens, fresh=fresh)
    question_tokens = Ragged(found["question_ids"], found["question_ends"])  # type: ignore[arg-type]
    context_tokens = Ragged(found["context_ids"], found["context_ends"])  # type: ignore[arg-type]
    spans = Ragged(found["spans"], found["context_ends"])  # type: ignore[arg-type]
    _check_room(questions, texts, question_tokens, template, max_seq_length, doc_stride)

    rows: list[tuple[int, int, int, int, int, int]] = []
    labels: list[tuple[int, int]] = []
    for number, question in enumerate(questions):
        text_at, context_at = int(text_index[number]), int(context_index[number])
        question_length, total = len(question_tokens[text_at]), len(context_tokens[context_at])
        room = max_seq_length - question_length - template.specials
        answer = _answer_tokens(question, spans[context_at]) if training else None
        for begin, end in pieces(total, room, doc_stride):
            lengths = (end - begin, question_length) if context_first else (question_length, end - begin)
            cls = _cls_position(template, lengths)
            rows.append((number, text_at, context_at, begin, end, cls))
            at = template.text_begin(0 if context_first else 1, *lengths)
            if answer is not None and begin <= answer[0] and answer[1] < end:
                labels.append((at + answer[0] - begin, at + answer[1] - begin))
            else:
                labels.append((cls, cls))
    return Windows(
        questions=questions,
        question_tokens=question_tokens,
        context_tokens=context_tokens,
        spans=spans,
        rows=np.array(rows, np.int32).reshape(-1, 6),
        labels=np.array(labels, np.int32).reshape(-1, 2),
        template=template,
        context_first=context_first,
        training=training,
    )


def _check_room(
    questions: Sequence[Question],
    texts: Sequence[str],
    tokens: Ragged,
    template: Template,
    max_seq_length: int,
    doc_stride: int,
) -> None:
    longest = int(np.argmax(tokens.lengths))
    room = max_seq_length - int(tokens.lengths[longest]) - template.specials
    if room > doc_stride:
        return
    name = next(question.id for question in questions if question.question == texts[longest])
    needed = int(tokens.lengths[longest]) + template.specials
    raise UserError(
        f"question {name!r} has {int(tokens.lengths[longest])} tokens; with {template.specials} special ones it leaves "
        f"{max(room, 0)} of --max_seq_length {max_seq_length} for the text, and windows overlap by --doc_stride {doc_stride}; "
        f"use --max_seq_length {needed + doc_stride + 1} or more, a smaller --doc_stride, or shorten the question"
    )


def _answer_tokens(question: Question, spans: NDArray[np.int32]) -> tuple[int, int] | None:
    """First and last context token of the first answer; None if there is no answer."""
    if not question.starts or not len(spans):
        return None
    begin = question.starts[0]
    end = begin + len(question.answers[0])
    # The last token that begins at or before the answer, and the first that ends at or after its end.
    first = int(np.searchsorted(spans[:, 0], begin, side="right")) - 1
    last = int(np.searchsorted(spans[:, 1], end, side="left"))
    if first < 0 or last >= len(spans) or last < first:
        return None
    return first, last


def _cls_position(template: Template, lengths: tuple[int, int]) -> int:
    at = 0
    for number, part in enumerate(template.parts):
        if template.cls_id in part:
            return at + part.index(template.cls_id)  # type: ignore[arg-type]
        at += len(part) + (lengths[number] if number < len(lengths) else 0)
    return 0
