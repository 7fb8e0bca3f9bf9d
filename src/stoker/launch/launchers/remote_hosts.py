"""The other machines before the first step: whether ssh gets in without a prompt, and whether they run the same versions.

Each failure names the host and the fix. Everything that reaches the remote shell is quoted here.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from stoker.errors import UserError
from stoker.machine import network

__all__ = ["Versions", "check_hosts", "own_versions", "silent", "ssh_command"]

_SECONDS = 30.0

# Runs with the launch's own Python on the other machine; importlib.metadata reads versions without importing torch.
_QUESTION = """
import json, platform, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
print("stoker-versions " + json.dumps([platform.python_version(), version("torch"), version("stoker")]))
"""


@dataclass(frozen=True)
class Versions:
    python: str
    torch: str | None
    stoker: str | None


def own_versions() -> Versions:
    import platform
    from importlib import metadata

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return Versions(platform.python_version(), version("torch"), version("stoker"))


def ssh_command(host: str, words: Sequence[str]) -> list[str]:
    """ssh that never prompts; each word arrives as it is, whatever it holds."""
    if host.startswith("-"):
        raise UserError(f"{host!r} is not a host name")
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=8"]
    extra = shlex.split(os.environ.get("STOKER_SSH_OPTIONS", ""))
    return ["ssh", "-T", "-x", *options, *extra, "--", host, shlex.join(words)]


def check_hosts(hosts: Sequence[str], python: str = sys.executable) -> None:
    """Tries all hosts at once; raises with the first that cannot take part."""
    remote = [host for host in hosts if not network.is_local(host)]
    if not remote:
        return
    if shutil.which("ssh") is None:
        raise UserError(f"{remote[0]} is another machine, and there is no ssh here; install the OpenSSH client")
    with ThreadPoolExecutor(max_workers=min(len(remote), 32)) as pool:
        answers = list(pool.map(lambda host: _ask(host, python), remote))
    mine = own_versions()
    for host, theirs in zip(remote, answers, strict=True):
        _compare(host, mine, theirs)


def _ask(host: str, python: str) -> Versions:
    command = ssh_command(host, [python, "-c", _QUESTION])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{host} did not answer over ssh within {_SECONDS:.0f} s; is it up, and port 22 open?"
        ) from None
    for line in done.stdout.splitlines():
        if line.startswith("stoker-versions "):
            return Versions(*json.loads(line.partition(" ")[2]))
    raise UserError(_diagnose(host, done.returncode, done.stderr, python))


def _diagnose(host: str, code: int, complaint: str, python: str) -> str:
    text = complaint.lower()
    last = next((line.strip() for line in reversed(complaint.splitlines()) if line.strip()), f"exit code {code}")
    if "permission denied" in text:
        return f"{host} refuses the ssh key of this user; run `ssh-copy-id {host}` once, then try `ssh {host} true`"
    if "host key verification failed" in text or "identification has changed" in text:
        return f"{host}'s ssh host key is not known here, or has changed; run `ssh {host}` once and check what it says"
    if "could not resolve" in text or "name or service not known" in text:
        return f"{host} has no address; correct the hostfile, or add it to DNS or /etc/hosts"
    if "connection refused" in text:
        return f"{host} refuses ssh connections (port 22); start sshd there"
    if "timed out" in text or "no route to host" in text or "network is unreachable" in text:
        return f"{host} cannot be reached over ssh ({last}); is it up, and on this network?"
    if "no such file" in text or "not found" in text or code == 127:
        return f"{host} has no {python}; install the same Python environment at the same place there"
    return f"{host} could not be asked over ssh: {last}"


def _compare(host: str, mine: Versions, theirs: Versions) -> None:
    here, there = mine.python.rsplit(".", 1)[0], theirs.python.rsplit(".", 1)[0]
    if here != there:
        raise UserError(f"{host} runs Python {theirs.python}, this machine {mine.python}; make them the same")
    for name in ("torch", "stoker"):
        own, other = getattr(mine, name), getattr(theirs, name)
        if own != other:
            have = f"{name} {other}" if other else f"no {name}"
            raise UserError(
                f"{host} has {have}, this machine {own}; run `pip install {name}=={own}` there, in {sys.prefix}"
            )


def silent(names: Sequence[str]) -> list[str]:
    """Those of the other machines that do not answer any more."""

    def answers(host: str) -> bool:
        try:
            done = subprocess.run(
                ssh_command(host, ["true"]), stdin=subprocess.DEVNULL, capture_output=True, timeout=12, check=False
            )
        except (subprocess.TimeoutExpired, OSError):
            return False
        return done.returncode == 0

    remote = [host for host in names if not network.is_local(host)]
    with ThreadPoolExecutor(max_workers=max(min(len(remote), 32), 1)) as pool:
        return [host for host, alive in zip(remote, pool.map(answers, remote), strict=True) if not alive]
