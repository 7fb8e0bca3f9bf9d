"""Training on one process, two and four: the same weights, evenly divided work, and options that have their effect."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comm.ranks import Ranks

MODULE = "distributed.training_cases"


@pytest.fixture(scope="module")
def jobs() -> Iterator[Callable[[str, int], Ranks]]:
    made: dict[tuple[str, int], Ranks] = {}

    def job(backend: str, size: int) -> Ranks:
        if (backend, size) not in made:
            environment = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)} for rank in range(size)]
            made[backend, size] = Ranks(backend, size, environment)
        return made[backend, size]

    yield job
    for one in made.values():
        one.kill()


def run(job: Ranks, folder: Path, **changed: Any) -> list[dict[str, Any]]:
    return job.run("train", str(folder), changed, module=MODULE)


@pytest.fixture(scope="module")
def alone(jobs: Callable[[str, int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights of the same training in one process."""
    known: dict[int, Any] = {}

    def weights(rows: int) -> Any:
        if rows not in known:
            folder = tmp_path_factory.mktemp("alone")
            known[rows] = run(jobs("gloo", 1), folder, rows=rows, optim="sgd", learning_rate=0.2)[0]["weights"]
        return known[rows]

    return weights


# Two epochs of 61 rows in batches of 8 end unevenly: 5 rows for 4 ranks; 57 leaves one row, three ranks have none.
@pytest.mark.parametrize("rows", [64, 61, 57])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_the_same_training_gives_the_same_weights(
    jobs: Callable[[str, int], Ranks], alone: Any, tmp_path: Path, backend: str, size: int, rows: int
) -> None:
    results = run(jobs(backend, size), tmp_path, rows=rows, optim="sgd", learning_rate=0.2)
    assert results[0]["wrapped"] == "DistributedDataParallel"
    for result in results:
        assert np.array_equal(result["weights"], results[0]["weights"])  # ranks never drift apart
    expected = alone(rows)
    assert np.abs(results[0]["weights"] - expected).max() < 2e-6  # weights are of the order of 1


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_accumulated_batches_are_averaged_once_and_give_the_same_weights(
    jobs: Callable[[str, int], Ranks], alone: Any, tmp_path: Path, backend: str
) -> None:
    settings = {"rows": 64, "optim": "sgd", "learning_rate": 0.2, "gradient_accumulation_steps": 2}
    results = run(jobs(backend, 2), tmp_path, **settings)
    assert np.abs(results[0]["weights"] - alone(64)).max() < 2e-6


def test_ranks_get_nearly_the_same_number_of_tokens(jobs: Callable[[str, int], Ranks], tmp_path: Path) -> None:
    def spread(**settings: Any) -> float:
        tokens = np.array([result["tokens"] for result in run(jobs("ccl", 2), tmp_path, rows=64, **settings)])
        return float((tokens.max(0) / tokens.mean(0)).mean())

    assert spread() < 1.06 < 1.1 < spread(balance_tokens=False)


@pytest.mark.parametrize("compression", ["bf16", "bf16-feedback", "powersgd"])
def test_compressed_gradients_give_nearly_the_same_weights(
    jobs: Callable[[str, int], Ranks], alone: Any, tmp_path: Path, compression: str
) -> None:
    settings = {"rows": 64, "optim": "sgd", "learning_rate": 0.2, "gradient_compression": compression}
    results = run(jobs("ccl", 2), tmp_path, **settings)
    assert all(result["compressed"] for result in results)
    assert np.array_equal(results[0]["weights"], results[1]["weights"])
    apart = np.abs(results[0]["weights"] - alone(64)).max()
    assert 0 < apart < (0.2 if compression == "powersgd" else 2e-3)


def test_local_sgd_every_step_equals_ddp_with_sgd(
    jobs: Callable[[str, int], Ranks], alone: Any, tmp_path: Path
) -> None:
    # The mean of weights after one step of plain SGD is the step with the mean gradient, unless it was clipped.
    settings = {"rows": 64, "optim": "sgd", "learning_rate": 0.2, "max_grad_norm": 0.0}
    results = run(jobs("ccl", 2), tmp_path, local_sgd=1, **settings)
    expected = run(jobs("gloo", 1), tmp_path, **settings)[0]["weights"]
    assert results[0]["wrapped"] == "BertForSequenceClassification"
    assert np.abs(results[0]["weights"] - expected).max() < 2e-6


def test_local_sgd_trains_as_ddp_in_its_first_steps(jobs: Callable[[str, int], Ranks], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rows": 64, "max_steps": 6, "gradient_accumulation_steps": 2}
    expected = run(jobs("ccl", 2), tmp_path, **settings)[0]["weights"]
    warm = run(jobs("ccl", 2), tmp_path, local_sgd=4, local_sgd_warmup_steps=6, **settings)
    assert warm[0]["wrapped"] == "BertForSequenceClassification"
    assert np.array_equal(warm[0]["weights"], warm[1]["weights"])
    assert np.abs(warm[0]["weights"] - expected).max() < 2e-6
    without = run(jobs("ccl", 2), tmp_path, local_sgd=4, **settings)[0]["weights"]
    partly = run(jobs("ccl", 2), tmp_path, local_sgd=4, local_sgd_warmup_steps=4, **settings)[0]["weights"]
    assert 2e-6 < np.abs(partly - expected).max() < np.abs(without - expected).max()


def test_local_sgd_resumes_exactly_from_its_first_steps_and_from_later_ones(
    jobs: Callable[[str, int], Ranks], tmp_path: Path
) -> None:
    job = jobs("ccl", 2)
    settings: dict[str, Any] = {"local_sgd": 3, "local_sgd_outer_lr": 1.4, "local_sgd_warmup_steps": 4}
    settings |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 12}
    whole = run(job, tmp_path / "whole", **settings)
    kept = {path.name for path in (tmp_path / "whole").glob("checkpoint-*")}
    # The ranks agree in steps 1 to 4, in every third step after them, at the end of an epoch of 8 steps, and at the end.
    assert {"checkpoint-2", "checkpoint-4", "checkpoint-7", "checkpoint-10", "checkpoint-12"} <= kept
    for step in (2, 7):
        resumed = run(job, tmp_path / f"from{step}", resume=str(tmp_path / "whole" / f"checkpoint-{step}"), **settings)
        assert np.array_equal(resumed[0]["weights"], whole[0]["weights"])


def test_local_sgd_ends_with_the_same_weights_on_all_ranks_and_resumes_exactly(
    jobs: Callable[[str, int], Ranks], tmp_path: Path
) -> None:
    job = jobs("ccl", 2)
    settings: dict[str, Any] = {"local_sgd": 3, "local_sgd_outer_lr": 0.7, "local_sgd_outer_momentum": 0.9}
    settings |= {"save_strategy": "steps", "save_steps": 4, "max_steps": 14}
    whole = run(job, tmp_path / "whole", **settings)
    assert np.array_equal(whole[0]["weights"], whole[1]["weights"])
    kept = sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*"))
    # Asked for at 4, 8, 12; written when the ranks agreed: every third step, and after each epoch of 8.
    assert kept == ["checkpoint-12", "checkpoint-14", "checkpoint-6", "checkpoint-9"]
    resumed = run(job, tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-9"), **settings)
    assert np.array_equal(resumed[0]["weights"], whole[0]["weights"])


def test_local_sgd_resumes_with_ranks_that_have_no_state_of_their_own(
    jobs: Callable[[str, int], Ranks], tmp_path: Path
) -> None:
    job = jobs("ccl", 2)
    settings: dict[str, Any] = {"local_sgd": 2, "local_sgd_outer_lr": 0.7, "local_sgd_outer_momentum": 0.9}
    settings |= {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    run(job, tmp_path / "whole", **settings)
    for name in ("local_sgd_1.pt", "stoker_manifest.json"):  # as if there had been one rank less
        (tmp_path / "whole" / "checkpoint-4" / name).unlink()
    settings |= {"resume": str(tmp_path / "whole" / "checkpoint-4"), "max_steps": 8, "save_strategy": "no"}
    resumed = run(job, tmp_path / "again", **settings)
    assert np.array_equal(resumed[0]["weights"], resumed[1]["weights"])


def test_a_balanced_run_resumes_exactly_in_the_middle_of_an_epoch(
    jobs: Callable[[str, int], Ranks], tmp_path: Path
) -> None:
    job, settings = jobs("ccl", 2), {"save_strategy": "steps", "save_steps": 5}
    whole = run(job, tmp_path / "whole", **settings)
    for step in (5, 10):
        resumed = run(job, tmp_path / "again", resume=str(tmp_path / "whole" / f"checkpoint-{step}"), **settings)
        assert np.array_equal(resumed[0]["weights"], whole[0]["weights"]), step


def test_the_log_names_the_rank_that_was_waited_for(jobs: Callable[[str, int], Ranks], tmp_path: Path) -> None:
    results = run(jobs("ccl", 2), tmp_path, slow=1, num_train_epochs=1)
    logged = [entry for entry in results[0]["history"] if "loss" in entry]
    assert logged
    assert all(entry["waited_for_rank"] == 1 and entry["waited"] > 0 for entry in logged)
    entries = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    rows = [row for entry in entries if entry["kind"] == "waits" for row in entry["rows"]]
    steps = [row[0] for row in rows]
    assert steps == list(range(1, len(steps) + 1))
    assert all(row[1] == 1 and row[2] > 0 and row[3] == 0 for row in rows)


def test_an_accelerator_loop_averages_every_k_steps_and_before_it_saves(
    jobs: Callable[[str, int], Ranks],
) -> None:
    job = jobs("ccl", 2)
    plain = job.run("accelerate", {}, module=MODULE)
    assert plain[0]["wrapped"] == "DistributedDataParallel"
    assert np.array_equal(plain[0]["before"], plain[1]["before"])
    local = job.run("accelerate", {"STOKER_LOCAL_SGD": "2"}, module=MODULE)
    assert not np.array_equal(local[0]["before"], local[1]["before"])  # three steps: one since the average
    assert np.array_equal(local[0]["after"], local[1]["after"])
    assert 0 < np.abs(local[0]["after"] - plain[0]["after"]).max() < 1e-2
    small = job.run("accelerate", {"STOKER_GRADIENT_COMPRESSION": "bf16"}, module=MODULE)
    assert np.array_equal(small[0]["before"], small[1]["before"])
    assert 0 < np.abs(small[0]["after"] - plain[0]["after"]).max() < 1e-3


def test_an_accelerator_loop_with_local_sgd_resumes_from_a_checkpoint(
    jobs: Callable[[str, int], Ranks], tmp_path: Path
) -> None:
    words = {"STOKER_LOCAL_SGD": "2", "STOKER_LOCAL_SGD_OUTER_LR": "0.7", "STOKER_LOCAL_SGD_OUTER_MOMENTUM": "0.9"}
    results = jobs("ccl", 2).run("accelerate_and_resume", str(tmp_path / "kept"), words, module=MODULE)
    for result in results:
        assert np.array_equal(result["resumed"], result["whole"])
        # A checkpoint that knows nothing of averages: nothing has moved since, so an average changes nothing.
        assert np.array_equal(result["without"], result["saved"])
        assert np.array_equal(result["whole"], results[0]["whole"])


def test_options_of_launch_reach_the_ranks() -> None:
    from stoker.cli.launch import parse
    from stoker.launch.options import to_variables

    options = parse(["-n", "2", "--gradient_compression", "bf16", "--local-sgd", "8", "script.py", "--local_sgd", "4"])
    assert to_variables(options) == {"STOKER_GRADIENT_COMPRESSION": "bf16", "STOKER_LOCAL_SGD": "8"}
    assert options.arguments == ["--local_sgd", "4"]
