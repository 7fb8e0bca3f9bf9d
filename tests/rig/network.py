"""`Rig`: two to four hosts that are one machine, each with its own network, host name, /dev/shm and sshd.

Keys are made for the rig and removed with it. Commands on a host run in the namespaces of its sshd, so that all of a host's
processes see the same network and the same shared memory. `leftovers` is how tests look for what was left running.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rig import warm
from rig.needs import program

NAMES = ("alpha", "beta", "gamma", "delta")
_NUMBERS = itertools.count()


class Rig:
    """`with Rig(2) as rig: rig.run("alpha", ["mpirun", ...])`."""

    def __init__(self, hosts: int = 2) -> None:
        self.hosts = NAMES[:hosts]
        number = next(_NUMBERS)  # names of the last rig may linger: a namespace goes when its last process has
        self._tag = f"stk{os.getpid() % 100000}{chr(97 + number % 26)}"
        self._subnet = f"10.{64 + (os.getpid() + number) % 64}.{os.getpid() // 64 % 256}"
        self._sshd: dict[str, subprocess.Popen[bytes]] = {}
        self.directory = Path(tempfile.mkdtemp(prefix="stoker-rig-"))

    def __enter__(self) -> Rig:
        try:
            self._make_keys()
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for number, host in enumerate(self.hosts):
                self._add(host, number)
            for host in self.hosts:
                self._await_sshd(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def close(self) -> None:
        for host in self.hosts:
            for pid in self._pids(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for sshd in self._sshd.values():
            sshd.wait()
        for host in self.hosts:
            subprocess.run([_program("ip"), "netns", "del", self._namespace(host)], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{self._namespace(host)}", ignore_errors=True)
        subprocess.run([_program("ip"), "link", "del", self._bridge], capture_output=True, check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    # What tests do on hosts

    def address(self, host: str) -> str:
        return f"{self._subnet}.{self.hosts.index(host) + 1}"

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """A command line that runs `words` on a host; the working directory stays."""
        target = str(self._sshd[host].pid)
        return [
            _program("nsenter"),
            "-t",
            target,
            "--net",
            "--mount",
            "--uts",
            "--ipc",
            f"--wd={os.getcwd()}",
            "--",
            *words,
        ]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """With an ssh that knows the rig's keys first on PATH."""
        found = {**os.environ, **(more or {})}
        found["PATH"] = f"{self.directory}:{found['PATH']}"
        return found

    def run(
        self, host: str, words: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        return warm.run(
            self.command(host, words),
            env=self.environment(env),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, host: str, words: Sequence[str], *, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        return warm.Popen(
            self.command(host, words),
            env=self.environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hostfile(self, text: str | None = None) -> str:
        """The path of a hostfile; without `text`, one with all hosts."""
        path = self.directory / "hostfile"
        path.write_text("".join(f"{host}\n" for host in self.hosts) if text is None else text)
        return str(path)

    def add_name(self, name: str, host: str) -> None:
        """From now on all hosts know this name of a host."""
        for one in self.hosts:
            with open(f"/etc/netns/{self._namespace(one)}/hosts", "a") as file:
                file.write(f"{self.address(host)} {name}\n")

    def shape(self, *, rate: str | None = None, delay: str | None = None, loss: float = 0.0) -> None:
        """Every host's link, in what it sends: `rate="1gbit", delay="1ms", loss=0.01`. Replaces what was there.

        tbf and a BPF filter are in every kernel met so far; latency needs netem, which small virtual machines may lack.
        """
        self.unshape()
        for host in self.hosts:
            if delay:
                limit = ["rate", rate] if rate else []
                self._in(host, "tc", "qdisc", "add", "dev", "eth0", "root", "netem", "delay", delay, *limit)
            elif rate:
                # One tick's worth at 10 Gbit/s is a megabyte; a smaller bucket would itself be the limit.
                self._in(
                    host,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    "eth0",
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "2mb",
                    "latency",
                    "50ms",
                )
            if loss:
                self._in(host, "tc", "qdisc", "add", "dev", "eth0", "clsact")
                self._in(host, "tc", "filter", "add", "dev", "eth0", "egress", "bpf", "da", "bytecode", _drop(loss))

    def unshape(self) -> None:
        for host in self.hosts:
            for what in ("root", "clsact"):
                with contextlib.suppress(RuntimeError):
                    self._in(host, "tc", "qdisc", "del", "dev", "eth0", what)

    def can_delay(self) -> bool:
        """Whether this kernel has netem."""
        try:
            self.shape(delay="1ms")
        except RuntimeError:
            return False
        finally:
            self.unshape()
        return True

    def cut(self, host: str) -> None:
        """The cable is pulled."""
        _ip("link", "set", self._outside(host), "down")

    def restore_link(self, host: str) -> None:
        _ip("link", "set", self._outside(host), "up")

    def kill(self, host: str) -> None:
        """The host loses power: its link is gone, and so is everything that ran on it."""
        self.cut(host)
        for pid in self._pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, host: str) -> list[int]:
        """The processes on a host, without its sshd: if that one ends, so do the host's namespaces."""
        return [pid for pid in self._pids(host) if pid != self._sshd[host].pid]

    def forget_keys(self, host: str) -> None:
        """The host accepts no key any more."""
        (self.directory / f"authorized_keys.{host}").write_text("")

    def accept_keys(self, host: str) -> None:
        shutil.copy(self.directory / "key.pub", self.directory / f"authorized_keys.{host}")

    def leftovers(self, seconds: float = 5.0) -> list[str]:
        """Commands still running on any host beside its sshd, once they have had a moment to end."""
        end = time.monotonic() + seconds
        while (found := self._running()) and time.monotonic() < end:
            time.sleep(0.1)
        return found

    # How hosts are made

    @property
    def _bridge(self) -> str:
        return f"{self._tag}-br"

    def _namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def _outside(self, host: str) -> str:
        return f"{self._tag}-{self.hosts.index(host)}"

    def _make_keys(self) -> None:
        for name in ("key", "host_key"):
            subprocess.run(
                [_program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(self.directory / name)], check=True
            )
        host_key = (self.directory / "host_key.pub").read_text()
        (self.directory / "known_hosts").write_text(f"* {host_key}")
        (self.directory / "ssh_config").write_text(
            f"IdentityFile {self.directory}/key\nIdentitiesOnly yes\nUserKnownHostsFile {self.directory}/known_hosts\n"
            "GlobalKnownHostsFile /dev/null\nStrictHostKeyChecking yes\nUpdateHostKeys no\nLogLevel ERROR\n"
        )
        ssh = self.directory / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {_program("ssh")} -F {self.directory}/ssh_config "$@"\n')
        ssh.chmod(0o755)

    def _add(self, host: str, number: int) -> None:
        namespace, outside = self._namespace(host), self._outside(host)
        files = Path("/etc/netns") / namespace
        files.mkdir(parents=True, exist_ok=True)
        names = "".join(f"{self.address(name)} {name}\n" for name in self.hosts)
        (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (files / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once: no other names are known
        _ip("netns", "add", namespace)
        _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", outside, "master", self._bridge, "up")
        self._in(host, "ip", "link", "set", "lo", "up")
        self._in(host, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._in(host, "ip", "link", "set", "eth0", "up")
        self.accept_keys(host)
        Path("/run/sshd").mkdir(exist_ok=True)
        options = {
            "ListenAddress": self.address(host), "HostKey": f"{self.directory}/host_key", "StrictModes": "no",
            "AuthorizedKeysFile": f"{self.directory}/authorized_keys.{host}", "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no", "PermitRootLogin": "prohibit-password", "PidFile": "none", "UsePAM": "no",
            "MaxStartups": "100", "PermitUserEnvironment": "no", "LogLevel": "ERROR",
        }  # fmt: skip
        words = [
            _program("sshd"),
            "-D",
            "-e",
            "-f",
            "/dev/null",
            *(w for k, v in options.items() for w in ("-o", f"{k}={v}")),
        ]
        setup = f'{_program("hostname")} {host} && {_program("mount")} -t tmpfs tmpfs /dev/shm && exec "$@"'
        self._sshd[host] = subprocess.Popen(
            [
                _program("ip"),
                "netns",
                "exec",
                namespace,
                _program("unshare"),
                "--uts",
                "--ipc",
                "--mount",
                "sh",
                "-c",
                setup,
                "sh",
                *words,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=open(self.directory / f"sshd.{host}", "wb"),  # noqa: SIM115
        )

    def _await_sshd(self, host: str) -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            listening = self._in(host, "ss", "-Hltn", "sport", "=", ":22").strip()
            if listening:
                return
            time.sleep(0.02)
        raise RuntimeError(f"sshd on {host} did not come up: {(self.directory / f'sshd.{host}').read_text()}")

    def _in(self, host: str, *words: str) -> str:
        done = subprocess.run(
            [_program("ip"), "netns", "exec", self._namespace(host), _program(words[0]), *words[1:]],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode and words[0] != "ss":
            raise RuntimeError(f"{' '.join(words)} on {host}: {done.stderr.strip()}")
        return done.stdout

    def _pids(self, host: str) -> list[int]:
        done = subprocess.run(
            [_program("ip"), "netns", "pids", self._namespace(host)], capture_output=True, text=True, check=False
        )
        return [int(word) for word in done.stdout.split()]

    def _running(self) -> list[str]:
        found = []
        for host in self.hosts:
            for pid in self._pids(host):
                if pid == self._sshd[host].pid:
                    continue
                with contextlib.suppress(OSError):
                    line = (
                        Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    )
                    if line:  # a zombie has none, and holds nothing
                        found.append(f"{host}: {pid} {line}")
        return found


def _program(name: str) -> str:
    return program("netns", name)


def _ip(*words: str) -> None:
    done = subprocess.run([_program("ip"), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _drop(share: float) -> str:
    """Classic BPF for tc: load a random word, drop (2) if it is below the threshold, else go on (-1)."""
    program = ["32 0 0 4294963256", f"53 0 1 {int(share * 2**32)}", "6 0 0 4294967295", "6 0 0 2"]
    return f"{len(program)},{','.join(program)}"
