"""Nobody who can reach a launch's port takes part in it: on one machine there is none, between machines there is a secret."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from live import SCRIPTS, STOKER, environment, launch, reports
from torch.distributed import TCPStore

from comm.ranks import free_port
from rig import warm
from stoker.errors import UserError
from stoker.launch.launchers.job_secret import advice, job_secret
from stoker.launch.launchers.round import Report, encode
from stoker.launch.rank.failure import of_launch

RANK = str(SCRIPTS / "rank.py")
TWO = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
MEET = """
import os, sys
import torch, torch.distributed as dist
if sys.argv[1:]:
    os.environ.update(MASTER_ADDR="localhost")  # another name of this host
dist.init_process_group("gloo")
x = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(x)
group = dist.new_group([0, 1])
dist.barrier(group)
everybody = [line.split() for line in open("/proc/net/tcp")][1:]
port = int(os.environ["MASTER_PORT"])
print("OPEN", any(words[3] == "0A" and words[1].endswith(f":{port:04X}") for words in everybody), x.tolist(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@TWO
@pytest.mark.parametrize("more", [[], pytest.param(["--own"], marks=pytest.mark.part("launch"))])
def test_ranks_of_one_machine_meet_without_an_open_port(more: list[str], tmp_path: Path) -> None:
    (tmp_path / "meet.py").write_text(MEET)
    done = launch("-n", "2", "--no-compat", "--oversubscribe", str(tmp_path / "meet.py"), *more)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] OPEN False [3.0, 3.0, 3.0]", "[1] OPEN False [3.0, 3.0, 3.0]"]


@pytest.mark.part("launch")
@pytest.mark.parametrize(("nodes", "kind"), [("2", "SealedStore"), ("1(x2)", "TCPStore")])
def test_ranks_of_srun_on_one_node_know_the_users_secret(nodes: str, kind: str, tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(
        "from torch.distributed.rendezvous import rendezvous\nprint(type(next(rendezvous('env://'))[0]).__name__)\n"
    )
    common = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": str(free_port()), "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0",
              "SLURM_STEP_TASKS_PER_NODE": nodes, "SLURM_STEP_NODELIST": "localhost",
              "STOKER_CACHE_DIR": str(tmp_path / "cache")}  # fmt: skip
    words = [*STOKER, "launch", "--no-compat", "--no-prefix", "--oversubscribe", str(script)]
    ranks = [
        warm.Popen(
            words,
            env=environment({**common, "SLURM_PROCID": rank, "SLURM_LOCALID": local}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, local in (("0", "0"), ("1", "1" if nodes == "2" else "0"))
    ]
    assert [process.communicate(timeout=120)[0] for process in ranks] == [f"{kind}\n", f"{kind}\n"]


@contextmanager
def two_machines(port: int, tmp_path: Path, *secrets: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Both on this host. The ranks run until a file is there."""
    words = ["launch", "--num_machines", "2", "-n", "2", "--no-compat", "--oversubscribe", "--rdzv_timeout", "60"]
    words += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    started = []
    try:
        for number, secret in enumerate(secrets):
            own = {"STOKER_SECRET": secret, "TMPDIR": str(tmp_path)}
            command = [*STOKER, *words, "--machine_rank", str(number), RANK, f"until={tmp_path / 'end'}"]
            started.append(
                warm.Popen(command, env=environment(own), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_report_without_the_secret_does_not_end_a_job(tmp_path: Path) -> None:
    port = free_port()
    with two_machines(port, tmp_path, "one", "one") as machines:
        for process in machines:
            assert process.stdout is not None
            assert len(reports(process.stdout.readline())) == 1
        stranger = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
        failed = encode(Report("x", "evil", "3", "2", "1", failure=of_launch("ended by a stranger")))
        for _ in range(15):  # for longer than it takes each machine to read and write
            for key in ("stoker/here/1", "stoker/here/0"):
                stranger.set(key, failed)
            stranger.set("stoker/round", json.dumps([9, ["x"], port, "broken", True, 0, [], None]))
            time.sleep(0.05)
        (tmp_path / "end").touch()
        for process in machines:
            _, errors = process.communicate(timeout=60)
            assert (process.returncode, errors) == (0, "")


def test_a_machine_with_another_secret_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with two_machines(free_port(), tmp_path, "one", "another") as machines:
        _, errors = machines[1].communicate(timeout=60)
        assert machines[1].returncode == 2
        assert "does not know the secret of this machine's jobs" in errors
        assert "STOKER_SECRET" in errors
        assert errors.count("\n") == 1
        assert machines[0].poll() is None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("STOKER_SECRET", raising=False)
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_secret_is_made_once_for_its_user_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = job_secret()
    assert len(first) == 64
    assert job_secret() == first
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert str(file) in advice()
    monkeypatch.setenv("STOKER_SECRET", "given")
    assert job_secret() == "given"


def test_a_secret_that_others_can_read_is_not_used(cache: Path) -> None:
    job_secret()
    (file,) = cache.iterdir()
    file.chmod(0o644)
    with pytest.raises(UserError, match="others may read"):
        job_secret()


def test_without_a_place_for_the_secret_the_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_SECRET", raising=False)
    monkeypatch.setenv("STOKER_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(UserError, match="set STOKER_SECRET"):
        job_secret()
