"""The live page is served to whoever has its address and to nobody else; readers get changes, and cannot hold anything up."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from attack.run_logs import MARKUP, variants
from rig import warm
from run_report.live_events import Events
from stoker.cli import main
from stoker.errors import UserError
from stoker.process_life import facts_of
from stoker.run_report.follow import LogFollower
from stoker.run_report.live_server import LiveServer, Viewer
from stoker.run_report.live_view import live_page, live_parts
from stoker.run_report.log import NAME, RunLog
from stoker.run_report.run_state import state_of

WATCH = [sys.executable, "-m", "stoker", "watch"]


@contextlib.contextmanager
def serving(folder: Path, **options: Any) -> Iterator[LiveServer]:
    server = LiveServer(Viewer(folder, every=0.05, **options))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.viewer.end()
        thread.join()


def begin(folder: Path, **more: Any) -> RunLog:
    log = RunLog(folder)
    log.write("start", task="qa", model="org/bert", process=facts_of(os.getpid()), **more)
    log.write("model", type="Bert", parameters=10, steps=100)
    return log


def request(address: str, path: str = "", *, method: str = "GET", host: str | None = None) -> tuple[int, Any, bytes]:
    """Status, headers and content. `path` is appended to the address, or replaces its path if it begins with a slash."""
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    connection.putrequest(method, path if path.startswith("/") else place.path + path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or place.netloc)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def test_the_page_and_its_stream_follow_the_log(tmp_path: Path) -> None:
    log = begin(tmp_path, title="A <b> title")
    with serving(tmp_path) as server:
        status, headers, page = request(server.address)
        assert status == 200
        assert b"A &lt;b&gt; title" in page
        nonce = re.search(r"script-src 'nonce-([^']+)'", headers["Content-Security-Policy"])
        assert nonce is not None
        assert f'<script nonce="{nonce[1]}">'.encode() in page
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["Referrer-Policy"] == "no-referrer"
        events = Events(server.address)
        events.until("running", "header")
        assert events.parts["charts"] == []
        for step in (1, 2):
            log.write("step", step=step, loss=1.0 / step, tokens_per_second=1234.0)
        events.until("of 100 steps")
        events.until("1,234")
        while events.parts["charts"][0]["panels"][0]["curves"][0]["x"] != [1, 2]:
            events.next()
        log.write("evaluation", step=2, eval_f1=61.0)
        events.until("61.0")
        log.write("examples", rows=[{"texts": ["<i>"], "answer": "yes", "expected": ["no"], "right": False}])
        events.until("&lt;i&gt;", "examples")
        log.write("end", reason="finished", step=2)
        events.until("finished", "header")
        assert events.parts["continues"] is False
        log.write("start", resumed_at=1, process=facts_of(os.getpid()))
        events.until("running", "header")
        server.viewer.end()
        lines = events.rest()
        assert [line for line in lines if line][-2:] == ["event: end", "data: {}"]


def test_only_what_has_changed_is_sent(tmp_path: Path) -> None:
    log = begin(tmp_path)
    with serving(tmp_path) as server:
        events = Events(server.address)
        while not events.next().startswith("data: "):
            pass
        assert set(events.parts) >= {"header", "tiles", "about", "charts"}
        log.write("evaluation", step=1, eval_f1=61.0)
        while not (line := events.next()).startswith("data: "):
            pass
        assert set(json.loads(line[6:])) <= {"tiles", "charts"}


@pytest.mark.parametrize(
    "path",
    ["/", "/events", "/run.jsonl", "/../../etc/passwd", "//etc/passwd", "/TOKEN", "/TOKENx/", "/TOKEN/run.jsonl", "*", "/é/",
     "/TOKEN/../run.jsonl", "/TOKEN/%2e%2e/run.jsonl", "/TOKEN/events/", "/TOKEN/?x", "/token/", "/%54OKEN/", "/TOKEN\\",
     "http://127.0.0.1/TOKEN/"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_nothing_but_the_page_and_its_stream_is_served(tmp_path: Path, path: str, method: str) -> None:
    begin(tmp_path)
    with serving(tmp_path) as server:
        place = urlsplit(server.address)
        raw = f"{method} {path.replace('TOKEN', server.token)} HTTP/1.0\r\nHost: {place.netloc}\r\n\r\n"
        with socket.create_connection((place.hostname, place.port), timeout=60) as client:
            client.sendall(raw.encode())
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        head = answer.split(b"\r\n")[0]
        if path == "/TOKEN":
            assert b" 308 " in head
        else:
            assert b" 404 " in head
        assert b"org/bert" not in answer
        assert server.token.encode() not in answer or path == "/TOKEN"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_other_methods_are_refused(tmp_path: Path, method: str) -> None:
    begin(tmp_path)
    with serving(tmp_path) as server:
        status, _, content = request(server.address, method=method)
        assert status == 501
        assert content == b"Not Implemented\n"


def test_requests_for_another_host_are_refused(tmp_path: Path) -> None:
    """As a browser sends them for a page of a stranger whose name was made to point here."""
    begin(tmp_path)
    with serving(tmp_path) as server:
        port = urlsplit(server.address).port
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "192.0.2.1",
            "",
            "localhost@evil.example",
        ):
            status, _, content = request(server.address, host=host)
            assert (status, content) == (403, b"Forbidden\n"), host
        for host in ("localhost:9999", "LOCALHOST", "127.0.0.1", "[::1]:80"):
            assert request(server.address, host=host)[0] == 200, host


def test_on_other_interfaces_names_of_strangers_are_refused_too(tmp_path: Path) -> None:
    server = LiveServer(Viewer(tmp_path), "0.0.0.0")
    with contextlib.closing(server.socket):
        assert server.address.startswith(f"http://{socket.gethostname()}:")
        assert server.knows_host("192.0.2.7:80")
        assert server.knows_host(socket.gethostname())
        assert not server.knows_host("evil.example")


def test_tokens_are_long_and_new_for_every_server(tmp_path: Path) -> None:
    servers = [LiveServer(Viewer(tmp_path)) for _ in range(2)]
    assert servers[0].token != servers[1].token
    assert min(len(one.token) for one in servers) >= 32
    for one in servers:
        one.server_close()


def test_a_reader_that_never_reads_delays_neither_the_log_nor_other_readers(tmp_path: Path) -> None:
    log = begin(tmp_path)
    with serving(tmp_path) as server:
        server.send_timeout = 1.0
        place = urlsplit(server.address)
        lazy = []
        for _ in range(8):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((place.hostname, place.port))
            client.sendall(f"GET {place.path}events HTTP/1.0\r\nHost: {place.netloc}\r\n\r\n".encode())
            lazy.append(client)
        events = Events(server.address)
        text = "x" * 400_000  # fills the buffers of the lazy ones
        for step in range(1, 41):
            log.write("step", step=step, loss=1.0, tokens_per_second=1000.0)
            log.write(
                "examples", rows=[{"texts": [f"{step} {text}"], "answer": "yes", "expected": ["yes"], "right": True}]
            )
            events.until(f"{step} xxx", "examples")
        deadline = time.monotonic() + 60
        while server.viewer._readers > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.viewer._readers == 1, "readers that do not read are dropped"
        for client in lazy:
            client.close()


def test_readers_beyond_the_limit_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveServer, "most_readers", 3)
    begin(tmp_path)
    with serving(tmp_path) as server:
        events = [Events(server.address) for _ in range(3)]
        assert request(server.address)[0] == 503
        assert request(server.address, "/")[0] == 404
        for one in events:
            one.connection.close()
            one.answer.close()


def test_a_killed_run_is_shown_as_killed_and_a_finished_one_as_finished(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    log = RunLog(tmp_path)
    log.write("start", process=facts_of(process.pid))
    log.write("step", step=7, loss=1.0)
    with serving(tmp_path) as server:
        events = Events(server.address)
        events.until("running", "header")
        process.kill()
        process.communicate()
        events.until("killed", "header")
        assert "after step 7" in events.parts["header"]


def test_a_log_that_is_empty_or_missing_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    with serving(tmp_path) as server:
        assert b"nothing has been logged yet" in request(server.address)[2]
        events = Events(server.address)
        events.until("not started", "header")
        begin(tmp_path)
        events.until("running", "header")


def test_with_a_process_the_log_of_an_earlier_run_is_not_shown(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write("start", title="an earlier run", process={"id": 1})
    log.write("end", reason="finished")
    with serving(tmp_path, process=os.getpid()) as server:
        page = request(server.address)[2]
        assert b"an earlier run" not in page
        assert b"model and data are being prepared" in page
        log.start_over()
        begin(tmp_path, title="this run")
        assert b"this run" in request(server.address)[2]


def watch(*arguments: str) -> subprocess.Popen[str]:
    return warm.Popen([*WATCH, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_prints_one_address_and_ends_with_the_process_it_was_given(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    RunLog(tmp_path).write("start", process=facts_of(process.pid))
    served = watch(str(tmp_path), "--process", str(process.pid))
    assert served.stdout is not None
    address = served.stdout.readline().removeprefix("watch it at ").strip()
    assert urlsplit(address).hostname == "127.0.0.1"
    events = Events(address)
    events.until("running", "header")
    process.kill()
    process.communicate()
    lines = events.rest()
    assert "event: end" in lines
    assert "killed" in events.parts["header"], "the last state reaches the page before the server ends"
    rest, errors = served.communicate(timeout=60)
    assert (served.returncode, rest, errors) == (0, "", "")


def test_ctrl_c_ends_the_command_with_a_last_word_to_its_readers(tmp_path: Path) -> None:
    begin(tmp_path)
    served = watch(str(tmp_path))
    assert served.stdout is not None
    events = Events(served.stdout.readline().removeprefix("watch it at ").strip())
    events.until("running", "header")
    served.terminate()
    assert "event: end" in events.rest()
    _, errors = served.communicate(timeout=60)
    assert (served.returncode, errors) == (0, "")


def test_bad_requests_give_one_sentence_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(tmp_path / "run")
    (tmp_path / "none").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.jsonl").touch()
    for trial in ("trial-001", "trial-002"):
        (tmp_path / "search" / trial).mkdir(parents=True)
        (tmp_path / "search" / trial / "run.jsonl").touch()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        for argv, words in (
            ([str(tmp_path / "missing")], "does not exist"),
            ([str(tmp_path / "none")], "has no run.jsonl"),
            ([str(tmp_path / "search")], f"watch one of them, such as {tmp_path / 'search' / 'trial-002'}"),
            ([str(tmp_path / "new" / "run.jsonl")], "is a file; name the folder of a run"),
            ([str(tmp_path / "new"), "--port", port], f"port {port} of 127.0.0.1 is in use"),
            ([str(tmp_path / "run"), "--port", port], f"port {port} of 127.0.0.1 is in use; choose another --port"),
            ([str(tmp_path / "run"), "--port", "70000"], "is not a port"),
            ([str(tmp_path / "run"), "--host", "192.0.2.1"], "--host 192.0.2.1 cannot be used"),
            ([str(tmp_path / "run"), "--host", "no such host"], "--host no such host cannot be used"),
            ([str(tmp_path / "run"), "--host", "x" * 300], "cannot be used"),
            ([str(tmp_path / "run"), "--process", "999999999"], "there is no such process"),
            ([], "the following arguments are required: DIR"),
        ):
            assert main(["watch", *argv]) == 2, argv
            captured = capsys.readouterr()
            assert words in captured.err
            assert captured.err.count("\n") == 1
            assert captured.out == ""
        with pytest.raises(UserError, match="is in use"):
            LiveServer(Viewer(tmp_path), "127.0.0.1", int(port))


def test_neither_torch_nor_matplotlib_is_loaded_to_watch(tmp_path: Path) -> None:
    """The process shares its memory and its cores with the training."""
    code = (
        "import sys, stoker.cli.watch, stoker.run_report.live_server; from pathlib import Path;"
        "viewer = stoker.run_report.live_server.Viewer(Path(sys.argv[1])); viewer.page('x'); viewer.reader().__enter__();"
        "sys.exit(99 if {'torch', 'matplotlib', 'numpy'} & set(sys.modules) else 0)"
    )
    begin(tmp_path)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_no_text_of_a_log_becomes_markup(tree_path: Path) -> None:
    """The parts that the page inserts as HTML, of odd logs."""
    allowed = re.compile(
        r"<(?!/?(h1|h2|p|span|b|i|section|article|div|table|tr|th|td|pre|mark|small|details|summary|progress|code)\b)"
    )
    for number, (name, folder) in enumerate(variants(7, tree_path, more=5)):
        if number % 5:
            continue
        follower = LogFollower(folder)
        follower.poll()
        state = state_of(follower.run, follower.quiet_for)
        parts = live_parts(follower.run, state, follower.quiet_for)
        html = "".join(value for key, value in parts.items() if isinstance(value, str) and key != "title")
        assert not allowed.search(html), name
        assert MARKUP not in html, name
        json.dumps(parts, allow_nan=False)
        if number % 250 == 0:
            assert MARKUP not in live_page(follower.run, state, 0.0, folder, "nonce")
    assert number > 1000


def test_slow_strangers_do_not_keep_the_owner_out(tmp_path: Path) -> None:
    begin(tmp_path)
    with serving(tmp_path) as server, contextlib.ExitStack() as strangers:
        place = urlsplit(server.address)
        for _ in range(200):
            slow = strangers.enter_context(socket.create_connection((place.hostname, place.port), timeout=60))
            slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert request(server.address)[0] == 200
        Events(server.address).until("running", "header")


def test_a_request_that_does_not_end_is_dropped(tmp_path: Path) -> None:
    begin(tmp_path)
    with serving(tmp_path) as server:
        server.request_timeout = 0.2
        place = urlsplit(server.address)
        with socket.create_connection((place.hostname, place.port), timeout=0.1) as slow:
            for _ in range(100):  # a byte now and then, so that no single read takes long
                try:
                    slow.sendall(b"x")
                    if slow.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            else:
                pytest.fail("the connection is still open")


def test_readers_with_the_token_have_no_deadline(tmp_path: Path) -> None:
    log = begin(tmp_path)
    with serving(tmp_path) as server:
        server.request_timeout = 0.2
        events = Events(server.address)
        events.until("running", "header")
        with socket.create_connection(server.server_address[:2], timeout=60) as stranger:
            assert stranger.recv(1) == b"", "it has outlived the time of a request"
        log.write("evaluation", step=1, eval_f1=61.0)
        events.until("61.0")


def test_many_can_connect_at_once(tmp_path: Path) -> None:
    """Before any of them is accepted, as when the training keeps all cores busy."""
    server = LiveServer(Viewer(tmp_path))
    with contextlib.closing(server.socket), contextlib.ExitStack() as clients:
        for _ in range(40):
            clients.enter_context(socket.create_connection(server.server_address[:2], timeout=0.5))
