"""The release workflow and the conda recipe are valid, pinned, and ask for what the package asks for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RECIPE = ROOT / "recipe" / "recipe.yaml"
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def test_workflows_are_valid_by_github_s_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_workflows_pass_the_security_linter() -> None:
    zizmor = Path(sys.executable).with_name("zizmor")
    command = [str(zizmor), "--offline", "--no-progress", *map(str, WORKFLOWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_commit_and_name_their_version(workflow: Path) -> None:
    used = re.findall(r"uses: *(.*)", workflow.read_text())
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_only_the_publishing_job_may_ask_for_an_identity() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release["permissions"] == {"contents": "read"}
    allowed = {name: job["permissions"] for name, job in release["jobs"].items() if "permissions" in job}
    assert allowed == {"publish": {"id-token": "write"}}


def test_every_make_target_in_a_workflow_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    asked = {name for path in WORKFLOWS for name in re.findall(r"run: make ([a-z-]+)", path.read_text())}
    assert asked
    assert asked <= targets


def test_the_conda_recipe_can_be_rendered() -> None:
    from rattler_build.stage0 import Stage0Recipe
    from rattler_build.variant_config import VariantConfig

    variants = VariantConfig({"cxx_compiler": ["gxx"], "c_stdlib": ["sysroot"]})
    assert len(Stage0Recipe.from_file(RECIPE).render(variants)) == 1


def test_the_conda_recipe_has_the_version_and_the_requirements_of_the_package() -> None:
    recipe = yaml.safe_load(RECIPE.read_text())
    assert f'version = "{recipe["context"]["version"]}"' in PYPROJECT
    declared = re.search(r"^dependencies = \[(.*?)^\]", PYPROJECT, re.M | re.S)
    assert declared is not None
    asked = {entry.replace("torch>", "pytorch>") for entry in re.findall(r'"(.*)"', declared[1])}
    assert {entry.replace(" ", "") for entry in recipe["requirements"]["run"]} - {"python>=3.10"} == asked
    assert 'requires-python = ">=3.10"' in PYPROJECT


def test_the_container_is_checked_with_the_files_it_is_built_from() -> None:
    from check_container import SOURCES

    named = (ROOT / ".containerignore").read_text().splitlines()
    assert sorted(line[1:] for line in named if line.startswith("!")) == sorted(SOURCES)
    assert (ROOT / ".dockerignore").resolve() == ROOT / ".containerignore"


def test_the_image_gets_the_versions_that_the_tests_passed_with(tmp_path: Path) -> None:
    """The beginning of build.sh with a pip that only notes how it is called."""
    (tmp_path / "bin").mkdir()
    pip = tmp_path / "bin" / "pip"
    pip.write_text(f"""#!/bin/sh
echo "$@" >>{tmp_path}/calls
if [ "$1" = freeze ]; then echo torch==9.8.7+cpu; fi
""")
    pip.chmod(0o755)
    script = (ROOT / "container" / "build.sh").read_text()
    part = script[script.index("# From PyTorch's own index") : script.index("/opt/stoker/bin/python -m")]
    for word, path in (
        ("/opt/stoker", tmp_path),
        ("/src", ROOT),
        ("/tmp/constraints.txt", tmp_path / "constraints.txt"),
    ):
        part = part.replace(word, str(path))
    subprocess.run(["sh", "-euc", part], check=True, env={"PATH": "/usr/bin:/bin"})
    assert f"install -q -c {tmp_path}/constraints.txt" in (tmp_path / "calls").read_text()
    given = (tmp_path / "constraints.txt").read_text()
    assert given == "torch==9.8.7\n" + (ROOT / "constraints.txt").read_text()
    tested = re.findall(r"^TORCH +\?= (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert re.findall(r"\$\{TORCH:-(.*?)\}", script) == tested
    assert re.findall(r'^ARG TORCH="?(.*?)"?$', (ROOT / "Containerfile").read_text(), re.M) == tested


@pytest.mark.parametrize(("missing", "code"), [("trl", 0), ("numpy.tests", 1)])
def test_the_image_is_built_without_packages_of_other_extras_but_not_with_parts_missing(
    missing: str, code: int, tmp_path: Path
) -> None:
    """The end of build.sh with a Python in which every import fails: there is no `trl` with EXTRAS=hf,embed."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"""#!{sys.executable} -S
import builtins, sys
def fail(*_):
    raise ModuleNotFoundError("No module named {missing!r}", name="{missing}")
builtins.__import__ = fail
exec(sys.argv[2])
""")
    python.chmod(0o755)
    script = (ROOT / "container" / "build.sh").read_text()
    end = script[script.index("# Byte code of what Stoker imports") :]
    done = subprocess.run(["sh", "-euc", end], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
