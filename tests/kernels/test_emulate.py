"""What `make emulate` says and returns; the emulator itself takes minutes and is run by `.ci/run`."""

from __future__ import annotations

import os

import emulate
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
def test_the_emulated_machine_is_judged_by_its_serial_line(serial: str, sentence: str | None) -> None:
    found = emulate.verdict(serial, cases=9, builds=3)
    assert found is None if sentence is None else sentence in (found or "")


def test_a_machine_that_cannot_run_the_emulator_gets_one_sentence(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(emulate, "BUILD", tmp_path)
    monkeypatch.setattr(emulate, "PACKAGES", {"bochs": str(tmp_path / "bochs")})
    monkeypatch.setattr(native, "available", lambda: ["avx2", "baseline"])
    monkeypatch.setattr(emulate.os, "geteuid", lambda: 1000)
    assert emulate.main() == 2
    assert "sudo apt-get install bochs" in capsys.readouterr().err
    monkeypatch.setattr(emulate.shutil, "which", lambda name: None)
    assert emulate.main() == 2
    assert "no apt-get here" in capsys.readouterr().err


def test_a_cpu_with_avx512_needs_no_emulator(monkeypatch, capsys) -> None:
    monkeypatch.setattr(native, "available", lambda: ["avx512", "avx2", "baseline"])
    assert emulate.main() == 0
    assert "this CPU has AVX-512" in capsys.readouterr().out


def test_the_image_is_made_again_only_when_a_file_of_it_has_changed(monkeypatch, tmp_path) -> None:
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
