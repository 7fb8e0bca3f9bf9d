"""An adapter that cannot be used is refused in one sentence, whatever PEFT makes of its files."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs the extra sft")

from stoker import bounded
from stoker.cli import main
from stoker.errors import UserError
from stoker.tasks.sft.language_model import load_for_chat
from tasks.language_models import save_tiny_llama, tokenizer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Break = Callable[[Path], None]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("adapter")
    base = AutoModelForCausalLM.from_pretrained(save_tiny_llama(root / "base"))
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    get_peft_model(base, config).save_pretrained(root / "lora")
    tokenizer().save_pretrained(root / "lora")
    return root / "lora"


def setting(**values: Any) -> Break:
    def change(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**content, **values}))

    return change


class _Code:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(_Code()))


def _writing(name: str, content: bytes) -> Break:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


BROKEN: dict[str, tuple[Break, str]] = {
    "r is negative": (setting(r=-1), "`r` should be a positive integer value"),
    "r is text": (setting(r="2"), "from adapter_config.json and the weights"),
    "r is another": (setting(r=3), "size mismatch"),
    "target_modules match nothing": (setting(target_modules=["nothing"]), "not found in the base model"),
    "target_modules are numbers": (setting(target_modules=[1, None]), "from adapter_config.json and the weights"),
    "target_modules are no pattern": (setting(target_modules="(("), "from adapter_config.json and the weights"),
    "the pattern never ends": (setting(target_modules="(([a-z0-9_.])+)+!"), "takes more than 0.2 s"),
    "megatron_core is a module": (setting(megatron_config={"a": 1}, megatron_core="antigravity"), "megatron"),
    "prompts are tuned": (setting(peft_type="PROMPT_TUNING", num_virtual_tokens=4), "PROMPT_TUNING"),
    "the type is unknown": (setting(peft_type="NO_SUCH"), "NO_SUCH"),
    "layers are repeated": (setting(layer_replication=[[0, 2], [0, 2]]), "repeats layers of its base model"),
    "the weights are a pickle": (_pickled, "contains pickled code, which is never loaded"),
    "the weights are cut": (_writing(WEIGHTS, b"\0" * 20), "adapter_model.safetensors is damaged"),
    "the configuration is a list": (_writing(CONFIG, b"[]"), CONFIG),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_adapter_gets_one_sentence(
    fault: str, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    change, expected = BROKEN[fault]
    change(Path(shutil.copytree(adapter, tmp_path / "lora")))
    with pytest.raises(UserError) as caught:
        load_for_chat(str(tmp_path / "lora"))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "has no config.json" not in str(caught.value)
    assert "executed" not in capsys.readouterr().out


def test_commands_end_with_exit_code_two_for_a_broken_adapter(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "lora"))
    setting(r=-1)(folder)
    assert main(["chat", "--model", str(folder), "--prompt", "Which?"]) == 2
    assert main(["export", str(folder), "--to", "safetensors", "--output_dir", str(tmp_path / "new")]) == 2
    printed = capsys.readouterr().err
    assert printed.count("no adapter can be loaded from the folder") == 2
    assert "Traceback" not in printed
