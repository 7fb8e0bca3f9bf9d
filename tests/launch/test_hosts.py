"""Two and four hosts: the real mpirun of every MPI over ssh, `stoker launch` on each machine, and what goes wrong there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import HOSTILE, SCRIPTS, STOKER, environment, reports

from rig import MPIS, Rig, mpi_environment

pytestmark = [pytest.mark.part("hosts"), pytest.mark.root, pytest.mark.netns]
mpi = pytest.mark.mpi
RANK = str(SCRIPTS / "rank.py")
LIGHT = ["launch", "--no-compat", "--oversubscribe"]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(2) as made:
        yield made


@pytest.fixture
def wide_rig() -> Iterator[Rig]:
    with Rig(4) as made:
        yield made


def wait_for(process: subprocess.Popen[str], count: int) -> None:
    """Until `count` ranks have reported."""
    assert process.stdout is not None
    while count:
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        count -= "REPORT" in line


def mpirun_words(name: str, rig: Rig) -> list[str]:
    if name == "openmpi":
        path = rig.hostfile("".join(f"{host} slots=2\n" for host in rig.hosts))
        return [
            "mpirun",
            "--hostfile",
            path,
            "-n",
            "4",
            *(w for k in ("PYTHONPATH",) if k in os.environ for w in ("-x", k)),
        ]
    return ["mpirun", "-f", rig.hostfile(), "-n", "4", "-ppn", "2", "-genv", "OWN", "a b"]


@mpi
@pytest.mark.parametrize("name", MPIS)
def test_ranks_under_mpirun_recognise_themselves_on_two_hosts(name: str, rig: Rig, tmp_path: Path) -> None:
    env = environment(mpi_environment(name))
    done = rig.run("alpha", [*mpirun_words(name, rig), *STOKER, *LIGHT, RANK, *HOSTILE], env=env)
    assert done.returncode == 0, done.stderr
    found = reports(done.stdout)
    assert [(rank, found[rank]["host"], found[rank]["LOCAL_RANK"]) for rank in sorted(found)] == [
        (0, "alpha", "0"), (1, "alpha", "1"), (2, "beta", "0"), (3, "beta", "1"),
    ]  # fmt: skip
    assert all(report["argv"] == HOSTILE for report in found.values())
    assert len({(report["MASTER_ADDR"], report["MASTER_PORT"]) for report in found.values()}) == 1
    assert found[0]["MASTER_ADDR"] == rig.address("alpha")
    assert not rig.leftovers()


@mpi
@pytest.mark.parametrize("name", MPIS)
def test_stoker_starts_mpirun_by_itself_and_ends_all_with_the_first_error(name: str, rig: Rig) -> None:
    env = environment(mpi_environment(name))
    words = [*STOKER, *LIGHT, "--launcher", name, "-f", rig.hostfile("alpha\nbeta:2  # two\n"), "-n", "4", "-ppn", "2"]
    arguments = [*HOSTILE, ":", "-n", "1", "false"]
    done = rig.run("alpha", [*words, "-genv", "OWN=a b", RANK, *arguments, "x" * 100_000, "y" * 100_000], env=env)
    assert done.returncode == 0, done.stderr
    found = reports(done.stdout)
    assert [found[rank]["host"] for rank in sorted(found)] == ["alpha", "alpha", "beta", "beta"]
    assert all(
        report["argv"] == [*arguments, "x100000", "y100000"] and report["OWN"] == "a b" for report in found.values()
    )
    done = rig.run("alpha", [*words, "--no-host-check", RANK, "raise@2"], env=env)
    last = done.stderr.rpartition("\nstoker: ")[2]
    assert done.returncode == 1
    assert last.startswith("rank 2 on beta failed first, exit code 1")
    assert last.endswith("ValueError: boom of 2\n")
    assert not rig.leftovers()


@mpi
@pytest.mark.parametrize("name", MPIS)
@pytest.mark.parametrize("slots", ["alpha:1\nbeta:3\n", "alpha:3\nbeta:1\n"])
def test_each_host_gets_as_many_ranks_as_the_hostfile_says(name: str, slots: str, rig: Rig) -> None:
    words = [*STOKER, *LIGHT, "--launcher", name, "-f", rig.hostfile(slots), "--no-host-check", RANK]
    done = rig.run("alpha", words, env=environment(mpi_environment(name)))
    assert done.returncode == 0, done.stderr
    found = reports(done.stdout)
    first = int(slots.split()[0].partition(":")[2])
    assert [found[rank]["host"] for rank in sorted(found)] == ["alpha"] * first + ["beta"] * (4 - first)


@mpi
@pytest.mark.parametrize("name", MPIS)
def test_ctrl_c_and_a_killed_launcher_leave_nothing_on_any_host(name: str, rig: Rig) -> None:
    env = environment(mpi_environment(name))
    words = [
        *STOKER,
        *LIGHT,
        "--launcher",
        name,
        "-f",
        rig.hostfile(),
        "-n",
        "2",
        "-ppn",
        "1",
        "--no-host-check",
        RANK,
        "hang",
    ]
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        process = rig.start("alpha", words, env=env)
        wait_for(process, 2)
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == code
        assert not rig.leftovers(10)


@mpi
@pytest.mark.parametrize("name", ["impi"])  # the guard is the same for all
def test_a_host_that_dies_ends_the_launch_and_is_named(name: str) -> None:
    with Rig(2) as rig:
        env = environment(mpi_environment(name))
        words = [
            *STOKER,
            *LIGHT,
            "--launcher",
            name,
            "-f",
            rig.hostfile(),
            "-n",
            "2",
            "-ppn",
            "1",
            "--no-host-check",
            RANK,
            "hang",
        ]
        process = rig.start("alpha", words, env=env)
        wait_for(process, 2)
        rig.kill("beta")
        errors = process.communicate(timeout=60)[1]
        assert process.returncode == 1
        assert errors.rstrip().endswith("stoker: beta no longer answers; all ranks were ended. Is it up?")
        assert not rig.leftovers()


@mpi
def test_four_hosts_on_shaped_links(wide_rig: Rig) -> None:
    wide_rig.shape(rate="1gbit", loss=0.01)
    env = environment(mpi_environment("mpich"))
    done = wide_rig.run("alpha", [*STOKER, *LIGHT, "-f", wide_rig.hostfile(), "-n", "4", RANK], env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(report["host"] for report in reports(done.stdout).values()) == ["alpha", "beta", "delta", "gamma"]


@mpi
@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("alpha\nbeta\nalpha\n", "line 3: alpha is already in line 1"),
        ("alpha\nomega\n", "line 2: omega is not known to this machine"),
        ("alpha slots=1\nbeta slots=1\n", "alpha has 1 slots, but 2 processes per machine were requested"),
        ("-oProxyCommand=touch${IFS}pwned\n", "is not a host name or address"),
    ],
)
def test_an_invalid_hostfile_is_reported_in_one_sentence(hosts: str, says: str, rig: Rig) -> None:
    words = [*STOKER, *LIGHT, "-f", rig.hostfile(hosts), "-ppn", "2", RANK]
    done = rig.run("alpha", words, env=environment(mpi_environment("mpich")))
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@mpi
def test_a_refused_key_names_the_host_and_the_fix(rig: Rig) -> None:
    rig.forget_keys("beta")
    try:
        done = rig.run(
            "alpha", [*STOKER, *LIGHT, "-f", rig.hostfile(), RANK], env=environment(mpi_environment("mpich"))
        )
    finally:
        rig.accept_keys("beta")
    assert done.returncode == 2
    assert "beta refuses the ssh key of this user; run `ssh-copy-id beta` once" in done.stderr


@mpi
def test_a_port_in_use_is_reported(rig: Rig) -> None:
    code = "import socket,time; s=socket.socket(); s.bind(('0.0.0.0',29555)); s.listen(); print('up',flush=True); time.sleep(60)"
    busy = rig.start("alpha", [sys.executable, "-c", code])
    try:
        assert busy.stdout is not None
        busy.stdout.readline()
        words = [*STOKER, *LIGHT, "-f", rig.hostfile(), "--main_process_port", "29555", RANK]
        done = rig.run("alpha", words, env=environment(mpi_environment("mpich")))
        assert "port 29555 on alpha is in use by another program" in done.stderr
        words = [
            *STOKER,
            *LIGHT,
            "--num_machines",
            "2",
            "--main_process_ip",
            rig.address("alpha"),
            "--main_process_port",
            "29555",
        ]
        done = rig.run("alpha", [*words, RANK], env=environment())
        assert done.returncode == 2
        assert f"port 29555 on {rig.address('alpha')} is in use" in done.stderr
    finally:
        busy.kill()
        busy.communicate()


def by_hand(rig: Rig, host: str, rank: int, *words: str) -> subprocess.Popen[str]:
    address = ["--main_process_ip", rig.address("alpha"), "--main_process_port", "29500"]
    launch = [*STOKER, *LIGHT, "--num_machines", "2", "-n", "2", "--machine_rank", str(rank), *address, RANK, *words]
    return rig.start(host, launch, env=environment())


def test_stoker_launch_on_each_machine_forms_one_job(rig: Rig) -> None:
    both = [by_hand(rig, host, rank, *HOSTILE) for rank, host in enumerate(rig.hosts)]
    outputs = [process.communicate(timeout=90) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    found = {**reports(outputs[0][0]), **reports(outputs[1][0])}
    assert [(found[rank]["host"], found[rank]["WORLD_SIZE"]) for rank in (0, 1)] == [("alpha", "2"), ("beta", "2")]
    assert all(report["argv"] == HOSTILE for report in found.values())
    assert not rig.leftovers()


def test_an_error_on_one_machine_ends_the_others_with_its_traceback(rig: Rig) -> None:
    both = [by_hand(rig, host, rank, "raise@1") for rank, host in enumerate(rig.hosts)]
    outputs = [process.communicate(timeout=90) for process in both]
    for process, (_, errors) in zip(both, outputs, strict=True):
        last = errors.rpartition("\nstoker: ")[2]
        assert process.returncode == 1
        assert last.startswith("rank 1 on beta failed first")
        assert last.endswith("ValueError: boom of 1\n")
    assert not rig.leftovers()


def test_a_machine_that_dies_ends_the_others() -> None:
    with Rig(2) as rig:
        both = [by_hand(rig, host, rank, "hang") for rank, host in enumerate(rig.hosts)]
        for process in both:
            wait_for(process, 1)
        rig.kill("alpha")
        errors = both[1].communicate(timeout=60)[1]
        assert both[1].returncode == 1
        assert f"machine 0 ({rig.address('alpha')}) is gone" in errors
        both[0].communicate()
        assert not rig.leftovers()


def test_a_job_with_a_range_of_machines_continues_without_one_and_takes_it_back(tmp_path: Path) -> None:
    """Each round of ranks reports who takes part in it; the last one ends by itself, once the test says so."""
    end = tmp_path / "end"
    with Rig(2) as rig:
        words = [*STOKER, *LIGHT, "--nnodes", "1:2", "-ppn", "1", "--rdzv_endpoint", f"{rig.address('alpha')}:29500"]

        def begin(host: str) -> subprocess.Popen[str]:
            env = environment({"STOKER_LAUNCH_SILENCE": "3"})
            return rig.start(host, [*words, RANK, f"until={end}"], env=env)

        def next_round(process: subprocess.Popen[str]) -> tuple[str, str]:
            assert process.stdout is not None
            while "REPORT" not in (line := process.stdout.readline()):
                assert line, process.stderr.read() if process.stderr else ""
            report = next(iter(reports(line).values()))
            return report["RANK"], report["WORLD_SIZE"]

        alpha, beta = begin("alpha"), begin("beta")
        assert [next_round(alpha), next_round(beta)] == [("0", "2"), ("1", "2")]
        beta.kill()  # its ranks die with it; alpha gets no message
        assert next_round(alpha) == ("0", "1")
        beta.communicate()
        beta = begin("beta")
        assert [next_round(alpha), next_round(beta)] == [("0", "2"), ("1", "2")]
        end.touch()
        errors = [process.communicate(timeout=30)[1] for process in (alpha, beta)]
        assert [alpha.returncode, beta.returncode] == [0, 0], errors
        changes = [line for line in errors[0].splitlines() if "continuing" in line]
        assert changes == [
            "stoker: machine 2 (beta) is gone; continuing with 1 of 2 machines",
            "stoker: machine 3 (beta) has joined; continuing with 2 of 2 machines",
        ]
        assert not rig.leftovers()


def test_the_rig_shapes_its_links() -> None:
    """The rig itself: a link of 100 Mbit/s carries no more, and a cut cable nothing."""
    receiver = (
        "import socket,time; s=socket.create_server(('0.0.0.0',5001)); print('up',flush=True)\n"
        "c,_=s.accept(); n=0; t=time.time()\n"
        "while (d:=c.recv(1<<20)): n+=len(d)\n"
        "print(n/(time.time()-t)/1e6)"
    )
    with Rig(2) as rig:
        rig.shape(rate="100mbit")
        listening = rig.start("beta", [sys.executable, "-c", receiver])
        assert listening.stdout is not None
        listening.stdout.readline()
        sender = "import socket; s=socket.create_connection(('beta',5001)); s.sendall(bytes(20_000_000))"
        assert rig.run("alpha", [sys.executable, "-c", sender]).returncode == 0
        assert (
            5 < float(listening.communicate(timeout=30)[0]) < 20
        )  # megabytes per second; 12.5 is the limit, 2 MB burst on top
        rig.cut("beta")
        probe = "import socket; socket.create_connection(('beta',22),timeout=1)"
        assert rig.run("alpha", [sys.executable, "-c", probe]).returncode != 0
        rig.restore_link("beta")
        assert rig.run("alpha", [sys.executable, "-c", probe]).returncode == 0
    assert socket.gethostname() not in rig.hosts
