"""Follows docs/install.md in an empty Debian, with the wheel that `make wheel` built: `make newcomer-check`.

debootstrap lays out the Debian, chroot runs the commands of the page in it as an ordinary user, and a Chromium outside opens the
page that `stoker watch` serves. Needs root, debootstrap, Chromium and a network. `--torch` and `--torch-index` name another torch
than the page does, for a network that does not reach PyTorch's index.
Exits 0 if all works, 2 if this machine cannot do it, else 1.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from newcomer import SHORT, follow, read_page  # noqa: E402

from rig.debian_root import MIRROR, DebianRoot, missing_needs  # noqa: E402

BUILD = ROOT / "build" / "newcomer"
USER = "newcomer"
INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", default="torch", help="the requirement of torch, as torch==2.13.0")
    parser.add_argument("--torch-index", default=INDEX, help="empty: pip's default")
    parser.add_argument("--mirror", default=MIRROR)
    parser.add_argument("--whole", action="store_true", help="train as long as the page says, and time it")
    options = parser.parse_args()
    wheels = list((ROOT / "dist").glob("*.whl"))
    reason = missing_needs() or (None if shutil.which("chromium") else "needs chromium (apt-get install chromium)")
    if reason or len(wheels) != 1:
        print(f"newcomer: {reason or 'needs one wheel in dist; run make wheel'}", file=sys.stderr)
        return 2
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    debian = DebianRoot.empty(BUILD / "root", options.mirror)
    home = debian.path / "home" / USER
    debian.run(["useradd", "--create-home", "--shell", "/bin/bash", USER])
    (home / "dist").mkdir()
    shutil.copy(wheels[0], home / "dist")
    steps = read_page()
    begin = time.monotonic()
    debian.run(["sh", "-c", "apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv"],
               {"DEBIAN_FRONTEND": "noninteractive"})  # fmt: skip
    print(f"newcomer: apt install python3-venv: {time.monotonic() - begin:.0f} s", flush=True)
    begin = time.monotonic()
    debian.run(["bash", "-c", install_commands(steps["Install"], options)], user=USER, pip=True)
    print(f"newcomer: Install: {time.monotonic() - begin:.0f} s", flush=True)

    def shell(script: str, **named: object) -> subprocess.Popen[str]:
        return debian.start(["bash", "-c", script], user=USER, **named)  # type: ignore[arg-type]

    printed = follow(steps, shell, home, BUILD, "" if options.whole else SHORT)
    print(printed[-600:])
    print("newcomer: docs/install.md was followed in an empty Debian: the model in int8 answers")
    return 0


def install_commands(script: str, options: argparse.Namespace) -> str:
    """The commands of the page but the build of the wheel, which happens on another machine."""
    lines = [line for line in script.splitlines() if line and not line.startswith("make ")]
    index = f"--index-url {options.torch_index}" if options.torch_index else ""
    return "\n".join(["set -e", *lines]).replace(f"pip install torch --index-url {INDEX}",
                                                 f"pip install '{options.torch}' {index}")  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AssertionError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"newcomer: {error}", file=sys.stderr)
        sys.exit(1)
