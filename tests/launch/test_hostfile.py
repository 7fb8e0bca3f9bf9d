"""The hostfile is read in the format of every MPI and checked; arguments of ssh commands are quoted."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stoker.errors import UserError
from stoker.launch.launchers import remote_hosts
from stoker.launch.launchers.mpi import Mpirun, command, hostfile_text
from stoker.launch.placement.hostfile import Host, check, parse, read, spread


def test_the_formats_of_all_mpis_are_read() -> None:
    text = "# the cluster\nalpha\nbeta:4   # Intel MPI\n\ngamma slots=2 max_slots=4\n[fe80::1]:3\nfe80::2\n10.0.0.1\tslots=8\n"
    assert [(host.name, host.slots) for host in parse(text)] == [
        ("alpha", None), ("beta", 4), ("gamma", 2), ("fe80::1", 3), ("fe80::2", None), ("10.0.0.1", 8),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["-oProxyCommand=x", "a;b", "$(x)", "`x`", "a|b", "a'b", "fe80::1%$(x)", "fe80::1%a;b"]
)
def test_names_that_a_shell_or_ssh_could_interpret_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"line 2: .* is not a host name"):
        parse(f"ok\n{name}\n")


def known(name: str) -> tuple[str, ...]:
    return {"alpha": ("10.0.0.1",), "beta": ("10.0.0.2",), "alias": ("10.0.0.1",)}.get(name, ())


@pytest.mark.parametrize(
    ("text", "per_host", "says"),
    [
        ("alpha\nbeta\nalpha\n", None, "line 3: alpha is already in line 1"),
        ("alpha\nnowhere\n", None, "line 2: nowhere is not known"),
        ("alpha\nalias\n", None, "the same machine, 10.0.0.1"),
        ("alpha slots=1\n", 2, "alpha has 1 slots, but 2 processes"),
        ("alpha slots=0\n", None, "must be at least 1"),
    ],
)
def test_errors_name_the_host(text: str, per_host: int | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check(parse(text), "hostfile", per_host=per_host, resolve=known, is_local=lambda name: True)


def test_a_hostfile_without_this_machine_gives_a_warning() -> None:
    notes = check(parse("alpha\nbeta\n"), "hosts", resolve=known, is_local=lambda name: False)
    assert notes == ["hosts does not name this machine, which will only start the others"]
    assert check(parse("alpha\n"), "hosts", resolve=known, is_local=lambda name: True) == []


def test_an_empty_or_missing_hostfile_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "h").write_text("# nothing\n")
    with pytest.raises(UserError, match="names no host"):
        read(str(tmp_path / "h"))
    with pytest.raises(UserError, match="does not exist"):
        read(str(tmp_path / "nowhere"))


def test_processes_are_spread_by_ppn_slots_or_evenly() -> None:
    names = (Host("a"), Host("b"))
    assert [count for _, count in spread(names, 4, 2)] == [2, 2]
    assert [count for _, count in spread(names, 3, None)] == [2, 1]
    assert [count for _, count in spread((Host("a", 1), Host("b", 3)), None, None)] == [1, 3]
    assert [count for _, count in spread((Host("a", 1), Host("b", 3)), 2, None)] == [1, 1]
    with pytest.raises(UserError, match="the hosts take 4"):
        spread(names, 5, 2)


def test_each_mpi_gets_its_own_command_line() -> None:
    counts = [(Host("a"), 2), (Host("b"), 2)]
    intel = command(Mpirun("impi", "/i/mpirun"), counts, "h", {}, ["python", "x y"])
    assert intel == ["/i/mpirun", "-n", "4", "-f", "h", "-ppn", "2", "-genv", "I_MPI_PIN", "0", "python", "x y"]
    mpich = command(Mpirun("mpich", "/m/mpirun"), counts, "h", {}, ["python"])
    assert mpich == ["/m/mpirun", "-n", "4", "-f", "h", "-ppn", "2", "-bind-to", "none", "python"]
    openmpi = command(Mpirun("openmpi", "/o/mpirun"), counts, "h", {"HF_HOME": "/x", "EDITOR": "vi"}, ["python"])
    assert openmpi[:7] == ["/o/mpirun", "-n", "4", "--hostfile", "h", "--map-by", "ppr:2:node"]
    assert openmpi[openmpi.index("-x") + 1] == "HF_HOME"
    assert "EDITOR" not in openmpi
    assert hostfile_text(Mpirun("openmpi", ""), counts) == "a slots=2\nb slots=2\n"
    assert hostfile_text(Mpirun("impi", ""), counts) == "a:2\nb:2\n"
    with pytest.raises(UserError, match="no IPv6 address"):
        hostfile_text(Mpirun("mpich", ""), [(Host("fe80::1"), 1)])


def test_hosts_with_different_slots_get_that_many_ranks() -> None:
    """-ppn would have the most of any host on the first."""
    counts = [(Host("a"), 1), (Host("b"), 3)]
    for kind in ("impi", "mpich"):
        assert "-ppn" not in command(Mpirun(kind, "mpirun"), counts, "h", {}, ["python"])
        assert "-ppn" in command(Mpirun(kind, "mpirun"), counts[::-1], "h", {}, ["python"])
    assert "-machinefile" in command(Mpirun("impi", "mpirun"), counts, "h", {}, ["python"])
    openmpi = command(Mpirun("openmpi", "mpirun"), counts, "h", {}, ["python"])
    assert openmpi[openmpi.index("--map-by") + 1] == "slot"


def test_arguments_reach_the_remote_shell_unchanged(tmp_path: Path) -> None:
    words = ["printf", "%s|", "a b", "$(touch pwned)", "it's", '"', "new\nline", "`x`", "", "\\", "*", "~"]
    sent = remote_hosts.ssh_command("host", words)[-1]
    done = subprocess.run(["sh", "-c", sent], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "|".join(words[2:]) + "|"
    assert not list(tmp_path.iterdir())


def test_ssh_never_prompts_and_takes_no_host_for_an_option() -> None:
    command = remote_hosts.ssh_command("host", ["true"])
    assert "BatchMode=yes" in command
    assert command[command.index("--") + 1] == "host"
    with pytest.raises(UserError):
        remote_hosts.ssh_command("-oProxyCommand=x", ["true"])


@pytest.mark.parametrize(
    ("complaint", "says"),
    [
        ("root@b: Permission denied (publickey).", "ssh-copy-id b"),
        ("Host key verification failed.", "run `ssh b` once"),
        ("ssh: connect to host b port 22: Connection refused", "start sshd"),
        ("ssh: connect to host b port 22: No route to host", "cannot be reached"),
        ("ssh: Could not resolve hostname b: Name or service not known", "has no address"),
        ("sh: 1: /v/bin/python: not found", "has no /v/bin/python"),
        ("something else", "something else"),
    ],
)
def test_each_failure_of_ssh_names_the_host_and_the_fix(complaint: str, says: str) -> None:
    text = remote_hosts._diagnose("b", 255, complaint, "/v/bin/python")
    assert says in text
    assert text.startswith("b")


def test_different_versions_on_a_host_are_refused() -> None:
    mine = remote_hosts.Versions("3.11.4", "2.13.0", "1.0")
    remote_hosts._compare("b", mine, remote_hosts.Versions("3.11.9", "2.13.0", "1.0"))
    for theirs, says in (
        (remote_hosts.Versions("3.12.1", "2.13.0", "1.0"), "Python 3.12.1"),
        (remote_hosts.Versions("3.11.4", "2.12.0", "1.0"), "torch 2.12.0"),
        (remote_hosts.Versions("3.11.4", "2.13.0", None), "no stoker"),
    ):
        with pytest.raises(UserError, match=says):
            remote_hosts._compare("b", mine, theirs)
