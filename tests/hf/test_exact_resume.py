"""A run that is killed and resumed ends with bitwise the same weights as one that was not, whenever it is killed."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from parts import rest_in
from rig import warm

HERE = Path(__file__).parent

FIRST_CHECKPOINT = range(11, 29)
"""Calls that put it on the disk: torch.save, fsync of each file, the manifest, the renames; other calls precede them."""


def runs(folder: Path, scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = warm.run(
        [sys.executable, str(HERE / "killed_runs.py"), str(folder)],
        input="\n".join(json.dumps(scenario) for scenario in scenarios),
        capture_output=True,
        text=True,
        timeout=600,
        transformers=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]


def outputs(folder: Path) -> str:
    return "\n".join(path.read_text()[-1500:] for path in sorted(folder.glob("run-*/output.txt")))


@pytest.mark.parametrize(
    "settings",
    rest_in(
        "kills", [{"tokens_per_batch": 48}, {}, {"group_by_length": True, "eval_strategy": "epoch", "max_steps": 16}]
    ),
    ids=["by tokens", "by rows", "by length"],
)
def test_a_run_killed_at_random_steps_ends_with_the_same_weights(tree_path: Path, settings: dict[str, Any]) -> None:
    chance = random.Random(str(settings))
    scenarios: list[dict[str, Any]] = [{"kills": [], "settings": settings}]
    for _ in range(4):
        kills = sorted(chance.sample(range(1, 14), 2))
        scenarios.append({"kills": [f"step:{step}" for step in kills], "settings": settings})
    results = runs(tree_path, scenarios)
    assert results[0]["ends"] == [0]
    for scenario, result in zip(scenarios[1:], results[1:], strict=True):
        assert result["ends"] == [-9, -9, 0], (scenario, outputs(tree_path))
        assert result["weights"] == results[0]["weights"], scenario


@pytest.mark.parametrize(
    "settings",
    [
        {"mask_seed": None},
        {"mask_seed": 3, "tokens_per_batch": 48},
        {"mask_seed": None, "dataloader_num_workers": 2, "eval_strategy": "no"},
    ],
    ids=["global generators", "a generator of its own", "workers"],
)
def test_the_masks_of_a_masked_lm_are_drawn_again(tree_path: Path, settings: dict[str, Any]) -> None:
    scenarios = [{"kills": kills, "settings": settings} for kills in ([], ["step:5", "step:10"])]
    undisturbed, killed = runs(tree_path, scenarios)
    assert undisturbed["ends"] == [0], outputs(tree_path)
    assert killed["ends"] == [-9, -9, 0], outputs(tree_path)
    assert killed["begun"] == ["start", "checkpoint-3", "checkpoint-9"]
    assert killed["weights"] == undisturbed["weights"]


@pytest.mark.part("kills")
def test_a_run_killed_while_writing_a_checkpoint_loses_nothing(tree_path: Path) -> None:
    chance = random.Random(7)
    points = [*FIRST_CHECKPOINT, *sorted(chance.sample(range(FIRST_CHECKPOINT.stop, 60), 4))]
    kills = [*(f"write:{point}" for point in points), *(f"manifest:{number}" for number in range(3))]
    settings = {"max_steps": 7, "eval_strategy": "no"}
    results = runs(tree_path, [{"kills": [kill] if kill else [], "settings": settings} for kill in ["", *kills]])
    for kill, result in zip(kills, results[1:], strict=True):
        assert result["ends"] == [-9, 0], (kill, outputs(tree_path))
        assert result["weights"] == results[0]["weights"], kill
        assert result["left"] == [], kill
    # With the manifest half written, the checkpoint does not count, and the one before it does.
    assert [result["begun"][1] for result in results[-3:]] == ["start", "checkpoint-3", "checkpoint-6"]


def test_after_a_signal_the_step_ends_a_checkpoint_is_saved_and_the_resume_command_printed(tree_path: Path) -> None:
    results = runs(tree_path, [{"kills": []}, {"kills": ["SIGTERM:5"]}, {"kills": ["SIGINT:7"]}])
    assert results[1]["ends"] == [143, 0], outputs(tree_path)
    assert results[2]["ends"] == [130, 0], outputs(tree_path)
    assert results[1]["weights"] == results[2]["weights"] == results[0]["weights"]
    output = (tree_path / "run-1" / "output.txt").read_text()
    assert "Stopped by SIGTERM after step 6" in output
    assert f'trainer.train(resume_from_checkpoint="{tree_path / "run-1" / "checkpoint-6"}")' in output
    assert "Stopped by Ctrl-C after step 8" in (tree_path / "run-2" / "output.txt").read_text()
