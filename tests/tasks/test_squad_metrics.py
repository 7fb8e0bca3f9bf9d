"""EM and F1 by the official definition: cases worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.tasks.qa.data import Question, read_questions
from stoker.tasks.qa.metrics import exact_match, f1, normalized, squad, squad_v2


def question(name: str, *answers: str) -> Question:
    return Question(name, "?", " ".join(answers) or "-", answers, (0,) * len(answers))


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("The  Cat.", "cat"),
        ("a theory of an ant", "theory of ant"),
        ("U.S.A. (1776)", "usa 1776"),
        ("the", ""),
        ("Beyoncé's", "beyoncés"),
        ("$1,000", "1000"),
    ],
)
def test_articles_punctuation_case_and_space_are_ignored(raw: str, clean: str) -> None:
    assert normalized(raw) == clean


@pytest.mark.parametrize(
    ("predicted", "true", "expected"),
    [
        ("Ada Lovelace", "ada lovelace", 1.0),
        ("Ada", "Ada Lovelace", 2 / 3),  # precision 1, recall 1/2
        ("the big big dog", "big dog", 4 / 5),  # precision 2/3, recall 1: repeated words count once each
        ("cat", "dog", 0.0),
        ("", "dog", 0.0),
        ("the", "a", 0.0),  # both empty after cleaning: no word in common
    ],
)
def test_f1_is_that_of_the_two_bags_of_words(predicted: str, true: str, expected: float) -> None:
    assert f1(predicted, true) == pytest.approx(expected)


def test_exact_match_after_cleaning() -> None:
    assert exact_match("The Norman.", "norman") == 1.0
    assert exact_match("Normans", "norman") == 0.0


def test_the_best_of_several_answers_counts_and_a_missing_prediction_is_wrong() -> None:
    questions = [question("1", "Paris", "the city of Paris"), question("2", "1843"), question("3", "a dog")]
    scores = squad({"1": "city of Paris", "2": "in 1843"}, questions)
    assert scores["exact_match"] == pytest.approx(100 / 3)
    assert scores["f1"] == pytest.approx(100 * (1 + 2 / 3 + 0) / 3)


def test_version_two_scores_answerable_and_unanswerable_questions_separately() -> None:
    questions = [question("1", "Paris"), question("2"), question("3"), question("4", "a b c d")]
    predictions = {"1": "Paris", "2": "", "3": "Rome", "4": "b c"}
    scores = squad_v2(predictions, questions)
    partial = 2 * 1.0 * (2 / 3) / (1 + 2 / 3)  # "a" is an article: b c d against b c
    assert scores["exact"] == pytest.approx(50.0)
    assert scores["f1"] == pytest.approx(100 * (1 + 1 + 0 + partial) / 4)
    assert (scores["HasAns_exact"], scores["NoAns_exact"]) == (50.0, 50.0)
    assert scores["HasAns_f1"] == pytest.approx(100 * (1 + partial) / 2)
    assert (scores["total"], scores["HasAns_total"], scores["NoAns_total"]) == (4, 2, 2)


def test_an_answer_of_an_article_alone_is_an_answer() -> None:
    scores = squad_v2({"1": "Rome", "2": ""}, [question("1", "The"), question("2")])
    assert (scores["HasAns_total"], scores["NoAns_total"]) == (1, 1)
    assert (scores["HasAns_exact"], scores["NoAns_exact"]) == (0.0, 100.0)


def test_version_two_finds_the_best_threshold() -> None:
    questions = [question("1", "Paris"), question("2"), question("3", "Oslo")]
    predictions = {"1": "Paris", "2": "Rome", "3": "Oslo"}
    scores = squad_v2(predictions, questions, {"1": 0.1, "2": 0.8, "3": 0.3}, threshold=0.5)
    assert scores["exact"] == pytest.approx(100.0)  # question 2 is above the threshold, so empty, so right
    assert scores["best_exact"] == pytest.approx(100.0)
    assert scores["best_exact_thresh"] == 0.3


def test_no_questions_give_a_score_of_zero() -> None:
    assert squad({}, []) == {"exact_match": 0.0, "f1": 0.0}


@pytest.mark.data
def test_human_scores_on_the_dev_set_are_the_published_ones(data: Path) -> None:
    """People's score as the SQuAD paper defines it: the second answer is the prediction, the others are the truth.

    Rajpurkar et al. 2016 (arXiv 1606.05250), section 6.2; table 5 gives 80.3 EM and 90.5 F1 for the dev set of version 1.0.
    This is version 1.1, and three questions have one answer only, so the figures are near, not the same.
    """
    questions = [q for q in read_questions(data / "squad" / "dev-v1.1.json.gz", training=False) if len(q.answers) > 1]
    truth = [Question(q.id, q.question, q.context, (q.answers[0], *q.answers[2:]), ()) for q in questions]
    scores = squad({q.id: q.answers[1] for q in questions}, truth)
    assert scores["exact_match"] == pytest.approx(80.3, abs=2.0)
    assert scores["f1"] == pytest.approx(90.5, abs=1.0)
