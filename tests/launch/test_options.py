"""The options of accelerate, mpirun and ipexrun are understood; arguments after the script belong to the script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker.cli.launch import parse
from stoker.errors import UserError
from stoker.launch.config.config_file import Config, with_config
from stoker.launch.launch_plan import Plan, show
from stoker.launch.options import Options, RankOptions, declared, table, to_flags
from stoker.launch.rank.rank_settings import Settings
from stoker.launch.start import make_plan
from stoker.machine import Machine

Recorded = Callable[[str], Machine]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--config_file c.yaml", {"config_file": "c.yaml"}),
        ("--cpu", {"cpu": True}),
        ("--ipex", {"ipex": True}),
        ("--no-ipex", {"ipex": False}),
        ("--mixed_precision bf16", {"mixed_precision": "bf16"}),
        ("--num_processes 2", {"num_processes": 2}),
        ("--num-processes=2", {"num_processes": 2}),
        ("-n 2", {"num_processes": 2}),
        ("-np 2", {"num_processes": 2}),
        ("-ppn 4", {"per_machine": 4}),
        ("--num_machines 3 --machine_rank 1", {"num_machines": 3, "machine_rank": 1}),
        ("--nnodes 3", {"num_machines": 3}),
        ("--main_process_ip h --main_process_port 1", {"main_process_ip": "h", "main_process_port": 1}),
        ("--master-addr h --master-port 1", {"main_process_ip": "h", "main_process_port": 1}),
        ("--num_cpu_threads_per_process 6", {"threads": 6}),
        ("--mpirun_hostfile f", {"hostfile": "f"}),
        ("-f f", {"hostfile": "f"}),
        ("-hostfile f", {"hostfile": "f"}),
        ("--mpirun_ccl 2", {"ccl_workers": 2}),
        ("--ccl-worker-count 2", {"ccl_workers": 2}),
        ("--max_restarts 3", {"max_restarts": 3}),
        ("--nnodes 2:4", {"min_machines": 2, "num_machines": 4}),
        ("--nnodes 2:2", {"min_machines": None, "num_machines": 2}),
        ("--rdzv_endpoint node1:29400", {"main_process_ip": "node1", "main_process_port": 29400}),
        ("--rdzv_endpoint [fe80::1]:29400", {"main_process_ip": "fe80::1", "main_process_port": 29400}),
        ("-m", {"module": True}),
        ("-genv A 1 -genv B=2", {"genv": (("A", "1"), ("B", "2"))}),
        ("--ninstances 2 --ncores-per-instance 8", {"per_machine": 2, "cores_per_process": 8}),
        ("--nodes-list 0,1", {"nodes": (0, 1)}),
        ("--use-logical-cores", {"logical": True}),
        ("--memory-allocator tcmalloc", {"allocator": "tcmalloc"}),
        ("--log-dir d", {"log_dir": "d"}),
        ("--extra-mpi-params '-v -x'", {"extra_mpi": ("-v", "-x")}),
        ("--dry-run", {"dry_run": True}),
        ("--no-compat", {"compat": False}),
    ],
)
def test_options_of_accelerate_mpirun_torchrun_and_ipexrun_are_understood(words: str, expected: dict[str, Any]) -> None:
    import shlex

    found = parse([*shlex.split(words), "script.py"])
    assert {name: getattr(found, name) for name in expected} == expected


def test_arguments_after_the_script_are_not_parsed() -> None:
    words = ["-n", "2", "s.py", "-n", "3", "--ipex", "--", "--dry-run", "a b", "", "$(x)"]
    found = parse(words)
    assert found.num_processes == 2
    assert found.ipex is None
    assert not found.dry_run
    assert found.arguments == words[3:]
    assert parse(["--", "s.py", "--", "x"]).arguments == ["--", "x"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num_procesess", "2", "s.py"], "did you mean --num_processes"),
        (["-n", "0", "s.py"], "not a whole number above 0"),
        (["-n", "2"], "no script was given"),
        (["--mixed_precision", "int3", "s.py"], "int3"),
        (["-ppn", "2", "--ninstances", "3", "s.py"], "contradict"),
        (["--main_process_port", "99999", "s.py"], "not a port"),
        (["-genv", "A-B=1", "s.py"], "NAME=VALUE"),
        (["-n", "\u00b2", "s.py"], "not a whole number above 0"),
        (["--extra_mpi_params", "'open", "s.py"], "cannot be split as a shell would"),
        (["--rdzv_timeout", "-1", "s.py"], "seconds above 0"),
        (["--local_sgd_outer_lr", "nan", "s.py"], "not a number"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        parse(words)
    assert "\n" not in str(caught.value)


def test_the_table_in_the_docs_is_made_from_the_declarations() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs" / "launch.md"
    written = docs.read_text().partition("<!-- options -->\n")[2].partition("\n<!-- end")[0]
    assert written == table(), "replace it by the output of `python -m stoker.launch.options`"


def test_the_flags_of_a_launch_set_the_same_rank_options_again() -> None:
    """What `--emit` writes, for a value of each option that is sent to ranks."""
    words = "--mixed_precision bf16 --no-ipex --no-compat --log-dir d --num_cpu_threads_per_process 2 --backend ccl \
        --gradient_compression bf16 --local_sgd 4 --local_sgd_outer_lr 0.7 --local_sgd_outer_momentum 0.9 \
        --local_sgd_warmup_steps 20 --oversubscribe \
        --no-prefix --heal --ncores-per-instance 3 --nodes-list 0,2 --use-logical-cores --use-e-cores --bind none \
        --memory-allocator jemalloc --mpirun_ccl 1 -genv A=b --dynamo_backend inductor"
    asked = parse([*words.split(), "s.py"])
    unset = [name for name in declared(RankOptions) if getattr(asked, name) == getattr(RankOptions(), name)]
    assert unset == ["module"], "a new option needs a value in this test"
    assert parse([*to_flags(asked), "s.py"]) == asked
    assert Settings.from_json(Settings.from_options(asked).to_json()) == Settings.from_options(asked)


def test_ignored_options_are_reported() -> None:
    found = parse(["--enable_cpu_affinity", "--same_network", "--quiet", "--rdzv_id", "1", "s.py"])
    assert len(found.notes) == 2
    assert all(note.startswith("--") for note in found.notes)


def test_settings_are_restored_from_json() -> None:
    settings = Settings(nodes=(0, 1), master=("h", 1), genv=(("A", "b c"),), ipex=False, log_dir="x 'y\"")
    assert Settings.from_json(settings.to_json()) == settings
    assert Settings().to_json() == "{}"
    with pytest.raises(UserError, match="not settings"):
        Settings.from_json('{"unknown": 1}')


def plan(options: Options, config: Config, machine: Machine) -> Plan:
    return make_plan(with_config(options, config), machine, {})[1]


def test_the_command_line_overrides_the_config_file(recorded: Recorded) -> None:
    config = Config(distributed_type="MULTI_CPU", num_processes=4, mixed_precision="bf16", ipex=False, threads=3)
    found = plan(parse(["-n", "2", "--mixed_precision", "no", "--ipex", "s.py"]), config, recorded("ice_lake"))
    assert (found.size, found.settings.mixed_precision, found.settings.ipex, found.settings.threads) == (
        2,
        "no",
        True,
        3,
    )
    found = plan(parse(["s.py"]), config, recorded("ice_lake"))
    assert (found.size, found.settings.mixed_precision, found.settings.ipex) == (4, "bf16", False)


def test_a_multi_cpu_yaml_without_mpirun_runs_all_its_processes(recorded: Recorded) -> None:
    found = plan(parse(["s.py"]), Config(distributed_type="MULTI_CPU", num_processes=2), recorded("avx2_vm"))
    assert found.launcher == "torchrun"
    assert len(found.ranks) == 2
    found = plan(parse(["--cpu", "--num_processes", "2", "s.py"]), Config(), recorded("avx2_vm"))
    assert found.launcher == "torchrun"
    assert [rank.placement.threads for rank in found.ranks if rank.placement] == [2, 2]


def test_one_process_gets_all_cores_and_each_machine_its_ranks(recorded: Recorded) -> None:
    found = plan(parse(["--cpu", "s.py"]), Config(), recorded("genoa"))
    assert found.launcher == "single"
    assert found.ranks[0].placement
    assert found.ranks[0].placement.threads == 192
    config = Config(
        distributed_type="MULTI_CPU", num_machines=4, num_processes=16, machine_rank=2, main_process_ip="10.0.0.1"
    )
    found = plan(parse(["s.py"]), config, recorded("genoa"))
    assert [rank.rank for rank in found.ranks] == [8, 9, 10, 11]
    assert found.port == 29500


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num_machines", "2", "-n", "3", "s.py"], "cannot be divided evenly"),
        (["--num_machines", "2", "-n", "2", "s.py"], "need --main_process_ip"),
        (["--num_machines", "2", "--machine_rank", "2", "--main_process_ip", "h", "s.py"], "numbered 0 to 1"),
        (["-n", "500", "s.py"], "Use at most"),
        (["--launcher", "torchrun", "-f", "h", "s.py"], "takes no hostfile"),
    ],
)
def test_impossible_plans_are_refused_before_anything_starts(words: list[str], says: str, recorded: Recorded) -> None:
    with pytest.raises(UserError, match=says):
        plan(parse(words), Config(), recorded("genoa"))


def test_too_many_threads_for_one_process_suggests_fewer_threads(recorded: Recorded) -> None:
    with pytest.raises(UserError, match=r"1 process of 500 threads needs 500 .* Use fewer threads, or allow"):
        plan(parse(["--ncores-per-instance", "500", "s.py"]), Config(), recorded("genoa"))


def test_more_machines_than_the_hostfile_names_are_refused(recorded: Recorded, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("127.0.0.1\n")
    words = ["--nnodes", "2", "--hostfile", str(tmp_path / "hosts"), "--nprocs-per-node", "2", "s.py"]
    with pytest.raises(UserError, match=r"--num_machines 2: .* names 1"):
        plan(parse(words), Config(), recorded("genoa"))


def test_dry_run_shows_every_rank_and_the_command(recorded: Recorded) -> None:
    options = parse(["-n", "4", "--mixed_precision", "bf16", "-genv", "A=b c", "s.py", "x y", "$(z)"])
    launcher, found = make_plan(options, recorded("sapphire_rapids_4"), {})
    text = show(found, options, launcher.command(found, options, {}))
    assert text.count("rank ") == 4
    assert "cores    28-55" in text
    assert "memory   node 3" in text
    assert "threads  28" in text
    assert "ACCELERATE_MIXED_PRECISION=bf16" in text
    assert "A='b c'" in text
    assert "'x y' '$(z)'" in text


def test_omp_num_threads_is_used_if_it_fits(recorded: Recorded) -> None:
    machine, options = recorded("ice_lake"), parse(["-n", "2", "s.py"])
    for value, threads in (("4", 4), ("500", 40), ("2,3", 2), ("x", 40)):
        found = make_plan(options, machine, {"OMP_NUM_THREADS": value})[1]
        assert [rank.placement.threads for rank in found.ranks if rank.placement] == [threads] * 2


def test_a_missing_script_is_reported_in_one_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["launch", str(tmp_path / "none.py")]) == 2
    assert "there is no script" in capsys.readouterr().err


def test_a_huge_number_of_processes_is_refused_before_it_is_planned(recorded: Recorded, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"are too many; the most is 65,536, and 4,096 on each"):
        plan(parse(["--oversubscribe", "-n", "65536", "s.py"]), Config(), recorded("genoa"))
    (tmp_path / "hosts").write_text("".join(f"127.0.0.{number} slots=4096\n" for number in range(1, 30)))
    with pytest.raises(UserError, match="118,784 processes"):
        plan(parse(["-f", str(tmp_path / "hosts"), "s.py"]), Config(), recorded("genoa"))
    found = plan(parse(["--oversubscribe", "-n", "4096", "s.py"]), Config(), recorded("genoa"))
    assert len(found.ranks) == 4096
