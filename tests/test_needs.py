"""A test whose need is not met is skipped with the reason, whichever of the need's programs is missing."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from parts import PARTS, part_of, pytest_command
from rig.needs import NEEDS, program, unmet

HERE = Path(__file__).parent
PROGRAMS = sorted({entry for need in NEEDS.values() for entry in need.programs})
# For this process and its children, every place of these programs becomes a file that cannot be executed.
HIDE = f"""
import json, os, sys
sys.path.insert(0, {str(HERE)!r})
from attack import sandbox
from rig.needs import NEEDS, places_of_programs, unmet

def hide(entry):
    paths = (os.path.join(place, name) for name in entry.split("|") for place in places_of_programs())
    found = {{os.path.realpath(path) for path in paths if os.access(path, os.X_OK)}}
    for path in found:
        sandbox.mount("/dev/null", path, "", sandbox.BIND)
    return found

sandbox.own_mounts()
"""


def run_hiding(program: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HIDE + program, *words],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.root
@pytest.mark.mounts
def test_whichever_program_is_missing_its_needs_are_not_met_and_the_reason_names_it() -> None:
    each = """
reasons = {}
for entry in sys.argv[1:]:
    hidden = hide(entry)
    reasons[entry] = {name: unmet(name) for name, need in NEEDS.items() if entry in need.programs}
    for path in hidden:
        sandbox.unmount(path)
print(json.dumps(reasons))
"""
    reasons = json.loads(run_hiding(each, *PROGRAMS))
    assert sorted(reasons) == PROGRAMS
    for entry, of_needs in reasons.items():
        for name, reason in of_needs.items():
            assert reason, f"{name} is met without {entry}"
            assert entry.replace("|", " or ") in reason


@pytest.mark.root
@pytest.mark.mounts
def test_where_every_program_is_missing_tests_are_skipped_and_none_fails() -> None:
    """A test that executes a program of another need than its own would fail."""
    needing = [name for name, need in NEEDS.items() if need.programs and name != "mounts"]
    files = [
        str(file) for file in HERE.rglob("test_*.py") if any(f"mark.{name}" in file.read_text() for name in needing)
    ]
    all_of_them = f"""
for entry in {PROGRAMS!r}:
    hide(entry)
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", " or ".join(needing), *files]
    summary = run_hiding(all_of_them, *words).splitlines()[-1]
    assert "skipped" in summary
    assert "passed" not in summary, "a test has a need that it does not use"


def test_a_program_that_no_need_names_is_refused() -> None:
    with pytest.raises(StopIteration):
        program("netns", "tcpdump")


def test_reasons_say_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    assert unmet("browser") == "no chromium or chromium-browser or google-chrome (Debian: chromium)"
    assert unmet("engines") == "no java (Debian: default-jre-headless; `make engines` fetches it)"


def test_all_parts_come_round_by_the_commit() -> None:
    commits = [hashlib.sha1(bytes([number])).hexdigest() for number in range(200)]
    assert {part_of(commit) for commit in commits} == set(PARTS)


@pytest.mark.parametrize("name", ["docs", "kills"])
def test_pytest_takes_the_name_of_a_part_for_no_folder(name: str) -> None:
    """`docs` is the name of both."""
    words = pytest_command(name)[3:]
    assert not [word for word in words if (HERE.parent / word).exists()]
    assert f"--part={name}" in words


def test_the_nightly_workflow_runs_all_parts() -> None:
    import yaml

    workflow = yaml.safe_load((HERE.parent / ".github" / "workflows" / "nightly.yml").read_text())
    assert workflow["jobs"]["part"]["strategy"]["matrix"]["part"] == list(PARTS)
