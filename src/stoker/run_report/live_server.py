"""Serves the live page of one run: a page and its stream of changes, by Python's own HTTP server; nothing else.

The address contains a random token. Requests without it, or for another host name (as a page of a stranger could send them
through DNS rebinding), are refused. Every reader has a thread that waits for the next state and sends what differs from the
last one; there are no queues, so a reader that does not read costs one blocked thread until its time is over.

A connection that has not shown the token yet has little time to do so, and is dropped sooner if many others come: whoever can
reach the port can open connections, but not keep those out who know the address.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from stoker.errors import UserError
from stoker.process_life import facts_of, is_alive
from stoker.run_report.follow import LogFollower
from stoker.run_report.live_view import live_page, live_parts
from stoker.run_report.log import Run
from stoker.run_report.run_state import State, state_of

__all__ = ["LiveServer", "Viewer"]

_STRANGERS = 64
"""Connections that have not shown it yet."""
_PING = 15.0
"""Seconds after which a reader is sent a comment if nothing has changed, so that closed connections are noticed."""
_LAST_WORDS = 3.0
"""Seconds for readers to take the last state when the server ends."""


class Viewer:
    """The present state of a run, and a way to wait for the next one. Reads the log only while somebody looks."""

    def __init__(self, folder: Path, *, process: int | None = None, every: float = 1.0) -> None:
        self.folder = folder
        self._follower = LogFollower(folder)
        self._process = facts_of(process) if process is not None else None
        self._every = every
        self._changed = threading.Condition()
        self._parts: dict[str, Any] = {}
        self._version = 0
        self._readers = 0
        self._ended = False

    def page(self, nonce: str) -> str:
        with self._changed:
            self._follower.poll()
            return live_page(*self._view(), self.folder, nonce)

    def run_until_ended(self) -> None:
        """Looks for news until `end` is called, or until the process it was given ends."""
        over = False
        while not over:
            with self._changed:
                self._changed.wait(self._every)
                over = self._ended or self._process_ended
                if self._readers:
                    self._refresh()

    def end(self) -> None:
        """Lets readers take the last state."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._readers == 0, _LAST_WORDS)

    @property
    def _process_ended(self) -> bool:
        return self._process is not None and is_alive(self._process) is False

    @contextlib.contextmanager
    def reader(self) -> Iterator[None]:
        with self._changed:
            self._readers += 1
            self._refresh()
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def next_parts(self, known: int, patience: float) -> tuple[int, dict[str, Any], bool]:
        """The version of the state, its parts, and whether more will come; waits for a version after `known`."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != known or self._ended, patience)
            return self._version, self._parts, not self._ended

    def _refresh(self) -> None:
        self._follower.poll()
        parts = live_parts(*self._view())
        if parts != self._parts:
            self._parts, self._version = parts, self._version + 1
            self._changed.notify_all()

    def _view(self) -> tuple[Run, State, float]:
        follower = self._follower
        run, quiet_for = follower.run, follower.quiet_for
        if self._process is not None and (run.start.get("process") or {}).get("id") != self._process["id"]:
            return (
                Run(),
                State("waiting", "model and data are being prepared"),
                0.0,
            )  # the log is that of an earlier run
        state = state_of(run, quiet_for)
        if follower.problem and state.may_continue:
            state = State("waiting" if not run.start else "silent", follower.problem)
        return run, state, quiet_for


class LiveServer(ThreadingHTTPServer):
    """Listens from the moment it is made; `serve` answers until `viewer` ends."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128
    """Connections that the system holds until they are accepted; Python's own limit is 5."""
    most_readers = 64
    """Connections that have shown the token."""
    send_timeout = 15.0
    """Seconds that a reader may take to receive an update."""
    request_timeout = 5.0
    """Seconds in which a whole request must arrive. A browser sends it at once."""

    def __init__(self, viewer: Viewer, host: str = "127.0.0.1", port: int = 0) -> None:
        self.viewer = viewer
        self.token = secrets.token_urlsafe(24)
        self._slots = threading.BoundedSemaphore(self.most_readers)
        self._strangers: dict[socket.socket, float] = {}
        """When connections that have not shown the token were accepted, the oldest first."""
        self._strangers_lock = threading.Lock()
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self.address_family = found[0]
            super().__init__((found[4][0], found[4][1]), _Handler)  # type: ignore[arg-type]
        except (OSError, UnicodeError) as error:
            raise UserError(_why_not(error, host, port)) from None
        bound = ipaddress.ip_address(str(self.server_address[0]).partition("%")[0])
        self._local = bound.is_loopback
        self._names = {"localhost", "127.0.0.1", "::1", str(bound), host.lower()}
        if not self._local:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    @property
    def address(self) -> str:
        """What to type into a browser."""
        bound = ipaddress.ip_address(str(self.server_address[0]).partition("%")[0])
        host = socket.gethostname() if bound.is_unspecified else str(bound)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/{self.token}/"

    def serve(self) -> None:
        """Returns when the viewer has ended and its readers have the last state."""
        answering = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
        answering.start()
        try:
            self.viewer.run_until_ended()
        finally:
            self.viewer.end()
            self.shutdown()
            self.server_close()

    def server_bind(self) -> None:
        # HTTPServer's own looks up the name of the host, which can take seconds without a network.
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def knows_host(self, header: str) -> bool:
        """Whether a request was meant for this server. The port may be that of a tunnel."""
        name = header.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name.rstrip(".") in self._names:
            return True
        if self._local:
            return False
        try:  # an address, unlike a name, cannot be made to point elsewhere
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._strangers_lock:
            while len(self._strangers) >= _STRANGERS:
                self._drop(next(iter(self._strangers)))
            self._strangers[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """Called several times a second while the server runs."""
        with self._strangers_lock:
            oldest = time.monotonic() - self.request_timeout
            for request in [one for one, accepted in self._strangers.items() if accepted < oldest]:
                self._drop(request)

    @contextlib.contextmanager
    def reader_slot(self, request: socket.socket) -> Iterator[bool]:
        """For a connection that has shown the token: whether there is room for it."""
        self._forget(request)
        has_slot = self._slots.acquire(blocking=False)
        try:
            yield has_slot
        finally:
            if has_slot:
                self._slots.release()

    def _forget(self, request: socket.socket) -> None:
        with self._strangers_lock:
            self._strangers.pop(request, None)

    def _drop(self, request: socket.socket) -> None:
        """Ends a connection; its own thread, which waits for it, closes it."""
        del self._strangers[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away, or took too long, is no error."""


def _why_not(error: Exception, host: str, port: int) -> str:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; choose another --port, or leave it out to get a free one"
    if number in (errno.EACCES, errno.EPERM):
        return f"port {port} needs special rights; choose a --port above 1023, or leave it out to get a free one"
    reason = getattr(error, "strerror", None) or str(error)
    return f"--host {host} cannot be used: {reason}; give a name or an address of this machine"


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version = "stoker"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.send_timeout)

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self.server.knows_host(hosts[0]):
            return self.send_error(HTTPStatus.FORBIDDEN)
        parts = self.path.split("/")
        token = parts[1] if len(parts) > 1 and not parts[0] else ""
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            return self.send_error(HTTPStatus.NOT_FOUND)
        with self.server.reader_slot(self.connection) as has_slot:
            return self._answer(parts) if has_slot else self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)

    def _answer(self, parts: list[str]) -> None:
        """Answers a request with the right token."""
        if parts[2:] == [""]:
            return self._send_page()
        if parts[2:] == ["events"]:
            return self._send_events()
        if len(parts) == 2:  # copied without the last character
            return self._begin(HTTPStatus.PERMANENT_REDIRECT, "text/plain", Location=f"/{self.server.token}/")
        return self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Nothing of the request is repeated in the answer."""
        self._begin(code, "text/plain; charset=utf-8")
        if self.command != "HEAD":
            self.wfile.write(f"{HTTPStatus(code).phrase}\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal belongs to the training."""

    def _begin(self, code: int, kind: str, policy: str = "", **headers: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", f"default-src 'none'; frame-ancestors 'none'{policy}")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")  # the address contains the token
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        page = self.server.viewer.page(nonce).encode("utf-8", "replace")
        allowed = f"; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; base-uri 'none'"
        self._begin(HTTPStatus.OK, "text/html; charset=utf-8", f"{allowed}; form-action 'none'")
        if self.command != "HEAD":
            self.wfile.write(page)

    def _send_events(self) -> None:
        self._begin(HTTPStatus.OK, "text/event-stream; charset=utf-8")
        if self.command == "HEAD":
            return
        sent: dict[str, Any] = {}
        version, more = -1, True
        with self.server.viewer.reader():
            self.wfile.write(b"retry: 2000\n\n")
            while more:
                version, parts, more = self.server.viewer.next_parts(version, _PING)
                changed = {name: value for name, value in parts.items() if sent.get(name) != value}
                sent = parts
                self.wfile.write(f"data: {json.dumps(changed)}\n\n".encode() if changed else b": nothing new\n\n")
            self.wfile.write(b"event: end\ndata: {}\n\n")
