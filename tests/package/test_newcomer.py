"""A newcomer who follows docs/install.md in an empty environment gets a model in int8 that answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from check_wheel import Environment, borrow_packages, hide_compilers
from newcomer import follow, read_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_all_steps() -> None:
    steps = read_page()
    assert list(steps) == ["Install", "Look at your machine", "Train", "Watch", "Serve"]
    assert "stoker-*.whl)[demo,onnx]" in steps["Install"]


@pytest.mark.part("docs")
@pytest.mark.browser
def test_a_newcomer_trains_watches_and_exports_a_model_that_answers(tmp_path: Path) -> None:
    """Torch and the other requirements are borrowed from this environment; the wheel of Stoker is built and installed."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "dist"),
             "-C", "cmake.define.STOKER_COMPILE_BACKEND=OFF", str(ROOT)]  # fmt: skip
    # cmake and ninja are beside this Python. The build in build/wheel is the one that `make install` has made.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    built = subprocess.run(build, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr

    home = tmp_path / "home"
    home.mkdir()
    programs = hide_compilers(os.environ["PATH"], tmp_path / "programs")
    environment = Environment(home / "stoker", borrow_packages(tmp_path / "borrowed"), programs)
    variables = environment.variables | {"HOME": str(home), "OMP_WAIT_POLICY": "passive", "PIP_NO_INDEX": "1"}
    steps = read_page()
    commands = steps["Install"].splitlines()
    install = next(line for line in commands if "dist/stoker" in line)

    def shell(script: str, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=variables, text=True, **options)  # type: ignore[call-overload, no-any-return]

    done = shell(f". ~/stoker/bin/activate\n{install}", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed = done.communicate()[0]
    assert done.returncode == 0, printed
    printed = follow(steps, shell, tmp_path, tmp_path)
    assert "after:  exact match" in printed
    assert "as fast" in printed
    assert "F1" in printed
    assert "score" in printed.splitlines()[-2] + printed.splitlines()[-1], "the exported model answers"
    assert (tmp_path / "demo" / "onnx-int8" / "model.onnx").stat().st_size > 0
    assert (tmp_path / "demo" / "report.html").exists()
    assert shutil.which("stoker", path=str(environment.bin))
