"""Runs every kernel on several builds of the native library and compares the results. Needs Python and numpy, not torch.

    python tests/kernels/builds_agree.py DIRECTORY baseline avx2

DIRECTORY holds the builds. Exits 0 if every case agrees on all of them and every exported function has a case; a kernel that
leaves its buffers ends the process with SIGSEGV, after the name of the case. For tests/kernels/emulate.py, `--write` keeps a
checksum of every result, `--files` lists what the process has loaded, and `--expect` compares with checksums from elsewhere.
For tests/kernels/arm.py, `--results` keeps the results of the first build, and `--against` compares with such a file.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
from build_cases import CASES, LEFT_OUT, Case, Results
from native_calls import Native

# What rounding may do between builds, as a share of the result and of the largest result of its kind: sums of some hundred
# products in another order for fp32, one unit in the last place for bf16. Seen between baseline and AVX2: 5e-7 and 0.0015.
TOLERANCE = {"float32": 3e-6, "float64": 3e-6, "bf16": 2.0**-8}


def widened(values: np.ndarray) -> tuple[np.ndarray, str]:
    """As fp64, and the name of the storage type; the cases keep bf16 as uint16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64), "bf16"
    return values.astype(np.float64), str(values.dtype)


def difference(found: np.ndarray, expected: np.ndarray, exact: bool) -> str | None:
    """How two results of a case differ beyond what is allowed, or None."""
    if found.tobytes() == expected.tobytes():
        return None
    a, kind = widened(found)
    b, _ = widened(expected)
    bad = np.isfinite(a) != np.isfinite(b)
    gap = np.abs(np.where(np.isfinite(a) & np.isfinite(b), a - b, 0.0))
    largest = np.abs(np.where(np.isfinite(b), b, 0.0)).max()
    worst = float((gap / (np.abs(b) + largest + 1e-30)).max())
    if not exact and not bad.any() and worst <= TOLERANCE[kind]:
        return None
    where = np.flatnonzero((gap > 0) | bad)
    allowed = 0.0 if exact else TOLERANCE[kind]
    return f"{where.size} of {gap.size} elements differ, first {where[:4]}, at most {worst:.2g} ({kind}, allowed {allowed:.2g})"


def compare(
    case: Case, builds: dict[str, Native], expected: dict[str, int], reference: Results | None = None
) -> tuple[list[str], dict[str, int], Results]:
    """What differs in a case, the checksum of its results on each build, and the reference results.

    The reference is the first build's, unless results from another machine are given.
    """
    wrong, sums = [], {}
    origin = "the other machine" if reference else next(iter(builds))
    for level, native in builds.items():
        print(f"{case.name}: {level}", flush=True)
        results = {name: np.array(values) for name, values in case.run(native).items()}
        native.check_and_release()
        sums[level] = zlib.crc32(b"".join(values.tobytes() for values in results.values()))
        if sums[level] != expected.get(level, sums[level]):
            wrong.append(f"{case.name}: {level} gives other bits here than on the machine the checksums are from")
        reference = reference or results
        for name, values in results.items():
            if text := difference(values, reference[name], case.exact):
                wrong.append(f"{case.name}: {name} of {level} is not that of {origin}: {text}")
    assert reference is not None
    return wrong, sums, reference


def save_results(path: Path, results: dict[str, Results]) -> None:
    named = {f"{case}\n{name}": values for case, arrays in results.items() for name, values in arrays.items()}
    np.savez(path, names=list(named), **{f"array{index}": values for index, values in enumerate(named.values())})


def load_results(path: Path) -> dict[str, Results]:
    results: dict[str, Results] = {}
    with np.load(path) as archive:
        for index, both in enumerate(archive["names"]):
            case, _, name = str(both).partition("\n")
            results.setdefault(case, {})[name] = archive[f"array{index}"]
    return results


def exported(library: Path) -> set[str]:
    run = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in run.stdout.splitlines()}
    return {name for name in names if name.startswith("stoker_")}


def without_case(directory: Path, reached: set[str]) -> set[str]:
    """Functions that any build exports, also those that cannot run here, and no case calls."""
    libraries = sorted(directory.glob("libstoker-*.so"))
    return set().union(*map(exported, libraries)) - reached - LEFT_OUT.keys()


def loaded_files() -> list[str]:
    """The files that a machine needs to run what this process has run."""
    files = set()
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        files |= {getattr(module, "__file__", None), getattr(spec, "cached", None)}
    with open("/proc/self/maps") as maps:
        files |= {line.split()[-1] for line in maps}
    return sorted(file for file in files if file and file.startswith("/") and Path(file).is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("builds", nargs="+")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--files", type=Path)
    parser.add_argument("--expect", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    faulthandler.enable()
    directory = options.directory.resolve()  # the loader searches elsewhere for a name without a directory
    builds = {level: Native(str(directory / f"libstoker-{level}.so")) for level in options.builds}
    expected = json.loads(options.expect.read_text()) if options.expect else {}
    reference = load_results(options.against) if options.against else {}
    wrong: list[str] = []
    sums, results = {}, {}
    cases = [case for case in CASES if case.emulated or not options.expect]
    for case in cases:
        if options.against and case.name not in reference:
            wrong.append(f"{case.name}: not in {options.against}")
        differing, sums[case.name], results[case.name] = compare(
            case, builds, expected.get(case.name, {}), reference.get(case.name)
        )
        wrong += differing
    for level, native in builds.items():
        if (found := native.call("isa").decode()) != level:
            wrong.append(f"libstoker-{level}.so says that it is {found}")
    if not options.expect and not options.against:  # an emulated machine has no nm, and its cases are the same
        missing = without_case(directory, set().union(*(native.reached for native in builds.values())))
        wrong += [f"{name} is exported but has no case in tests/kernels/build_cases.py" for name in sorted(missing)]
    if options.write:
        options.write.write_text(json.dumps(sums))
    if options.results:
        save_results(options.results, results)
    if options.files:
        options.files.write_text("\n".join(loaded_files()))
    print("\n".join(wrong) if wrong else f"{len(cases)} cases x {len(builds)} builds equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
