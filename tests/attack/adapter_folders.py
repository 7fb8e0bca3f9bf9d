"""Folders of LoRA adapters with odd configurations and damaged weights, for the commands that load a language model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attack import odd
from attack.case import Case
from attack.command_lines import flat, good_training

__all__ = ["adapter_folder"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ODD: tuple[Any, ...] = (
    None, -1, 0, 3, 1.5, "x", "", [], {}, [None], [-1], {"a": 1}, True, "((", "(a|b|q)*(a|q|[a-z._0-9])*!",
    "(([a-z0-9_.])+)+!", ".*", "all-linear", ["q_proj", "nothing"], [[0, 9]], [[0, 1], [0, 2]], [[0, 10**9]], 10**400,
)  # fmt: skip
_FIELDS: dict[str, tuple[Any, ...]] = {
    "r": (1 << 40, 7, "2"),
    "lora_alpha": (float("nan"), 1e400),
    "lora_dropout": (2.0, float("nan")),
    "target_modules": (["lm_head"], ["embed_tokens"], ["model"], ["layers.0"], ["norm"]),
    "exclude_modules": (["q_proj"],),
    "peft_type": ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "IA3", "LOHA", "ADALORA", "VERA", "OFT", "POLY", "LN_TUNING",
                  "NO_SUCH", "lora", "MULTITASK_PROMPT_TUNING"),
    "task_type": ("SEQ_CLS", "NO_SUCH", "FEATURE_EXTRACTION"),
    "bias": ("all", "lora_only", "no_such"),
    "layer_replication": ([[0, 2]] * 9999,),
    "layers_to_transform": ([0], [99], 10**12),
    "layers_pattern": ("layers", "([a-z.]+)+!"),
    "rank_pattern": ({"q_proj": 5}, {"((": 5}, {"([a-z.]+)+!": 5}, {"q_proj": -1}),
    "alpha_pattern": ({"q_proj": "x"},),
    "modules_to_save": (["lm_head"], ["nothing"]),
    "megatron_config": ({"a": 1},),
    "megatron_core": ("antigravity", "this", "megatron.core"),
    "init_lora_weights": ("pissa", "gaussian", "olora", "loftq", "eva", "corda", "no_such", "orthogonal"),
    "auto_mapping": ({"base_model_class": "system", "parent_library": "os"},),
    "base_model_name_or_path": ("/nowhere", "./nowhere", "no such", "owner/name", "adapter", "/dev/zero", "\0"),
    "revision": ("main", "no such"),
    "trainable_token_indices": ([10**9], [0]),
    "target_parameters": (["q_proj.weight"], ["nothing"]),
    "use_dora": (True,),
    "use_rslora": (True,),
    "loftq_config": ({"a": 1},),
    "no_such_field": (1,),
}  # fmt: skip


def adapter_folder(r: random.Random, base: Path) -> Case:
    changes = [_change(r) for _ in range(r.choice((1, 1, 1, 2)))]

    def before(folder: str) -> None:
        adapter = Path(folder) / "cwd" / "adapter"
        shutil.copytree(base / "adapter", adapter)
        for change in changes:
            change(adapter)

    command = r.choice((
        ["chat", "--model", "adapter", "--prompt", "Who?", "--max_new_tokens", "2"],
        ["use", "--model", "adapter", "--text", "Who?"],
        ["export", "adapter", "--to", r.choice(("safetensors", "gguf")), "--output_dir", "new"],
        ["train", "sft", *flat(good_training("sft")), "--model_name_or_path", "adapter"],
    ))  # fmt: skip
    links = {name: str(base / name) for name in ("llm", "train.jsonl", "dev.jsonl")}
    return Case(command, links=links, before=before, writes=("out", "new"))


def _change(r: random.Random) -> Callable[[Path], None]:
    kind = r.random()
    if kind < 0.7:
        name = r.choice(list(_FIELDS))
        return _setting({name: r.choice(_FIELDS[name] if r.random() < 0.6 else _ODD)})
    if kind < 0.8:
        state = r.getstate()
        file = r.choice((_CONFIG, _WEIGHTS, "tokenizer_config.json"))
        return lambda folder: _damage(folder / file, state)
    return r.choice((_pickled, _without_weights, _other_tensors, _not_finite, _with_a_model_beside))


def _setting(values: dict[str, Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / _CONFIG).read_bytes())
        if isinstance(content, dict):
            (folder / _CONFIG).write_text(json.dumps({**content, **values}))

    return lambda folder: _if_json(folder / _CONFIG, lambda: change(folder))


def _if_json(path: Path, change: Callable[[], None]) -> None:
    """An earlier change may have damaged the file."""
    try:
        change()
    except ValueError:
        path.write_bytes(b"{}")


def _damage(path: Path, state: Any) -> None:
    r = random.Random()
    r.setstate(state)
    path.write_bytes(odd.damage(r, path.read_bytes()))


def _pickled(folder: Path) -> None:
    (folder / _WEIGHTS).unlink(missing_ok=True)
    (folder / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")


def _without_weights(folder: Path) -> None:
    (folder / _WEIGHTS).unlink(missing_ok=True)


def _other_tensors(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save

    (folder / _WEIGHTS).write_bytes(save({"base_model.model.nothing.lora_A.weight": np.zeros((2, 2), np.float32)}))


def _not_finite(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import load, save

    def change() -> None:
        tensors = load((folder / _WEIGHTS).read_bytes())
        (folder / _WEIGHTS).write_bytes(save({name: np.full_like(one, np.nan) for name, one in tensors.items()}))

    if (folder / _WEIGHTS).exists():
        try:
            change()
        except Exception:  # an earlier change has damaged the file
            _without_weights(folder)


def _with_a_model_beside(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
