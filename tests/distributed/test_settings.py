"""The options for training in several processes: which values are possible, wherever they are given."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

import pytest

from stoker.cli.launch import parse
from stoker.distributed.settings import DistributedSettings
from stoker.errors import UserError
from stoker.hf.arguments import TrainingArguments
from stoker.launch.options import RankOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_compression": "zip"}, "gradient_compression is 'zip'; choose one of none, bf16"),
        ({"local_sgd": -1}, "local_sgd is -1; it must be a number of steps"),
        ({"gradient_compression": "powersgd", "local_sgd": 8}, "does not work with local_sgd"),
        ({"local_sgd": 8, "local_sgd_outer_lr": 0.0}, "local_sgd_outer_lr is 0.0; it must be above 0"),
        ({"local_sgd": 8, "local_sgd_outer_lr": -1.0}, "local_sgd_outer_lr is -1.0; it must be above 0"),
        ({"local_sgd": 8, "local_sgd_outer_lr": float("nan")}, "local_sgd_outer_lr is nan"),
        (
            {"local_sgd": 8, "local_sgd_outer_momentum": 1.0},
            "local_sgd_outer_momentum is 1.0; it must be from 0 to below 1",
        ),
        ({"local_sgd": 8, "local_sgd_warmup_steps": -1}, "local_sgd_warmup_steps is -1; it must be a number of steps"),
        ({"local_sgd": 8, "local_sgd_outer_momentum": -0.1}, "local_sgd_outer_momentum is -0.1"),
    ],
)
def test_impossible_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedSettings.read(options)


def test_possible_values_are_accepted_and_none_means_the_default() -> None:
    assert DistributedSettings.read({"gradient_compression": None, "local_sgd": None}) == DistributedSettings()
    DistributedSettings(gradient_compression="bf16-feedback", local_sgd_outer_lr=0.7, local_sgd_outer_momentum=0.9)
    DistributedSettings(gradient_compression="powersgd")


@pytest.mark.parametrize(
    "words",
    [
        "--local_sgd 8 --gradient_compression powersgd",
        "--local_sgd 8 --local_sgd_outer_lr=-1",
        "--local_sgd 8 --local_sgd_outer_lr 0",
        "--local_sgd 8 --local_sgd_outer_momentum 5",
    ],
)
def test_launch_refuses_impossible_values_before_it_starts_anything(words: str) -> None:
    with pytest.raises(UserError, match="local_sgd"):
        parse([*words.split(), "script.py"])


def test_values_come_from_the_environment_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_LOCAL_SGD", "x")
    with pytest.raises(ValueError, match="STOKER_LOCAL_SGD is 'x', which is not a number"):
        DistributedSettings.read({})
    monkeypatch.setenv("STOKER_LOCAL_SGD", "")
    assert DistributedSettings.read({}).local_sgd == 0
    monkeypatch.setenv("STOKER_LOCAL_SGD", "4")
    assert DistributedSettings.read({}).local_sgd == 4
    assert DistributedSettings.read({"local_sgd": 0}).local_sgd == 0


def test_messages_name_the_options_that_are_on() -> None:
    assert str(DistributedSettings()) == ""
    assert (
        str(DistributedSettings(gradient_compression="bf16", local_sgd=4))
        == "local_sgd=4 and gradient_compression=bf16"
    )


@pytest.mark.parametrize("setting", dataclasses.fields(DistributedSettings), ids=lambda setting: setting.name)
def test_the_flag_and_the_training_argument_are_derived_from_the_setting(setting: dataclasses.Field[Any]) -> None:
    declared = {field.name: field for field in dataclasses.fields(RankOptions)}[setting.name]
    assert declared.type == f"{setting.type} | None"
    assert declared.default is None
    flag = declared.metadata["option"]
    argument = TrainingArguments.__dataclass_fields__[setting.name]
    # Parsers of transformers replace the field's own type by what is left without None.
    assert get_type_hints(TrainingArguments)[setting.name] == type(setting.default) | None
    assert argument.default is None
    assert flag.help == setting.metadata["help"]
    assert argument.metadata["help"].lower() == f"{setting.metadata['help']}.".lower()
    assert flag.choices == argument.metadata.get("choices", ()) == setting.metadata.get("choices", ())
