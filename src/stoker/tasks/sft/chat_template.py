"""The chat template of a tokenizer: turns as text, and which characters of that text the assistant has written.

Where the answers begin and end follows from rendering the turns before them. Templates that rewrite earlier turns do not allow
that; for those, the template marks the answers itself, or TRL has a version of it that does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from stoker.bounded import OutOfBounds, bounded
from stoker.errors import UserError, one_line
from stoker.tasks.files import is_unicode
from stoker.tasks.loading import tokenizer_of
from stoker.tasks.sft.data import Message, Unusable
from stoker.user_files import read_text

__all__ = ["DEFAULT_TEMPLATE", "adopt_template", "ensure_template", "marking_template", "render", "spans_of_answers"]

log = logging.getLogger("stoker")

DEFAULT_TEMPLATE = """\
{%- if bos_token %}{{ bos_token }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '### Assistant:\\n' + message.content + eos_token + '\\n' }}
{%- else -%}
{{ '### ' + message.role | capitalize + ':\\n' + message.content + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif -%}"""
"""For models without a template. Its headings are ordinary text, so it needs no tokens that the model does not know; the
answer ends with the model's own end-of-text token."""

_MEMORY = 1 << 30
_LONGEST_TEXT, _MOST_COPIES = 1 << 20, 20
"""Characters of a rendered chat: this many, and as many again for each character of its turns."""

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE: list[Message] = [
    {"role": "user", "content": "One?"}, {"role": "assistant", "content": "Uno."},
    {"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Due."},
]  # fmt: skip


def adopt_template(tokenizer: Any, path: str) -> None:
    """Gives a tokenizer the template of --chat_template_path: a file, or that of another tokenizer."""
    flag = "--chat_template_path"
    if path.endswith((".jinja", ".j2")):
        tokenizer.chat_template = read_text(path, flag)
        return
    template = tokenizer_of(path, flag=flag).chat_template
    if not template:
        raise UserError(f"the tokenizer of {flag} {path} has no chat template; name another one, or a .jinja file")
    tokenizer.chat_template = template


def ensure_template(tokenizer: Any, name: str) -> None:
    """Gives a tokenizer without a chat template the default one, and says so."""
    if tokenizer.chat_template:
        return
    if tokenizer.eos_token is None:
        raise UserError(
            f"the tokenizer of {name} has neither a chat template nor an end-of-text token (eos_token), so the model could not "
            "learn where an answer ends; use another model, or add one of them to its tokenizer_config.json"
        )
    tokenizer.chat_template = DEFAULT_TEMPLATE
    log.warning(
        "the tokenizer of %s has no chat template; turns are written as '### User:' and '### Assistant:', and the template is "
        "saved with the model", name,
    )  # fmt: skip


def render(tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
    """The turns as text. Unusable if the template rejects them; UserError if it takes too long or writes too much.

    A template is a program that comes with the model. Another row would not make a runaway one better, so it ends the command.
    """
    try:
        text: str = bounded(
            lambda: tokenizer.apply_chat_template(list(messages), tokenize=False, **options), memory=_MEMORY, timed=True
        )
    except OutOfBounds as limit:
        raise _runaway(f"{limit} for one chat") from None
    except Exception as error:  # it may raise anything
        raise Unusable(f"the chat template rejects it: {one_line(error)[:200]}") from None
    if len(text) > _LONGEST_TEXT:
        given = len(str(messages)) + len(str(options.get("tools") or ""))
        if len(text) > _LONGEST_TEXT + _MOST_COPIES * given:
            raise _runaway(f"writes {len(text):,} characters for a chat of {given:,}")
    if not is_unicode(text):
        raise Unusable("the chat template writes a lone surrogate (half a character)")
    return text


def _runaway(what: str) -> UserError:
    return UserError(f"the tokenizer's chat template {what}; repair it (chat_template.jinja or tokenizer_config.json)")


def spans_of_answers(
    tokenizer: Any, messages: Sequence[Message], text: str, *, last_only: bool, tools: Any = None
) -> list[tuple[int, int]]:
    """Begin and end in `text` of each answer with its end-of-turn token, or of the last one only."""
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for n in answers[-1:] if last_only else answers:
        before = render(tokenizer, messages[:n], add_generation_prompt=True, tools=tools)
        after = text if n == len(messages) - 1 else render(tokenizer, messages[: n + 1], tools=tools)
        end = len(after.rstrip())  # the line break after a turn is not the assistant's
        if not text.startswith(before) or text[:end] != after[:end]:
            raise Unusable(f"the chat template writes turn {n + 1} in another way once turns follow it")
        spans.append((len(before), end))
    return spans


def marking_template(tokenizer: Any, *, last_only: bool) -> str | None:
    """The template by which transformers can mark the answers; None if they follow from the turns before them."""
    if _MARKERS.search(str(tokenizer.chat_template)):
        return str(tokenizer.chat_template)
    try:
        spans_of_answers(tokenizer, _PROBE, render(tokenizer, _PROBE), last_only=last_only)
    except Unusable as reason:
        why = str(reason)
    else:
        return None
    from trl import get_training_chat_template

    try:
        return str(get_training_chat_template(tokenizer) or tokenizer.chat_template)
    except Exception:  # it has none for this template, or the template is broken
        raise UserError(
            "with the chat template of this tokenizer it cannot be told which tokens are the assistant's: it rewrites earlier "
            f"turns and does not mark answers by {{% generation %}} ({why}); use --loss_on all, or a tokenizer with another "
            "template"
        ) from None
