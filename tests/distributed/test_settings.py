"""The words for training in several processes: what they may be, at every door that takes them."""

from __future__ import annotations

import pytest

from stoker.cli.launch import parse
from stoker.distributed.settings import check_words, from_environment, without_use
from stoker.errors import UserError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("zip", None, 1.0, 0.0), "gradient_compression is 'zip'; choose one of none, bf16"),
        ((None, -1, 1.0, 0.0), "local_sgd is -1; it must be a number of steps"),
        (("powersgd", 8, 1.0, 0.0), "cannot be had with local_sgd"),
        ((None, 8, 0.0, 0.0), "local_sgd_outer_lr is 0.0; it must be above 0"),
        ((None, 8, -1.0, 0.0), "local_sgd_outer_lr is -1.0; it must be above 0"),
        ((None, 8, float("nan"), 0.0), "local_sgd_outer_lr is nan"),
        ((None, 8, 1.0, 1.0), "local_sgd_outer_momentum is 1.0; it must be from 0 to below 1"),
        ((None, 8, 1.0, -0.1), "local_sgd_outer_momentum is -0.1"),
    ],
)
def test_words_that_cannot_be_are_named(words: tuple[str | None, int | None, float, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_words(*words)


def test_words_that_can_be_pass() -> None:
    for words in ((None, None, 1.0, 0.0), ("bf16-feedback", 0, 0.7, 0.9), ("powersgd", 0, 1.0, 0.0)):
        check_words(*words)


@pytest.mark.parametrize(
    "words",
    [
        "--local_sgd 8 --gradient_compression powersgd",
        "--local_sgd 8 --local_sgd_outer_lr=-1",
        "--local_sgd 8 --local_sgd_outer_lr 0",
        "--local_sgd 8 --local_sgd_outer_momentum 5",
    ],
)
def test_launch_refuses_them_before_it_starts_anything(words: str) -> None:
    with pytest.raises(UserError, match="local_sgd"):
        parse([*words.split(), "script.py"])


def test_a_wrong_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_LOCAL_SGD", "x")
    with pytest.raises(ValueError, match="STOKER_LOCAL_SGD is 'x', which is not a number"):
        from_environment("local_sgd", int)
    monkeypatch.setenv("STOKER_LOCAL_SGD", "")
    assert from_environment("local_sgd", int) is None
    monkeypatch.setenv("STOKER_LOCAL_SGD", "4")
    assert from_environment("local_sgd", int) == 4


def test_what_is_set_and_does_nothing_has_a_name() -> None:
    assert without_use("none", 0) == without_use(None, None) == ""
    assert without_use("bf16", 4) == "local_sgd 4 and gradient_compression bf16"
