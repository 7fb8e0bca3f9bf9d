"""A chat template that runs away or writes nothing ends the command in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the extra sft")

from rig import warm
from stoker import bounded
from stoker.cli import main
from stoker.errors import UserError
from stoker.tasks.sft import chat_template
from stoker.tasks.sft.data import Chat, Example
from stoker.tasks.sft.samples import choose_samples
from tasks.language_models import CHATML, chat, save_tiny_llama, tokenizer, write_chats
from tasks.task_runs import train_command

RUNAWAY = {
    "multiplies text": ("{{ 'x' * 4000000000 }}", "needs more than 1.1 GB of memory"),
    "pads text": ("{{ '%4000000000d' % 1 }}", "needs more than 1.1 GB of memory"),
    "doubles text": (
        "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
        "needs more than 1.1 GB of memory",
    ),
    "writes too much": ("{{ 'x' * 9000000 }}", "writes 9,000,000 characters for a chat of"),
}  # fmt: skip
LOOP = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


RENDER = """
import sys
sys.path.insert(0, sys.argv[1])
from stoker.errors import UserError
from stoker.tasks.sft import chat_template
from tasks.language_models import tokenizer
for template in sys.argv[2:]:
    try:
        chat_template.render(tokenizer(template), [{"role": "user", "content": "Which?"}])
    except UserError as error:
        print(error)
"""


def test_a_template_that_takes_too_much_memory_ends_in_one_sentence() -> None:
    """In a process of its own, because this one may have gigabytes that are free and mapped already."""
    templates = [template for template, _ in RUNAWAY.values()]
    words = [sys.executable, "-c", RENDER, str(Path(__file__).parents[1]), *templates]
    done = warm.run(words, capture_output=True, text=True, timeout=100, transformers=True)
    sentences = [line for line in done.stdout.splitlines() if line]
    for sentence, (_, message) in zip(sentences, RUNAWAY.values(), strict=True):
        assert message in sentence, done.stderr


def test_a_template_that_loops_ends_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    llama, data = save_tiny_llama(tmp_path / "llama", LOOP), write_chats(tmp_path / "d.jsonl")
    assert main(["chat", "--model", str(llama), "--prompt", "Which?"]) == 2
    assert main(train_command("sft", llama, data, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert error.count("the tokenizer's chat template takes more than 0.2 s for one chat; repair it") == 2
    assert "Traceback" not in error


def test_a_power_that_takes_for_ever_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja computes constants while it compiles, and ignores the errors of that."""
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    with pytest.raises(UserError, match=r"takes more than 0\.2 s"):
        chat_template.render(tokenizer("{{ (7 ** 77777777) % 10 }}"), [{"role": "user", "content": "Which?"}])


def test_a_template_that_writes_nothing_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama, data = save_tiny_llama(tmp_path / "llama", "{# nothing #}"), write_chats(tmp_path / "d.jsonl")
    assert main(["chat", "--model", str(llama), "--prompt", "Which?"]) == 2
    assert "the model cannot answer this prompt: its chat template writes nothing" in capsys.readouterr().err
    assert main(train_command("sft", llama, data, tmp_path / "out")) == 2
    assert "it has no token to learn" in capsys.readouterr().err


def test_a_template_that_rejects_prompts_leaves_no_sample() -> None:
    only_whole = "{% if messages[-1].role == 'user' %}{{ raise_exception('no answer') }}{% endif %}" + CHATML
    example = Example("d.jsonl, line 1", Chat(chat(1)))
    assert len(choose_samples([example], tokenizer(CHATML), 1)) == 1
    assert choose_samples([example], tokenizer(only_whole), 1) == []
    assert choose_samples([example], tokenizer("{# nothing #}"), 1) == []


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ '\\ud800' }}" + CHATML, "lone surrogate"), ("{{ " + "(" * 400, "recursion"), ("{% for", "unexpected")],
    ids=["half a character", "nested", "cut"],
)
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_a_template_that_fails_is_reported_with_the_cause(
    template: str, message: str, loss_on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama, data = save_tiny_llama(tmp_path / "llama", template), write_chats(tmp_path / "d.jsonl")
    assert main(train_command("sft", llama, data, tmp_path / "out", "--loss_on", loss_on)) == 2
    error = capsys.readouterr().err
    assert message in error.lower()
    assert "Traceback" not in error
