"""The invented world is a sound SQuAD data set in which no question can be answered without reading."""

from __future__ import annotations

import json
from pathlib import Path

from stoker.tasks.demo.world import as_squad, make_world
from stoker.tasks.qa.data import read_questions


def test_every_answer_is_at_its_offset_and_the_layout_is_that_of_squad(tmp_path: Path) -> None:
    made = make_world(400, seed=1, training=True)
    path = tmp_path / "world.json"
    path.write_text(json.dumps(as_squad(made)))
    assert read_questions(path, training=True, strict=True) == made


def test_the_seed_determines_the_world() -> None:
    assert make_world(40, seed=1, training=True) == make_world(40, seed=1, training=True)
    assert make_world(40, seed=1, training=True) != make_world(40, seed=2, training=True)


def test_evaluation_has_texts_names_and_wordings_that_training_does_not_have() -> None:
    train, dev = make_world(3000, seed=7, training=True), make_world(300, seed=7, training=False)
    assert not {q.context for q in train} & {q.context for q in dev}
    patterns = [
        {" ".join(word for word in q.question.split() if word.islower()) for q in part} for part in (train, dev)
    ]
    assert patterns[1] - patterns[0]
    assert len(patterns[0]) > 40, "the wording varies"


def test_every_text_has_distractors() -> None:
    """Each question's text holds another sentence that could be mistaken for the answer's: three subjects per text."""
    for question in make_world(60, seed=4, training=False):
        assert question.context.count(".") >= 6
        assert question.context.count(question.answers[0]) == 1 or len(question.answers[0]) < 7
