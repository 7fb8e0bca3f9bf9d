"""What `make arm` says and returns; QEMU itself is run by `.ci/run`."""

from __future__ import annotations

from pathlib import Path

import arm
import builds_agree
import numpy as np
import pytest


@pytest.mark.parametrize(
    ("code", "part"), [(139, "SIGSEGV"), (-11, "SIGSEGV"), (132, "SIGILL"), (1, "does not agree with the baseline")]
)
def test_the_exit_code_of_the_emulated_process_is_explained(code: int, part: str) -> None:
    assert part in arm.sentence(code)


def test_missing_packages_are_named_and_the_exit_code_is_2(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(arm, "BUILD", tmp_path)
    monkeypatch.setattr(arm, "PACKAGES", {"qemu-user": str(tmp_path / "qemu")})
    monkeypatch.setattr(arm.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("debian.os.geteuid", lambda: 1000)
    monkeypatch.setattr("debian.shutil.which", lambda name: f"/usr/bin/{name}")
    assert arm.main() == 2
    assert "sudo apt-get install qemu-user" in capsys.readouterr().err


def test_an_arm_cpu_needs_no_emulator(monkeypatch, capsys) -> None:
    monkeypatch.setattr(arm.platform, "machine", lambda: "aarch64")
    assert arm.main() == 0
    assert "this is an Arm CPU" in capsys.readouterr().out


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = {"a case, fp32": {"y": np.arange(6, dtype=np.float32).reshape(2, 3)}, "b": {"y": np.zeros(0, np.uint16)}}
    builds_agree.save_results(tmp_path / "results.npz", results)
    read = builds_agree.load_results(tmp_path / "results.npz")
    assert read.keys() == results.keys()
    for case, arrays in results.items():
        assert read[case]["y"].dtype == arrays["y"].dtype
        assert np.array_equal(read[case]["y"], arrays["y"])
