"""The printed resume command works when it is pasted: one for all ranks, with the options of the launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from live import HOSTILE, environment

from parts import rest_in
from rig import warm
from stoker.hf.checkpointing import command
from stoker.launch.options import Options
from stoker.launch.rank.rank_settings import Settings
from stoker.launch.start import with_launch_command
from stoker.run_report.log import read_run

SCRIPT = str(Path(__file__).resolve().parent.parent / "distributed" / "elastic_script.py")
TRAINING = ["--per_device_train_batch_size", "4", "--max_steps", "8", "--save_steps", "3", "--report_to", "none",
            "--disable_tqdm", "true", "--ddp_timeout", "60"]  # fmt: skip
RETIRED = ["--no_cuda", "--use_ipex", "--overwrite_output_dir", "True"]
SECRETS = ["--hub_token", "hf_of_an_option"]


@pytest.mark.parametrize("processes", rest_in("launch", [1, 2]))
def test_the_printed_command_resumes_the_run(tmp_path: Path, processes: int) -> None:
    out = tmp_path / "Ada's $(touch pwned) out"
    launch = ["-n", str(processes), "--oversubscribe", "-genv", "MY_TOKEN=hf_of_a_variable", SCRIPT]
    done = warm.run(
        [sys.executable, "-m", "stoker", "launch", *launch, "--output_dir", str(out), "--stop_at", "4",
         *RETIRED, *SECRETS, *TRAINING],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 143, done.stderr[-3000:]
    assert "Stopped by SIGTERM after step 5" in done.stderr
    printed = [line.removeprefix("[0]").strip() for line in done.stderr.splitlines() if "--resume_from" in line]
    assert len(printed) == 1, done.stderr[-3000:]
    assert "hf_of" not in done.stderr
    assert "give again: MY_TOKEN --hub_token" in done.stderr
    pasted = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {printed[0]}"], capture_output=True, text=True, cwd=tmp_path
    )
    words = pasted.stdout.split("\0")[:-1]  # as the shell takes them
    again = warm.run(words, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert again.returncode == 0, again.stderr[-3000:]
    run = read_run(out)
    assert run.finished
    starts = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines() if '"start"' in line]
    assert [start["resumed_at"] for start in starts] == [None, 5]
    assert not (tmp_path / "pwned").exists()


def test_arguments_survive_the_shell() -> None:
    line = command.from_launch(["printf", "%s\\0"], HOSTILE, Path("out dir/checkpoint-5"))
    done = subprocess.run(["bash", "-c", line.strip()], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == [*HOSTILE, "--resume_from_checkpoint", "out dir/checkpoint-5"]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--a 1 --overwrite_output_dir --b --resume_from_checkpoint out/checkpoint-2 --c=x", "--a 1 --b --c=x"),
        ("--overwrite_output_dir True --b 2 --resume-from-checkpoint=out/checkpoint-2", "--b 2"),
        ("--overwrite_output_dir=True first second", "first second"),
        ("--resume_from_checkpoint here first", "first"),
    ],
)
def test_the_resume_command_drops_options_that_would_restart_the_run(words: str, kept: str) -> None:
    assert " ".join(command.without_start_options(words.split())) == kept


def test_secrets_are_left_out_and_named() -> None:
    line = command.from_launch(
        ["stoker", "launch", "-genv", "HF_TOKEN=x1", "--extra-mpi-params", "-genv HF_TOKEN x4", "-genv", "A=1", "s.py"],
        ["--hub_token=x2", "--mode", "hidden", "--api_key", "x3", "--output_dir", "o"], Path("o/checkpoint-1"),
    )  # fmt: skip
    assert line == (
        "  stoker launch -genv A=1 s.py --mode hidden --output_dir o --resume_from_checkpoint o/checkpoint-1\n"
        "(secrets are not shown; give again: HF_TOKEN --extra-mpi-params --hub_token --api_key)"
    )


def test_a_script_without_trainer_options_gets_a_line_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--fast"])
    assert command.resuming(Path("o/checkpoint-1")) == '  trainer.train(resume_from_checkpoint="o/checkpoint-1")'


@pytest.mark.parametrize(
    ("original", "argv", "shown"),
    [
        (["python", "-X", "dev", "-m", "pack.train", "--output_dir", "o"], ["/x/pack/train.py", "--output_dir", "o"],
         ["-X", "dev", "-m", "pack.train", "--output_dir", "o"]),
        (["python", "train.py", "--output_dir", "o"], ["train.py", "--output_dir", "o"], ["train.py", "--output_dir", "o"]),
        (["python", "wrapper.py", "x"], ["train.py", "--output_dir", "o"], ["train.py", "--output_dir", "o"]),
    ],
)  # fmt: skip
def test_without_a_launch_the_original_python_command_is_used(
    monkeypatch: pytest.MonkeyPatch, original: list[str], argv: list[str], shown: list[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", original)
    monkeypatch.setattr(sys, "argv", argv)
    expected = " ".join([sys.executable, *shown, "--resume_from_checkpoint", "o/checkpoint-1"])
    assert command.resuming(Path("o/checkpoint-1")).strip() == expected


def test_the_resume_command_starts_with_the_launch_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "launches", [])
    command.launched_as(command.Launch(("stoker", "launch", "-n", "2", "-f", "my hosts", "-m", "stoker")))
    arguments = ["train", "qa", "--overwrite_output_dir", "--output_dir", "o"]
    line = "stoker launch -n 2 -f 'my hosts' -m stoker train qa --output_dir o --resume_from_checkpoint o/checkpoint-1"
    assert command.resuming(Path("o/checkpoint-1"), arguments).strip() == line


def test_a_launch_from_python_has_a_launch_command(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(script="pack.train", module=True, arguments=["--output_dir", "o"])
    monkeypatch.setattr(
        sys, "argv", ["/x/stoker/__main__.py", "launch", "-n", "2", "-m", "pack.train", "--output_dir", "o"]
    )
    head = (sys.executable, "-m", "stoker", "launch")
    assert with_launch_command(Settings(), options).launch_command == (*head, "-n", "2", "-m", "pack.train")
    monkeypatch.setattr(sys, "argv", ["/x/stoker/__main__.py", "something", "else"])
    settings = with_launch_command(Settings(), options, launcher_prints=True)
    assert settings.launch_command == (*head, "-m", "pack.train")
    assert Settings.from_json(settings.to_json()) == settings


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for name in ("optimizer.pt", "scheduler.pt"):
        with zipfile.ZipFile(path / name, "w") as archive:
            archive.writestr("data", b"0")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def test_a_failed_launch_names_the_checkpoint_of_its_own_run(tmp_path: Path) -> None:
    words = ["stoker", "launch", "-n", "2", "s.py"]
    arguments = ["--output_dir", str(tmp_path), "--overwrite_output_dir"]
    assert command.after_failed_launch(words, arguments) is None
    old = checkpoint(tmp_path, 500)
    assert f"--resume_from_checkpoint {old}" in str(command.after_failed_launch(words, arguments))
    os.utime(old / "trainer_state.json", (100.0, 100.0))
    (tmp_path / "run.jsonl").write_text(json.dumps({"kind": "start", "time": 5000.0}) + "\n")
    assert command.after_failed_launch(words, arguments) is None
    mine = checkpoint(tmp_path, 5)
    line = f"stoker launch -n 2 s.py --output_dir {tmp_path} --resume_from_checkpoint {mine}"
    assert str(command.after_failed_launch(words, arguments)).strip() == line
