"""`--push_to_hub`: what is uploaded, and what is reported if the hub cannot be reached. The hub is a local fake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parts import rest_in
from rig import warm
from stoker.hf.secrets import HIDDEN
from tasks.fake_hub import FakeHub, fake_hub
from tasks.language_models import save_tiny_llama, write_chats
from tasks.models import save_tiny_bert

TOKEN = "hf_not_to_be_seen"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        yield running


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_tiny_bert(folder / "bert")
    save_tiny_llama(folder / "llama")
    write_chats(folder / "chats.jsonl", count=16)
    (folder / "rows.tsv").write_text(
        "sentence1\tsentence2\tlabel\n" + "".join(f"a {n}\tb {n}\t{n % 2}\n" for n in range(16))
    )
    (folder / "classes.tsv").write_text("text\tlabel\n" + "".join(f"a text {n}\t{n % 2}\n" for n in range(16)))
    tagged = {"tokens": ["Ada", "wrote"], "ner_tags": ["B-PER", "O"]}
    (folder / "tagged.jsonl").write_text("\n".join([json.dumps(tagged)] * 16))
    (folder / "texts.txt").write_text("\n".join(f"A text about the number {n}." for n in range(40)))
    return folder


def train(
    files: Path, out: Path, endpoint: str, *more: str, task: str = "classify"
) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's library reads its address once, when it is imported."""
    own = {"ner": "tagged.jsonl", "mlm": "texts.txt", "fewshot": "classes.tsv", "sft": "chats.jsonl"}
    data = str(files / own.get(task, "rows.tsv"))
    words = [
        "train", task, "--model_name_or_path", str(files / ("llama" if task == "sft" else "bert")), "--train_file", data,
        "--validation_file", data, "--do_train", "--do_eval", "--max_steps", "2", "--report_to", "none",
        "--save_strategy", "no", "--output_dir", str(out), "--push_to_hub", "--hub_token", TOKEN, *more,
    ]  # fmt: skip
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return warm.run(
        [sys.executable, "-m", "stoker", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


PARTS = {
    "classify": (),
    "ner": (),
    "mlm": (),
    "embed": ("modules.json", "1_Pooling/config.json"),
    "rerank": ("modules.json",),
    "fewshot": ("modules.json", "model_head.safetensors", "config_setfit.json"),
}
"""What belongs to the model of a task beside what every model has."""


@pytest.mark.parametrize("task", rest_in("tasks", PARTS))
def test_model_card_and_report_reach_the_hub(hub: FakeHub, files: Path, tmp_path: Path, task: str) -> None:
    if PARTS[task]:
        pytest.importorskip("setfit" if task == "fewshot" else "sentence_transformers", reason="needs an extra")
    more = ["--max_seq_length", "16"] if task == "mlm" else ["--samples", "0"] if PARTS[task] else []
    done = train(files, tmp_path / "paraphrases", hub.address, *more, task=task)
    assert done.returncode == 0, done.stderr
    pushed = hub.repositories["somebody/paraphrases"]
    expected = {"model.safetensors", "config.json", "tokenizer.json", "README.md", "report.html", *PARTS[task]}
    assert expected <= set(pushed), sorted(pushed)
    assert pushed["model.safetensors"] == (tmp_path / "paraphrases" / "model.safetensors").read_bytes()
    assert b'"stoker"' in pushed["README.md"]
    assert b"/tmp" not in pushed["README.md"].partition(b"\n---\n")[0]
    assert hub.commits == ["End of training"]
    assert b'"somebody/paraphrases"' in pushed["README.md"]
    assert not [name for name in pushed if name.startswith((".", "_", "checkpoint-"))]


@pytest.mark.part("tasks")
@pytest.mark.parametrize(
    ("options", "model"),
    [([], {"adapter_model.safetensors", "adapter_config.json"}), (["--full"], {"model.safetensors", "config.json"})],
    ids=["LoRA", "full"],
)
def test_a_language_model_reaches_the_hub(
    hub: FakeHub, files: Path, tmp_path: Path, options: list[str], model: set[str]
) -> None:
    pytest.importorskip("trl", reason="needs the extra sft")
    done = train(files, tmp_path / "colours", hub.address, "--samples", "1", *options, task="sft")
    assert done.returncode == 0, done.stderr
    pushed = hub.repositories["somebody/colours"]
    assert {*model, "tokenizer.json", "chat_template.jinja", "README.md", "report.html"} <= set(pushed), sorted(pushed)
    for name in model:
        assert pushed[name] == (tmp_path / "colours" / name).read_bytes()
    assert b'"somebody/colours"' in pushed["README.md"]
    assert hub.commits == ["End of training"]
    assert not [name for name, content in pushed.items() if TOKEN.encode() in content]
    assert not [name for name in pushed if name.startswith((".", "_", "checkpoint-"))]


@pytest.mark.part("tasks")
def test_the_token_is_neither_stored_nor_published(hub: FakeHub, files: Path, tmp_path: Path) -> None:
    saving = ["--save_strategy", "steps", "--save_steps", "1", "--hub_strategy", "every_save"]
    done = train(files, tmp_path / "out", hub.address, *saving)
    assert done.returncode == 0, done.stderr
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "training_args.bin" for path in kept)
    assert not [path for path in kept if TOKEN.encode() in path.read_bytes()]
    assert not [name for name, content in hub.repositories["somebody/out"].items() if TOKEN.encode() in content]
    assert f"--hub_token {HIDDEN}" in (tmp_path / "out" / "README.md").read_text()


def test_an_unreachable_hub_stops_the_run_before_training(files: Path, tmp_path: Path) -> None:
    done = train(files, tmp_path / "out", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--push_to_hub: the repository 'out' cannot be created on the hub" in done.stderr
    assert "leave the option out" in done.stderr
    assert "trained to step" not in done.stderr


def test_a_failed_upload_is_reported_and_the_model_is_kept(hub: FakeHub, files: Path, tmp_path: Path) -> None:
    hub.full = True
    done = train(files, tmp_path / "out", hub.address)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert f"upload it with `hf upload somebody/out {tmp_path / 'out'}`" in done.stderr
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 1000
