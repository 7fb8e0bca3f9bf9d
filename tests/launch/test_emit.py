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

# sbatch's long options that are used here, with the form of their values (sbatch(1)).
SBATCH = {
    "job-name": r"[\w-]+", "nodes": r"\d+", "ntasks": r"\d+", "ntasks-per-node": r"\d+", "cpus-per-task": r"\d+",
    "exclusive": None, "time": r"[\d:-]+", "partition": r"\w+", "output": r"\S+",
}  # fmt: skip

# The parts of the Kubernetes API (batch/v1 Job, v1 Service) that a manifest of ours may use: a type, or (type, required).
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
CONTAINER = {
    "name": (str, True), "image": (str, True), "command": ([str], False),
    "resources": ({"requests": ({"cpu": (str, False)}, False), "limits": ({"cpu": (str, False)}, False)}, False),
    "ports": ([{"containerPort": (int, True), "name": (str, False)}], False),
    "volumeMounts": ([{"name": (str, True), "mountPath": (str, True)}], False),
}  # fmt: skip
POD = {
    "restartPolicy": (str, True), "subdomain": (str, False), "containers": ([CONTAINER], True),
    "volumes": ([{"name": (str, True), "emptyDir": ({"medium": (str, False)}, False)}], False),
}  # fmt: skip
METADATA = {"name": (str, True), "labels": ({"app": (str, True)}, False)}
SCHEMAS: dict[str, Any] = {
    "Job": {
        "apiVersion": (str, True), "kind": (str, True), "metadata": (METADATA, True),
        "spec": ({
            "completions": (int, False), "parallelism": (int, False), "completionMode": (str, False),
            "backoffLimit": (int, False),
            "template": ({"metadata": ({"labels": ({"app": (str, True)}, False)}, False), "spec": (POD, True)}, True),
        }, True),
    },
    "Service": {
        "apiVersion": (str, True), "kind": (str, True), "metadata": (METADATA, True),
        "spec": ({
            "clusterIP": (str, False), "publishNotReadyAddresses": (bool, False), "selector": ({"app": (str, True)}, True),
            "ports": ([{"name": (str, False), "port": (int, True)}], True),
        }, True),
    },
}  # fmt: skip


def emit(options: Options, config: Config) -> str:
    return emitter.emit(with_config(options, config))


def validate(value: Any, schema: Any, where: str) -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        assert set(value) <= set(schema), f"{where}: {set(value) - set(schema)} is not in the schema"
        for key, (inner, required) in schema.items():
            assert key in value or not required, f"{where}.{key} is missing"
            if key in value:
                validate(value[key], inner, f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            validate(item, schema[0], f"{where}[{number}]")
    else:
        assert type(value) is schema, f"{where} is {value!r}, not {schema.__name__}"


@pytest.mark.parametrize("machines", [1, 4])
def test_manifests_follow_the_schema(machines: int) -> None:
    words = [
        "--emit",
        "kubernetes",
        "--emit_image",
        "r/i:1",
        "--num_machines",
        str(machines),
        "-ppn",
        "2",
        "Train_QA.py",
    ]
    documents = list(yaml.safe_load_all(emit(parse(words), Config(threads=4))))
    assert [document["kind"] for document in documents] == (["Service", "Job"] if machines > 1 else ["Job"])
    for document in documents:
        validate(document, SCHEMAS[document["kind"]], document["kind"])
        assert NAME.fullmatch(document["metadata"]["name"])
    job = documents[-1]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (machines, machines, "Indexed")
    assert job["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "8"


def expand(word: str) -> str:
    """An argument of `command` as Kubernetes expands it: $$ is $, $(NAME) a variable."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda match: "$" if match[0] == "$$" else f"<{match[1]}>", word)


def test_kubernetes_passes_the_scripts_arguments_unchanged() -> None:
    words = ["--emit", "kubernetes", "--emit_image", "i", "--num_machines", "2", "-genv", "A=$(B)", "s.py", *HOSTILE]
    job = list(yaml.safe_load_all(emit(parse(words), Config())))[-1]
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
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_ON_NODE": "32"},
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


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
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
