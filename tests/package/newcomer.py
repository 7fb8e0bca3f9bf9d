"""Follows docs/install.md as a newcomer does: its commands in their order, in shells, and its live page in a browser.

What it leaves to others is the place: an empty virtual environment (test_newcomer.py) or an empty Debian (check_newcomer.py).
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from rig.chromium import browser

__all__ = ["SHORT", "Steps", "follow", "read_page"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "install.md"
# A few minutes of training become seconds. All other commands are executed as the page has them.
SHORT = " --questions 96 --no-compare"
_STATUS = "document.querySelector('.pill')?.textContent"
_POINTS = "(document.querySelector('#chart-loss path')?.getAttribute('d').match(/[ML]/g) ?? []).length"

Steps = dict[str, str]
Shell = Callable[..., "subprocess.Popen[str]"]
"""Starts a script in a new terminal: its text, and options of subprocess.Popen."""


def read_page() -> Steps:
    """The commands under each numbered heading."""
    found: Steps = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        heading = re.match(r"\d+\. (.*)", part)
        if heading is not None:
            found[heading[1]] = "\n".join(re.findall(r"^```\n(.*?)^```", part, re.M | re.S))
    return found


def follow(steps: Steps, shell: Shell, folder: Path, profile: Path, training_options: str = SHORT) -> str:
    """Does all steps but the first, which installs; `folder` is where the commands run. Returns what they printed."""
    activate = next(line for line in steps["Watch"].splitlines() if "activate" in line)

    def run(name: str, script: str) -> str:
        begin = time.monotonic()
        process = shell(f"set -e\n{activate}\n{script}", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        printed = process.communicate()[0]
        assert process.returncode == 0, f"{name}: exit code {process.returncode}\n{printed[-4000:]}"
        print(f"newcomer: {name}: {time.monotonic() - begin:.0f} s", flush=True)
        return printed

    printed = run("Look at your machine", steps["Look at your machine"])
    with (profile / "training.log").open("w+") as log:
        begin = time.monotonic()
        script = f"set -e\n{activate}\n{steps['Train'].strip()}{training_options}"
        training = shell(script, stdout=log, stderr=subprocess.STDOUT)
        try:
            _watch(steps["Watch"], shell, training, folder, profile)
        finally:
            training.terminate()
            training.wait()
            log.seek(0)
            trained = log.read()
        assert training.returncode == 0, trained[-4000:]
        print(f"newcomer: Train, and Watch in a browser: {time.monotonic() - begin:.0f} s", flush=True)
    serve = steps["Serve"]
    if (
        training_options == SHORT
    ):  # a score of a model that was hardly trained may well fall by a point, which is exit code 1
        serve = re.sub(r"^(stoker export .*)$", r"\1 || [ $? = 1 ]", serve, flags=re.M)
    return "\n".join([printed, trained, run("Serve", serve)])


def _watch(script: str, shell: Shell, training: subprocess.Popen[str], folder: Path, profile: Path) -> None:
    """Opens the page as soon as the run has a folder, and looks at it until training ends."""
    while not (folder / "demo" / "run.jsonl").exists():
        assert training.poll() is None, "training ended before it began"
        time.sleep(0.2)
    server = shell(f"set -e\n{script}".replace("stoker watch", "exec stoker watch"), stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:\S+", line)))
        with browser(profile) as page:
            page.open(address)
            page.wait_for(f"{_STATUS} === 'running'", 300)
            page.wait_for(f"{_POINTS} >= 2", 600)
            seen = page.evaluate(_POINTS)
            page.wait_for(f"{_STATUS} === 'finished'", 900)
            assert page.evaluate(_POINTS) > seen, "the curve grew while the model learned"
            assert page.messages == []
        training.wait(300)
    finally:
        server.terminate()
        server.communicate()
