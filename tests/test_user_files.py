"""Reading a file given by a user takes limited time and memory, and fails with one sentence."""

from __future__ import annotations

import gzip
import os
import socket
import threading
from pathlib import Path

import pytest

from stoker import user_files
from stoker.errors import UserError
from stoker.user_files import check_replaceable, read_bytes, read_text


@pytest.fixture
def odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(user_files, "PATIENCE", 0.2)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "nul").write_bytes(b"a\0b\n")
    (tmp_path / "latin").write_bytes(b"K\xf6ln\n")
    (tmp_path / "large").write_bytes(b"x" * 2_000_000)
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    found = {
        name: str(tmp_path / name) for name in ("pipe", "folder", "nul", "latin", "large", "loop", "socket", "none")
    }
    return {**found, "zero": "/dev/zero", "nobody": "~nobody-of-that-name/x", "NUL in the name": "a\0b", "empty": ""}


SAYS = {
    "pipe": "nothing was written to this pipe", "folder": "it is a folder", "nul": "it is not text", "latin": "not UTF-8 text",
    "large": "more than 1 MB", "loop": "symbolic links", "socket": "No such device", "none": "does not exist",
    "zero": "a device or socket", "nobody": "does not exist", "NUL in the name": "not the name of a file",
    "empty": "does not exist",
}  # fmt: skip


@pytest.mark.parametrize("name", SAYS)
def test_a_file_that_cannot_be_read_is_reported_in_one_sentence(name: str, odd_files: dict[str, str]) -> None:
    with pytest.raises(UserError, match=SAYS[name]) as caught:
        read_text(odd_files[name], "hostfile")
    assert str(caught.value).startswith("hostfile ")
    assert "\n" not in str(caught.value)
    assert "\0" not in str(caught.value)


def test_a_pipe_with_a_writer_is_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with open(tmp_path / "pipe", "w") as pipe:
            pipe.write("alpha\n")
            pipe.flush()
            pipe.write("beta\n")

    writer = threading.Thread(target=write)
    writer.start()
    assert read_text(tmp_path / "pipe", "hostfile") == "alpha\nbeta\n"
    writer.join()


def test_a_gzip_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "d.json.gz"
    path.write_bytes(gzip.compress(b" " * 50_000_000))
    assert path.stat().st_size < 100_000
    with pytest.raises(UserError, match="more than 1 MB"):
        read_bytes(path, "data file", limit=1_000_000, gzipped=True)
    path.write_bytes(gzip.compress(b"{}"))
    assert read_bytes(path, "data file", limit=1_000_000, gzipped=True) == b"{}"
    path.write_bytes(gzip.compress(b"x" * 1000)[:-9])
    with pytest.raises(UserError, match="not a whole gzip file"):
        read_bytes(path, "data file", limit=1_000_000, gzipped=True)


def test_devices_pipes_and_folders_are_never_replaced(odd_files: dict[str, str], tmp_path: Path) -> None:
    for name in ("pipe", "folder", "socket", "NUL in the name", "empty"):
        with pytest.raises(UserError, match="cannot be written"):
            check_replaceable(odd_files[name], "config file")
    with pytest.raises(UserError, match="it is a device"):
        check_replaceable("/dev/null", "config file")
    (tmp_path / "link").symlink_to("real")
    assert check_replaceable(tmp_path / "link", "config file") == tmp_path / "real"


def test_user_input_in_messages_is_shortened_and_escaped() -> None:
    shown = str(UserError(f"--seed {'7' * 5000} \x1b[2J\0: no"))
    assert shown == "--seed 77777777777777777777...(5,000 characters) \\x1b[2J\\x00: no"
    path = "/" + "/".join(["folder"] * 60)
    assert path in str(UserError(f"{path} does not exist"))
