"""`make mutants`: how many of the faults drawn over src/ and csrc/ do the tests of `make test` notice?

First the tests of `make test` run once with a recorder (reach.py), so that of each fault only the tests run that execute its
function. With --all, the tests of the parts that can run here are recorded too, and try the faults that `make test` misses. The
work is done in a copy of the project, build/mutants/tree; results are added to build/mutants/SEED.jsonl one by one, and a run
that was interrupted continues there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import durations  # noqa: E402
from mutants import reach  # noqa: E402
from mutants.faults import Fault, draw  # noqa: E402
from parts import PARTS  # noqa: E402

WORK = ROOT / "build" / "mutants"
TREE = WORK / "tree"
SECONDS = 1200
EVERY_COMMIT = "every-commit"
_START = TREE / "tests" / "mutants" / "start"


def copy_project() -> None:
    """What git knows, as it is in the working tree; what was built there stays."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in files.stdout.splitlines():
        source, target = ROOT / name, TREE / name
        if source.is_file() and not (target.exists() and target.read_bytes() == source.read_bytes()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target, follow_symlinks=False)


def build() -> bool:
    """False if the compiler refuses it."""
    library = TREE / "build" / "dev"
    if not library.exists():
        subprocess.run(
            ["cmake", "-S", ".", "-B", str(library), "-G", "Ninja"], cwd=TREE, env=environment(), stdout=2, check=True
        )
    return (
        subprocess.run(["cmake", "--build", str(library)], cwd=TREE, env=environment(), capture_output=True).returncode
        == 0
    )


def environment(**more: str) -> dict[str, str]:
    beside = os.path.dirname(sys.executable)
    return os.environ | {
        "PATH": f"{beside}:{os.environ['PATH']}", "PYTHONPATH": str(TREE / "src"), "OMP_WAIT_POLICY": "passive",
        "STOKER_NATIVE_DIR": str(TREE / "build" / "dev"), "PYTHONDONTWRITEBYTECODE": "1", **more,
    }  # fmt: skip


def pytest(*words: str, **more: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    with open(WORK / "log", "w") as log:
        try:
            return subprocess.run(
                command, cwd=TREE, env=environment(**more), stdout=log, stderr=log, timeout=SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            return 1  # a fault that makes a test hang is noticed


def record(part: str) -> None:
    """Runs the tests of a part with the recorder. Those that fail without any fault notice nothing: they are left out later."""
    print(f"recording which tests of the part {part} execute which functions", flush=True)
    unfinished = WORK / "reach.unfinished"
    unfinished.write_text("")
    words = ["-n", "2", "--no-loadscope-reorder", "-p", "each_test", f"--part={part}"]
    pytest(*words, PYTHONPATH=f"{TREE / 'src'}:{_START}", STOKER_REACH=str(unfinished))
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", (WORK / "log").read_text(), re.M)
    failing_of(part).write_text("\n".join(failed))
    unfinished.rename(reach_of(part))


def reach_of(part: str) -> Path:
    return WORK / f"reach-{part}.tsv"


def failing_of(part: str) -> Path:
    return WORK / f"failing-{part}"


def tests_of(fault: Fault, reached: Mapping[tuple[str, int], set[str]]) -> list[str]:
    """Tests that may notice a fault, and whole files of them."""
    if fault.function:
        return sorted(reached.get((fault.file.removeprefix("src/stoker/"), fault.function), set()))
    stem = Path(fault.file).stem
    folders = ("comm", "distributed") if "/comm/" in fault.file else ("kernels", "model")
    files = [path for folder in folders for path in (TREE / "tests" / folder).glob("test_*.py")]
    return [str(path.relative_to(TREE)) for path in sorted(files, key=lambda path: (stem not in path.stem, path))]


def notices(fault: Fault, part: str, reached: Mapping[tuple[str, int], set[str]]) -> bool:
    tests = tests_of(fault, reached)
    if not tests:
        return False
    taken = durations.of_files(tests)
    (WORK / "tests").write_text("\n".join(sorted(tests, key=lambda test: taken[test.partition("::")[0]])))
    skipped = [f"--deselect={test}" for test in failing_of(part).read_text().splitlines()]
    code = pytest("-x", "-n", "2", *skipped, f"--part={part}", f"@{WORK / 'tests'}")
    return code not in (0, 5)  # 5: none of them is in this part


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="where `make test` notices nothing, try the other tests too")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    copy_project()
    if not build():
        raise SystemExit("the project does not compile as it is")
    parts = [EVERY_COMMIT, *(part for part in PARTS if given.all and PARTS[part].has_tests)]
    for part in parts:
        if not reach_of(part).exists():
            record(part)
    reached = {part: reach.read(reach_of(part)) for part in parts}
    results = WORK / f"{given.seed}.jsonl"
    known = {row["fault"]: row for row in map(json.loads, results.read_text().splitlines())} if results.exists() else {}
    for number, fault in enumerate(draw(TREE, given.faults, given.seed), 1):
        if str(fault) not in known:
            known[str(fault)] = row = {"fault": str(fault), "by": try_out(fault, reached)}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{number:4} {known[str(fault)]['by']:<12} {fault}", flush=True)
    summarise([row["by"] for row in known.values()])
    return 0


def try_out(fault: Fault, reached: Mapping[str, Mapping[tuple[str, int], set[str]]]) -> str:
    """Who notices it: the compiler, `make test`, `make test-all`, or nobody."""
    original = (TREE / fault.file).read_text()
    in_cpp = not fault.function
    try:
        fault.plant(TREE)
        if in_cpp and not build():
            return "compiler"
        part = next((part for part, tests in reached.items() if notices(fault, part, tests)), None)
        return "nobody" if part is None else "test" if part == EVERY_COMMIT else "test-all"
    finally:
        (TREE / fault.file).write_text(original)
        if in_cpp:
            build()


def summarise(found: list[str]) -> None:
    real = [by for by in found if by != "compiler"]
    caught = [by for by in real if by != "nobody"]
    here, missed = caught.count("test"), real.count("nobody")
    print(
        f"{len(real)} faults: {here} noticed by `make test`, {len(caught) - here} more by `make test-all`, {missed} by nobody"
    )
    if caught:
        print(f"`make test` notices {here / len(caught):.0%} of what all tests notice")


if __name__ == "__main__":
    sys.exit(main())
