"""A headless Chromium that a test controls over a pipe by the DevTools protocol, for pages that change while they are open."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rig.needs import program

__all__ = ["FLAGS", "Browser", "browser", "executable"]

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run", "--hide-scrollbars")  # fmt: skip


_WITH_PIPES = """
import os, sys
for place, descriptor in zip((3, 4), sys.argv[1:3]):  # where Chromium expects its pipes
    os.dup2(int(descriptor), place)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable() -> str:
    return program("browser", "chromium")


class Browser:
    """One page of a browser. `messages` has what the page logged, and errors of its scripts and its policy."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._buffer = b""
        self._number = 0
        self.messages: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable", self._session)

    def show(self, width: int, height: int, *, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", self._session, **size)
        self._call("Emulation.setEmulatedMedia", self._session, features=scheme)

    def open(self, address: str) -> None:
        self._call("Page.navigate", self._session, url=address)

    def evaluate(self, script: str) -> Any:
        done = self._call("Runtime.evaluate", self._session, expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_for(self, script: str, patience: float = 60.0) -> bool:
        """Returns when an expression is true; fails with the text of the page if it does not become true."""
        deadline = time.monotonic() + patience
        while not self.evaluate(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"not true: {script}\n{self.evaluate('document.body.innerText')}"
            time.sleep(0.1)
        return True

    def screenshot(self, path: Path) -> Path:
        shot = self._call("Page.captureScreenshot", self._session, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            request["sessionId"] = session
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.messages.append(json.dumps(answer["params"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Starts a browser with an empty profile in `folder`, and ends it."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    theirs = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (theirs_in, theirs_out)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _WITH_PIPES, *map(str, theirs), executable(), *FLAGS, "--remote-debugging-pipe",
         f"--user-data-dir={folder / 'profile'}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=theirs,
    )  # fmt: skip
    for one in (theirs_in, theirs_out, *theirs):
        os.close(one)
    try:
        yield Browser(ours_in, ours_out)
    finally:
        process.kill()
        process.wait()
        for one in (ours_in, ours_out):
            os.close(one)
