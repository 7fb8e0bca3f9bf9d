"""`Cluster`: a real Slurm on the hosts of a `Rig`: munged and slurmctld on the first, a slurmd on each of the others.

Everything it writes lies in the rig's directory. Times are as short as Slurm permits: a node that does not answer is down after
seconds, and its job is queued again at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rig.needs import program
from rig.network import Rig


class Cluster:
    """`with Rig(3) as rig, Cluster(rig, {"beta": 2, "gamma": 1}) as slurm: slurm.run(["srun", ...])`."""

    def __init__(self, rig: Rig, cpus: Mapping[str, int]) -> None:
        self.rig, self.nodes = rig, tuple(cpus)
        self._cpus = dict(cpus)
        self.directory = rig.directory / "slurm"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self.directory.mkdir()
            self._write_configuration()
            self._start("munged", None, [
                "munged", "--foreground", "--force", f"--key-file={self.directory}/munge.key",
                f"--socket={self.directory}/munge.socket", f"--pid-file={self.directory}/munged.pid",
                f"--log-file={self.directory}/munged.log", f"--seed-file={self.directory}/munged.seed",
            ])  # fmt: skip
            _wait(lambda: (self.directory / "munge.socket").exists(), "munged did not start", self._logs)
            self._start("slurmctld", self.rig.hosts[0], ["slurmctld", "-D"])
            for node in self.nodes:
                self.start_node(node)
            self.await_state(*self.nodes, state="idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *about: object) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()

    def run(self, words: Sequence[str], *, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        """A command on the first host, as a user types it there."""
        return subprocess.run(
            self.rig.command(self.rig.hosts[0], words), env=self.environment(), capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Without what belongs to the tests' own launcher; `stoker` is first on PATH."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMP_", "MASTER_"))}
        here = os.path.dirname(sys.executable)
        config = {"SLURM_CONF": str(self.directory / "slurm.conf"), "XDG_CONFIG_HOME": "/nonexistent"}
        daemons = os.path.dirname(program("slurm", "slurmctld"))
        return {**kept, **config, "PATH": os.pathsep.join((here, os.environ.get("PATH", ""), daemons))}

    def start_node(self, node: str) -> None:
        self._start(f"slurmd.{node}", node, ["slurmd", "-D", "-N", node])

    def fail_node(self, node: str) -> None:
        """The node loses power: everything on it is gone, and it answers nobody."""
        self.rig.cut(node)
        daemon = self._daemons.pop(f"slurmd.{node}")
        for pid in self.rig.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def return_node(self, node: str) -> None:
        self.rig.restore_link(node)
        self.start_node(node)

    def submit(self, script: str, folder: Path) -> str:
        """Hands a batch script to sbatch in `folder`; returns the number of the job."""
        path = folder / "job.sh"
        path.write_text(script)
        done = self.run(["sbatch", "--parsable", f"--chdir={folder}", str(path)])
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def await_state(self, *nodes: str, state: str, seconds: float = 60) -> None:
        def is_there() -> bool:
            shown = self.run(["sinfo", "-h", "-N", "-o", "%N %t", "-n", ",".join(nodes)]).stdout.splitlines()
            return {line.split()[1] for line in shown} == {state} and len(shown) == len(nodes)

        _wait(is_there, f"{', '.join(nodes)} did not become {state}", self._logs, seconds)

    def await_end(self, job: str, seconds: float = 120) -> str:
        """The state in which a job has ended."""
        states: list[str] = []

        def has_ended() -> bool:
            shown = self.run(["scontrol", "-o", "show", "job", job]).stdout
            states[:] = [word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")]
            return bool(states) and states[0] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")

        _wait(has_ended, f"job {job} did not end", self._logs, seconds)
        return states[0]

    def _start(self, name: str, host: str | None, words: list[str]) -> None:
        command = [program("slurm", words[0]), *words[1:]]
        self._daemons[name] = subprocess.Popen(
            self.rig.command(host, command) if host else command, env=self.environment(), stdin=subprocess.DEVNULL,
            stdout=open(self.directory / f"{name}.out", "ab"), stderr=subprocess.STDOUT,  # noqa: SIM115
        )  # fmt: skip

    def _logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self.directory.glob("*.out")))

    def _write_configuration(self) -> None:
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        (self.directory / "state").mkdir()
        lines = {
            "ClusterName": "rig", "SlurmctldHost": self.rig.hosts[0], "SlurmUser": "root", "SlurmdUser": "root",
            "AuthType": "auth/munge",
            # A job that is queued again waits for the lifetime of its credentials.
            "AuthInfo": f"socket={self.directory}/munge.socket,cred_expire=5", "CredType": "cred/munge",
            "StateSaveLocation": f"{self.directory}/state", "SlurmdSpoolDir": f"{self.directory}/spool.%n",
            "SlurmctldPidFile": f"{self.directory}/slurmctld.pid", "SlurmdPidFile": f"{self.directory}/slurmd.%n.pid",
            "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/affinity", "SwitchType": "switch/none",
            "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_Core", "MpiDefault": "none",
            "SchedulerParameters": "sched_interval=1,sched_min_interval=0,bf_interval=1", "SlurmdTimeout": "5",
            "MessageTimeout": "3", "TCPTimeout": "1", "SlurmctldTimeout": "30", "InactiveLimit": "0", "KillWait": "5",
            "BatchStartTimeout": "20", "ReturnToService": "2", "SlurmdParameters": "config_overrides",
        }  # fmt: skip
        nodes = [f"NodeName={node} CPUs={count} RealMemory=2000 State=UNKNOWN" for node, count in self._cpus.items()]
        partition = f"PartitionName=cpu Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP"
        text = "\n".join([*(f"{name}={value}" for name, value in lines.items()), *nodes, partition])
        (self.directory / "slurm.conf").write_text(text + "\n")
        (self.directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def _wait(is_there: Callable[[], bool], what: str, logs: Callable[[], str], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}\n{logs()}")
        time.sleep(0.2)
