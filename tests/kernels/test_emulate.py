"""What `make emulate` says and returns; the emulator itself takes minutes and is run by `.ci/run`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import emulate
import emulate_bf16
import pytest

from stoker.kernels import native


@pytest.mark.parametrize(
    ("serial", "sentence"),
    [
        ("stoker: 9 cases x 3 builds equal\r\nstoker: exit 0\r\n", None),
        ("stoker: 8 cases x 3 builds equal\r\nstoker: exit 0\r\n", "the test failed"),
        ("stoker: dropout: y of avx512 is not that of baseline\r\nstoker: exit 1\r\n", "exit code 1"),
        ("stoker: dropout: avx512\r\nstoker: exit 139\r\n", "SIGSEGV"),
        ("stoker: dropout: avx512\r\nstoker: exit 132\r\n", "SIGILL"),
        ("Kernel panic - not syncing", "panicked"),
        ("", "ended without a result"),
    ],
)
def test_the_result_of_the_emulated_machine_is_read_from_its_serial_line(serial: str, sentence: str | None) -> None:
    found = emulate.verdict(serial, cases=9, builds=3)
    assert found is None if sentence is None else sentence in (found or "")


def test_an_error_says_why_a_machine_cannot_run_the_emulator(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(emulate, "BUILD", tmp_path)
    monkeypatch.setattr(emulate, "PACKAGES", {"bochs": str(tmp_path / "bochs")})
    monkeypatch.setattr(native, "available", lambda: ["avx2", "baseline"])
    monkeypatch.setattr(emulate.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(emulate.os, "geteuid", lambda: 1000)
    assert emulate.main() == 2
    assert "sudo apt-get install bochs" in capsys.readouterr().err
    monkeypatch.setattr(emulate.shutil, "which", lambda name: None)
    assert emulate.main() == 2
    assert "no apt-get here" in capsys.readouterr().err


def test_a_cpu_with_avx512_needs_no_emulator(monkeypatch, capsys) -> None:
    monkeypatch.setattr(emulate.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "available", lambda: ["avx512", "avx2", "baseline"])
    assert emulate.main() == 0
    assert "this CPU has AVX-512" in capsys.readouterr().out


def test_the_image_is_rebuilt_only_if_a_file_in_it_has_changed(monkeypatch, tmp_path) -> None:
    library, sums = tmp_path / "library", tmp_path / "sums"
    monkeypatch.setattr(emulate, "SUMS", sums)
    library.write_text("first")
    sums.write_text("{}")
    files = {"/library": library, "/sums": sums}
    before = emulate.fingerprint_of(files)
    os.utime(sums, (1, 1))
    assert emulate.fingerprint_of(files) == before
    sums.write_text("{ }")
    assert emulate.fingerprint_of(files) != before
    sums.write_text("{}")
    library.write_text("other")
    assert emulate.fingerprint_of(files) != before


def test_a_cpu_with_avx512_is_emulated_on_request(monkeypatch, capsys, tmp_path) -> None:
    def install(*arguments: object) -> None:
        raise emulate.Obstacle("as far as the packages")

    monkeypatch.setattr(emulate, "BUILD", tmp_path)
    monkeypatch.setattr(emulate.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "available", lambda: ["avx512", "avx2", "baseline"])
    monkeypatch.setattr(emulate.debian, "install", install)
    assert emulate.main(["--anyway"]) == 2
    assert "as far as the packages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("serial", "sentence"),
    [
        ("stoker: booted\r\nstoker: 9 results right by AVX512-BF16\r\nstoker: exit 0\r\n", None),
        ("stoker: booted\r\nstoker: 9 results right by AMX-BF16\r\nstoker: exit 0\r\n", "the test failed"),
        ("stoker: booted\r\nstoker: wrong: nt 1 x 1 x 1\r\nstoker: exit 1\r\n", "exit code 1"),
        ("stoker: booted\r\nstoker: not available\r\nstoker: exit 3\r\n", "not available in bf16"),
        ("stoker: booted\r\nstoker: nt\r\nstoker: exit 132\r\n", "SIGILL"),
        ("Kernel panic - not syncing", "panicked"),
        ("stoker: booted\r\n", "ended without a result"),
    ],
)
def test_the_result_of_the_bf16_products_is_read_from_the_serial_line(serial: str, sentence: str | None) -> None:
    found = emulate_bf16.verdict(serial)
    assert found is None if sentence is None else sentence in (found or "")


@pytest.mark.parametrize(
    ("archive", "update", "sentence"),
    [
        (("", ""), 0, "apt knows no archive of Debian"),
        (("http://nowhere.invalid/debian/", ""), 1, "Debian's trixie could not be read"),
    ],
)
def test_an_error_says_why_bochs_3_cannot_be_had(monkeypatch, capsys, tmp_path, archive, update, sentence) -> None:
    """And what was unpacked before is kept."""
    kept = tmp_path / "trixie" / "kept"
    monkeypatch.setattr(emulate_bf16, "SYSTEM", kept.parent)
    monkeypatch.setattr(emulate_bf16, "BUILD", tmp_path)
    monkeypatch.setattr(emulate_bf16, "WORK", tmp_path / "bf16")
    monkeypatch.setattr(emulate_bf16, "LOG", tmp_path / "apt.log")
    monkeypatch.setattr(emulate_bf16.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(emulate_bf16, "archive", lambda: archive)
    monkeypatch.setattr(emulate_bf16.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(emulate_bf16.debian, "need_apt", lambda: None)
    monkeypatch.setattr(emulate_bf16.debian, "apt", lambda *arguments: update)
    (tmp_path / "apt.log").write_text("E: no such suite")
    kept.parent.mkdir()
    kept.touch()
    assert emulate_bf16.main(["--anyway"]) == 2
    assert sentence in capsys.readouterr().err
    assert kept.exists()


def test_the_list_of_files_for_the_emulated_machine_is_complete(tmp_path) -> None:
    """It names what is opened before the script, modules that replace themselves, and libraries; on every CPU."""
    files = tmp_path / "files"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "STOKER_ISA": "baseline"}
    command = [sys.executable, str(emulate.HERE / "bf16_units.py"), "--files", str(files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = files.read_text().splitlines()
    for end in (
        "/encodings/__init__.py",
        "/torch/_VF.py",
        "/lib/libtorch_cpu.so",
        "/bin/torch_shm_manager",
        "/stoker/kernels/linear.py",
    ):
        assert any(name.endswith(end) for name in listed), end


def test_the_archive_is_the_one_that_apt_is_configured_for(monkeypatch, tmp_path) -> None:
    (tmp_path / "apt-get").write_text(
        "#!/bin/sh\nprintf 'Label: Debian\\nRepo-URI: http://one.invalid/debian/\\nSigned-By: /keys\\n\\n"
        "Repo-URI: http://two.invalid/debian/\\n'"
    )
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert emulate_bf16.archive() == ("http://one.invalid/debian/", "/keys")


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """Puts a program in the place of Bochs; it runs in the directory of the serial line's file."""

    def put(program: str) -> None:
        path = tmp_path / "bochs"
        path.write_text(
            f"#!{sys.executable}\nimport os, pty, sys, time, tty\nif '--help' in sys.argv: sys.exit(0)\n{program}"
        )
        path.chmod(0o755)

    monkeypatch.setattr(emulate, "BUILD", tmp_path)
    monkeypatch.setattr(emulate, "SERIAL", tmp_path / "serial.log")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return put


def test_an_emulator_that_does_not_end_is_stopped(stand_in, monkeypatch, tmp_path) -> None:
    stand_in("open('new', 'w').write(str(os.getpid())); os.rename('new', 'pid'); time.sleep(600)")
    started = tmp_path / "pid"
    clock = SimpleNamespace(monotonic=lambda: 1e9 if started.exists() else 0.0, sleep=time.sleep)
    monkeypatch.setattr(emulate, "time", clock)  # the limit is reached as soon as the program runs
    emulate.run_bochs()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_the_screen_of_the_emulator_is_read_so_that_it_never_blocks(stand_in, monkeypatch) -> None:
    """Bochs draws on a terminal of its own, and names it in what it prints."""
    stand_in(
        "ours, theirs = pty.openpty()\n"
        "tty.setraw(theirs)\n"
        "print(f'Bochs connected to screen \"{os.ttyname(theirs)}\"', flush=True)\n"
        "for _ in range(256): os.write(ours, b'x' * 4096)\n"
        "open('serial.log', 'w').write('stoker: the end')"
    )
    monkeypatch.setattr(emulate, "WALL_SECONDS", 120)
    emulate.run_bochs()
    assert emulate.SERIAL.read_text() == "stoker: the end"
