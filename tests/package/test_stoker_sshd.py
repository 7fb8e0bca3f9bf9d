"""The image's sshd also starts where ~/.ssh is a volume that it cannot write to, as in an MPIJob of Kubernetes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path

import pytest

from stoker.machine.network import free_port

SSHD = Path(__file__).parents[2] / "container" / "stoker-sshd"
# As the operator mounts it: a file system of its own, writable by nobody, in which every file belongs to root.
OWN = 'cp key.pub "$HOME/.ssh/authorized_keys"'
MOUNTED = f'mount -t tmpfs -o mode=1777 tmpfs "$HOME/.ssh" && {OWN} && mount -o remount,ro "$HOME/.ssh"'


@pytest.mark.part("hosts")
@pytest.mark.root
@pytest.mark.netns
@pytest.mark.parametrize("setup", [OWN, MOUNTED], ids=["own folder", "volume"])
def test_sshd_takes_the_key_in_the_home_directory(setup: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key"], cwd=tmp_path, check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    port = str(free_port())
    # sshd looks the home directory up by user, so that user's home is mounted over here, for this process only.
    words = [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        f'mount --bind "$1" /root; export HOME=/root; {setup}; exec sh "$2"',
        "sh",
    ]
    with subprocess.Popen(
        [*words, str(home), str(SSHD)], cwd=tmp_path, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SSHD_PORT": port},
        stderr=subprocess.PIPE, text=True,
    ) as sshd:  # fmt: skip
        try:
            assert connect(tmp_path, port) == "here\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                sshd.send_signal(signal.SIGTERM)


def connect(folder: Path, port: str) -> str:
    words = ["ssh", "-F", "/dev/null", "-i", "key", "-p", port, "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no",
             "-o", "UserKnownHostsFile=/dev/null", "root@127.0.0.1", "echo", "here"]  # fmt: skip
    end = time.monotonic() + 10
    while True:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode == 0 or time.monotonic() > end:
            return done.stdout or done.stderr
        time.sleep(0.2)
