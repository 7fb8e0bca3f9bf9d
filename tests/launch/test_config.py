"""Config files of any age are read, explained, checked and written, and today's accelerate takes what is migrated."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rig import warm
from stoker.cli import main
from stoker.errors import UserError
from stoker.launch.config import config_file, migrate
from stoker.launch.config.check_config import check
from stoker.launch.config.config_file import Config
from stoker.launch.config.prompts import ask_all, move
from stoker.launch.config.questions import QUESTIONS, RELEASES, to_config
from stoker.machine import Machine

Recorded = Callable[[str], Machine]

# The two files of accelerate's guide for IPEX, as `accelerate config` wrote them then.
ONE_PROCESS = """\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
downcast_bf16: 'no'
ipex_config:
  ipex: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""
MANY_MACHINES = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
dynamo_backend: 'NO'
ipex_config:
  ipex: true
machine_rank: 0
main_process_ip: 36.112.23.24
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
mpirun_config:
  mpirun_ccl: '1'
  mpirun_hostfile: /home/user/hostfile
num_machines: 4
num_processes: 16
rdzv_backend: static
same_network: true
use_cpu: true
"""


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No config file of the person who runs the tests is read."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path


def read(text: str) -> Config:
    return Config.from_mapping(yaml.safe_load(text))


def test_both_files_of_the_old_guide_are_read() -> None:
    one, many = read(ONE_PROCESS), read(MANY_MACHINES)
    assert (one.is_distributed, one.ipex, one.mixed_precision, one.num_processes) == (False, None, "bf16", 1)
    assert (many.is_distributed, many.num_machines, many.num_processes, many.main_process_ip) == (
        True,
        4,
        16,
        "36.112.23.24",
    )
    assert (many.hostfile, many.ccl_workers, many.dynamo_backend) == ("/home/user/hostfile", 1, None)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("fp16: true\ndistributed_type: NO\n", "mixed_precision", "fp16"),  # before mixed_precision existed
        ("mixed_precision: no\n", "mixed_precision", None),  # False in yaml
        ("distributed_type: no\n", "distributed_type", "NO"),  # False in yaml
        ("distributed_type: MULTI_XPU\nnum_processes: 4\n", "distributed_type", "MULTI_CPU"),
        ("dynamo_backend: INDUCTOR\n", "dynamo_backend", "inductor"),
        ("dynamo_config:\n  dynamo_backend: INDUCTOR\n", "dynamo_backend", "inductor"),
        ("ipex_config:\n  ipex: false\n", "ipex", False),
        ("ipex_config: {}\n", "ipex", None),
        ("ipex_config: false\n", "ipex", False),
        ("num_processes: -1\n", "num_processes", -1),
        ("main_process_port: '29501'\n", "main_process_port", 29501),
        ("mpirun_config: null\n", "hostfile", None),
        ("{}", "num_machines", None),
    ],
)
def test_keys_of_all_accelerate_releases_are_read(text: str, name: str, value: object) -> None:
    assert getattr(read(text), name) == value


def test_json_of_the_first_versions_is_read(tmp_path: Path) -> None:
    path = tmp_path / "default_config.json"
    path.write_text(json.dumps({"distributed_type": "MULTI_CPU", "num_processes": 2, "fp16": False}))
    assert Config.read(path).num_processes == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not valid yaml"),
        ("- 1\n- 2\n", "must hold keys and values"),
        ("distributed_type: DEEPSPEED\n", "DEEPSPEED is not for CPUs"),
        ("distributed_type: NONSENSE\n", "must be NO or MULTI_CPU"),
        ("num_processes: many\n", "num_processes: 'many' is not a whole number above 0"),
        ("mixed_precision: int3\n", "must be one of no, fp16"),
        ("compute_environment: AMAZON_SAGEMAKER\n", "LOCAL_MACHINE"),
        ("use_cpu: perhaps\n", "must be true or false"),
        ("a: 2020-13-45\n", "not valid yaml: month"),
        ("a: 1\n  b: 2\n", "not valid yaml: line 2: mapping values"),
        pytest.param("a: " + "[" * 3000, "not valid yaml", id="deep"),
        ("stoker_config: fast\n", "stoker_config is 'fast'; it must hold keys"),
        ("mpirun_config: hosts\n", "mpirun_config is 'hosts'; it must hold keys"),
        ("mpirun_config:\n  mpirun_ccl: -1\n", "mpirun_ccl: '-1' is not a whole number of 0 or more"),
        (
            "stoker_config:\n  num_cpu_threads_per_process: -2\n",
            "per_process: '-2' is not a whole number above 0",
        ),
        ("main_process_port: 99999\n", "main_process_port: '99999' is not a port, 0 to 65535"),
        ("num_machines: 0\n", "num_machines: '0' is not a whole number above 0"),
        ("num_processes: 0\n", "num_processes: '0' is not a whole number above 0"),
        ("num_processes: -3\n", "num_processes: '-3' is not a whole number above 0"),
        ("machine_rank: -1\n", "machine_rank: '-1' is not a whole number of 0 or more"),
    ],
)
def test_an_invalid_file_is_reported_in_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        Config.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_written_file_is_read_back_and_has_accelerates_keys(tmp_path: Path) -> None:
    config = Config(
        distributed_type="MULTI_CPU", num_machines=2, num_processes=4, main_process_ip="10.0.0.1", main_process_port=1234,
        mixed_precision="bf16", ipex=False, hostfile="hosts", ccl_workers=2, threads=3, launcher="impi",
        dynamo_backend="inductor",
    )  # fmt: skip
    config.write(tmp_path / "deep" / "c.yaml")
    again = Config.read(tmp_path / "deep" / "c.yaml")
    assert again == config
    keys = yaml.safe_load((tmp_path / "deep" / "c.yaml").read_text())
    assert {"compute_environment", "distributed_type", "ipex_config", "machine_rank", "main_process_ip", "main_process_port",
            "main_training_function", "mixed_precision", "num_machines", "num_processes", "rdzv_backend", "same_network",
            "use_cpu"} <= set(keys)  # fmt: skip


@pytest.mark.parametrize("text", [ONE_PROCESS, MANY_MACHINES])
def test_a_migrated_file_is_accepted_by_todays_accelerate(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    old = tmp_path / "old.yaml"
    old.write_text(text)
    with pytest.raises(ValueError, match="unknown keys"):
        load_config_from_file(str(old))
    assert main(["config", "migrate", str(old)]) == 0
    taken = load_config_from_file(str(tmp_path / "old.migrated.yaml"))
    assert taken.num_processes == yaml.safe_load(text)["num_processes"]
    printed = capsys.readouterr().out
    assert "ipex_config" in printed
    assert "stoker launch" in printed
    assert (Config.read(tmp_path / "old.migrated.yaml").num_machines or 1) == yaml.safe_load(text)["num_machines"]


def test_every_retired_key_is_explained() -> None:
    old = yaml.safe_load(MANY_MACHINES) | {"fp16": True, "use_xpu": True, "own_key": 1}
    printed = "\n".join(migrate.explain(old, Config.from_mapping(old)))
    for key in ("ipex_config", "mpirun_ccl", "fp16", "dynamo_backend", "use_xpu", "own_key"):
        assert key in printed
    assert "own_key" not in migrate.for_accelerate(Config.from_mapping(old))


def test_check_reports_more_processes_than_cores(recorded: Recorded) -> None:
    config = Config(
        distributed_type="MULTI_CPU", num_machines=4, num_processes=16, main_process_ip="127.0.0.1", main_process_port=1
    )
    texts = [finding.text for finding in check(config, recorded("avx2_vm")) if finding.severity == "error"]
    assert not any("processes" in text for text in texts)
    config = Config(
        distributed_type="MULTI_CPU", num_machines=4, num_processes=32, main_process_ip="127.0.0.1", main_process_port=1
    )
    texts = [finding.text for finding in check(config, recorded("avx2_vm")) if finding.severity == "error"]
    assert any("32 processes on 4 machines are 8 on each" in text and "physical cores" in text for text in texts)


def test_check_finds_a_busy_port_an_unknown_address_and_a_bad_hostfile(recorded: Recorded, tmp_path: Path) -> None:
    machine = recorded("genoa")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        config = Config(
            distributed_type="MULTI_CPU", num_processes=2, main_process_ip="127.0.0.1", main_process_port=port
        )
        assert any(f"port {port} is in use" in finding.text for finding in check(config, machine))
    config = Config(
        distributed_type="MULTI_CPU", num_machines=2, num_processes=2, main_process_ip="no-such-host.invalid"
    )
    assert any("no-such-host.invalid is not known" in finding.text for finding in check(config, machine))
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1\n127.0.0.1\n")
    config = Config(distributed_type="MULTI_CPU", num_machines=2, num_processes=2, hostfile=str(hosts))
    assert any("is already in line 1" in finding.text for finding in check(config, machine))
    config = Config(num_processes=4)
    assert any("distributed_type is NO" in finding.text for finding in check(config, machine))


def test_check_exits_with_1_if_a_launch_would_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_machines: 2\nnum_processes: 3\nmain_process_ip: 127.0.0.1\n")
    assert main(["config", "check", str(path)]) == 1
    assert "cannot be divided evenly" in capsys.readouterr().out
    path.write_text("distributed_type: NO\nnum_proceses: 2\ndowncast_bf16: 'no'\n")
    assert main(["config", "check", str(path)]) == 0
    assert (
        capsys.readouterr().out
        == "warning: num_proceses: ignored, because neither Stoker nor accelerate has such a key\n"
    )


# The two dialogues of accelerate's guide for IPEX: (what was asked, what was typed or chosen).
GUIDE_ONE_PROCESS = ["This machine", "No distributed training", "yes", "yes", "NO", "NO", "bf16"]
GUIDE_MANY_MACHINES = [
    "This machine", "multi-CPU", "4", "0", "36.112.23.24", "29500", "yes", "yes", "yes", "/home/user/hostfile", "1", "NO", "16",
    "bf16",
]  # fmt: skip


def piped(lines: list[str], machine: Machine, **named: Any) -> tuple[Config, str]:
    screen = io.StringIO()
    answers = ask_all({}, machine, io.StringIO("\n".join(lines) + "\n"), screen, **named)
    return to_config(answers), screen.getvalue()


def test_the_dialogues_of_the_old_guide_give_its_files(recorded: Recorded) -> None:
    one, _ = piped(GUIDE_ONE_PROCESS, recorded("ice_lake"))
    old = read(ONE_PROCESS)
    for name in (
        "distributed_type",
        "ipex",
        "mixed_precision",
        "num_processes",
        "use_cpu",
        "dynamo_backend",
        "machine_rank",
    ):
        assert getattr(one, name) == getattr(old, name), name
    many, screen = piped(GUIDE_MANY_MACHINES, recorded("ice_lake"))
    old = read(MANY_MACHINES)
    for one_field in dataclasses.fields(Config):
        if one_field.name not in ("other", "notes"):
            assert getattr(many, one_field.name) == getattr(old, one_field.name), one_field.name
    assert "IPEX" in screen
    assert "launch mpirun? [yes/NO]: yes" in screen


# Which questions accelerate asked has changed; each of these ends in the same file.
SAME_FILE = {
    "the guide": ["This machine", "multi-CPU", "1", "yes", "no", "no", "2", "bf16"],
    "with a check of operations": ["This machine", "multi-CPU", "1", "no", "yes", "no", "no", "2", "bf16"],
    "before mpirun": ["This machine", "multi-CPU", "1", "yes", "no", "2", "bf16"],
    "numbers of the menus": ["0", "1", "1", "yes", "no", "no", "2", "2"],
    "short words": ["LOCAL_MACHINE", "MULTI_CPU", "1", "y", "n", "N", "2", "BF16"],
    "defaults": ["", "multi-CPU", "", "", "", "", "2", "bf16"],
}


@pytest.mark.parametrize("lines", SAME_FILE.values(), ids=SAME_FILE)
def test_piped_answers_to_every_release_give_the_same_file(lines: list[str], recorded: Recorded) -> None:
    config, _ = piped(lines, recorded("sapphire_rapids_4"))
    assert config == Config(distributed_type="MULTI_CPU", num_processes=2, mixed_precision="bf16")


def test_missing_last_answers_are_the_defaults(recorded: Recorded) -> None:
    config, _ = piped(["This machine", "multi-CPU", "1", "yes", "no", "no", "2"], recorded("sapphire_rapids_4"))
    assert config == Config(distributed_type="MULTI_CPU", num_processes=2, mixed_precision="no")


def test_answers_to_todays_accelerate_are_accepted_too(recorded: Recorded) -> None:
    """It asks neither for IPEX nor for oneCCL's workers."""
    lines = ["This machine", "multi-CPU", "1", "no", "yes", "hosts", "no", "2", "bf16"]
    config, _ = piped(lines, recorded("ice_lake"))
    # The guide asked for a number after the hostfile; `no` is none, so this is not the guide's dialogue.
    assert (config.hostfile, config.num_processes, config.ipex) == ("hosts", 2, None)
    config, _ = piped(["This machine", "No distributed training", "yes", "no", "no", "bf16"], recorded("ice_lake"))
    assert (config.is_distributed, config.mixed_precision) == (False, "bf16")


def test_torch_dynamo_and_its_options_are_kept(recorded: Recorded) -> None:
    lines = [
        "This machine",
        "No distributed training",
        "yes",
        "yes",
        "yes",
        "inductor",
        "yes",
        "default",
        "no",
        "yes",
        "no",
    ]
    config, _ = piped(lines, recorded("ice_lake"))
    assert config.dynamo_backend == "inductor"
    assert config.other == {
        "dynamo_config": {"dynamo_mode": "default", "dynamo_use_fullgraph": False, "dynamo_use_dynamic": True}
    }


def test_a_terminal_is_asked_nothing_that_accelerate_did_not_ask(recorded: Recorded) -> None:
    old = {"compute_environment", "distributed_type", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
           "same_network", "rdzv_backend", "use_cpu", "ipex", "use_mpirun", "mpirun_hostfile", "mpirun_ccl", "dynamo",
           "dynamo_backend", "dynamo_customized", "dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "num_processes",
           "mixed_precision"}  # fmt: skip
    assert {question.name for question in QUESTIONS if RELEASES[0].asks(question, more=False)} == old
    more = {question.name for question in QUESTIONS if RELEASES[0].asks(question, more=True)}
    assert more - old == {"launcher", "num_cpu_threads_per_process"}


def test_more_asks_for_launcher_and_threads(recorded: Recorded) -> None:
    lines = ["This machine", "multi-CPU", "1", "yes", "no", "torchrun", "no", "2", "3", "bf16"]
    config, screen = piped(lines, recorded("ice_lake"), more=True)
    assert (config.launcher, config.threads) == ("torchrun", 3)
    assert (
        "How many threads should each process use? [one per core of the machine it runs on: 40 on this machine]: 3\n"
        in screen
    )
    lines[8] = ""
    assert piped(lines, recorded("ice_lake"), more=True)[0].threads is None


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["This machine", "No distributed training", "yes", "yes", "no", "yes", "bf16"], "does not launch DeepSpeed"),
        (["AWS (Amazon SageMaker)"], "answer with one of LOCAL_MACHINE"),
        (["This machine", "multi-GPU"], "answer with one of NO, MULTI_CPU"),
        (["This machine", "multi-CPU", "9" * 5000], "answer with a whole number"),
        (
            ["This machine", "No distributed training", "yes", "yes", "no", "no", "bf16", "more"],
            "'more' is one line too many",
        ),
        (["This machine", "No distributed training", "perhaps"], "answer yes or no"),
        (["x" * 100_000], "longer than"),
    ],
)
def test_an_invalid_answer_is_reported_in_one_sentence(lines: list[str], says: str, recorded: Recorded) -> None:
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        piped(lines, recorded("ice_lake"))
    assert "\n" not in str(caught.value)


def test_defaults_for_processes_and_threads_depend_on_the_machine(recorded: Recorded) -> None:
    screen = io.StringIO()
    answers = ask_all({}, recorded("sapphire_rapids_4"), io.StringIO("\n" * 30), screen, more=True)
    assert answers["distributed_type"] == "MULTI_CPU"
    assert answers["num_processes"] == 2
    assert "56 on this machine]" in screen.getvalue()
    assert answers["mixed_precision"] == "no", "precision is asked for, not proposed by the CPU"


def test_every_question_is_also_a_flag(homeless: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config", "--yes", "--distributed_type", "MULTI_CPU", "--num_machines", "2", "--num_processes", "2",
             "--launcher", "torchrun", "--machine-rank", "1", "--main_process_ip", "localhost", "--main_process_port", "2222",
             "--same_network", "no", "--use_cpu", "yes", "--ipex", "no", "--dynamo", "no", "--mixed_precision", "bf16",
             "--num_cpu_threads_per_process", "1", "--compute_environment", "LOCAL_MACHINE"]  # fmt: skip
    assert main(words) == 0
    config = Config.read(config_file.own_path())
    assert (config.machine_rank, config.main_process_port, config.same_network, config.ipex) == (1, 2222, False, False)
    capsys.readouterr()
    assert main(["config", "show"]) == 0
    assert "main_process_port: 2222" in capsys.readouterr().out


def test_num_processes_implies_multi_cpu_and_unneeded_flags_are_reported(
    homeless: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--yes", "--num_processes", "2"]) == 0
    config = Config.read(config_file.own_path())
    assert (config.distributed_type, config.num_processes) == ("MULTI_CPU", 2)
    assert main(["config", "--yes", "--distributed_type", "NO", "--num_processes", "2"]) == 0
    assert "num_processes=2 is ignored" in capsys.readouterr().err
    assert main(["config", "--yes", "--main_process_port", "99999"]) == 2
    assert "answer with a port" in capsys.readouterr().err


def test_an_unwritable_path_is_reported_and_no_file_is_left(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").mkdir()
    with pytest.raises(UserError, match="cannot be written: name a file"):
        Config().write(tmp_path / "c.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_a_wrong_answer_in_a_pipe_is_reported_in_one_sentence(recorded: Recorded) -> None:
    with pytest.raises(UserError, match="answer with one of NO, MULTI_CPU"):
        ask_all({}, recorded("genoa"), io.StringIO("\nGPU\n"), io.StringIO())
    with pytest.raises(UserError, match="not UTF-8"):
        ask_all({}, recorded("genoa"), io.TextIOWrapper(io.BytesIO(b"\n\xff\n"), encoding="utf-8"), io.StringIO())


def test_arrows_and_digits_move_the_selection_and_wrap_around() -> None:
    assert [move(key, 0, 3) for key in ("up", "down", "k", "j", "2", "9", "x")] == [2, 1, 2, 1, 2, 0, 0]


def test_arrow_keys_choose_in_a_terminal_and_yes_and_no_are_typed(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    path = tmp_path / "c.yaml"
    code = "import sys; from stoker.cli import main; sys.exit(main(sys.argv[1:]))"
    process = warm.Popen(
        [sys.executable, "-c", code, "config", "--config_file", str(path)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    # environment, type (one down: multi-CPU), machines, IPEX (typed: no), mpirun, dynamo, processes, precision (one down).
    # Each key is sent when its question stands on the screen.
    steps = [("environment", b"\r"), ("type of machine", b"\x1b[B\r"), ("different machines", b"\r"), ("IPEX", b"n\r"),
             ("launch mpirun", b"no\r"), ("dynamo", b"perhaps\r"), ("answer yes or no", b"N\r"), ("processes should", b"2\r"),
             ("mixed precision", b"\x1b[B\r")]  # fmt: skip
    seen = ""
    for words, keys in steps:
        while words not in seen or (keys.startswith(b"\x1b") and "➔" not in seen.partition(words)[2]):
            seen += os.read(controller, 4096).decode(errors="replace")
        seen = ""
        for key in [keys[:3], keys[3:]] if keys.startswith(b"\x1b") else [keys]:
            os.write(controller, key)
            if key.startswith(b"\x1b"):
                while "➔" not in seen:
                    seen += os.read(controller, 4096).decode(errors="replace")
    try:
        while os.read(controller, 4096):
            pass
    except OSError:
        pass
    assert process.wait(timeout=30) == 0
    config = Config.read(path)
    assert (config.is_distributed, config.ipex, config.num_processes) == (True, False, 2)


def test_the_default_file_is_stokers_own_then_accelerates(homeless: Path) -> None:
    assert config_file.find(None) == (Config(), None)
    accelerates = homeless / "hf" / "accelerate" / "default_config.yaml"
    accelerates.parent.mkdir(parents=True)
    accelerates.write_text("num_processes: 3\n")
    assert config_file.find(None)[1] == accelerates
    Config(num_processes=5).write(config_file.own_path())
    assert config_file.find(None)[0].num_processes == 5
    with pytest.raises(UserError, match="does not exist"):
        config_file.find("nowhere.yaml")
