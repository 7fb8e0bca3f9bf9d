"""Reads chats, prompts with completions, instructions, texts and preference pairs; the columns tell which of them a file has.

Rows that cannot be used are reported through `Faults` with their position. Everything that is a dialogue becomes a `Chat`;
templates and tokens are left to `chat_template` and `features`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.english import with_article
from stoker.errors import UserError
from stoker.tasks.faults import Faults
from stoker.tasks.files import Row, is_unicode, read_rows

__all__ = [
    "FORMATS",
    "PAIR_FORMATS",
    "Chat",
    "Example",
    "Format",
    "Pair",
    "Plain",
    "Unusable",
    "collect",
    "read_examples",
    "recognised",
]

Message = dict[str, Any]
"""`role` and `content`, and what else a chat template may read, such as `tool_calls`."""


class Unusable(ValueError):
    """A row that cannot be trained on; the message says why."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A dialogue whose last turn is the assistant's."""

    messages: list[Message]
    tools: Any = None


@dataclass(frozen=True, slots=True)
class Plain:
    """A text, after a prompt that may be empty. It is trained as it is, without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to a prompt, of which the first is preferred; either chats or plain texts."""

    chosen: Chat | Plain
    rejected: Chat | Plain


@dataclass(frozen=True, slots=True)
class Example:
    where: str
    content: Chat | Plain | Pair


@dataclass(frozen=True)
class Format:
    name: str
    columns: tuple[str, ...]
    """The columns by which it is recognised."""
    read: Callable[[dict[str, Any]], Chat | Plain | Pair]
    loss_on: str
    """Default of --loss_on."""


_ROLES = ("system", "developer", "user", "assistant", "tool")
_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "bard": "assistant", "model": "assistant", "assistant": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Roles of ShareGPT's `from`, which differ between data sets."""


def _text(values: dict[str, Any], name: str, *, empty: bool = False) -> str:
    value = values.get(name)
    if value is None and empty:
        return ""
    if value is None:
        raise Unusable(f"its {name} is missing")
    if not isinstance(value, str):
        raise Unusable(f"its {name} is {with_article(type(value).__name__)}, not text")
    if not empty and not value.strip():
        raise Unusable(f"its {name} is empty")
    if not is_unicode(value):
        raise Unusable(f"its {name} contains a lone surrogate (half a character, as from a wrong encoding)")
    return value


def _list(values: dict[str, Any], name: str) -> list[Any]:
    """A list of turns. CSV files, and some Parquet files, contain it as JSON text."""
    value = values.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Unusable(f"its {name} is text that is not JSON") from None
    if not isinstance(value, list):
        found = "missing" if value is None else f"{with_article(type(value).__name__)}, not a list of turns"
        raise Unusable(f"its {name} is {found}")
    if not value:
        raise Unusable(f"its {name} is empty")
    return value


def _content(turn: dict[str, Any], number: int) -> str:
    """The text of a message; OpenAI's format also allows a list of parts, of which only texts can be trained on."""
    value = turn.get("content")
    if isinstance(value, list):
        kinds = [part.get("type", "text") if isinstance(part, dict) else None for part in value]
        if set(kinds) - {"text"}:
            raise Unusable(f"turn {number} has a part that is not text")
        value = "".join(str(part.get("text", "")) for part in value)
    if value is None and turn.get("tool_calls"):
        return ""
    return _text({f"content of turn {number}": value}, f"content of turn {number}", empty=bool(turn.get("tool_calls")))


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise Unusable(f"turn {number} is {with_article(type(turn).__name__)}, not an object with role and content")
    if "role" not in turn and "from" in turn:
        return _spoken(turn, number)
    role = turn.get("role")
    if role not in _ROLES:
        raise Unusable(f"turn {number} has the role {role!r}; known are {', '.join(_ROLES)}")
    # Columns of Parquet files have the keys of all messages, with None where a message does not have them.
    given = {name: value for name, value in turn.items() if value is not None}
    return {**given, "role": role, "content": _content(turn, number)}


def _spoken(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise Unusable(f"turn {number} is {with_article(type(turn).__name__)}, not an object with from and value")
    if "from" not in turn and "role" in turn:
        return _message(turn, number)
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker.lower() not in _SPEAKERS:
        raise Unusable(f"turn {number} is from {speaker!r}; known are human, gpt and system")
    return {"role": _SPEAKERS[speaker.lower()], "content": _content({"content": turn.get("value")}, number)}


def _answered(messages: Sequence[Message], tools: Any = None) -> Chat:
    """The chat up to the assistant's last turn; nothing can be learned from what follows it."""
    last = max((n for n, one in enumerate(messages) if one["role"] == "assistant"), default=None)
    if last is None:
        raise Unusable("it has no turn of the assistant")
    if not any(one["role"] in {"user", "tool"} for one in messages[:last]):
        raise Unusable("no turn of the user comes before the assistant's")
    if isinstance(tools, str):
        tools = _list({"tools": tools}, "tools")
    return Chat(list(messages[: last + 1]), tools or None)


def _chat(values: dict[str, Any]) -> Chat:
    turns = _list(values, "messages")
    return _answered([_message(turn, n) for n, turn in enumerate(turns, 1)], values.get("tools"))


def _sharegpt(values: dict[str, Any]) -> Chat:
    return _answered(_dialogue(values), values.get("tools"))


def _dialogue(values: dict[str, Any]) -> list[Message]:
    """ShareGPT's turns, with the system prompt that some data sets have in a column."""
    messages = [_spoken(turn, n) for n, turn in enumerate(_list(values, "conversations"), 1)]
    system = _text(values, "system", empty=True)
    return [{"role": "system", "content": system}, *messages] if system.strip() else messages


def _alpaca(values: dict[str, Any]) -> Chat:
    instruction, more = _text(values, "instruction"), _text(values, "input", empty=True)
    asked = f"{instruction}\n\n{more}" if more.strip() else instruction
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": _text(values, "output")}]
    if (system := _text(values, "system", empty=True)).strip():
        messages.insert(0, {"role": "system", "content": system})
    return Chat(messages)


def _prompt_completion(values: dict[str, Any]) -> Chat | Plain:
    if isinstance(values.get("prompt"), str) and isinstance(values.get("completion"), str):
        return Plain(_text(values, "prompt"), _text(values, "completion"))
    return _answered([*_turns(values, "prompt"), *_turns(values, "completion")], values.get("tools"))


def _turns(values: dict[str, Any], name: str) -> list[Message]:
    """One or several messages, in OpenAI's or ShareGPT's format."""
    found = values.get(name)
    turns = [found] if isinstance(found, dict) else _list(values, name)
    return [_message(turn, n) for n, turn in enumerate(turns, 1)]


def _plain(values: dict[str, Any]) -> Plain:
    return Plain("", _text(values, "text"))


def _preference(values: dict[str, Any]) -> Pair:
    answers = {name: values.get(name) for name in ("chosen", "rejected")}
    plain = all(isinstance(answer, str) for answer in answers.values())
    if plain and isinstance(values.get("prompt"), str):
        prompt = _text(values, "prompt")
        pair = Pair(*(Plain(prompt, _text(values, name)) for name in answers))
    else:
        chosen, rejected = (_answer(values, name) for name in answers)
        if chosen.messages[:-1] != rejected.messages[:-1]:
            raise Unusable("chosen and rejected differ before the last answer; they must answer the same turns")
        pair = Pair(chosen, rejected)
    if pair.chosen == pair.rejected:
        raise Unusable("chosen and rejected are the same")
    return pair


def _answer(values: dict[str, Any], name: str) -> Chat:
    """A chat that ends with one of the answers. Without a prompt, each answer is a whole chat, as in HH-RLHF's format."""
    answer = values.get(name)
    is_text = isinstance(answer, str) and not answer.lstrip().startswith("[")
    turns = [{"role": "assistant", "content": _text(values, name)}] if is_text else _turns(values, name)
    if isinstance(values.get("prompt"), str) and not values["prompt"].lstrip().startswith("["):
        before = [{"role": "user", "content": _text(values, "prompt")}]
    else:
        before = _turns(values, "prompt") if values.get("prompt") is not None else []
    if values.get("conversations") is not None:
        before = _dialogue(values)
    return _answered([*before, *turns], values.get("tools"))


FORMATS = (
    Format("chat messages", ("messages",), _chat, "assistant"),
    Format("ShareGPT conversations", ("conversations",), _sharegpt, "assistant"),
    Format("prompts and completions", ("prompt", "completion"), _prompt_completion, "completions"),
    Format("Alpaca instructions", ("instruction", "output"), _alpaca, "completions"),
    Format("plain text", ("text",), _plain, "all"),
)
PAIR_FORMATS = (Format("preference pairs", ("chosen", "rejected"), _preference, "completions"),)


def recognised(columns: Collection[str], source: str, *, pairs: bool) -> Format:
    """The first format whose columns are all there."""
    formats = PAIR_FORMATS if pairs else FORMATS
    if not pairs and set(PAIR_FORMATS[0].columns) <= set(columns):
        raise UserError(f"{source} contains preference pairs (columns chosen and rejected); add --dpo to train on them")
    for one in formats:
        if set(one.columns) <= set(columns):
            return one
    known = "; ".join(" and ".join(one.columns) for one in formats)
    raise UserError(
        f"{source} has no columns that can be trained on: its columns are {', '.join(map(str, columns))}, and one of these is "
        f"needed: {known}; rename its columns"
    )


def read_examples(
    path: str | Path, *, pairs: bool, strict: bool = False, most: int | None = None
) -> tuple[Format, list[Example], Faults]:
    """The usable rows of a file. The caller adds what it finds itself to the faults, and settles them."""
    faults = Faults(str(path), strict)
    return *collect(read_rows(Path(path), faults, texts=True), faults, pairs=pairs, most=most), faults


def collect(
    rows: Iterable[Row], faults: Faults, *, pairs: bool, most: int | None = None
) -> tuple[Format, list[Example]]:
    """The usable rows, at most `most`, and the format, which the columns of the first row decide."""
    chosen: Format | None = None
    examples: list[Example] = []
    for row in rows:
        if most is not None and len(examples) >= most:
            break
        if chosen is None:
            chosen = recognised(list(row.values), faults.source, pairs=pairs)
        try:
            examples.append(Example(row.where, chosen.read(row.values)))
        except Unusable as reason:
            faults.add(row.where, str(reason))
    if chosen is None:
        faults.settle(0)
        raise UserError(f"{faults.source} contains no rows")
    return chosen, examples
