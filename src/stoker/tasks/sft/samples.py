"""Greedy answers of a model to prompts, before and after training, for the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stoker.hf.checkpointing import random_state
from stoker.tasks.sft.chat_template import render
from stoker.tasks.sft.data import Chat, Example, Pair, Unusable

__all__ = ["Sample", "Samples", "answer", "answers", "choose_samples"]

log = logging.getLogger("stoker")

_TOKENS = 64
"""Of each answer in the report; longer ones say little more, and the answers before training delay its start."""
_PROMPT_TOKENS = 512
_AT_ONCE = 20
"""Prompts that are answered together. The weights are read from memory once for all of them."""


@dataclass(frozen=True)
class Sample:
    shown: str
    """The last turn of the user, or the text to continue."""
    prompt: str
    """As the model reads it."""
    special: bool
    """Whether the tokenizer adds its special tokens; a chat template has written them already."""
    expected: str


def choose_samples(examples: Sequence[Example], tokenizer: Any, most: int) -> list[Sample]:
    """Prompts spread over the examples, the shorter ones preferred: their answers come sooner."""
    parts = [examples[n * len(examples) // most : (n + 1) * len(examples) // most] for n in range(most)]
    found = [_sample(min(part[:50], key=_size), tokenizer) for part in parts if part]
    return [one for one in found if one is not None]


def _size(example: Example) -> int:
    return len(str(example.content))


def _sample(example: Example, tokenizer: Any) -> Sample | None:
    content = example.content.chosen if isinstance(example.content, Pair) else example.content
    if isinstance(content, Chat):
        before = content.messages[:-1]
        asked = next((one["content"] for one in reversed(before) if one["role"] in {"user", "tool"}), "")
        try:
            prompt = render(tokenizer, before, add_generation_prompt=True, tools=content.tools)
        except Unusable:  # a template that accepts whole chats may still reject one that lacks its answer
            return None
        sample = Sample(asked, prompt, False, content.messages[-1]["content"])
    elif content.prompt:
        sample = Sample(content.prompt, content.prompt, True, content.completion)
    else:
        words = content.completion.split(" ")
        half = min(len(words) // 2, 20)
        if not half:
            return None
        first = " ".join(words[:half])
        sample = Sample(first, first, True, " ".join(words[half:])[:300])
    length = len(tokenizer(sample.prompt, add_special_tokens=sample.special)["input_ids"])
    return sample if 0 < length <= _PROMPT_TOKENS else None


def answer(model: Any, tokenizer: Any, prompt: str, *, special: bool, streamer: Any = None, **options: Any) -> str:
    """The text that the model generates after `prompt`."""
    inputs = tokenizer(prompt, add_special_tokens=special, return_tensors="pt", return_token_type_ids=False)
    return _generate(model, tokenizer, inputs, streamer=streamer, **options)[0]


def _generate(model: Any, tokenizer: Any, inputs: Any, **options: Any) -> list[str]:
    stops = model.generation_config.eos_token_id
    stops = {*(stops if isinstance(stops, list) else [stops]), tokenizer.eos_token_id} - {None}
    stop: dict[str, Any] = {"eos_token_id": sorted(stops)} if stops else {}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.no_grad():
        ids = model.generate(**inputs, pad_token_id=pad, **stop, **options)
    texts: list[str] = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def answers(
    model: Any, tokenizer: Any, samples: Sequence[Sample], *, max_new_tokens: int = _TOKENS,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:  # fmt: skip
    """Greedy answers, several prompts of similar length at a time, without changing the random numbers of training."""
    training = model.training
    model.eval()
    order = sorted(range(len(samples)), key=lambda n: len(samples[n].prompt))
    # A tokenizer without a padding token takes one prompt at a time; those of a training have one.
    size = _AT_ONCE if tokenizer.pad_token_id is not None else 1
    found: dict[int, str] = {}
    try:
        with random_state.preserved():
            for special in (False, True):
                kind = [n for n in order if samples[n].special is special]
                for part in (kind[n : n + size] for n in range(0, len(kind), size)):
                    inputs = tokenizer(
                        [samples[n].prompt for n in part], add_special_tokens=special, return_tensors="pt",
                        return_token_type_ids=False, padding=size > 1, padding_side="left",
                    )  # fmt: skip
                    texts = _generate(model, tokenizer, inputs, max_new_tokens=max_new_tokens, **greedy())
                    found.update(zip(part, texts, strict=True))
                    progress(len(found))
    finally:
        model.train(training)
    return [found[n] for n in range(len(samples))]


def greedy() -> dict[str, Any]:
    """Generation options for the most likely token; the others only silence warnings about settings without effect."""
    return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


@dataclass
class Samples:
    """Prompts that are answered before and after training; both answers are shown in the report."""

    samples: Sequence[Sample]
    answered: list[list[str]] = field(default_factory=list)
    """The answers of each time."""

    @property
    def purpose(self) -> str:
        return "for the report (--samples 0 leaves them out)"

    def ask(self, model: Any, tokenizer: Any) -> dict[str, float]:
        """Asks all of them once; returns scores, of which plain samples have none."""
        self.answered.append(answers(model, tokenizer, self.samples))
        return {}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the run log's `examples` entry."""
        before, after = self.answered[0], self.answered[-1]
        return [
            {
                "question": one.shown[:1500],
                "before": old.strip(),
                "answer": new.strip(),
                "expected": [one.expected[:1500]],
            }
            for one, old, new in zip(self.samples, before, after, strict=True)
        ]
