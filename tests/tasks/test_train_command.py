"""`stoker train` from data to a model that stock transformers loads; mistakes give one sentence and exit code 2."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rig import warm
from stoker.cli import main
from stoker.tasks.demo.world import as_squad, make_world
from tasks.models import byte_level


@pytest.fixture(scope="module")
def squad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    (folder / "train.json").write_text(json.dumps(as_squad(make_world(32, seed=1, training=True))))
    (folder / "dev.json").write_text(json.dumps(as_squad(make_world(12, seed=1, training=False))))
    return folder


def qa_command(bert: Path, squad: Path, out: Path, *more: str) -> list[str]:
    return [
        "train", "qa", "--model_name_or_path", str(bert), "--train_file", str(squad / "train.json"),
        "--validation_file", str(squad / "dev.json"), "--test_file", str(squad / "dev.json"), "--do_train", "--do_eval",
        "--do_predict", "--max_seq_length", "96", "--doc_stride", "16", "--num_train_epochs", "1",
        "--per_device_train_batch_size", "8", "--report_to", "none", "--output_dir", str(out), *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(bert: Path, squad: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the options of an IPEX-era command."""
    out = tmp_path_factory.mktemp("out") / "squad"
    assert main(qa_command(bert, squad, out, "--use_ipex", "--bf16", "--no_cuda")) == 0
    return out


def test_a_run_leaves_model_metrics_predictions_card_log_and_report(trained: Path) -> None:
    expected = {
        "model.safetensors", "config.json", "tokenizer.json", "README.md", "report.html", "run.jsonl", "all_results.json",
        "eval_predictions.json", "eval_nbest_predictions.json", "predict_predictions.json", "predict_nbest_predictions.json",
    }  # fmt: skip
    assert expected <= {path.name for path in trained.iterdir()}
    assert len(json.loads((trained / "predict_predictions.json").read_text())) == 12
    results = json.loads((trained / "all_results.json").read_text())
    assert {"eval_f1", "eval_exact_match", "train_loss"} <= set(results)
    card = (trained / "README.md").read_text()
    assert 'pipeline_tag: "question-answering"' in card
    assert "base_model" not in card  # a folder is no name on the hub
    assert "stoker train qa" in (trained / "run.jsonl").read_text()


STOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "stoker":
            raise ImportError("stoker is not to be used here")
sys.meta_path.insert(0, Blocked())
import json, os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch would load Stoker's backend by its entry point
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer
folder, question, context = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForQuestionAnswering.from_pretrained(folder).eval()
inputs = tokenizer(question, context, return_tensors="pt")
with torch.no_grad():
    output = model(**inputs)
print(json.dumps([type(model).__name__, output.start_logits[0].tolist(), output.end_logits[0].tolist()]))
assert not any(name.split(".")[0] == "stoker" for name in sys.modules)
"""


def test_the_model_answers_in_stock_transformers_without_stoker(trained: Path, tmp_path: Path) -> None:
    import torch

    from stoker.tasks.qa.question_answerer import QuestionAnswerer

    question, context = "Who founded Torwick?", "Torwick was founded by Elusa Halostone. The Ane flows through it."
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = warm.run(
        [sys.executable, "-c", STOCK, str(trained), question, context],
        capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path, transformers=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    name, start, _ = json.loads(done.stdout.splitlines()[-1])
    assert name == "BertForQuestionAnswering"
    answerer = QuestionAnswerer.load(str(trained))
    inputs = answerer.tokenizer(question, context, return_tensors="pt")
    with torch.no_grad():
        ours = answerer.model(**inputs).start_logits[0]
    assert ours == pytest.approx(torch.tensor(start), abs=1e-4)


def test_ask_answers_from_a_file_with_score_and_sentence(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Torwick was founded by Elusa Halostone. The Ane flows through it.")
    assert main(["ask", "--model", str(trained), "--file", str(text), "--question", "Who founded it?", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["answer"] == text.read_text()[answer["begin"] : answer["end"]]
    assert 0 < answer["score"] <= 1
    assert main(["ask", "--model", str(trained), "--file", str(text), "--question", "Who founded it?"]) == 0
    assert "score" in capsys.readouterr().out
    assert main(["ask", "--model", str(trained), "--file", str(text), "--question", "Who? " * 300]) == 2
    assert "the question has 600 tokens" in capsys.readouterr().err


def test_ask_rejects_a_model_that_is_not_trained_for_question_answering(
    bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "--model", str(bert), "--text", "Ada wrote it.", "--question", "Who?"]) == 2
    assert "is not trained for question answering (it has no qa_outputs.bias" in capsys.readouterr().err


def test_evaluating_in_the_folder_of_a_run_does_not_change_its_log(trained: Path, bert: Path, squad: Path) -> None:
    before = (trained / "run.jsonl").read_bytes()
    command = [word for word in qa_command(bert, squad, trained) if word not in {"--do_train", "--do_predict"}]
    assert main(command) == 0
    assert (trained / "run.jsonl").read_bytes() == before


def test_the_same_command_again_resumes_where_it_stopped(
    bert: Path, squad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    command = qa_command(
        bert, squad, tmp_path / "out", "--save_steps", "2", "--max_steps", "4", "--tokens_per_batch", "400"
    )
    assert main(command) == 0
    log = tmp_path / "out" / "run.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if json.loads(line)["kind"] != "complete"))  # as after a kill
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    capsys.readouterr()
    assert main([*command, "--num_train_epochs", "2"]) == 0
    said = capsys.readouterr().err
    assert "resuming from" in said
    assert "other settings" not in said + caplog.text, "--max_steps overrides --num_train_epochs"
    assert main([*command, "--overwrite_output_dir"]) == 0
    said = capsys.readouterr().err
    assert "resuming from" not in said
    assert f"the checkpoints of an earlier run in {tmp_path / 'out'} were deleted" in said


def test_classify_trains_evaluates_and_predicts(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"sentence1": f"word {n} is here", "sentence2": f"there is {n % 3}", "label": ["no", "yes"][n % 2]}
        for n in range(24)
    ]
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    code = main([
        "train", "classify", "--model_name_or_path", str(bert), "--train_file", str(tmp_path / "train.jsonl"),
        "--validation_file", str(tmp_path / "dev.jsonl"), "--test_file", str(tmp_path / "test.jsonl"), "--do_train",
        "--do_eval", "--do_predict", "--num_train_epochs", "1", "--tokens_per_batch", "96", "--report_to", "none",
        "--output_dir", str(out),
    ])  # fmt: skip
    assert code == 0
    assert json.loads((out / "config.json").read_text())["id2label"] == {"0": "no", "1": "yes"}
    assert 0 <= json.loads((out / "eval_results.json").read_text())["eval_accuracy"] <= 1
    lines = (out / "predict_results.txt").read_text().splitlines()
    assert len(lines) == 25
    assert {line.split("\t")[1] for line in lines[1:]} <= {"no", "yes"}
    (tmp_path / "three.jsonl").write_text("\n".join(json.dumps({**row, "label": n % 3}) for n, row in enumerate(rows)))
    again = ["train", "classify", "--model_name_or_path", str(out), "--train_file", str(tmp_path / "three.jsonl")]
    assert main([*again, "--do_train", "--output_dir", str(tmp_path / "three")]) == 2
    assert "--ignore_mismatched_sizes replaces it" in capsys.readouterr().err


MISTAKES = {
    "qa --do_trian --model_name_or_path m --train_file x --output_dir o --do_eval": "did you mean --do_train?",
    "qa --model_name_or_path m --output_dir o": "has nothing to do; add --do_train",
    "qa --model_name_or_path m --do_train --output_dir o": "--train_file is missing",
    "qa --do_train --output_dir o": "--model_name_or_path",
    "sing": "unknown task 'sing'",
    "ner @ --label_names tags": "name the column of the file with --label_column_name",
    "ner @ --validation_file x.json --eval_strategy steps --metric_for_best_model F": "choose one of loss, precision, recall, f1",
    "mlm @ --mlm_probability 1.5": "--mlm_probability is 1.5; it must be above 0 and below 1",
    "mlm @ --masking letters": "invalid choice: 'letters'",
    "mlm @ --do_predict --test_file x.json": "does not predict a test file",
    "mlm @ --do_eval --validation_split_percentage 100": "it must be at least 0 and below 100",
    "mlm @ --train_file=": "--train_file is empty; give a name",
    "classify --model_name_or_path m --task_name mprc --do_train --output_dir o": "is not a GLUE task",
    "qa @ --learning_rate fast": "'fast' is not a finite number",
    "qa @ --max_train_samples 0": "--max_train_samples is 0; it must be 1 or more",
    "qa @ --max_steps 0": "--max_steps is 0; it must be 1 or more, or -1 to train for --num_train_epochs",
    "qa @ --max_steps -2": "--max_steps is -2; it must be 1 or more",
    "qa @ --doc_stride -5": "--doc_stride is -5; it must be 0 or more",
    "qa @ --per_device_train_batch_size 0": "--per_device_train_batch_size is 0",
    "qa @ --gradient_accumulation_steps 0": "--gradient_accumulation_steps is 0",
    "qa @ --learning_rate -1": "--learning_rate is -1.0; it must be 0 or more",
    "qa @ --seed -1": "--seed is -1",
    "qa @ --seed 4294967296": "--seed is 4294967296; it must be below 4,294,967,296",
    "qa @ --dataloader_num_workers -1": "--dataloader_num_workers is -1; it must be 0 or more",
    "qa @ --weight_decay -1": "--weight_decay is -1.0; it must be 0 or more",
    "qa @ --adam_beta1 2": "--adam_beta1 is 2.0; it must be below 1",
    "qa @ --adam_beta2 1": "--adam_beta2 is 1.0; it must be below 1",
    "qa @ --eval_accumulation_steps 0": "--eval_accumulation_steps is 0; it must be 1 or more",
    "qa @ --validation_file x.json --eval_strategy steps --metric_for_best_model exact_mach": "did you mean exact_match?",
    "qa @ --validation_file x.json --eval_strategy steps --metric_for_best_model loss": "choose one of exact_match, f1",
    "classify @ --validation_file x.json --eval_strategy steps --metric_for_best_model acuracy": "did you mean accuracy?",
    "qa @ --token a --use_auth_token b": "--use_auth_token is the former name of --token; give only one of them",
    "qa @ --report_to nope": "--report_to nope: nope is not supported",
    "qa @ --deepspeed x.json": "deepspeed",
    "qa @ --learning_rate inf": "'inf' is not a finite number",
    "qa @ --weight_decay nan": "'nan' is not a finite number",
    "qa @ --max_steps 99999999999999999999": "is not a whole number of at most 18 digits",
    "qa @ --seed " + "9" * 5000: "characters) is not a whole number",
    "qa @ --dataloader_num_workers 99999": "--dataloader_num_workers is 99999; it must be below 1,025",
    "qa @ --tokens_per_batch 999999999999": "--tokens_per_batch is 999999999999; it must be below 134,217,728",
    "qa @ --neftune_noise_alpha -1": "--neftune_noise_alpha is -1.0; it must be 0 or more",
    "qa @ --output_dir=": "--output_dir is empty; give a name",
    "qa @ --cache_dir=": "--cache_dir is empty; give a name",
    "qa @ --output_dir \udcff": "'\\udcff' is not UTF-8 text",
    "qa @ --fsdp full_shard": "--fsdp needs more than one process",
    "qa @ --optim sgd --optim_args momentum=nan": "nan is not a finite number",
    'qa @ --lr_scheduler_type polynomial --lr_scheduler_kwargs {"power":Infinity}': "inf is not a finite number",
    "qa @ --lr_scheduler_kwargs x": "--lr_scheduler_kwargs x: write names and values as JSON",
    "qa @ --gradient_checkpointing_kwargs x": "--gradient_checkpointing_kwargs x: write names and values as JSON",
    "qa @ --torch_compile_mode x": "--torch_compile_mode x is unknown; choose one of default",
    "qa @ --output_dir /proc/none": "--output_dir /proc/none cannot be created",
    "qa options.json": "recipe options.json does not exist",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_an_invalid_request_gets_one_sentence_and_exit_code_two(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text("[]")
    usual = "--model_name_or_path m --train_file x.json --do_train --output_dir o"
    assert main(["train", *words.replace("@", usual).split()]) == 2
    error = capsys.readouterr().err
    assert MISTAKES[words] in error
    assert "Traceback" not in error
    assert len(error) < 1000


def test_a_missing_reporting_package_is_named_as_pip_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    hidden = ("tensorboard", "tensorboardX")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in hidden else found(name, *rest))
    for name in (*hidden, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    words = "--model_name_or_path m --dataset_name d --do_train --report_to tensorboard"
    assert main(["train", "qa", *words.split(), "--output_dir", str(tmp_path)]) == 2
    assert "--report_to tensorboard: tensorboard is not installed; pip install tensorboard" in capsys.readouterr().err


def test_advice_of_a_library_that_is_imported_with_transformers_is_not_shown() -> None:
    """bitsandbytes gives it on CPUs with bf16 units while it is imported."""
    code = "import stoker.tasks, logging; logging.getLogger('bitsandbytes.backends.cpu.ops').warning('install kernels')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_whose_weights_overflow_in_its_last_step_saves_no_model_and_exits_with_code_two(
    bert: Path, squad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = "--learning_rate 1e300 --max_steps 1 --save_strategy no"
    assert main(qa_command(bert, squad, out, *words.split())) == 2
    message = capsys.readouterr().err
    assert "stoker: the weights are no longer finite after step 1; nothing of that step was saved" in message
    assert "Traceback" not in message
    assert not list(out.rglob("*.safetensors"))


def test_a_missing_model_is_reported_in_one_sentence(
    squad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(qa_command(Path("no/such-model"), squad, tmp_path / "out")) == 2
    message = capsys.readouterr().err
    assert "is not a local folder and cannot be loaded from the hub" in message
    assert "name a folder with --model_name_or_path" in message


def test_truncated_weights_are_reported_in_one_sentence(
    trained: Path, squad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(trained, broken, ignore=shutil.ignore_patterns("checkpoint-*"))
    os.truncate(broken / "model.safetensors", 5000)
    assert main(qa_command(broken, squad, tmp_path / "out")) == 2
    assert f"no model can be loaded from the folder {broken}: " in capsys.readouterr().err
    assert main(["ask", "--model", str(broken), "--text", "Ada wrote it.", "--question", "Who?"]) == 2
    assert f"no question-answering model can be loaded from the folder {broken}: " in capsys.readouterr().err


def test_the_best_checkpoint_is_chosen_by_f1(bert: Path, squad: Path, tmp_path: Path) -> None:
    words = "--max_steps 2 --eval_strategy steps --eval_steps 1 --save_strategy steps --save_steps 1"
    words += " --load_best_model_at_end --lr_scheduler_type reduce_lr_on_plateau"
    assert main(qa_command(bert, squad, tmp_path / "out", *words.split())) == 0
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["best_metric"] == max(entry["eval_f1"] for entry in state["log_history"] if "eval_f1" in entry)
    assert state["best_model_checkpoint"]


def test_the_best_metric_is_the_tasks_unless_given(tmp_path: Path) -> None:
    from stoker.tasks.option_parser import OptionParser
    from stoker.tasks.qa.fine_tune import QaOptions
    from stoker.tasks.training_options import check_best

    def best(words: str) -> tuple[str | None, bool | None, dict[str, object] | None]:
        argv = ["--model_name_or_path", "m", "--output_dir", str(tmp_path), "--eval_strategy", "steps", *words.split()]
        args = OptionParser("train qa", QaOptions).read(argv)[-1]
        check_best(args, argv, ("exact_match", "f1"), "f1")
        return args.metric_for_best_model, args.greater_is_better, args.lr_scheduler_kwargs

    assert best("") == (None, None, None)
    assert best("--load_best_model_at_end --save_strategy steps") == ("f1", True, None)
    assert best("--save_strategy best") == ("f1", True, None)
    assert best("--lr_scheduler_type reduce_lr_on_plateau") == ("f1", True, {"mode": "max"})
    assert best("--metric_for_best_model eval_exact_match") == ("eval_exact_match", True, None)


def test_retired_options_of_the_example_scripts_keep_their_meaning(caplog: pytest.LogCaptureFixture) -> None:
    from stoker.tasks.loading import hub_options
    from stoker.tasks.option_parser import OptionParser
    from stoker.tasks.qa.fine_tune import QaOptions
    from stoker.tasks.training_options import ModelOptions

    def model(words: str) -> ModelOptions:
        argv = ["--model_name_or_path", "m", "--output_dir", "o", *words.split()]
        options: ModelOptions = OptionParser("train qa", QaOptions).read(argv)[0]
        return options

    assert model("--use_auth_token").token is True
    assert model("--use_auth_token False").token is False
    assert model("--use_auth_token hf_x").token == "hf_x"
    assert hub_options(model("--use_fast_tokenizer True"))["trust_remote_code"] is False
    assert hub_options(model("--trust_remote_code False"))["trust_remote_code"] is False
    assert hub_options(model("--trust_remote_code"))["trust_remote_code"] is True
    assert not caplog.text
    with caplog.at_level("WARNING", logger="stoker"):
        model("--use_fast_tokenizer False")
    assert "--use_fast_tokenizer False is ignored" in caplog.text


def test_an_encoder_decoder_model_can_be_trained_for_classification(tmp_path: Path) -> None:
    import transformers

    config = transformers.BartConfig(
        vocab_size=400, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64, bos_token_id=0, pad_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=2, problem_type="multi_label_classification",
    )  # fmt: skip
    transformers.BartModel(config).save_pretrained(tmp_path / "bart")
    byte_level().save_pretrained(tmp_path / "bart")
    rows = [{"text": f"word {n} is here", "label": ["no", "yes"][n % 2]} for n in range(12)]
    file, out = tmp_path / "rows.jsonl", tmp_path / "out"
    file.write_text("\n".join(map(json.dumps, rows)))
    code = main([
        "train", "classify", "--model_name_or_path", str(tmp_path / "bart"), "--train_file", str(file),
        "--validation_file", str(file), "--test_file", str(file), "--do_train", "--do_eval", "--do_predict",
        "--max_steps", "2", "--max_seq_length", "32", "--report_to", "none", "--output_dir", str(out),
    ])  # fmt: skip
    assert code == 0
    assert json.loads((out / "config.json").read_text())["problem_type"] == "single_label_classification"
    assert 0 <= json.loads((out / "eval_results.json").read_text())["eval_accuracy"] <= 1
    assert len((out / "predict_results.txt").read_text().splitlines()) == 13


def test_a_hub_data_set_without_the_package_is_reported_in_one_sentence(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    command = ["train", "qa", "--model_name_or_path", str(bert), "--dataset_name", "squad", "--do_train"]
    assert main([*command, "--output_dir", str(tmp_path / "o")]) == 2
    assert "pip install 'stoker[hub]'" in capsys.readouterr().err


def test_resume_together_with_overwrite_deletes_nothing(
    bert: Path, squad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "checkpoint-7").mkdir(parents=True)
    command = qa_command(bert, squad, out, "--overwrite_output_dir", "--resume_from_checkpoint", "True")
    assert main(command) == 2
    assert "there is no checkpoint to resume from" in capsys.readouterr().err
    assert (out / "checkpoint-7").exists()


@pytest.mark.parametrize("task", ["qa", "classify", "fewshot", "ner", "mlm", "sft", "embed", "rerank"])
def test_help_fits_on_a_screen(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", task, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 48
    assert any("--push_to_hub" in line for line in lines)


def test_help_all_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "qa", "--help-all"]) == 0
    everything = capsys.readouterr().out
    assert {"--lr_scheduler_type", "--use_ipex", "--doc_stride", "--fsdp"} <= set(everything.replace(",", " ").split())


@pytest.mark.part("tasks")
def test_a_log_file_gets_plain_lines(bert: Path, squad: Path, tmp_path: Path) -> None:
    done = warm.run(
        [sys.executable, "-m", "stoker", *qa_command(bert, squad, tmp_path / "out", "--max_steps", "2")],
        capture_output=True, text=True, timeout=300, transformers=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 2/2  loss" in done.stderr
    assert "tokens/s" in done.stderr
    assert "\x1b" not in done.stderr
    assert "it/s" not in done.stderr
    assert len(done.stderr.splitlines()) < 15, done.stderr


def test_training_continues_when_the_reader_of_its_output_exits(bert: Path, squad: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stoker", *qa_command(bert, squad, tmp_path / "out", "--max_steps", "2")]
    process = warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, transformers=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    assert process.wait(timeout=300) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize("busy", [False, True])
def test_rates_measured_before_training_include_the_clock(
    busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without it, `stoker doctor` could only show them as shares of the nominal peak.
    from stoker.machine import Machine, load, measure
    from stoker.machine.rates import Rates
    from stoker.tasks.training_run import machine_rates

    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("stoker.kernels.clock.clock_ghz", lambda threads: 3.5)
    full = measure.measure_rates

    def short(machine: Machine, *, clock: measure.Clock | None) -> Rates:
        return dataclasses.replace(full(machine, clock=clock, seconds=0.2), disturbed=busy)

    monkeypatch.setattr(measure, "measure_rates", short)
    monkeypatch.setattr(load, "current_load", lambda: load.Load(busy=2.0, stolen=0.0, cpus=2))
    assert machine_rates(print).clock_all == 3.5
    monkeypatch.setattr(measure, "product_gflops", lambda *_: (1e9, 128, 3.7))
    again = machine_rates(print)
    # Only rates that may be too low are checked in every run.
    assert (again.fp32_all == 1e9, again.clock_all) == ((True, 3.7) if busy else (False, 3.5))


@pytest.mark.parametrize(("busy", "measured"), [(0.0, 1), (2.0, 0)], ids=["quiet now", "still busy"])
def test_rates_of_a_busy_machine_are_measured_again_when_it_is_quiet(
    busy: float, measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.machine import Machine, load, measure, rates, this_machine
    from stoker.tasks.training_run import machine_rates

    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path))
    first = dataclasses.replace(measure.measure_rates(this_machine(), clock=None, seconds=0.2), disturbed=True)
    assert rates.save(this_machine(), first) is None
    calls: list[Machine] = []

    def again(machine: Machine, *, clock: measure.Clock | None) -> rates.Rates:
        calls.append(machine)
        return dataclasses.replace(first, bandwidth_all=2.0 * first.bandwidth_all, disturbed=False)

    monkeypatch.setattr(measure, "measure_rates", again)
    monkeypatch.setattr(load, "current_load", lambda: load.Load(busy=busy, stolen=0.0, cpus=2))
    found = machine_rates(print)
    assert len(calls) == measured
    assert found.bandwidth_all == (1 + measured) * first.bandwidth_all
    machine_rates(print)
    assert len(calls) == measured  # stored


def test_three_text_columns_are_reported_in_one_sentence(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.jsonl").write_text('{"a": "x", "b": "y", "c": "z", "label": 1}\n')
    words = ["--model_name_or_path", str(bert), "--train_file", str(tmp_path / "d.jsonl"), "--do_train"]
    for names in ("a,b,c", "a,"):
        more = ["--text_column_names", names, "--output_dir", str(tmp_path / "o")]
        assert main(["train", "classify", *words, *more]) == 2
        assert f"--text_column_names {names}: name one column, or two" in capsys.readouterr().err


def test_a_file_size_limit_is_reported_in_one_sentence_and_keeps_old_files(
    bert: Path, squad: Path, tmp_path: Path
) -> None:
    """The weights of the first checkpoint fit below the limit; those of the second do not, once the limit is lower."""
    out = tmp_path / "out"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000 << 10,) * 2)"  # as ulimit -f 1000 does
    code = "import sys; from stoker.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [
        arg for arg in qa_command(bert, squad, out, "--save_steps", "1") if arg not in ("--do_eval", "--do_predict")
    ]
    kept: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "transformers": True}
    first = warm.run([sys.executable, "-c", code, *words, "--max_steps", "1"], **kept)
    assert first.returncode == 0, first.stderr
    before = {path: path.read_bytes() for path in sorted((out / "checkpoint-1").iterdir())}
    more = ["--max_steps", "2", "--resume_from_checkpoint", "True"]
    done = warm.run([sys.executable, "-c", f"{limit}; {code}", *words, *more], **kept)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("stoker: checkpoint-2 could not be written: the size limit of a file is 1.0 MB (ulimit -f)")
    assert f"{out / 'checkpoint-1'} is the last good checkpoint, and complete" in last
    assert {path: path.read_bytes() for path in sorted((out / "checkpoint-1").iterdir())} == before
    assert not (out / "checkpoint-2").exists()
