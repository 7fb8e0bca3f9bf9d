"""Checks of the other machines before a launch: ssh without a prompt, and the same versions of Python, torch and Stoker.

Each failure names the host and the fix. Everything that reaches the remote shell is quoted in this file.
"""

from __future__ import annotations

import inspect
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stoker.errors import UserError
from stoker.machine import network

__all__ = ["Versions", "check_hosts", "own_versions", "silent", "ssh_command"]

_SECONDS = 30.0
_ANSWER = "stoker-versions "


@dataclass(frozen=True)
class Versions:
    python: str
    torch: str | None
    stoker: str | None


def own_versions() -> Versions:
    return Versions(*_versions())


def _versions() -> list[Any]:
    """Its source also runs on the other machines; importlib.metadata reads versions without importing the packages."""
    import platform
    from importlib import metadata

    packages = [next((one.version for one in metadata.distributions(name=name)), None) for name in ("torch", "stoker")]
    return [platform.python_version(), *packages]


def ssh_command(host: str, words: Sequence[str]) -> list[str]:
    """An ssh command that never prompts; each argument arrives unchanged."""
    if host.startswith("-"):
        raise UserError(f"{host!r} is not a host name")
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=8"]
    extra = shlex.split(os.environ.get("STOKER_SSH_OPTIONS", ""))
    return ["ssh", "-T", "-x", *options, *extra, "--", host, shlex.join(words)]


def _ssh(host: str, words: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ssh_command(host, words), stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False,
        text=True, errors="replace",
    )  # fmt: skip


def check_hosts(hosts: Sequence[str], python: str = sys.executable) -> None:
    """Checks all hosts at once; raises for the first that cannot take part."""
    remote = [host for host in hosts if not network.is_local(host)]
    if not remote:
        return
    if shutil.which("ssh") is None:
        raise UserError(f"{remote[0]} is another machine, and this one has no ssh; install the OpenSSH client")
    with ThreadPoolExecutor(max_workers=min(len(remote), 32)) as pool:
        answers = list(pool.map(lambda host: _ask(host, python), remote))
    mine = own_versions()
    for host, theirs in zip(remote, answers, strict=True):
        _compare(host, mine, theirs)


def _ask(host: str, python: str) -> Versions:
    script = f"from __future__ import annotations\nimport json\n{inspect.getsource(_versions)}\n"
    script += f"print({_ANSWER!r} + json.dumps(_versions()))"
    try:
        done = _ssh(host, [python, "-c", script], _SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{host} did not answer over ssh within {_SECONDS:.0f} s; is it up, and port 22 open?"
        ) from None
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER):
            return Versions(*json.loads(line.removeprefix(_ANSWER)))
    raise UserError(_diagnose(host, done.returncode, done.stderr, python))


def _diagnose(host: str, code: int, complaint: str, python: str) -> str:
    text = complaint.lower()
    last = next((line.strip() for line in reversed(complaint.splitlines()) if line.strip()), f"exit code {code}")
    if "permission denied" in text:
        return f"{host} refuses the ssh key of this user; run `ssh-copy-id {host}` once, then try `ssh {host} true`"
    if "host key verification failed" in text or "identification has changed" in text:
        return f"{host}'s ssh host key is unknown to this machine, or has changed; run `ssh {host}` once and check the message"
    if "could not resolve" in text or "name or service not known" in text:
        return f"{host} has no address; correct the hostfile, or add it to DNS or /etc/hosts"
    if "connection refused" in text:
        return f"{host} refuses ssh connections (port 22); start sshd there"
    if "timed out" in text or "no route to host" in text or "network is unreachable" in text:
        return f"{host} cannot be reached over ssh ({last}); is it up, and on this network?"
    if "no such file" in text or "not found" in text or code == 127:
        return f"{host} has no {python}; install the same Python environment at the same path there"
    return f"{host} could not be checked over ssh: {last}; try `ssh {host} true`"


def _compare(host: str, mine: Versions, theirs: Versions) -> None:
    if mine.python.rsplit(".", 1)[0] != theirs.python.rsplit(".", 1)[0]:
        raise UserError(f"{host} runs Python {theirs.python}, this machine {mine.python}; make them the same")
    for name in ("torch", "stoker"):
        own, other = getattr(mine, name), getattr(theirs, name)
        if own != other:
            have = f"{name} {other}" if other else f"no {name}"
            raise UserError(
                f"{host} has {have}, this machine {own}; run `pip install {name}=={own}` there, in {sys.prefix}"
            )


def silent(names: Sequence[str]) -> list[str]:
    """The other machines that no longer answer."""

    def answers(host: str) -> bool:
        try:
            return _ssh(host, ["true"], 12).returncode == 0
        except (subprocess.TimeoutExpired, OSError):
            return False

    remote = [host for host in names if not network.is_local(host)]
    with ThreadPoolExecutor(max_workers=max(min(len(remote), 32), 1)) as pool:
        return [host for host, alive in zip(remote, pool.map(answers, remote), strict=True) if not alive]
