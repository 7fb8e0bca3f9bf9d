"""Nothing is read from the cache that somebody else could have written, and nobody else can change what is in it."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from stoker.comm import compiled
from stoker.kernels import native
from stoker.machine import cache_directory
from stoker.tasks import cache

NOBODY = 65534
HOW = ("not the user's", "writable by all", "a link")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home below a sticky directory, as /tmp is."""
    monkeypatch.delenv("STOKER_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache_directory, "warned", set())
    with tempfile.TemporaryDirectory(prefix="stoker-trust-", dir="/tmp") as made:
        monkeypatch.setenv("HOME", made)
        yield Path(made)


@pytest.fixture
def folder(home: Path) -> Path:
    """A cache directory with one file of each kind that is read."""
    cache_directory.save("rates.json", {"value": 1})
    cache.cached("qa", "key", _arrays)
    made = cache_directory.trusted_directory()
    (made / "thing.so").write_bytes(b"library")
    (made / "thing.so").chmod(0o700)
    return made


def _arrays() -> cache.Arrays:
    return {"ids": np.arange(3)}


def _touch(compiler: str, target: Path) -> list[str]:
    return ["sh", "-c", f"umask 0; echo made anew > '{target}'"]


def _compiled() -> bytes:
    return compiled.compile_once("thing.so", _touch, "a thing").read_bytes()


def _is_read(folder: Path) -> tuple[bool, bool, bool]:
    """Whether JSON, arrays and libraries are taken from the cache."""
    arrays_found = cache.cached("qa", "key", _arrays)[1]
    try:
        library = _compiled() == b"library"
    except compiled.CompiledUnavailable:
        library = False
    return cache_directory.load("rates.json") is not None, arrays_found, library


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_of_the_user_are_read_and_private(folder: Path, home: Path) -> None:
    assert _is_read(folder) == (True, True, True)
    for path in (home / ".cache", folder, folder / "features"):
        assert _mode(path) == 0o700
    for path in (folder / "rates.json", folder / "features" / "qa-key.npz"):
        assert _mode(path) == 0o600


def test_the_default_directory_is_made_private(folder: Path) -> None:
    folder.chmod(0o755)
    assert _is_read(folder) == (True, True, True)
    cache_directory.save("rates.json", {"value": 2})
    assert _mode(folder) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_nothing_is_read_from_a_directory_that_others_may_write(
    folder: Path, mode: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_directory, "group_of_one", lambda gid: False)
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING, "stoker"):
        assert _is_read(folder) == (False, False, False)
        assert _is_read(folder) == (False, False, False)
    assert f"others may write to it (mode {mode:04o}); run `chmod 700 {folder}`" in caplog.text
    assert len(caplog.records) == 1
    with pytest.raises(OSError, match="others may write"):
        cache_directory.save("rates.json", {})
    with pytest.raises(compiled.CompiledUnavailable, match=r"others may write.*chmod 700"):
        _compiled()


def test_nothing_is_read_below_a_directory_where_others_could_replace_the_cache(folder: Path, home: Path) -> None:
    home.chmod(0o777)
    assert _is_read(folder) == (False, False, False)
    with pytest.raises(compiled.CompiledUnavailable, match=f"others may write to {home} .*chmod go-w {home}"):
        _compiled()
    home.chmod(0o1777)  # here only the owner of a directory may rename it
    assert _is_read(folder) == (True, True, True)


def test_a_private_group_counts_as_the_user(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_directory, "group_of_one", lambda gid: True)
    for path in (home, folder, folder / "rates.json"):
        path.chmod(0o770)
    assert _is_read(folder) == (True, True, True)
    # an access control list lets others write, and shows as the group's bit only
    monkeypatch.setattr(cache_directory, "extended_attributes", lambda path: ["system.posix_acl_access"])
    assert _is_read(folder) == (False, False, False)


@pytest.mark.root
def test_nothing_is_read_from_a_directory_of_another_user(folder: Path, home: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)
    assert _is_read(folder) == (False, False, False)
    os.chown(folder, 0, 0)
    assert _is_read(folder) == (True, True, True)
    os.chown(home, NOBODY, NOBODY)
    assert _is_read(folder) == (False, False, False)


def _spoil(path: Path, how: str) -> None:
    if how == "writable by all":
        path.chmod(0o666)
    elif how == "a link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    else:
        os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.root if "user" in how else ()) for how in HOW])
def test_a_file_that_somebody_else_could_have_written_is_replaced(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "sh")
    library = folder / "thing.so"
    for path in (folder / "rates.json", folder / "features" / "qa-key.npz", library):
        _spoil(path, how)
    with caplog.at_level(logging.WARNING, "stoker"):
        assert _is_read(folder) == (False, False, False)
    assert len(caplog.records) == 3, caplog.text
    assert all(record.getMessage().endswith("; remove it") for record in caplog.records)
    assert library.read_bytes() == b"made anew\n"
    assert not library.is_symlink()
    assert _mode(library) == 0o700
    cache_directory.save("rates.json", {"value": 1})
    assert cache_directory.load("rates.json") == {"value": 1}
    assert cache.cached("qa", "key", _arrays)[1]


def test_the_lock_file_is_not_opened_through_a_link(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "sh")
    precious = home / "precious"
    precious.write_text("kept")
    directory = cache_directory.make_directory()
    (directory / "thing.so.lock").symlink_to(precious)
    with pytest.raises(
        compiled.CompiledUnavailable, match=r"thing\.so\.lock is not used: it is a symbolic link; remove it"
    ):
        _compiled()
    assert precious.read_text() == "kept"
    (directory / "thing.so.lock").unlink()
    os.mkfifo(directory / "thing.so.lock")  # opened for writing, it would wait for a reader
    with pytest.raises(compiled.CompiledUnavailable, match="not a regular file"):
        _compiled()


def test_a_pipe_in_place_of_a_file_does_not_block(home: Path) -> None:
    os.mkfifo(cache_directory.make_directory() / "rates.json")
    assert cache_directory.load("rates.json") is None


@pytest.mark.root
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_code_of_another_user_in_a_writable_cache_is_not_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, marker = home / "open", home / "marker"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("STOKER_CACHE_DIR", str(folder))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    source = home / "evil.c"
    source.write_text(
        f'#include <fcntl.h>\n__attribute__((constructor)) static void run(void) {{ creat("{marker}", 0600); }}\n'
    )
    planted = folder / compiled._file_name()
    monkeypatch.setattr(native, "directories", list)  # no installed library either
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(planted)], check=True)
    os.chown(planted, NOBODY, NOBODY)
    for mode in (0o1777, 0o700):  # also after the directory was closed with the file in it
        folder.chmod(mode)
        with pytest.raises(compiled.CompiledUnavailable):
            compiled.load.__wrapped__()
        assert not marker.exists()
    ctypes.CDLL(str(planted))
    assert marker.exists(), "it would have run"


@pytest.mark.root
def test_an_installed_library_is_loaded_only_if_nobody_else_could_have_written_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "sh")
    installed = home / "installed"
    installed.mkdir(mode=0o755)
    library = installed / "thing.so"
    library.write_bytes(b"installed")
    library.chmod(0o755)
    monkeypatch.setattr(native, "directories", lambda: [home / "missing", installed])
    assert _compiled() == b"installed"
    library.chmod(0o777)
    assert _compiled() == b"made anew\n"
    library.chmod(0o755)
    installed.chmod(0o777)
    assert _compiled() == b"made anew\n"
    installed.chmod(0o755)
    os.chown(library, NOBODY, NOBODY)
    assert _compiled() == b"made anew\n"
    os.chown(library, 0, 0)
    assert _compiled() == b"installed"
