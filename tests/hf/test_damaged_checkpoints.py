"""A damaged checkpoint is detected before anything is loaded: the newest intact one is used, and the damage is logged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf import tiny
from stoker.errors import UserError
from stoker.hf.checkpointing import choice, folders, manifest, run_facts

SETTINGS: dict[str, Any] = {"max_steps": 4, "save_steps": 2}
FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoint-2 and checkpoint-4; not to be written to."""
    folder = tmp_path_factory.mktemp("trained")
    tiny.trainer(folder, **SETTINGS).train()
    return folder


@pytest.fixture
def run(trained: Path, tree_path: Path) -> Path:
    return Path(shutil.copytree(trained, tree_path / "run"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """One bit in the middle, where the numbers are; the file system notices nothing."""
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 0x10]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, empty, flip, Path.unlink, replace_by_folder])
@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_is_detected_and_the_older_checkpoint_is_used(
    run: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert choice.newest_usable(run) == run / "checkpoint-4"
    damage(run / "checkpoint-4" / name)
    with caplog.at_level("WARNING", logger="stoker"):
        assert choice.newest_usable(run) == folders.last_good(run) == run / "checkpoint-2"
    assert f"{run / 'checkpoint-4'} is skipped because it cannot be resumed from: {name} " in caplog.text


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in FILES for damage in (truncate, empty)),
        ("optimizer.pt", flip),
        ("rng_state.pth", flip),
    ],
)
def test_without_a_manifest_damage_is_detected_by_the_structure_of_the_files(
    run: Path, name: str, damage: Callable[[Path], None]
) -> None:
    (run / "checkpoint-4" / manifest.NAME).unlink()
    assert folders.why_unusable(run / "checkpoint-4") is None
    damage(run / "checkpoint-4" / name)
    reason = folders.why_unusable(run / "checkpoint-4")
    assert reason is not None
    assert reason.startswith(name)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"files": {"../x": {"size": 1, "crc32": ""}}}', b"[" * 100_000]
)
def test_a_damaged_manifest_makes_a_checkpoint_unusable_without_an_exception(run: Path, content: bytes) -> None:
    (run / "checkpoint-4" / manifest.NAME).write_bytes(content)
    assert choice.newest_usable(run) == run / "checkpoint-2"


@pytest.mark.parametrize("content", ["[]", "7", "null", '{"global_step": "4"}', "[" * 100_000])
def test_an_invalid_trainer_state_makes_a_checkpoint_unusable_without_an_exception(run: Path, content: str) -> None:
    (run / "checkpoint-4" / manifest.NAME).unlink()
    (run / "checkpoint-4" / "trainer_state.json").write_text(content)
    assert choice.newest_usable(run) == run / "checkpoint-2"


def test_a_run_whose_newest_checkpoint_is_damaged_ends_with_the_weights_of_an_uninterrupted_run(
    trained: Path, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    truncate(run / "checkpoint-4" / "optimizer.pt")
    trainer = tiny.trainer(run, **SETTINGS)
    with caplog.at_level("WARNING", logger="stoker"):
        trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-4 is skipped" in caplog.text
    whole = transformers.BertForSequenceClassification.from_pretrained(trained / "checkpoint-4").state_dict()
    assert all(torch.equal(whole[name], value) for name, value in trainer.model.state_dict().items())
    assert choice.newest_usable(run) == run / "checkpoint-4"  # written again


def test_a_damaged_checkpoint_given_by_name_is_refused_and_the_newest_intact_one_suggested(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(run / "checkpoint-4" / "model.safetensors")
    with pytest.raises(UserError) as refusal:
        tiny.trainer(run, **SETTINGS).train(resume_from_checkpoint=str(run / "checkpoint-4"))
    message = str(refusal.value)
    assert message.startswith(
        f"{run / 'checkpoint-4'} cannot be resumed from: model.safetensors does not match its checksum"
    )
    assert f"{run / 'checkpoint-2'} is the newest complete one, give that instead" in message
    assert f"delete {manifest.NAME}" in message
    assert "is skipped" not in caplog.text  # the refusal says it
    empty(run / "checkpoint-2" / "scheduler.pt")
    with pytest.raises(UserError, match="no other checkpoint beside it is complete"):
        tiny.trainer(run, **SETTINGS).train(resume_from_checkpoint=str(run / "checkpoint-4"))


def test_damage_found_only_by_loading_is_a_user_error(run: Path) -> None:
    checkpoint = run / "checkpoint-4"
    (checkpoint / manifest.NAME).unlink()
    (checkpoint / "optimizer.pt").write_bytes(b"\x80\x02garbage")
    with pytest.raises(UserError, match="checkpoint-4 cannot be resumed from"):
        tiny.trainer(run, **{**SETTINGS, "max_steps": 6}).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_an_optimizer_or_scheduler_state_of_the_wrong_kind_is_a_user_error(run: Path, name: str) -> None:
    newest = run / "checkpoint-4"
    (newest / manifest.NAME).unlink()
    torch.save({"a": 1}, newest / name)
    with pytest.raises(UserError, match="checkpoint-4 cannot be resumed from"):
        tiny.trainer(run, max_steps=6, save_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "rmsprop"])
def test_an_optimizer_that_cannot_use_the_saved_state_is_refused(run: Path, optim: str) -> None:
    with pytest.raises(UserError, match=f"--optim adamw_torch.*, and --optim {optim} cannot continue from its state"):
        tiny.trainer(run, **{**SETTINGS, "max_steps": 6, "optim": optim}).train(resume_from_checkpoint=True)


def test_an_optimizer_with_the_same_state_resumes(run: Path) -> None:
    trainer = tiny.trainer(run, **{**SETTINGS, "max_steps": 6, "optim": "adamw_torch"})
    before = run_facts.read(run / "checkpoint-4")["run"]["optimizer"]
    other = "adamw_torch_fused" if before == "adamw_torch" else "adamw_torch"
    trainer.args.optim = transformers.training_args.OptimizerNames(other)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6


@pytest.mark.parametrize("content", ["[]", '{"model": 5}', '{"run": [1]}', "[" * 100_000])
def test_an_invalid_file_of_run_facts_is_ignored(run: Path, content: str) -> None:
    checkpoint = run / "checkpoint-4"
    (checkpoint / manifest.NAME).unlink()
    (checkpoint / run_facts.NAME).write_text(content)
    assert run_facts.check(checkpoint, {"model": {"shapes": "a"}, "data": {"rows": 1}, "run": {"seed": 1}}) == []


def test_files_that_resuming_does_not_read_may_be_changed_and_deleted(run: Path) -> None:
    checkpoint = run / "checkpoint-4"
    (checkpoint / "training_args.bin").unlink()
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "notes.txt").write_text("the good one")
    assert folders.why_unusable(checkpoint) is None


def test_a_checkpoint_of_stock_transformers_is_resumed(tree_path: Path) -> None:
    args = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, **SETTINGS}
    stock = transformers.Trainer(
        tiny.tiny_model(), transformers.TrainingArguments(str(tree_path), **args),
        data_collator=tiny.pad, train_dataset=tiny.TinyData(),
    )  # fmt: skip
    stock.train()
    assert not list(tree_path.rglob(manifest.NAME))
    ours = tiny.trainer(tree_path, **{**SETTINGS, "max_steps": 5})
    ours.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in ours.state.log_history if "tokens_per_second" in entry] == [5]


def test_shards_and_adapters_are_in_the_manifest_and_checked_without_one(run: Path) -> None:
    checkpoint = run / "checkpoint-4"
    model = tiny.tiny_model()
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="20KB")
    (checkpoint / "second").mkdir()
    shutil.copy(run / "checkpoint-2" / "model.safetensors", checkpoint / "second" / "adapter_model.safetensors")
    shards = sorted(path.name for path in checkpoint.glob("model-*.safetensors"))
    assert len(shards) > 1
    folders.seal_again(checkpoint)
    listed = json.loads((checkpoint / manifest.NAME).read_text())["files"]
    assert {*shards, "model.safetensors.index.json", "second/adapter_model.safetensors"} <= set(listed)
    assert folders.why_unusable(checkpoint) is None
    for damaged in (shards[-1], "second/adapter_model.safetensors"):
        kept = (checkpoint / damaged).read_bytes()
        truncate(checkpoint / damaged)
        assert str(folders.why_unusable(checkpoint)).startswith(damaged)
        (checkpoint / damaged).write_bytes(kept)
    (checkpoint / manifest.NAME).unlink()
    assert folders.why_unusable(checkpoint) is None
    truncate(checkpoint / shards[-1])
    assert str(folders.why_unusable(checkpoint)).startswith(shards[-1])
    (checkpoint / shards[-1]).unlink()
    assert f"names {shards[-1]}, which is missing" in str(folders.why_unusable(checkpoint))


def test_a_run_with_adapters_resumes_from_the_older_checkpoint(tree_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def trainer() -> Any:
        config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        torch.manual_seed(3)
        return tiny.trainer(tree_path, model=peft.get_peft_model(tiny.tiny_model(), config), **SETTINGS)

    trainer().train()
    adapter = tree_path / "checkpoint-4" / "adapter_model.safetensors"
    kept = adapter.read_bytes()
    flip(adapter)
    trainer().train(resume_from_checkpoint=True)
    assert adapter.read_bytes() == kept
    (tree_path / "checkpoint-4" / manifest.NAME).unlink()
    truncate(adapter)
    assert choice.newest_usable(tree_path) == tree_path / "checkpoint-2"


class RewritesWeights(transformers.TrainerCallback):
    """As callbacks do that save adapters, or round weights, into the checkpoint that was just written."""

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        with torch.no_grad():
            model.classifier.bias += 0.125
        model.save_pretrained(folder)
        (folder / "extra.pt").write_bytes(b"\x80\x02more")


def test_a_callback_may_change_the_checkpoint_in_on_save(tree_path: Path) -> None:
    trainer = tiny.trainer(tree_path, **SETTINGS)
    trainer.add_callback(RewritesWeights())
    trainer.train()
    manifest._KNOWN_INTACT.clear()  # as another process would see it
    assert choice.newest_usable(tree_path) == tree_path / "checkpoint-4"
    listed = json.loads((tree_path / "checkpoint-4" / manifest.NAME).read_text())["files"]
    assert "extra.pt" in listed


def test_a_damaged_best_model_is_not_loaded_and_a_warning_says_so(
    tree_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tiny.trainer(
        tree_path, **SETTINGS, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", greater_is_better=False, learning_rate=0.0,
    )  # fmt: skip

    class Damage(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == 3:
                flip(tree_path / "checkpoint-2" / "model.safetensors")

    trainer.add_callback(Damage())
    with caplog.at_level("WARNING", logger="stoker"):
        trainer.train()
    assert trainer.state.best_model_checkpoint == str(tree_path / "checkpoint-2")
    assert (
        f"the best model cannot be loaded: in {tree_path / 'checkpoint-2'}, model.safetensors does not" in caplog.text
    )
    assert "the weights of the last step are kept" in caplog.text
    last = transformers.BertForSequenceClassification.from_pretrained(tree_path / "checkpoint-4").state_dict()
    assert all(torch.equal(last[name], value) for name, value in trainer.model.state_dict().items())


def test_archives_written_without_checksums_are_not_considered_damaged(run: Path) -> None:
    checkpoint = run / "checkpoint-4"
    (checkpoint / manifest.NAME).unlink()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state": torch.arange(100)}, checkpoint / "optimizer.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert folders.why_unusable(checkpoint) is None
