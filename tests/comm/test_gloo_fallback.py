"""Where the ccl backend cannot be compiled, gloo is used instead: jobs run, and one line says why and what to install."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stoker
from comm.ranks import free_port
from launch.live import launch
from rig import Rig
from stoker.comm import compiled

PROGRAM = str(Path(__file__).with_name("gloo_fallback.py"))
SCRIPT = str(Path(__file__).resolve().parent.parent / "distributed" / "elastic_script.py")
NO_COMPILER = (
    "stoker ccl: ccl runs on gloo, which is slower, because the backend could not be compiled{}: no C++ compiler was found; "
    "install g++ and python3-dev (Debian, Ubuntu), or gcc-c++ and python3-devel (Fedora, RHEL)"
)


@pytest.fixture
def uncompiled(tmp_path: Path) -> dict[str, str]:
    """An environment with a copy of Stoker whose backend has not been compiled, and without a compiler."""
    package = tmp_path / "package" / "stoker"
    shutil.copytree(Path(stoker.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    with open(package / "comm" / "torch_backend" / "backend.cpp", "a") as source:
        source.write("// another version, for which no library has been compiled\n")
    programs = tmp_path / "programs"  # a PATH without compilers
    programs.mkdir()
    for name in ("ip", "nsenter", "unshare", "env", "sh"):
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    cache = tmp_path / "cache"
    return {
        **kept, "PYTHONPATH": str(package.parent), "PATH": str(programs), "STOKER_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def ccl_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("stoker ccl:")]


def test_two_ranks_without_a_compiler_run_on_gloo(uncompiled: dict[str, str]) -> None:
    common = {**uncompiled, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM], env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        ) for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=300) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    for output, _ in outputs:
        assert json.loads(output.splitlines()[-1]) == {"backend": "ccl", "serves": "gloo"}
    assert [ccl_lines(error) for _, error in outputs] == [[NO_COMPILER.format("")], []]


def test_without_python_headers_gloo_is_used_and_the_package_is_named(uncompiled: dict[str, str]) -> None:
    environment = {
        **uncompiled, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1", "RANK": "0",
        "CXX": "g++",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, PROGRAM, "no-headers"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["serves"] == "gloo"
    *_, line = ccl_lines(done.stderr)
    assert line.endswith(
        "because the backend could not be compiled: Python's headers are not in /nonexistent; "
        "install python3-dev (Debian, Ubuntu) or python3-devel (Fedora, RHEL)"
    )


def test_missing_torch_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(compiled.CompiledUnavailable, match=r"torch's C\+\+ headers are not in .*; reinstall torch"):
        compiled._command("g++", tmp_path / "thing.so")


def test_a_required_backend_that_cannot_be_compiled_is_an_error(uncompiled: dict[str, str]) -> None:
    environment = {
        **uncompiled, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1", "RANK": "0",
        "STOKER_CCL_BACKEND": "compiled",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode != 0
    assert "the ccl backend is not compiled on" in done.stderr.splitlines()[-1]


@pytest.mark.part("hosts")
@pytest.mark.root
@pytest.mark.netns
def test_one_host_without_a_compiler_makes_all_hosts_use_gloo(uncompiled: dict[str, str]) -> None:
    with Rig(2) as rig:
        processes = []
        for rank in range(4):
            common = uncompiled if rank >= 2 else {**os.environ, "OMP_NUM_THREADS": "1"}
            own = {
                **common,
                "MASTER_ADDR": rig.address("alpha"),
                "MASTER_PORT": "29525",
                "RANK": str(rank),
                "WORLD_SIZE": "4",
            }
            processes.append(rig.start(rig.hosts[rank // 2], [sys.executable, PROGRAM], env=own))
        outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert all(json.loads(output.splitlines()[-1]) == {"backend": "ccl", "serves": "gloo"} for output, _ in outputs)
    assert [ccl_lines(error) for _, error in outputs] == [[NO_COMPILER.format(" on beta")], [], [], []]


@pytest.mark.part("launch")
def test_a_trainer_with_ddp_backend_ccl_trains_without_a_compiler(uncompiled: dict[str, str], tmp_path: Path) -> None:
    done = launch(
        "-n", "2", "--oversubscribe", SCRIPT, "--ddp_backend", "ccl", "--output_dir", str(tmp_path / "out"),
        "--per_device_train_batch_size", "4", "--max_steps", "3", "--logging_steps", "1", "--report_to", "none",
        env=uncompiled,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ccl runs on gloo, which is slower" in done.stderr
    assert "'waited'" in done.stdout + done.stderr, "the waits of the ranks are still logged"
    assert "Traceback" not in done.stderr
