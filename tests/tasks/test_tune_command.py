"""`stoker tune` finds the best options, is continued after a kill, and writes the recipe that repeats the best trial."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from parts import rest_in

pytest.importorskip("optuna", reason="needs the extra tune")

import optuna

from rig import warm
from stoker.cli import main
from stoker.errors import UserError
from stoker.tasks.demo.world import as_squad, make_world
from stoker.tasks.tune.tune_command import SearchCommand, SearchOptions
from stoker.tasks.tune.tune_study import JOURNAL, STUDY, Journal
from tasks.language_models import save_tiny_llama, write_chats
from tasks.sentence_files import rows_of, write_lines
from tasks.task_runs import entries
from tasks.test_ner_command import conll

STOPPED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background inherit that it is ignored
from stoker.cli import main
from transformers.trainer_callback import CallbackHandler
trial, number, begin = sys.argv[1], int(sys.argv[2]), CallbackHandler.on_step_begin
def on_step_begin(self, args, state, control):
    if args.output_dir.endswith(trial) and state.global_step == 2:
        os.kill(os.getpid(), number)
    return begin(self, args, state, control)
CallbackHandler.on_step_begin = on_step_begin
sys.exit(main(sys.argv[3:]))
"""
"""Runs a command in which the third step of this trial begins with this signal."""
SPACE = "learning_rate=5e-3|1e-2,per_device_train_batch_size=8|16"


@pytest.fixture(scope="module")
def folder(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of rows for each task, and the models."""
    folder = tmp_path_factory.mktemp("tune")
    (folder / "bert").symlink_to(bert)
    save_tiny_llama(folder / "llm")
    words = [("poor", "sad"), ("fine", "good")]
    lines = [f"The day was {words[n % 2][n // 2 % 2]} and long\t{('no', 'yes')[n % 2]}" for n in range(32)]
    (folder / "rows.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    (folder / "rows.json").write_text(json.dumps(as_squad(make_world(16, seed=1, training=True))))
    (folder / "rows.txt").write_text("\n".join(one.context for one in make_world(30, seed=1, training=True)))
    conll(folder / "rows.conll", 16)
    write_chats(folder / "chats.jsonl", 16)
    for kind in ("pairs", "labelled texts", "pairs with scores"):
        write_lines(folder / f"{kind.split()[0]}-{kind.split()[-1]}.jsonl", rows_of(kind, 40))
    return folder


def tune(folder: Path, out: Path, *more: str, task: str = "classify", rows: str = "rows.tsv") -> list[str]:
    model = folder / ("llm" if task == "sft" else "bert")
    return [
        "tune", task, "--model_name_or_path", str(model), "--train_file", str(folder / rows),
        "--validation_file", str(folder / rows), "--output_dir", str(out), "--report_to", "none", *more,
    ]  # fmt: skip


def trials_in(out: Path) -> list[Any]:
    backend = optuna.storages.journal.JournalFileBackend(str(out / JOURNAL))
    return optuna.load_study(study_name=STUDY, storage=optuna.storages.JournalStorage(backend)).trials


def repeat_best(out: Path, into: Path) -> dict[str, Any]:
    """Trains from the best recipe as the search says, and returns its metrics."""
    assert main(["train", str(out / "best_recipe.yaml"), "--output_dir", str(into)]) == 0
    found: dict[str, Any] = json.loads((into / "all_results.json").read_text())
    return found


@pytest.mark.part("tasks")
def test_the_best_of_all_combinations_is_found_and_its_recipe_repeats_it_exactly(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = tune(folder, out, "--search", SPACE, "--trials", "9", "--num_train_epochs", "3", "--metric", "loss",
                   "--learning_rate", "5e-3", "--evaluations", "3", "--prune_after", "0", "--do_train",
                   "--eval_strategy", "epoch", "--save_strategy", "epoch", "--load_best_model_at_end")  # fmt: skip
    assert main(command) == 0
    printed = capsys.readouterr().err
    found = trials_in(out)
    assert len(found) == 4, "there are four combinations, and each is tried once"
    assert found[0].params == {"learning_rate": 0.005, "per_device_train_batch_size": 8}, "the options as given"
    assert len({tuple(one.params.values()) for one in found}) == 4
    assert [sorted(one.intermediate_values) for one in found] == [[33, 66, 100]] * 4
    best = min(found, key=lambda one: one.value)
    lines = [line for line in printed.splitlines() if line.startswith("trial ")]
    assert len(lines) == 4, "a line for each trial"
    assert lines[0].startswith(f"trial 1 of 4: loss {found[0].value:.4g}; learning rate 0.005, batch size 8; ")
    assert f"best loss: {best.value:.4g} in trial {best.number + 1}" in printed
    assert "evaluation at step" not in printed
    written = yaml.safe_load((out / "best_recipe.yaml").read_text())
    assert written["task"] == "classify"
    assert written["per_device_train_batch_size"] == best.params["per_device_train_batch_size"]
    assert written["eval_strategy"] == "epoch", "what the user has asked for stays in the recipe"
    assert sorted(one.name for one in out.iterdir()) == [
        "best_recipe.yaml", JOURNAL, "report.html", "trial-001", "trial-002", "trial-003", "trial-004",
    ]  # fmt: skip
    assert [one.name for one in (out / "trial-001").iterdir()] == ["run.jsonl"], "trials leave no models behind"
    assert repeat_best(out, tmp_path / "again")["eval_loss"] == best.value


def test_a_search_with_other_contents_of_its_files_is_refused(folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.tsv"
    rows.write_bytes((folder / "rows.tsv").read_bytes())
    options = {"output_dir": str(tmp_path), "train_file": str(rows), "model_name_or_path": str(folder / "bert")}
    command = SearchCommand.of("classify", options, SearchOptions(trials=1, search=SPACE))
    journal = Journal(tmp_path)
    journal.create(command.identity, "minimize")
    assert journal.find(command.identity) is not None
    rows.write_text(rows.read_text().replace("fine", "good"))
    with pytest.raises(UserError, match="has a search with other contents of the data or the model"):
        journal.find(command.identity)


@pytest.mark.part("kills")
def test_a_killed_search_continues_without_losing_or_repeating_a_trial(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = tune(folder, out, "--search", "learning_rate=1e-3..1e-2:log,num_train_epochs=1..3", "--trials", "4",
                   "--per_device_train_batch_size", "8", "--prune_after", "0", "--evaluations", "1")  # fmt: skip
    killed = warm.run(
        [sys.executable, "-c", STOPPED, "trial-003", str(int(signal.SIGKILL)), *command],
        capture_output=True, text=True, timeout=300, transformers=True,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    with open(out / JOURNAL, "a") as file:
        file.write('{"op_code": 8, "worker')  # what a kill in the middle of a write would leave
    logs = {name: (out / name / "run.jsonl").read_bytes() for name in ("trial-001", "trial-002")}
    assert main(command) == 0
    printed = capsys.readouterr().err
    assert "2 of 4 trials done" in printed
    assert re.findall(r"^trial \d+ of \d+", printed, re.M) == ["trial 4 of 5", "trial 5 of 5"], "one was repeated"
    found = trials_in(out)
    assert [one.state.name for one in found] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert found[3].params == found[2].params, "what was running is tried again"
    assert len({tuple(one.params.values()) for one in found if one.state.name == "COMPLETE"}) == 4
    assert logs == {name: (out / name / "run.jsonl").read_bytes() for name in logs}, "finished trials are not touched"
    page = (out / "report.html").read_text()
    assert page.count('<span class="pill good">finished</span>') == 5, "the search and four trials"
    assert '<span class="pill bad">killed</span>' in page

    capsys.readouterr()
    assert main(command) == 0
    assert "4 of 4 trials done" in capsys.readouterr().err
    assert len(trials_in(out)) == 5, "nothing was left to do"
    assert main([*command, "--trials", "5"]) == 0
    assert [one.state.name for one in trials_in(out)][5:] == ["COMPLETE"], "more trials may be asked for"

    for changed, message in (
        (
            ["--search", "learning_rate=1e-3..1e-1:log"],
            f"{out} has a search with --search learning_rate=1e-3..1e-2:log",
        ),
        (["--num_train_epochs", "2", "--seed", "7"], "this one has --"),
        (["--metric", "loss"], "has a search with --metric accuracy, and this one has --metric loss"),
        (["--evaluations", "2"], "--evaluations 1"),
    ):
        assert main([*command, *changed]) == 2
        assert message in capsys.readouterr().err
    rows = Path(command[command.index("--train_file") + 1])
    original = rows.read_bytes()
    rows.write_bytes(original + original.splitlines(keepends=True)[0])
    assert main(command) == 2
    assert "has a search with other contents of the data or the model" in capsys.readouterr().err
    rows.write_bytes(original)
    assert main(tune(folder, out, task="qa", rows="rows.json")) == 2
    assert "has a search with the task classify, and this one has the task qa" in capsys.readouterr().err
    (out / JOURNAL).write_text("not a journal\n")
    assert main(command) == 2
    assert "--overwrite_output_dir starts over" in capsys.readouterr().err
    assert main([*command, "--trials", "1", "--overwrite_output_dir"]) == 0
    assert len(trials_in(out)) == 1
    assert not (out / "trial-002").exists()


@pytest.mark.parametrize("number", rest_in("kills", [signal.SIGINT, signal.SIGTERM]))
def test_ctrl_c_keeps_what_was_found_and_says_how_to_go_on(
    folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    command = tune(folder, out, "--search", SPACE, "--trials", "2", "--max_steps", "4", "--evaluations", "1")
    stopped = warm.run(
        [sys.executable, "-c", STOPPED, "trial-002", str(int(number)), *command],
        capture_output=True, text=True, timeout=300, transformers=True,
    )  # fmt: skip
    assert stopped.returncode == 128 + number, stopped.stderr[-2000:]
    assert "stopped in trial 2, which will be repeated" in stopped.stderr
    assert "train it:  stoker train" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert "checkpoint" not in stopped.stderr
    assert [one.state.name for one in trials_in(out)] == ["COMPLETE", "FAIL", "WAITING"]
    assert entries(out / "trial-002", "end")[-1]["reason"] == "interrupted"
    again = shlex.split(stopped.stderr.rpartition("To go on:\n")[2])
    assert main(again[again.index("tune") :]) == 0
    assert [one.state.name for one in trials_in(out)] == ["COMPLETE", "FAIL", "COMPLETE"]


@pytest.mark.part("tasks")
def test_bad_trials_are_stopped_and_a_loss_that_is_not_finite_ends_only_its_trial(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = tune(folder, out, "--search", "learning_rate=1e-9|1e-1|1e38", "--learning_rate", "1e-9", "--trials", "3",
                   "--num_train_epochs", "4", "--metric", "loss", "--prune_after", "1")  # fmt: skip
    assert main(command) == 0
    found = {one.params["learning_rate"]: one for one in trials_in(out)}
    assert [one.state.name for one in found.values()] == ["COMPLETE", "PRUNED", "PRUNED"]
    assert [*found[0.1].intermediate_values] == [25], "stopped at the first evaluation"
    assert found[1e38].user_attrs["outcome"] == "diverged"
    printed = capsys.readouterr().err
    assert "pruned after 25% of its training" in printed
    assert "diverged; learning rate 1e+38" in printed
    states = {one["folder"].rpartition("/")[2]: one["status"] for one in _runs(out, capsys)}
    assert states["trial-001"] == "finished"
    assert sorted(states.values()) == ["finished", "pruned", "stopped"]


def _runs(out: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["runs", str(out), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    assert all("learning_rate" in one["settings"] for one in found)
    return found


def test_batches_that_do_not_fit_are_not_trained(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.tasks import memory_estimate

    monkeypatch.setattr(memory_estimate, "available", lambda: 700_000_000)
    out = tmp_path / "out"
    search = "per_device_train_batch_size=2|4096"
    (tmp_path / "many.tsv").write_text(
        "sentence\tlabel\n" + "".join(f"{'day ' * 100}{n}\t{('no', 'yes')[n % 2]}\n" for n in range(4096))
    )
    command = tune(folder, out, "--search", search, "--max_steps", "1", "--per_device_train_batch_size", "2",
                   "--train_file", str(tmp_path / "many.tsv"), "--validation_file", str(folder / "rows.tsv"))  # fmt: skip
    assert main([*command, "--max_eval_samples", "4"]) == 0
    found = trials_in(out)
    assert [one.state.name for one in found] == ["COMPLETE", "PRUNED"]
    assert found[1].user_attrs["outcome"] == "too large"
    assert "GB of memory" in found[1].user_attrs["reason"]


@pytest.mark.parametrize(
    ("task", "rows", "more", "metric"),
    rest_in(
        "tasks",
        [
            ("ner", "rows.conll", "", "f1"),
            ("sft", "chats.jsonl", "--samples 0 --search lora_r=2|4", "loss"),
            ("qa", "rows.json", "--max_seq_length 96 --doc_stride 16", "f1"),
            ("mlm", "rows.txt", "--max_seq_length 48", "loss"),
            ("embed", "pairs-pairs.jsonl", "--samples 0", "cosine_ndcg@10"),
            ("rerank", "pairs-scores.jsonl", "--samples 0", "spearman"),
            ("fewshot", "labelled-texts.jsonl", "--samples 0 --examples_per_class 2", "accuracy"),
        ],
    ),
)
def test_every_task_is_searched_by_its_main_score_and_the_recipe_repeats_it(
    folder: Path, tmp_path: Path, task: str, rows: str, more: str, metric: str
) -> None:
    out = tmp_path / "out"
    words = more.split()
    search = [] if "--search" in words else ["--search", "learning_rate=1e-3|1e-2"]
    command = tune(folder, out, *words, *search, "--trials", "2", "--max_steps", "2", "--evaluations", "1",
                   "--per_device_train_batch_size", "4", task=task, rows=rows)  # fmt: skip
    assert main(command) == 0
    found = trials_in(out)
    assert [one.state.name for one in found] == ["COMPLETE", "COMPLETE"]
    if task == "sft":
        sizes = {one.params["lora_r"]: entries(out / f"trial-00{one.number + 1}", "model")[0] for one in found}
        assert sizes[2]["parameters"] < sizes[4]["parameters"], "each trial has an adapter of its own rank"
    chosen = min if metric == "loss" else max
    best = chosen(one.value for one in found)
    assert repeat_best(out, tmp_path / "again")[f"eval_{metric}"] == best


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--search", "learning_rate=1e-5..1e-4,per_device_train_batch_size=0|8"],
            "--per_device_train_batch_size is 0",
        ),
        (["--search", "per_device_train_batch_size=8|1.5"], "'1.5' is not a whole number"),
        (["--search", "warp=1..2"], "'warp' cannot be searched"),
        (["--search", "lr_scheduler_type=linear|sideways"], "--search lr_scheduler_type=linear|sideways:"),
        (["--search", "lr_scheduler_type=linear|reduce_lr_on_plateau"], "follows the evaluations"),
        (["--trials", "0"], "argument --trials"),
        (["--hours", "0"], "is not a number of hours above 0"),
        (["--hours", "1", "--timeout", "60"], "not allowed with argument"),
        (["--direction", "up"], "argument --direction"),
        (["--metric", "bleu"], "--metric bleu is not measured; choose one of accuracy, f1"),
        (["--warp", "9"], "unknown option --warp"),
        (["stray"], "stray"),
        (["--model_name_or_path", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--validation_file="], "--validation_file is empty"),
        (["--output_dir="], "--output_dir is missing"),
    ],
)
def test_mistakes_give_one_sentence_and_exit_code_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(tune(folder, tmp_path / "out", *more)) == 2
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stoker")]
    assert len(printed) == 1
    assert message in printed[0]
    assert not list(tmp_path.glob("out/*"))


def test_a_mistake_in_a_search_that_starts_over_leaves_the_earlier_one_untouched(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trial-001").mkdir()
    names = [JOURNAL, "best_recipe.yaml", "report.html", "trial-001/run.jsonl"]
    for name in names:
        (tmp_path / name).write_text("found before")
    assert main(tune(folder, tmp_path, "--overwrite_output_dir", "--metric", "bleu")) == 2
    assert "--metric bleu is not measured" in capsys.readouterr().err
    assert [(tmp_path / name).read_text() for name in names] == ["found before"] * 4


def test_an_error_in_the_first_trial_is_not_mistaken_for_a_search_without_results(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.hf.trainer import Trainer

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("the loss expects labels")

    monkeypatch.setattr(Trainer, "train", fail)
    with pytest.raises(ValueError, match="the loss expects labels"):
        main(tune(folder, tmp_path / "out", "--search", SPACE))


def test_a_search_needs_its_package_a_task_and_a_folder_without_a_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.jsonl").write_text("")
    assert main(tune(folder, tmp_path)) == 2
    assert f"{tmp_path} has a training run" in capsys.readouterr().err
    assert main(["tune", "sing", "--output_dir", str(tmp_path)]) == 2
    assert "stoker tune: unknown task 'sing'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(tune(folder, tmp_path / "out")) == 2
    assert "stoker tune needs Optuna: pip install 'stoker[tune]'" in capsys.readouterr().err


def test_the_help_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["tune"], ["tune", "--help"], ["tune", "classify", "--help"], ["help", "tune"]):
        assert main(argv) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 32
        assert max(map(len, lines)) <= 130
    assert main(["--help"]) == 0
    assert "\n  tune " in capsys.readouterr().out
