"""As much of the hub's HTTP interface as making a repository and committing files takes, because no hub can run here.

What the client sends is kept: `repositories` by name, each with its files' bytes and its commits' messages.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class FakeHub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.full = False
        """Commits are refused, as by a hub that is out of order."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self._answer({"type": "user", "name": "somebody", "auth": {"accessToken": {"role": "write"}}})

    def do_POST(self) -> None:
        lines = self._body().decode().splitlines()
        if self.path == "/api/repos/create":
            name = f"somebody/{json.loads(lines[0])['name']}"
            self.server.repositories.setdefault(name, {})
            self._answer({"url": f"{self.server.address}/{name}"})
        elif "/preupload/" in self.path:
            asked = json.loads(lines[0])["files"]
            self._answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
            )
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in lines])
        else:
            self._answer({})

    def _commit(self, entries: list[dict[str, Any]]) -> None:
        if self.server.full:
            self._answer({"error": "the hub is out of order"}, 507)
            return
        name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
        for entry in entries:
            value = entry["value"]
            if entry["key"] == "file":
                self.server.repositories[name][value["path"]] = base64.b64decode(value["content"])
            else:
                self.server.commits.append(value["summary"])
        self._answer(
            {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.server.address}/{name}/commit/{'0' * 40}"}
        )

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
