"""--search of `stoker tune`: ranges, choices, and one sentence for what cannot be searched."""

from __future__ import annotations

import pytest

from stoker.cli.task_names import TASKS
from stoker.errors import UserError
from stoker.tasks.tune.search_space import default_search, parse_search
from stoker.tasks.tune.tune_command import SearchCommand, SearchOptions


class Suggested:
    """Answers like a trial of Optuna, with the lowest values."""

    def suggest_categorical(self, name: str, choices: tuple[object, ...]) -> object:
        return choices[0]

    def suggest_int(self, name: str, low: int, high: int, log: bool) -> int:
        return low

    def suggest_float(self, name: str, low: float, high: float, log: bool) -> float:
        return low * 1.000123


def test_ranges_and_choices_are_read_with_the_kind_of_their_option() -> None:
    space = parse_search(
        "learning_rate=1e-5..1e-3:log, lora_r=4|8|16,num_train_epochs=1..4,weight_decay=0..1,lr_scheduler_type=linear|cosine",
        "sft",
    )
    rate, rank, epochs, decay, schedule = space.parameters
    assert (rate.low, rate.high, rate.log, rate.whole) == (1e-5, 1e-3, True, False)
    assert rank.choices == (4, 8, 16)
    assert (epochs.low, epochs.high, epochs.whole, epochs.size) == (1, 4, True, 4)
    assert not decay.whole, "from 0 to 1 are the numbers between, not 0 and 1"
    assert schedule.choices == ("linear", "cosine")
    assert space.size is None
    assert space.suggest(Suggested()) == {
        "learning_rate": 1e-5, "lora_r": 4, "num_train_epochs": 1, "weight_decay": 0.0, "lr_scheduler_type": "linear",
    }  # fmt: skip
    assert parse_search(space.text, "sft") == space
    assert parse_search("num_train_epochs=0.5..2", "qa").size is None
    assert parse_search("num_train_epochs=1..3,per_device_train_batch_size=8|16", "qa").size == 6


def test_the_options_of_the_command_are_tried_first_if_they_are_in_the_space() -> None:
    space = parse_search("learning_rate=1e-5..1e-4:log,num_train_epochs=2..4,seed=1|2", "qa")
    assert space.start({"learning_rate": 5e-5, "num_train_epochs": 3.0, "seed": 2}) == {
        "learning_rate": 5e-5, "num_train_epochs": 3, "seed": 2,
    }  # fmt: skip
    assert space.start({"learning_rate": 5e-4, "num_train_epochs": 3.0, "seed": 2}) is None
    assert space.start({"learning_rate": 5e-5, "num_train_epochs": 2.5, "seed": 2}) is None
    assert space.start({"learning_rate": 5e-5, "num_train_epochs": None, "seed": 2}) is None


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ("", "is empty"),
        ("learnin_rate=1..2", "'learnin_rate' cannot be searched (did you mean learning_rate?)"),
        ("max_seq_length=64|128", "'max_seq_length' cannot be searched; choose from learning_rate"),
        ("lora_r=4|8", "'lora_r' cannot be searched"),
        ("learning_rate", "has no values"),
        ("learning_rate=", "has no values"),
        ("learning_rate=1e-4", "has one value; give it as --learning_rate 1e-4"),
        ("learning_rate=1e-4|1e-4", "has one value"),
        ("learning_rate=1e-4..1e-5", "is empty; the range must begin with the smaller number"),
        ("learning_rate=1e-4..1e-4", "is empty"),
        ("learning_rate=0..1e-4:log", "must begin above 0"),
        ("learning_rate=1e-5..1e-4:linear", "'linear' is unknown"),
        ("learning_rate=fast|slow", "'fast' is not a number"),
        ("learning_rate=1e-5..inf", "'inf' is not a number"),
        ("per_device_train_batch_size=8|12.5", "'12.5' is not a whole number"),
        ("per_device_train_batch_size=8..x", "'x' is not a whole number"),
        ("lr_scheduler_type=linear..cosine", "write choices instead of a range"),
        ("seed=1|2,seed=3|4", "names seed twice"),
    ],
)
def test_what_cannot_be_searched_gives_one_sentence(search: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_search(search, "classify")
    assert message in str(caught.value)
    assert str(caught.value).startswith("--search")


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_a_space_of_its_own_that_contains_its_defaults(task: str) -> None:
    space = parse_search(default_search(task), task)
    assert space.names[:3] == ["learning_rate", "per_device_train_batch_size", "num_train_epochs"]
    assert ("lora_r" in space.names) == (task == "sft")
    given = {"sft": (2e-4, 8), "embed": (2e-5, 64), "rerank": (2e-5, 16), "fewshot": (2e-5, 16)}.get(task, (5e-5, 8))
    epochs = 1 if task == "fewshot" else 3
    named = {
        "learning_rate": given[0],
        "per_device_train_batch_size": given[1],
        "num_train_epochs": epochs,
        "lora_r": 16,
    }
    assert space.start(named) is not None


def test_options_that_take_the_place_of_others_leave_them_out_of_the_search() -> None:
    def of(search: str | None = None, **options: object) -> list[str]:
        command = SearchCommand.of("sft", {"output_dir": "out", **options}, SearchOptions(20, search))
        return command.space.names

    assert of(max_steps=100) == ["learning_rate", "per_device_train_batch_size", "lora_r"]
    assert of(tokens_per_batch=1000) == ["learning_rate", "num_train_epochs", "lora_r"]
    assert of(full=True) == ["learning_rate", "per_device_train_batch_size", "num_train_epochs"]
    for search, options in (
        ("num_train_epochs=1..2", {"max_steps": 9}),
        ("per_device_train_batch_size=4|8,tokens_per_batch=512|1024", {}),
    ):
        with pytest.raises(UserError, match="has no effect with --"):
            of(search, **options)
    with pytest.raises(UserError, match="not possible with --full"):
        of("lora_r=4|8", full=True)


def test_the_command_that_continues_a_search_has_all_its_options() -> None:
    options = {"model_name_or_path": "a b", "output_dir": "out", "overwrite_output_dir": True, "hub_token": "hf_secret"}
    command = SearchCommand.of("qa", options, SearchOptions(7, "learning_rate=1e-5..1e-4:log", 60.0, "f1", None, 2))
    assert command.again.endswith(
        "tune qa '--model_name_or_path=a b' --output_dir=out --hub_token=hidden --trials=7 "
        "--search=learning_rate=1e-5..1e-4:log --metric=f1 --evaluations=2 --timeout=60.0"
    )
    assert "hf_secret" not in str(command.identity)
    assert command.wanted == 7
    assert SearchCommand.of("qa", options, SearchOptions(7, "seed=1|2|3")).wanted == 3, "there are three combinations"
