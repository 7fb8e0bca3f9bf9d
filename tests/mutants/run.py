"""`make mutants`: how many of the faults drawn over src/ and csrc/ do the tests of `make test` notice?

First all tests run once with a recorder (reach.py), so that of each fault only the tests run that execute its function: those
of `make test`, and with --all, if they pass, those of the parts that can run here. The work is done in a copy of the project,
build/mutants/tree; results are added to build/mutants/SEED.jsonl one by one, and a run that was interrupted continues there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import durations  # noqa: E402
from mutants import reach  # noqa: E402
from mutants.faults import Fault, draw  # noqa: E402

WORK = ROOT / "build" / "mutants"
TREE = WORK / "tree"
REACH = WORK / "reach.tsv"
FAILING = WORK / "failing"  # without any fault: these notice nothing
SECONDS = 1200
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


def record() -> None:
    print("recording which tests execute which functions: every test once, about half an hour", flush=True)
    unfinished = WORK / "reach.unfinished"
    unfinished.unlink(missing_ok=True)
    path = f"{TREE / 'src'}:{_START}"
    pytest("-n", "2", "--no-loadscope-reorder", "-p", "each_test", PYTHONPATH=path, STOKER_REACH=str(unfinished))
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", (WORK / "log").read_text(), re.M)
    FAILING.write_text("\n".join(failed))
    unfinished.rename(REACH)


def tests_of(fault: Fault, reached: Mapping[tuple[str, int], set[str]]) -> list[str]:
    """Tests that may notice a fault, and whole files of them."""
    if fault.function:
        return sorted(reached.get((fault.file.removeprefix("src/stoker/"), fault.function), set()))
    stem = Path(fault.file).stem
    folders = ("comm", "distributed") if "/comm/" in fault.file else ("kernels", "model")
    files = [path for folder in folders for path in (TREE / "tests" / folder).glob("test_*.py")]
    return [str(path.relative_to(TREE)) for path in sorted(files, key=lambda path: (stem not in path.stem, path))]


def notices(tests: Iterable[str], part: str | None) -> bool:
    taken = durations.of_files(tests)
    chosen = sorted(tests, key=lambda test: taken[test.partition("::")[0]])
    if not chosen:
        return False
    (WORK / "tests").write_text("\n".join(chosen))
    skipped = [f"--deselect={test}" for test in FAILING.read_text().splitlines()]
    code = pytest("-x", "-n", "2", *skipped, *(["--part", part] if part else []), f"@{WORK / 'tests'}")
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
    if not REACH.exists():
        record()
    reached = reach.read(REACH)
    results = WORK / f"{given.seed}.jsonl"
    known = {row["fault"]: row for row in map(json.loads, results.read_text().splitlines())} if results.exists() else {}
    for number, fault in enumerate(draw(TREE, given.faults, given.seed), 1):
        if str(fault) not in known:
            known[str(fault)] = row = {"fault": str(fault), "by": try_out(fault, reached, everything=given.all)}
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{number:4} {known[str(fault)]['by']:<12} {fault}", flush=True)
    summarise([row["by"] for row in known.values()])
    return 0


def try_out(fault: Fault, reached: Mapping[tuple[str, int], set[str]], *, everything: bool) -> str:
    """Who notices it: the compiler, `make test`, `make test-all`, or nobody."""
    original = (TREE / fault.file).read_text()
    in_cpp = not fault.function
    try:
        fault.plant(TREE)
        if in_cpp and not build():
            return "compiler"
        tests = tests_of(fault, reached)
        if notices(tests, "every-commit"):
            return "test"
        return "test-all" if everything and notices(tests, None) else "nobody"
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
