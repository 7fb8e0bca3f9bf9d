"""Batch scripts and manifests describe the same launch, are valid, and quote every argument."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from stoker.cli import main
from stoker.cli.launch import parse
from stoker.errors import UserError
from stoker.launch.config.config_file import Config, with_config
from stoker.launch.launchers import emit as emitter
from stoker.launch.options import Options

HOSTILE = ["a b", "$(touch pwned)", "it's", '"', "new\nline", "$HOME", "$$(X)"]

IMAGE = ["--emit_image", "registry/name:tag", "--emit"]

# sbatch's long options that are used here, with the form of their values (sbatch(1)).
SBATCH = {
    "job-name": r"[\w-]+", "nodes": r"\d+", "ntasks": r"\d+", "ntasks-per-node": r"\d+", "cpus-per-task": r"\d+",
    "exclusive": None, "mem": "0", "time": r"[\d:-]+", "partition": r"\w+", "output": r"\S+", "requeue": None,
    "open-mode": "append",
}  # fmt: skip


def emit(options: Options, config: Config) -> str:
    return emitter.emit(with_config(options, config))


def only_job(text: str) -> dict[str, Any]:
    return list(yaml.safe_load_all(text))[-1]


def expand(word: str) -> str:
    """An argument of `command` as Kubernetes expands it: $$ is $, $(NAME) a variable."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda match: "$" if match[0] == "$$" else f"<{match[1]}>", word)


def test_kubernetes_passes_the_scripts_arguments_unchanged() -> None:
    words = ["--emit", "kubernetes", "--emit_image", "i", "--num_machines", "2", "-genv", "A=$(B)", "s.py", *HOSTILE]
    job = only_job(emit(parse(words), Config()))
    command = [expand(word) for word in job["spec"]["template"]["spec"]["containers"][0]["command"]]
    assert command[-len(HOSTILE) :] == HOSTILE
    assert command[command.index("-genv") + 1] == "A=$(B)"
    assert command[command.index("--machine_rank") + 1] == "<JOB_COMPLETION_INDEX>"


def test_a_batch_script_is_valid_and_quotes_every_argument(tmp_path: Any) -> None:
    words = [
        "--emit",
        "slurm",
        "--num_machines",
        "2",
        "-ppn",
        "4",
        "--emit_time",
        "04:00:00",
        "--emit_partition",
        "cpu",
        "s.py",
    ]
    text = emit(parse([*words, *HOSTILE]), Config(mixed_precision="bf16"))
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            form = SBATCH[name]
            assert form is None if not value else re.fullmatch(form or "", value), line
    assert "--nodes=2" in text
    assert "--ntasks=8" in text
    assert "--ntasks-per-node=4" in text
    # Run it with an srun that prints its arguments.
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, cwd=tmp_path, check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    arguments = done.stdout.split("\0")[:-1]
    assert arguments[-len(HOSTILE) :] == HOSTILE
    assert arguments[2:6] == ["stoker", "launch", "--mixed_precision", "bf16"]
    assert [path.name for path in tmp_path.iterdir()] == ["srun"]


def test_srun_sees_no_second_program_in_the_scripts_arguments(tmp_path: Any) -> None:
    arguments = ["a", ":", "-n", "1", "touch", "x y"]
    line = shlex.split(emit(parse(["--emit", "slurm", "s.py", *arguments]), Config()).splitlines()[-1])
    assert ":" not in line
    (tmp_path / "stoker").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "stoker").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(line[line.index("sh") :], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split("\0")[:-1] == ["launch", "s.py", *arguments]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--emit", "kubernetes", "s.py"], "--emit_image"),
        (["--emit", "kubernetes", "--emit_image", "a b", "s.py"], "not the name of an image"),
        (["--emit", "slurm", "--emit_time", "1\n#SBATCH --uid=0", "s.py"], "not a value that Slurm accepts"),
        (["--emit", "slurm", "--num_machines", "2", "-n", "3", "s.py"], "evenly"),
        (["--emit", "trainjob", "s.py"], "--emit trainjob needs --emit_image"),
        ([*IMAGE, "mpijob", "--nnodes", "1:2", "s.py"], "all of its machines or none"),
        ([*IMAGE, "kubernetes", "--emit_memory", "64 GB", "s.py"], "not an amount of memory"),
        ([*IMAGE, "kubernetes", "--emit_cpus", "1", "-n", "2", "s.py"], "2 processes per pod need 2"),
        ([*IMAGE, "kubernetes", "--emit_cache", "a\nb", "s.py"], "not the name of a PersistentVolumeClaim"),
        ([*IMAGE, "kubernetes", "--emit_node_selector", "a=b\nc", "s.py"], "not a label of Kubernetes"),
        ([*IMAGE, "kubernetes", "--emit_node_selector", "a b/c=d", "s.py"], "not a label of Kubernetes"),
    ],
)
def test_invalid_emit_options_are_reported_in_one_sentence(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        emit(parse(words), Config())


def test_no_ipex_and_variables_are_emitted() -> None:
    text = emit(parse(["--emit", "slurm", "-genv", "A=b c", "-m", "pkg.mod"]), Config(ipex=False))
    assert shlex.split(text.splitlines()[-1])[-6:] == ["launch", "--no_ipex", "-genv", "A=b c", "-m", "pkg.mod"]


def test_placement_options_are_emitted() -> None:
    """The command in the job parses to the same options."""
    asked = ["--bind", "none", "--ncores-per-instance", "4", "--nodes-list", "0,2", "--use-e-cores", "--oversubscribe"]
    options = parse(["--emit", "slurm", *asked, "--no-prefix", "--dynamo_backend", "inductor", "s.py"])
    words = shlex.split(emit(options, Config()).splitlines()[-1])
    again = parse(words[words.index("launch") + 1 :])
    for name in ("bind", "cores_per_process", "nodes", "efficiency", "oversubscribe", "prefix", "dynamo_backend"):
        assert getattr(again, name) == getattr(options, name)


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "trainjob", "pytorchjob", "mpijob"])
def test_a_secret_is_not_written_into_what_is_printed(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--emit", kind, "--emit_image", "i", "-genv", "HF_TOKEN=x1y2z3", "-genv", "A=b", "s.py"]
    assert main(words) == 0
    printed, errors = capsys.readouterr()
    assert "x1y2z3" not in printed + errors
    assert "A=b" in printed
    assert "-genv HF_TOKEN is left out" in errors


def test_a_dry_run_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--dry-run", "-genv", "HF_TOKEN=x1y2z3", "-genv", "A=b", __file__, "word"]) == 0
    printed = capsys.readouterr().out
    assert "x1y2z3" not in printed
    assert "HF_TOKEN=hidden A=b" in printed
    assert f"handed over by the environment: {__file__} word" in printed
