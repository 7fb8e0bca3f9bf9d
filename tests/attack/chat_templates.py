"""Chat templates that loop, multiply, fail, write nothing or mark answers oddly, for the commands that render chats."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from attack import odd
from attack.case import Case
from attack.command_lines import flat, good_training

__all__ = ["chat_template"]

_GOOD = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_PIECES = (
    "",
    " ",
    "text",
    "{{ messages }}",
    "{{ messages[0].content }}",
    "{{ messages[-1]['content'] }}",
    "{{ bos_token }}",
    "{{ eos_token }}",
    "{{ nothing }}",
    "{{ nothing.at.all }}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ 'x' * 10**9 }}",
    "{{ 'x' * 10**6 }}",
    "{{ 'x' * 10**10 }}",
    "{{ [0] * 10**9 }}",
    "{{ 7 ** 7 ** 9 }}",
    "{{ 10 ** 6000 }}",
    "{{ 'x'.center(10**10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ range(10**9) | list }}",
    "{{ range(99999) | list }}",
    "{{ lipsum(10**6) }}",
    "{{ 'ab' | indent(10**10) }}",
    "{{ ''.join(['x'] * 10**8) }}",
    "{{ ('a' * 30 + '!') | replace('a', 'aa' * 10**6) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% set n = namespace(t='ab') %}{% for i in range(99) %}{% set n.t = n.t * 2 %}{% endfor %}{{ n.t }}",
    "{% set n = namespace(t=[0]) %}{% for i in range(99) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{{ m(n) + m(n) }}{% endmacro %}{{ m(1) }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}{{ os.system('touch pwned') }}",
    "{% extends 'x' %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}",
    "{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}",
    "{% generation %}{% endgeneration %}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].pop('role') }}",
    "{% set messages = [] %}",
    "{{ strftime_now('%Y') }}",
    "{{ strftime_now('%' * 9999) }}",
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ '\\ud800' }}",
    "{{ '\\x00' }}",
    "{{ caller() }}",
    "{% raw %}",
    "{% endfor %}",
    "{{",
    "{%",
    "{#",
    "{{ (" + "(" * 300,
    "{{ " + "1+" * 5000 + "1 }}",
    "{% if " * 60,
    "{{ messages | map(attribute='content') | join }}",
    "{% break %}",
    "{% do 1 %}",
    "{{ messages | sort(attribute='content') | first }}",
    "{{ loop }}",
    "{{ self }}",
    "{% block a %}{% endblock %}",
)


def chat_template(r: random.Random, base: Path) -> Case:
    kind = r.random()
    if kind < 0.2:
        content = odd.damage(r, _GOOD.encode())
    elif kind < 0.5:
        content = r.choice(_PIECES).encode("utf-8", "surrogatepass")
    else:
        pieces = [_GOOD, *(r.choice(_PIECES) for _ in range(r.choice((1, 2))))]
        r.shuffle(pieces)
        content = "".join(pieces).encode("utf-8", "surrogatepass")
    training = ["train", "sft", *flat(good_training("sft")), "--loss_on", r.choice(("completions", "assistant", "all"))]
    links = {name: str(base / name) for name in ("llm", "train.jsonl", "dev.jsonl")}
    if r.random() < 0.3:
        command = [*training, "--chat_template_path", "t.jinja"]
        return Case(command, {"t.jinja": content}, links, writes=("out",))

    def before(folder: str) -> None:
        model = Path(folder) / "cwd" / "model"
        shutil.copytree(base / "llm", model)
        (model / "chat_template.jinja").write_bytes(content)

    command = r.choice((
        ["chat", "--model", "model", "--prompt", "Who?", "--max_new_tokens", "2"],
        ["chat", "--model", "model", "--prompt", "Who?", "--max_new_tokens", "2", "--system", "Be brief."],
        ["use", "--model", "model", "--text", "Who?"],
        ["export", "model", "--to", "gguf", "--output_dir", "new"],
        [*training, "--model_name_or_path", "model"],
        [*training, "--model_name_or_path", "model", "--samples", "1"],
    ))  # fmt: skip
    return Case(command, links=links, before=before, writes=("out", "new"))
