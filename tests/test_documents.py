"""yaml and JSON from outside are read within limits: none can expand to more memory than it has text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from stoker.cli import main
from stoker.documents import BadDocument, parse_json, parse_yaml

SRC = Path(__file__).resolve().parents[1] / "src" / "stoker"

ALIASES = "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
"""Twelve lines that stand for 9^11 values, as they are found under any key that should hold one word."""
MERGES = "k0: &k0 {x: 1}\n" + "".join(f"k{n}: &k{n}\n  <<: [*k{n - 1}, *k{n - 1}]\n" for n in range(1, 41))
BOMBS = {
    "nested aliases": ALIASES,
    "nested aliases under a word": ALIASES + "mixed_precision: *a11\n",
    "nested aliases as keys": "a: &a [1, 1]\n" + "b: &b {? *a : *a}\nc: &c {? *b : *b}\n",
    "merged mappings": MERGES,
    "a long chain of aliases": "a0: &a0 x\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200)),
    "a long text many times": "a: &a " + "x" * 100_000 + "\nb: [" + ", ".join(["*a"] * 1000) + "]\n",
    "itself": "a: &a [*a]\n",
    "deep lists": "a: " + "[" * 100_000,
    "deep mappings": "\n".join(" " * n + "a:" for n in range(600)),
    "deep keys": "? " * 5000,
    "many values": "a: [" + "1, " * 50_000 + "1]\n",
    "many digits": "a: " + "9" * 5000,
    "many hexadecimal digits": "num_processes: 0x" + "f" * 50_000,
    "many sexagesimal digits": "num_processes: 1" + ":59" * 5000,
    "infinity": "num_processes: .inf\n",
    "not a number": "a: .nan\n",
    "a tag that does not fit": "a: !!timestamp soon\n",
    "a truth that is none": "a: !!bool perhaps\n",
    "a number that is none": "a: !!float x\n",
    "a tag of Python": "a: !!python/object/apply:os.system [exit 3]\n",
    "bytes": "a: !!binary aGVsbG8=\n",
    "a set": "a: !!set {x, y}\n",
    "a NUL": "a: \0\n",
    "control characters": "a: \x01\x02\n",
    "half a character": "a: '\udcff'\n",
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_document_beyond_the_limits_is_refused_at_once_in_one_sentence(text: str) -> None:
    with pytest.raises(BadDocument) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("words", [["config", "show"], ["config", "check"], ["config", "migrate"], ["launch"]])
@pytest.mark.parametrize("name", ["nested aliases under a word", "merged mappings", "a tag that does not fit"])
def test_every_command_that_reads_a_config_file_has_the_limits(
    name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BOMBS[name])
    words = [*words, "--config_file", str(path), __file__] if words == ["launch"] else [*words, str(path)]
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"stoker: config file {path} is not valid yaml: ")
    assert printed.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["c.yaml"]


def test_usual_config_files_are_within_the_limits() -> None:
    shared: list[str] = []
    written = yaml.safe_dump({"tpu_env": shared, "commands": shared, "fsdp_config": {"a": {"b": [1, 2.5, None]}}})
    assert "*id001" in written  # PyYAML writes aliases for what is shared
    assert parse_yaml(written) == {"tpu_env": [], "commands": [], "fsdp_config": {"a": {"b": [1, 2.5, None]}}}
    assert parse_yaml("base: &b {x: 1}\nmore: {<<: *b, y: 2}\n")["more"] == {"x": 1, "y": 2}
    assert parse_yaml("a: 2020-01-02\nb: no\nc: '5'\n")["b"] is False
    assert parse_yaml("") is None


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a": ' * 40 + "1" + "}" * 40, '{"a": 1e999}', '{"a": NaN}', '{"a": ' + "9" * 5000 + "}", "{"],
)
def test_json_has_the_same_limits(text: str) -> None:
    with pytest.raises(BadDocument):
        parse_json(text)
    assert parse_json(json.dumps({"a": [1, 2.5, None, True]})) == {"a": [1, 2.5, None, True]}
    assert not math.isnan(parse_json("1"))


def test_yaml_is_parsed_in_one_place() -> None:
    loads = ("yaml.load", "yaml.safe_load", "yaml.full_load", "yaml.compose", "yaml.SafeLoader", "CSafeLoader")
    found = {path.name for path in SRC.rglob("*.py") if any(word in path.read_text() for word in loads)}
    assert found == {"documents.py"}
