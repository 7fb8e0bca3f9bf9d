"""The package: one wheel for every Python, a native build that knows neither torch nor Python, one version number."""

from __future__ import annotations

import pkgutil
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import stoker
from stoker.requires import VERSIONS

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "csrc").glob("*/*.cpp"))


@pytest.fixture(scope="module")
def installed() -> metadata.Distribution:
    return metadata.distribution("stoker")


def test_the_wheel_is_for_every_python_on_this_platform(installed: metadata.Distribution) -> None:
    tags = re.findall(r"^Tag: (.*)$", installed.read_text("WHEEL") or "", re.M)
    assert tags
    assert all(re.fullmatch(r"py3-none-(many)?linux\w*", tag) for tag in tags), tags


def test_the_wheel_carries_the_native_library_and_the_types(installed: metadata.Distribution) -> None:
    names = {str(file) for file in installed.files or ()}
    assert {"stoker/_native/libstoker-baseline.so", "stoker/_native/stoker.h"} <= names
    assert "stoker/py.typed" in names
    for name in ("page.html.jinja", "live.html.jinja", "live_page.js", "overlay.html.jinja"):
        assert f"stoker/run_report/{name}" in names
    assert not [name for name in names if name.startswith(("tests", "csrc", "docs"))]


@pytest.mark.parametrize("library", VERSIONS)
def test_the_package_asks_for_the_versions_that_are_supported(library: str) -> None:
    """Read from pyproject.toml: the installed metadata may be older than the source."""
    asked = re.findall(rf'"{library}([<>=][^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert asked == [VERSIONS[library].range]


def test_the_makefile_tests_the_oldest_and_the_newest_versions() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"^TORCH +\?= torch==(.*)$", makefile, re.M) == [VERSIONS["torch"].newest]
    for library in ("transformers", "accelerate"):
        assert re.findall(rf"\b{library}==(\S+)", makefile) == [VERSIONS[library].oldest]
    constraints = (ROOT / "constraints.txt").read_text()
    for library in VERSIONS.keys() - {"torch"}:
        assert re.findall(rf"^{library}==(\S+)$", constraints, re.M) == [VERSIONS[library].newest]


def test_all_version_numbers_are_one() -> None:
    declared = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert declared is not None
    assert declared[1] == stoker.__version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {stoker.__version__.partition('.dev')[0]}" in changes


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_the_native_sources_include_neither_torch_nor_python(source: Path) -> None:
    command = ["c++", "-std=gnu++17", "-fopenmp", "-I", str(ROOT / "csrc"), "-M", str(source)]
    headers = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    foreign = [name for name in headers if re.search(r"torch|ATen|c10|Python\.h|pybind", name)]
    assert foreign == []


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_the_native_library_links_to_system_libraries_only(installed: metadata.Distribution) -> None:
    library = Path(str(installed.locate_file("stoker/_native/libstoker-baseline.so")))
    answer = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", answer)
    assert any(name.startswith(("libgomp", "libomp", "libiomp")) for name in needed)
    allowed = re.compile(r"(libgomp|libomp|libiomp5|libstdc\+\+|libc\+\+|libm|libgcc_s|libc|libpthread|ld-linux)[.-].*")
    assert [name for name in needed if not allowed.match(name)] == []


def test_importing_stoker_imports_little() -> None:
    code = "import sys; before = set(sys.modules); import stoker; print(len(set(sys.modules) - before))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(answer) < 40


def test_no_public_function_shares_its_name_with_a_package() -> None:
    """Importing a subpackage binds its name in `stoker`, which would hide a function of the same name."""
    modules = {module.name for module in pkgutil.iter_modules(stoker.__path__)}
    assert modules.isdisjoint(stoker.__all__)
