"""Chats and texts as token ids with labels: which tokens are trained on is decided here (`--loss_on`), per character."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.tasks.faults import Faults
from stoker.tasks.sft.chat_template import marking_template, render, spans_of_answers
from stoker.tasks.sft.data import Chat, Example, Pair, Plain, Unusable

__all__ = ["IGNORED", "Encoder", "Tokens", "make_pairs", "make_rows"]

log = logging.getLogger("stoker")

IGNORED = -100
"""The label of tokens that are not trained on; transformers' and TRL's own."""
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Tokens:
    ids: list[int]
    labels: list[int]

    @property
    def trained(self) -> bool:
        """Whether there is a token to learn; the first one has nothing before it from which it could be predicted."""
        return any(label != IGNORED for label in self.labels[1:])

    def part(self, begin: int, end: int) -> Tokens:
        return Tokens(self.ids[begin:end], self.labels[begin:end])


@dataclass(frozen=True)
class Encoder:
    """Tokenizes with labels on what `loss_on` names: the last answer (completions), every answer (assistant), or all."""

    tokenizer: Any
    loss_on: str
    marking: str | None
    """A chat template that marks the answers; None if rendering the turns before them shows where they are."""

    @classmethod
    def of(cls, tokenizer: Any, loss_on: str, *, chats: bool) -> Encoder:
        needed = chats and loss_on != "all"
        return cls(
            tokenizer, loss_on, marking_template(tokenizer, last_only=loss_on != "assistant") if needed else None
        )

    def __call__(self, content: Chat | Plain) -> Tokens:
        if isinstance(content, Plain):
            return self._plain(content)
        if self.marking is not None:
            return self._marked(content)
        text = render(self.tokenizer, content.messages, tools=content.tools)
        if self.loss_on == "all":
            return self._tokens(text, [(0, len(text))])
        last_only = self.loss_on == "completions"
        return self._tokens(
            text,
            spans_of_answers(self.tokenizer, content.messages, text, last_only=last_only, tools=content.tools),
        )

    def _tokens(self, text: str, spans: Sequence[tuple[int, int]], *, special: bool = False) -> Tokens:
        """A token is trained on if one of its characters is; only the template adds special tokens to chats."""
        found = self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        ids: list[int] = found["input_ids"]
        if self.loss_on == "all":
            return Tokens(ids, list(ids))
        labels = [
            one if any(first < end and begin < last for begin, end in spans) else IGNORED
            for one, (first, last) in zip(ids, found["offset_mapping"], strict=True)
        ]
        return Tokens(ids, labels)

    def _plain(self, content: Plain) -> Tokens:
        """As TRL does: the tokenizer's own special tokens, and the end-of-text token after the text."""
        eos: str = self.tokenizer.eos_token or ""
        text = content.prompt + content.completion
        text += "" if text.endswith(eos) else eos
        tokens = self._tokens(text, [(len(content.prompt), len(text))], special=True)
        twice = len(tokens.ids) > 1 and tokens.ids[-2:] == [self.tokenizer.eos_token_id] * 2
        return tokens.part(0, len(tokens.ids) - 1) if twice else tokens

    def _marked(self, content: Chat) -> Tokens:
        render(
            self.tokenizer, content.messages, tools=content.tools, chat_template=self.marking
        )  # stops a runaway template
        try:
            found = self.tokenizer.apply_chat_template(
                content.messages, tools=content.tools, chat_template=self.marking, return_dict=True,
                return_assistant_tokens_mask=True,
            )  # fmt: skip
        except Exception as error:  # templates are programs, and may raise anything
            raise Unusable(f"the chat template rejects it: {error}") from None
        ids, mask = found["input_ids"], list(found["assistant_masks"])
        if self.loss_on == "completions":
            end = len(mask) - mask[::-1].index(1) if 1 in mask else 0
            begin = max((n + 1 for n in range(end) if not mask[n]), default=0)
            mask = [int(begin <= n < end) for n in range(len(mask))]
        return Tokens(ids, [one if kept else IGNORED for one, kept in zip(ids, mask, strict=True)])


def make_rows(examples: Sequence[Example], encoder: Encoder, max_length: int, faults: Faults) -> list[Tokens]:
    """The rows of `examples`, at most `max_length` tokens each. Long texts continue in the next row; long chats are cut."""
    rows: list[Tokens] = []
    long = _Long(max_length, faults)
    for example in examples:
        content = example.content
        assert not isinstance(content, Pair)
        if (found := long.kept(example, encoder, [content])) is None:
            continue
        tokens = found[0]
        if isinstance(content, Plain) and not content.prompt:
            pieces = (tokens.part(n, n + max_length) for n in range(0, len(tokens.ids), max_length))
            rows += [piece for piece in pieces if piece.trained]
        else:
            rows.append(tokens.part(0, max_length))
            long.note_cut(example, found)
    long.report(len(examples))
    return rows


def make_pairs(
    examples: Sequence[Example], encoder: Encoder, max_length: int, faults: Faults
) -> list[tuple[Pair, int]]:
    """The pairs that can be trained on, with the number of tokens of both rows; TRL tokenizes them itself."""
    pairs: list[tuple[Pair, int]] = []
    long = _Long(max_length, faults)
    for example in examples:
        pair = example.content
        assert isinstance(pair, Pair)
        if (found := long.kept(example, encoder, [pair.chosen, pair.rejected])) is not None:
            pairs.append((pair, sum(min(len(tokens.ids), max_length) for tokens in found)))
            long.note_cut(example, found)
    long.report(len(examples))
    return pairs


@dataclass
class _Long:
    """Rows with more than `max_length` tokens. They depend on the option, so any number of them is allowed."""

    max_length: int
    faults: Faults
    cut: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def kept(self, example: Example, encoder: Encoder, contents: Sequence[Chat | Plain]) -> list[Tokens] | None:
        """The tokens; None, with the reason noted, if nothing can be learned from them."""
        try:
            found = [encoder(content) for content in contents]
            if not all(tokens.trained for tokens in found):
                raise Unusable("it has no token to learn")
        except Unusable as reason:
            self.faults.add(example.where, str(reason))
            return None
        if all(tokens.part(0, self.max_length).trained for tokens in found):
            return found
        if self.faults.strict:
            self.faults.add(example.where, f"its prompt alone fills --max_length {self.max_length}")
        self.skipped.append(example.where)
        return None

    def note_cut(self, example: Example, found: Sequence[Tokens]) -> None:
        if any(len(tokens.ids) > self.max_length for tokens in found):
            self.cut.append(example.where)

    def report(self, total: int) -> None:
        """Warns about the rows that were cut, and about those that were skipped."""
        limit = f"--max_length {self.max_length}"
        for places, what in (
            (self.cut, f"have more tokens than {limit}, and are cut there"),
            (self.skipped, f"are skipped, because their prompt alone fills {limit}"),
        ):
            if places:
                more = f" and {len(places) - _SHOWN:,} more" if len(places) > _SHOWN else ""
                shown = "; ".join(places[:_SHOWN])
                log.warning("%s of %s rows %s: %s%s", f"{len(places):,}", f"{total:,}", what, shown, more)
