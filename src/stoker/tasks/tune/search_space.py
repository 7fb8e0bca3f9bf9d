"""What is searched: the options of --search with their ranges and choices, or those that a task searches by default.

    learning_rate=1e-5..1e-3:log,lora_r=4|8|16,num_train_epochs=1..4

Neither Optuna nor torch is needed to read it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError
from stoker.numbers import finite_number, whole_number

__all__ = ["Parameter", "Space", "default_search", "parse_search"]

Value = int | float | str

WHOLE, NUMBER, EITHER, WORD = "a whole number", "a number", "either", "a word"
"""Kinds of options. A range of EITHER has whole numbers if its ends are: 1..4 epochs, but also 0.5..2."""
_KINDS = {
    "learning_rate": NUMBER, "per_device_train_batch_size": WHOLE, "num_train_epochs": EITHER,
    "gradient_accumulation_steps": WHOLE, "tokens_per_batch": WHOLE, "max_steps": WHOLE, "warmup_steps": EITHER,
    "warmup_ratio": NUMBER, "weight_decay": NUMBER, "lr_scheduler_type": WORD, "optim": WORD, "adam_beta1": NUMBER,
    "adam_beta2": NUMBER, "adam_epsilon": NUMBER, "max_grad_norm": NUMBER, "label_smoothing_factor": NUMBER,
    "neftune_noise_alpha": NUMBER, "seed": WHOLE,
}  # fmt: skip
"""Options that change training and not the data, which is read once for all trials."""
_LORA = {"lora_r": WHOLE, "lora_alpha": WHOLE, "lora_dropout": NUMBER}
_DPO = {"beta": NUMBER}
_DIGITS = 3
"""Significant digits of a number that is tried: enough for any of these options, and the command stays readable."""

_ENCODERS = "learning_rate=1e-5..1e-4:log,per_device_train_batch_size=8|16|32,num_train_epochs=2..4"
"""Around the values that the BERT paper (appendix A.3) advises to search: 2e-5 to 5e-5, 16 and 32, 2 to 4."""
_SENTENCES = "learning_rate=5e-6..1e-4:log,per_device_train_batch_size=16|32|64,num_train_epochs=1..4"
_DEFAULTS = {
    "qa": _ENCODERS,
    "classify": _ENCODERS,
    "ner": _ENCODERS,
    "mlm": "learning_rate=2e-5..4e-4:log,per_device_train_batch_size=8|16|32,num_train_epochs=1..3",
    "embed": _SENTENCES,
    "rerank": _SENTENCES,
    "fewshot": "learning_rate=5e-6..1e-4:log,per_device_train_batch_size=8|16|32,num_train_epochs=1..3",
}
_RATES = {
    (False, False): "5e-5..1e-3", (True, False): "5e-6..1e-4",
    (False, True): "2e-6..5e-5", (True, True): "2e-7..5e-6",
}  # fmt: skip
"""Learning rates of language models for (--full, --dpo), around the defaults of `stoker train sft`."""


@dataclass(frozen=True)
class Parameter:
    """An option with the values that may be tried: some choices, or all from `low` to `high`."""

    name: str
    text: str
    """Its values as they were typed."""
    choices: tuple[Value, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False
    whole: bool = False

    @property
    def size(self) -> int | None:
        """The number of values; None for a range of numbers that are not whole."""
        if self.choices:
            return len(self.choices)
        return int(self.high - self.low) + 1 if self.whole else None

    def suggest(self, trial: Any) -> Value:
        """The value that Optuna suggests for a trial."""
        if self.choices:
            chosen: Value = trial.suggest_categorical(self.name, self.choices)
            return chosen
        if self.whole:
            return int(trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log))
        number = float(f"{trial.suggest_float(self.name, self.low, self.high, log=self.log):.{_DIGITS}g}")
        return min(max(number, self.low), self.high)

    def contains(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        number = isinstance(value, int | float) and self.low <= value <= self.high
        return number and (not self.whole or value == int(value))

    @property
    def extremes(self) -> tuple[Value, ...]:
        """Values which, if they are valid, show that all are."""
        return self.choices or ((int(self.low), int(self.high)) if self.whole else (self.low, self.high))


@dataclass(frozen=True)
class Space:
    parameters: tuple[Parameter, ...]

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.parameters]

    @property
    def text(self) -> str:
        return ",".join(f"{one.name}={one.text}" for one in self.parameters)

    @property
    def size(self) -> int | None:
        """The number of combinations; None if there is no end of them."""
        sizes = [one.size for one in self.parameters]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    def suggest(self, trial: Any) -> dict[str, Value]:
        return {one.name: one.suggest(trial) for one in self.parameters}

    def start(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """These values of the searched options, to be tried first; None if one of them is not in the space."""
        found: dict[str, Any] = {one.name: values.get(one.name) for one in self.parameters}
        if not all(one.contains(found[one.name]) for one in self.parameters):
            return None
        return {
            one.name: int(found[one.name]) if one.whole and not one.choices else found[one.name]
            for one in self.parameters
        }  # fmt: skip


def default_search(task: str, *, full: bool = False, dpo: bool = False) -> str:
    """What a task searches without --search; the switches are those of sft."""
    if task != "sft":
        return _DEFAULTS[task]
    rank = "" if full else ",lora_r=4|8|16|32|64"
    return f"learning_rate={_RATES[full, dpo]}:log,per_device_train_batch_size=4|8|16,num_train_epochs=1..3{rank}"


def parse_search(text: str, task: str, *, full: bool = False, dpo: bool = False) -> Space:
    """Raises UserError for an option that cannot be searched, and for values that are none or not enough."""
    kinds = {**_KINDS, **(_LORA if task == "sft" and not full else {}), **(_DPO if task == "sft" and dpo else {})}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError("--search is empty; name options with their values, such as learning_rate=1e-5..1e-4:log")
    found: dict[str, Parameter] = {}
    for part in parts:
        name, equals, values = (one.strip() for one in part.partition("="))
        name = name.replace("-", "_").removeprefix("__")
        if name not in kinds:
            raise UserError(_unknown(name, kinds, full=full))
        if not equals or not values:
            raise UserError(
                f"--search {part} has no values; write a range such as {name}=1..4, or choices such as {name}=2|4"
            )
        if name in found:
            raise UserError(f"--search names {name} twice; name it once with all its values")
        found[name] = _parameter(name, values, kinds[name])
    return Space(tuple(found.values()))


def _unknown(name: str, kinds: Mapping[str, str], *, full: bool) -> str:
    if name in _LORA and full:
        return f"--search {name} is not possible with --full, which trains all weights without an adapter"
    close = difflib.get_close_matches(name, kinds, n=1, cutoff=0.6)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"--search: {name!r} cannot be searched{hint}; choose from {', '.join(kinds)}"


def _parameter(name: str, text: str, kind: str) -> Parameter:
    if ".." in text and "|" not in text:
        return _range(name, text, kind)
    words = [word.strip() for word in text.split("|")]
    choices = tuple(dict.fromkeys(_value(name, text, word, kind) for word in words))
    if len(choices) < 2:
        raise UserError(
            f"--search {name}={text} has one value; give it as --{name} {text}, or write a range or several choices"
        )
    return Parameter(name, text, choices)


def _range(name: str, text: str, kind: str) -> Parameter:
    ends, _, scale = text.partition(":")
    first, _, last = ends.partition("..")
    if scale not in ("", "log"):
        raise UserError(f"--search {name}={text}: {scale!r} is unknown; a range may end in :log")
    if kind == WORD:
        raise UserError(f"--search {name}={text}: write choices instead of a range, such as {name}=linear|cosine")
    low, high = (_value(name, text, end.strip(), kind) for end in (first, last))
    assert not isinstance(low, str)
    assert not isinstance(high, str)
    if not low < high:
        raise UserError(f"--search {name}={text} is empty; the range must begin with the smaller number")
    if scale and low <= 0:
        raise UserError(f"--search {name}={text}: with :log, the range must begin above 0")
    whole = kind == WHOLE or (kind == EITHER and isinstance(low, int) and isinstance(high, int))
    return Parameter(name, text, low=low, high=high, log=bool(scale), whole=whole)


def _value(name: str, text: str, word: str, kind: str) -> Value:
    if kind == WORD:
        if not word:
            raise UserError(f"--search {name}={text}: a choice is empty")
        return word
    whole, number = whole_number(word), finite_number(word)
    if kind == WHOLE and whole is None:
        raise UserError(f"--search {name}={text}: {word!r} is not a whole number")
    if number is None:
        raise UserError(f"--search {name}={text}: {word!r} is not a number")
    if whole is not None and kind != NUMBER:
        return whole
    return number
