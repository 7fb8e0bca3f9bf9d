"""Launches on this machine, as a person starts them: one process, several by the elastic agent, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from live import HOSTILE, SCRIPTS, STOKER, environment, launch, lost_output, reports, running

from rig import MPIS, mpi_environment, warm

RANK = str(SCRIPTS / "rank.py")
TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


def test_one_process_is_this_process_with_all_cores(tmp_path: Path) -> None:
    process = warm.Popen(
        [*STOKER, "launch", "-genv", "OWN=my secret", RANK, *HOSTILE],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    output = process.communicate(timeout=60)[0]
    report = reports(output)[0]
    assert process.returncode == 0
    assert report["pid"] == process.pid  # no fork
    assert report["argv"] == HOSTILE
    assert (report["name"], report["file"], report["path"]) == ("__main__", RANK, str(SCRIPTS))
    assert report["OWN"] == "my secret"
    assert "secret" not in report["cmdline"]  # any user may read it
    assert int(report["OMP_NUM_THREADS"]) == len(report["cores"]) > 0
    assert "[0]" not in output
    assert not list(tmp_path.iterdir())


def test_a_module_is_run_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "main.py").write_text("import sys\nprint(__package__, sys.argv[1:])\n")
    done = launch("--no-compat", "-m", "package.main", "x", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "package ['x']\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-m", "no_such_module"], "there is no module 'no_such_module' to run"),
        (["-m", "no_such_package.main"], "there is no module 'no_such_package.main' to run"),
        (["-m", "json"], "there is no module 'json' to run"),
        (["--log-dir", __file__, RANK], f"--log-dir {__file__}"),
    ],
)
def test_a_missing_script_or_module_is_reported_in_one_sentence(words: list[str], says: str) -> None:
    done = launch("--no-compat", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"stoker: {says}")
    assert done.stderr.count("\n") == 1


def test_settings_of_another_version_are_reported_in_one_sentence() -> None:
    words = [sys.executable, "-m", "stoker.launch.run", '{"from_the_future":1}', RANK]
    done = warm.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("stoker: these are not settings of this version of Stoker")
    assert done.stderr.count("\n") == 1


def test_an_import_error_inside_a_module_shows_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import no_such_module\n")
    done = launch("--no-compat", "-m", "bad", cwd=tmp_path)
    assert done.returncode == 1
    assert "line 1, in <module>" in done.stderr


def test_a_syntax_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    done = launch("--no-compat", str(tmp_path / "bad.py"))
    assert done.returncode == 1
    assert done.stderr.startswith(f'  File "{tmp_path}/bad.py", line 1')
    assert done.stderr.endswith("SyntaxError: invalid syntax\n")


@TWO
def test_standard_input_belongs_to_rank_0(tmp_path: Path) -> None:
    script = tmp_path / "read.py"
    script.write_text(
        "import sys, time\nif __import__('os').environ['RANK'] == '0': time.sleep(1)\nprint(sys.stdin.read())\n"
    )
    words = [*STOKER, "launch", "-n", "2", "--no-compat", str(script)]
    done = warm.run(
        words, env=environment(), input="for rank 0", capture_output=True, text=True, timeout=120, check=False
    )
    assert "[0] for rank 0" in done.stdout
    assert "[1] for rank 0" not in done.stdout


@pytest.mark.parametrize(("what", "code"), [("exit", 7), ("raise", 1)])
def test_one_process_ends_as_python_would(what: str, code: int) -> None:
    done = launch("--no-compat", RANK, what)
    assert done.returncode == code
    if what == "raise":
        assert done.stderr.startswith("Traceback")
        assert done.stderr.endswith("ValueError: boom of None\n")
        assert "runpy" not in done.stderr


@TWO
def test_several_processes_have_ranks_cores_and_unchanged_arguments(tmp_path: Path) -> None:
    own = ["-genv", "OWN", "my secret"]
    done = launch("-n", "2", "--no-compat", "--log-dir", "logs", *own, RANK, *HOSTILE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = reports(done.stdout)
    assert set(found) == {0, 1}
    for rank, report in found.items():
        assert report["argv"] == HOSTILE
        assert (report["WORLD_SIZE"], report["LOCAL_WORLD_SIZE"], report["OWN"]) == ("2", "2", "my secret")
        assert "secret" not in report["cmdline"]
        assert f"[{rank}] REPORT" in done.stdout
        assert reports((tmp_path / "logs" / f"rank_{rank}.log").read_text()) == {rank: report}
    assert not set(found[0]["cores"]) & set(found[1]["cores"])
    assert found[0]["MASTER_ADDR"] == "127.0.0.1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]


@TWO
@pytest.mark.parametrize(
    ("what", "code", "says"),
    [
        ("raise@1", 1, "ValueError: boom of 1"),
        ("exit@0", 7, "exit code 7"),
        ("kill@1", 137, "SIGKILL"),
    ],
)
def test_the_first_error_ends_all_ranks_and_is_printed_last(what: str, code: int, says: str) -> None:
    mark = uuid.uuid4().hex
    done = launch("-n", "2", "--no-compat", RANK, what, mark)
    assert done.returncode == code
    last = done.stderr.rpartition("\nstoker: ")[2]
    assert last.startswith(f"rank {what[-1]} on {socket.gethostname()} failed first, exit code {code}")
    assert says in last
    assert not running([mark])


@TWO
def test_a_failure_can_be_followed_by_a_restart() -> None:
    done = launch("-n", "2", "--max_restarts", "1", "--no-compat", RANK, "once@1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[1] REPORT") == 2


@TWO
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ending_the_launch_ends_everything_and_no_port_was_open(number: int, code: int) -> None:
    mark = uuid.uuid4().hex
    words = [*STOKER, "launch", "-n", "2", "--no-compat", RANK, "hang", mark]
    process = warm.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    port = int(reports(lines[0] + lines[1])[0]["MASTER_PORT"])
    assert listeners(port) == set()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert not running([mark])


def listeners(port: int) -> set[str]:
    """The addresses, as the kernel writes them, on which something listens at a port."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {words[1].rpartition(":")[0] for words in lines if words[3] == "0A" and words[1].endswith(f":{port:04X}")}


@TWO
def test_long_lines_of_two_ranks_are_not_mixed(tmp_path: Path) -> None:
    script = tmp_path / "long.py"
    script.write_text("import os\nfor _ in range(40): print(os.environ['RANK'] * 200_000, flush=True)\n")
    done = launch("-n", "2", "--no-compat", str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {str(rank) * 200_000}" for rank in (0, 1) for _ in range(40)]


@TWO
def test_only_rank_0_shows_its_progress(tmp_path: Path) -> None:
    done = launch("-n", "2", "--no-compat", "--log_dir", str(tmp_path), RANK, "bar")
    assert "2/3 of 0" in done.stderr
    assert "of 1" not in done.stderr
    assert "2/3 of 1" in (tmp_path / "rank_1.log").read_text()


@pytest.mark.parametrize(
    ("processes", "launcher"),
    [
        ("1", "torchrun"),
        pytest.param("2", "torchrun", marks=TWO),
        pytest.param("2", "impi", marks=[TWO, pytest.mark.part("launch"), pytest.mark.mpi]),
    ],
)
def test_unwritable_output_does_not_end_a_script(processes: str, launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "speak.py"
    script.write_text(
        "import os, sys\nfor _ in range(50): print('x' * 999, flush=True); print('y' * 999, file=sys.stderr)\n"
        "open(f'end.{os.environ.get(\"RANK\", 0)}', 'w').close()\n"
    )
    log = ["--log-dir", "logs"] if processes == "2" else []  # without it, one process writes by itself
    words = ["launch", "--launcher", launcher, "-n", processes, "--no-compat", *log, "speak.py"]
    env = environment(mpi_environment(launcher) if launcher in MPIS else None)
    out, err = lost_output("full disk"), lost_output("no reader")
    done = warm.run([*STOKER, *words], env=env, cwd=tmp_path, stdout=out, stderr=err, timeout=120, check=False)
    os.close(out)
    os.close(err)
    assert done.returncode == 0
    for rank in range(int(processes)):
        assert (tmp_path / f"end.{rank}").exists()
        if log:  # it has what the screen has lost
            assert (tmp_path / "logs" / f"rank_{rank}.log").stat().st_size == 100 * 1000


@pytest.mark.parametrize("how", ["", "import sys; sys.exit()", "import sys; sys.exit(1)"])
def test_a_plain_pytorch_loop_gets_a_hint_about_stoker_optimize(how: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(
        "import torch\nmodel = torch.nn.Linear(1, 1)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        f"model(torch.ones(1)).backward()\noptimizer.step()\n{how}\n"
    )
    done = launch("loop.py", cwd=tmp_path)
    assert done.stderr.count("stoker.optimize(model, optimizer)") == (done.returncode == 0)


@TWO
def test_a_port_in_use_is_reported() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        done = launch("-n", "2", "--main_process_port", str(port), "--no-compat", RANK)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"stoker: port {port} on 127.0.0.1 is in use by another program; choose another with --main_process_port\n"
    )


@pytest.mark.parametrize("words", [[], ["-n", "2"]])
def test_a_token_of_the_script_is_on_no_command_line_of_a_rank(words: list[str]) -> None:
    done = launch(*words, "--no-compat", "--oversubscribe", RANK, "--token", "x1y2z3", "--hub_token=x1y2z3", "rest")
    assert done.returncode == 0, done.stderr
    found = reports(done.stdout)
    assert len(found) == max(len(words), 1)
    for report in found.values():
        assert report["argv"] == ["--token", "x1y2z3", "--hub_token=x1y2z3", "rest"]
        assert "x1y2z3" not in report["cmdline"]  # any user may read it
        assert RANK in report["cmdline"]


def test_what_a_dry_run_shows_has_no_token() -> None:
    for words in ([], ["-n", "2"]):
        done = launch("--dry-run", *words, "--oversubscribe", RANK, "--token", "x1y2z3", "rest")
        assert done.returncode == 0, done.stderr
        assert "x1y2z3" not in done.stdout
        assert "--token hidden rest" in done.stdout


def test_more_ranks_than_cores_run_if_mpirun_has_started_them() -> None:
    cores = len(os.sched_getaffinity(0))
    size = str(4 * cores)
    common = {"PMI_SIZE": size, "MPI_LOCALNRANKS": size, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": str(cores)}
    warnings = {}
    for rank in ("0", "3"):
        own = {**common, "PMI_RANK": rank, "MPI_LOCALRANKID": rank}
        done = launch("--no-compat", RANK, env=own)
        assert done.returncode == 0, done.stderr
        assert reports(done.stdout)[int(rank)]["OMP_NUM_THREADS"] == "1"
        warnings[rank] = done.stderr.splitlines()
    assert warnings["3"] == []
    assert len(warnings["0"]) == 1
    assert f"{size} processes share this machine's cores" in warnings["0"][0]


def test_more_processes_than_cores_are_refused_in_one_line() -> None:
    done = launch("-n", "1000", "--no-compat", RANK)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--oversubscribe" in done.stderr


def test_a_config_file_with_retired_keys_is_used(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("distributed_type: 'NO'\nipex_config:\n  ipex: true\nmixed_precision: bf16\nuse_cpu: true\n")
    done = launch("--config_file", str(path), "--dry-run", RANK)
    assert "ACCELERATE_MIXED_PRECISION=bf16" in done.stdout


SRUN = """#!/bin/sh
while [ "$1" != "--kill-on-bad-exit=1" ]; do shift; done; shift
export SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_ID=0
export SLURM_STEP_NODELIST=localhost
exec "$@"
"""


def test_inside_an_allocation_srun_starts_the_ranks_which_recognise_themselves(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    words = ["--launcher", "slurm", "-n", "1", "--no-compat", RANK, *HOSTILE]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5"}
    done = launch(*words, env=env)
    assert done.returncode == 0, done.stderr
    report = reports(done.stdout)[0]
    assert (report["argv"], report["RANK"], report["MASTER_ADDR"]) == (HOSTILE, "0", "127.0.0.1")
    done = launch(*words)
    assert done.returncode == 2
    assert "--emit slurm" in done.stderr


def test_a_missing_allocator_is_reported_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.errors import UserError
    from stoker.launch.rank import allocators

    monkeypatch.setattr(allocators, "find", lambda name: None)
    allocators.preload("auto", ["x"])
    allocators.preload("default", ["x"])
    with pytest.raises(UserError, match="libjemalloc2"):
        allocators.preload("jemalloc", ["x"])
    monkeypatch.setattr(allocators, "find", lambda name: f"/lib/{name}.so")
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda path, words, env: started.append(env))
    allocators.preload("tcmalloc", ["x"], {"LD_PRELOAD": "/a.so"})
    assert started[0]["LD_PRELOAD"] == "/lib/tcmalloc.so:/a.so"
    allocators.preload("tcmalloc", ["x"], started[0])
    assert len(started) == 1
