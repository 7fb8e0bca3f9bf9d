"""Recipes: options from a file, with those of the command line taking precedence, and the recipe that every run writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from stoker.errors import UserError
from stoker.tasks import recipe
from stoker.tasks.option_parser import OptionParser
from stoker.tasks.qa.fine_tune import QaOptions

TASKS = ("qa", "sft")
OPTIONS = {
    "model_name_or_path": "m", "do_train": True, "use_ipex": False, "report_to": ["none"], "learning_rate": 3e-5,
    "output_dir": "a folder", "lr_scheduler_kwargs": {"num_cycles": 2}, "max_train_samples": None, "seed": 7,
}  # fmt: skip


@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump], ids=["json", "yaml"])
def test_a_recipe_is_read_as_its_arguments(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / ("recipe.json" if write is json.dumps else "recipe.yaml")
    path.write_text(write(OPTIONS))
    task, *argv = recipe.expand(["qa", str(path), "--seed", "8"], TASKS)
    model, data, args = OptionParser("train qa", QaOptions).read(argv)
    assert (task, model.model_name_or_path, data.max_train_samples) == ("qa", "m", None)
    assert (args.do_train, args.use_ipex, args.learning_rate) == (True, False, 3e-5)
    assert (args.output_dir, args.lr_scheduler_kwargs) == ("a folder", {"num_cycles": 2})
    assert args.seed == 8


@pytest.mark.parametrize("content", ["[a, b]", "a,b", "a, b"])
def test_options_with_several_values_may_be_lists(content: str, tmp_path: Path) -> None:
    from stoker.tasks.classify.fine_tune import ClassifyOptions

    (tmp_path / "r.yaml").write_text(f"model_name_or_path: m\ntext_column_names: {content}\nseed: 3\n")
    _, *argv = recipe.expand(["qa", str(tmp_path / "r.yaml")], TASKS)
    parser = OptionParser("train classify", ClassifyOptions)
    _, data, args = parser.read(argv)
    assert ([name.strip() for name in data.text_column_names.split(",")], args.seed) == (["a", "b"], 3)
    _, typed, _ = parser.read(["--model_name_or_path", "m", "--text-column-names", "a,", "b", "--seed", "3"])
    assert typed.text_column_names == "a,b"
    with pytest.raises(UserError, match="'b' is one value too many for the option before it"):
        parser.read(["--model_name_or_path", "m", "--output_dir", "a", "b"])


def test_a_recipe_may_name_its_task(tmp_path: Path) -> None:
    path = tmp_path / "r.yml"
    path.write_text("task: sft\nfull: true\n")
    assert recipe.expand([str(path), "--seed", "1"], TASKS) == ["sft", "--full=True", "--seed", "1"]
    assert recipe.expand(["sft", str(path)], TASKS) == ["sft", "--full=True"]
    with pytest.raises(UserError, match="is for stoker train sft, not for qa"):
        recipe.expand(["qa", str(path)], TASKS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("seed: 1\n", "does not name its task"),
        ("task: bake\n", "task 'bake' is unknown; choose qa, sft"),
        ("- a\n", "must contain the names of options"),
        ("1: 2\n", "must contain the names of options"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_a_bad_recipe_gets_one_sentence(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        recipe.expand([str(path)], TASKS)


def test_a_command_line_without_a_recipe_is_left_alone() -> None:
    argv = ["qa", "--train_file", "a.json", "--seed", "1"]
    assert recipe.expand(argv, TASKS) == argv
    assert recipe.expand([], TASKS) == []


def test_the_written_recipe_repeats_the_run(tmp_path: Path) -> None:
    argv = [
        "--model_name_or_path", "m", "--do_train", "--token", "hf_secret", "--seed=7", "--seed", "9", "--learning_rate", "3e-5",
        "--label_names", "start_positions", "end_positions", "--lr_scheduler_kwargs", '{"num_cycles": 2}', "--run_name", "007",
        "--output-dir", "out",
    ]  # fmt: skip
    recipe.write(tmp_path, "qa", argv)
    text = (tmp_path / recipe.FILE).read_text()
    assert "hf_secret" not in text
    assert "seed: 9\n" in text
    task, *read = recipe.expand([str(tmp_path / recipe.FILE)], TASKS)
    assert task == "qa"
    plain = [word for word in argv if word not in ("--token", "hf_secret")]
    assert _values(read) == _values(plain)


def _values(argv: list[str]) -> list[dict[str, object]]:
    return [vars(one) for one in OptionParser("train qa", QaOptions).read(argv)[:2]]


def test_recipes_know_the_switch_for_stock_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stoker.cli import main

    (tmp_path / "r.yaml").write_text("task: qa\nno_ipex: true\nmodel_name_or_path: m\n")
    assert main(["train", str(tmp_path / "r.yaml")]) == 2
    assert "has nothing to do" in capsys.readouterr().err  # and not: unknown option --no_ipex
