"""`stoker train embed` from data to a SentenceTransformer that stock libraries load; mistakes give one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from parts import rest_in

pytest.importorskip("sentence_transformers", reason="needs the extra embed")

from stoker.cli import main
from tasks.models import save_tiny_bert
from tasks.sentence_files import rows_of, write_lines
from tasks.task_runs import assert_resumes_exactly, entries, in_two_ranks, train_command, weights


def command(model: Path, data: Path, out: Path, *more: str) -> list[str]:
    return train_command("embed", model, data, out, *more)


@pytest.mark.parametrize(
    ("kind", "loss", "score"),
    [
        ("pairs", "MultipleNegativesRankingLoss", "cosine_ndcg@10"),
        ("triplets", "MultipleNegativesRankingLoss", "cosine_accuracy"),
        ("pairs with scores", "CoSENTLoss", "spearman_cosine"),
        ("labelled texts", "BatchAllTripletLoss", "cosine_accuracy"),
    ],
)
def test_each_kind_of_data_has_its_loss_evaluator_and_examples(
    kind: str,
    loss: str,
    score: str,
    bert: Path,
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from sentence_transformers import SentenceTransformer

    out = tmp_path / "out"
    more = ["--validation_file", str(files[kind]), "--samples", "2", "--learning_rate", "1e-3", "--max_steps", "4"]
    assert main(command(bert, files[kind], out, *more)) == 0
    assert f"data: {kind} (" in (said := capsys.readouterr().err)
    assert f"loss {loss}" in said
    assert [one["step"] for one in entries(out, "evaluation")] == [0, 4]
    assert {f"eval_{score}", "eval_loss", "train_loss"} <= set(json.loads((out / "all_results.json").read_text()))
    page = (out / "report.html").read_text()
    assert 2 <= page.count("before training:") == page.count("after training:") <= 4
    assert loss in page
    card = (out / "README.md").read_text()
    assert 'library_name: "sentence-transformers"' in card
    assert not (out / "eval").exists()
    model = SentenceTransformer(str(out), device="cpu")
    assert model.encode(["The boat."]).shape == (1, 32)
    assert any(not torch.equal(one, weights(bert)[name]) for name, one in weights(out).items() if name in weights(bert))


def test_the_tokens_are_those_of_the_models_own_preprocessing(bert: Path) -> None:
    from sentence_transformers import SentenceTransformer

    from stoker.tasks.sentences.token_table import TokenTable

    model = SentenceTransformer(str(bert), device="cpu")
    model.max_seq_length = 16
    texts = [row["context"] for row in rows_of("pairs", 40)] + ["Émile", " spaces  ", "word " * 40]
    table = TokenTable.build(model, [(prompt, text) for prompt in (None, "query: ") for text in texts], fresh=True)
    for prompt in (None, "query: "):
        for begin in range(0, len(texts), 7):
            part = texts[begin : begin + 7]
            expected, found = model.preprocess(part, prompt=prompt), table(part, prompt=prompt)
            assert {name: str(one) for name, one in expected.items()} == {name: str(one) for name, one in found.items()}
    unknown = table(["a text that is not in the table"])
    assert torch.equal(unknown["input_ids"], model.preprocess(["a text that is not in the table"])["input_ids"])
    assert table.lengths([(None, "word " * 40), ("query: ", "Émile")]).tolist()[0] == 16


@pytest.mark.parametrize("more", [[], ["--loss", "CachedMultipleNegativesRankingLoss", "--mini_batch_size", "8"]])
def test_training_gives_the_losses_and_weights_of_stock_sentence_transformers(
    more: list[str], bert: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses

    still = save_tiny_bert(tmp_path / "still")
    config = json.loads((still / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (still / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    settings = [
        "--max_steps",
        "4",
        "--per_device_train_batch_size",
        "16",
        "--learning_rate",
        "1e-3",
        "--warmup_steps",
        "0",
    ]
    assert main(command(still, files["pairs"], out, *settings, "--logging_steps", "1", *more)) == 0
    model = SentenceTransformer(str(still), device="cpu")
    args = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "stock"), max_steps=4, per_device_train_batch_size=16, learning_rate=1e-3, logging_steps=1,
        batch_sampler="no_duplicates", report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(
        model, args, train_dataset=Dataset.from_list(rows_of("pairs")), loss=losses.MultipleNegativesRankingLoss(model)
    )
    trainer.train()
    expected = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert [one["loss"] for one in entries(out, "step")] == pytest.approx(expected, rel=2e-4)
    stock = model.transformers_model.state_dict()
    for name, one in weights(out).items():
        assert torch.allclose(one, stock[name], atol=2e-4), name


def test_cached_losses_repeat_the_dropout_of_the_first_pass(bert: Path) -> None:
    """They compute every mini-batch twice, and restore torch's random numbers for the second time."""
    from sentence_transformers import SentenceTransformer

    import stoker

    model = stoker.optimize(SentenceTransformer(str(bert), device="cpu")).train()
    features = model.preprocess(["The boat of Ane.", "A letter that nobody has read."])
    state = torch.get_rng_state()
    first = model(dict(features))["sentence_embedding"]
    second = model(dict(features))["sentence_embedding"]
    torch.set_rng_state(state)
    assert torch.equal(model(dict(features))["sentence_embedding"], first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("kind", "more"),
    rest_in(
        "tasks",
        [
            (
                "pairs",
                ["--query_prompt", "query: ", "--document_prompt", "passage: ", "--bf16", "--max_seq_length", "24"],
            ),
            ("pairs with scores", ["--loss", "angle", "--matryoshka_dims", "16,8", "--no_ipex"]),
            ("pairs", ["--mine_negatives", "2", "--loss_kwargs", '{"directions": ["query_to_doc", "doc_to_query"]}']),
            (
                "triplets",
                ["--loss", "TripletLoss", "--loss_kwargs", '{"triplet_margin": 1}', "--tokens_per_batch", "512"],
            ),
            (
                "pairs with scores",
                ["--loss", "CosineSimilarityLoss", "--group_by_length", "--gradient_accumulation_steps", "2"],
            ),
            ("labelled texts", ["--loss", "BatchHardSoftMarginTripletLoss", "--gradient_checkpointing"]),
        ],
        keep=3,
    ),
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_options_of_training_work_together(
    kind: str, more: list[str], bert: Path, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import SentenceTransformer

    out = tmp_path / "out"
    assert main(command(bert, files[kind], out, "--validation_file", str(files[kind]), *more)) == 0
    said = capsys.readouterr().err
    assert (out / "modules.json").exists()
    results = json.loads((out / "all_results.json").read_text())
    if "--matryoshka_dims" in more:
        assert {f"eval_dim_{dim}_spearman_cosine" for dim in (32, 16, 8)} <= set(results)
    if "--query_prompt" in more:
        saved = json.loads((out / "config_sentence_transformers.json").read_text())["prompts"]
        assert (saved["query"], saved["document"]) == ("query: ", "passage: ")
        assert SentenceTransformer(str(out), device="cpu").max_seq_length == 24
    if "CosineSimilarityLoss" in more:
        assert "scores are divided by 5" in said


def test_mined_negatives_are_near_texts_of_the_corpus_that_are_not_answers(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sentence_transformers import SentenceTransformer

    from stoker.tasks.sentences.mining import mine_negatives
    from stoker.tasks.sentences.text_rows import read_text_rows

    rows = read_text_rows(write_lines(tmp_path / "pairs.jsonl", rows_of("pairs", 30)))
    corpus = [
        f"A text number {n} beside the pairs, about {row['context']}" for n, row in enumerate(rows_of("pairs", 10))
    ]
    model = SentenceTransformer(str(bert), device="cpu")
    before = torch.get_rng_state()
    found = mine_negatives(rows, model, corpus, 2, margin=0.0, skip=0, fresh=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert capsys.readouterr().err == ""  # progress bars are for terminals
    assert found.columns.texts == ("question", "context", "negative_1", "negative_2")
    contexts = rows.column(1) + corpus
    similar = model.similarity(model.encode(rows.column(0)), model.encode(contexts))
    for question, context, *negatives in found.texts:
        order = [contexts[n] for n in similar[rows.column(0).index(question)].argsort(descending=True)]
        assert negatives == [text for text in order if text != context][:2]
    assert mine_negatives(rows, model, corpus, 2, margin=0.0, skip=0) == found  # from the cache


@pytest.mark.parametrize(
    ("kind", "more"),
    rest_in(
        "kills",
        [
            ("pairs", ["--mine_negatives", "1"]),
            (
                "pairs",
                ["--loss", "CachedMultipleNegativesRankingLoss", "--mini_batch_size", "5", "--matryoshka_dims", "8"],
            ),
            ("pairs with scores", ["--eval_strategy", "steps", "--eval_steps", "2"]),
            ("labelled texts", []),
        ],
    ),
    ids=["mined", "cached", "scored", "labelled"],
)
def test_a_killed_run_resumes_to_bitwise_the_same_weights(
    kind: str, more: list[str], bert: Path, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed in the second epoch: the order of its batches, too, must be that of a run that was not killed."""
    usual = [
        "--max_steps",
        "8",
        "--per_device_train_batch_size",
        "16",
        "--save_steps",
        "2",
        "--learning_rate",
        "1e-3",
        *more,
    ]
    if "--eval_strategy" in more:
        usual += ["--validation_file", str(files[kind])]
    assert_resumes_exactly(lambda out: command(bert, files[kind], out, *usual), tmp_path, capsys)


@pytest.mark.part("tasks")
def test_two_processes_train_one_model_with_the_negatives_of_both(
    bert: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    more = ["--gather_across_devices", "--validation_file", str(files["pairs"]), "--samples", "1"]
    in_two_ranks(command(bert, files["pairs"], out, *more, "--per_device_train_batch_size", "8"))
    # The first loss is that of 16 rows at random weights; of 8 rows it would be about log 8.
    assert entries(out, "step")[0]["loss"] == pytest.approx(2.77, abs=0.4)
    assert (out / "model.safetensors").exists()
    assert "eval_cosine_ndcg@10" in json.loads((out / "eval_results.json").read_text())


def test_evaluation_alone_measures_a_model_and_leaves_it_as_it_is(
    bert: Path, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--do_train",
        "False",
        "--do_eval",
        "--validation_file",
        str(files["pairs with scores"]),
        "--output_dir",
        str(tmp_path),
    ]
    assert main(["train", "embed", "--model_name_or_path", str(bert), "--report_to", "none", *words]) == 0
    assert "spearman_cosine" in capsys.readouterr().err
    assert not (tmp_path / "model.safetensors").exists()


MISTAKES = {
    "@ --loss Cosent": "--loss CoSENTLoss takes pairs with scores, and the training data has pairs (question, context)",
    "@ --loss MultipleNegativeRanking": "did you mean MultipleNegativesRankingLoss?",
    "@ --loss_kwargs {": "--loss_kwargs is not JSON",
    "@ --loss_kwargs 3": "--loss_kwargs 3: write names and values as JSON",
    '@ --loss_kwargs {"scal":3}': "cannot be used",
    "@ --matryoshka_dims 64": "--matryoshka_dims 64: write numbers from 1 to 32",
    "@ --mine_negatives 0": "--mine_negatives is 0; it must be 1 or more",
    "@ --mine_negatives 90": "--mine_negatives 90 needs more texts to choose from",
    "@ --mini_batch_size 0": "--mini_batch_size is 0",
    "@ --tokens_per_batch 4096": "--tokens_per_batch is not possible with MultipleNegativesRankingLoss",
    "@ --max_seq_length 4": "--max_seq_length 4 leaves no room",
    "@ --text_column_names question,body": "has no column 'body'",
    "@ --text_column_names question,": "--text_column_names question,: write the names",
    "@ --do_predict --test_file x.jsonl": "does not predict a test file",
    "@ --train_file scored.jsonl --mine_negatives 1": "--mine_negatives adds negatives to pairs",
    "@ --train_file scored.jsonl --loss ContrastiveLoss": "takes pairs with the labels 0 and 1",
    "@ --train_file scored.jsonl --gather_across_devices": "--gather_across_devices is not possible with CoSENTLoss",
    "@ --train_file scored.jsonl --query_prompt x": "--query_prompt is for pairs and triplets",
    "@ --train_file missing.jsonl": "missing.jsonl does not exist",
    "@ --corpus_file odd.jsonl": "odd.jsonl has no column of texts",
    "@ --model_name_or_path empty": "no model can be loaded from the folder empty",
    "@ --model_name_or_path train.jsonl": "is a file; name a folder",
    "@ --tokenizer_name model": "--tokenizer_name is not possible here",
    "@ --metric_for_best_model f1 --eval_strategy steps --validation_file train.jsonl": "is not measured",
    "--model_name_or_path model --output_dir o": "--train_file is missing",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_an_invalid_request_gets_one_sentence_and_exit_code_two(
    words: str,
    bert: Path,
    files: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(bert)
    (tmp_path / "train.jsonl").symlink_to(files["pairs"])
    (tmp_path / "scored.jsonl").symlink_to(files["pairs with scores"])
    write_lines(tmp_path / "odd.jsonl", [{"a": "x", "b": "y"}])
    (tmp_path / "x.jsonl").touch()
    (tmp_path / "empty").mkdir()
    usual = (
        "--model_name_or_path model --train_file train.jsonl --output_dir o --max_steps 1 --report_to none --samples 0"
    )
    assert main(["train", "embed", *words.replace("@", usual).split()]) == 2
    error = capsys.readouterr().err
    assert MISTAKES[words] in error
    assert "Traceback" not in error


def test_stokers_attention_can_be_named_when_a_model_is_loaded(bert: Path) -> None:
    from sentence_transformers import SentenceTransformer

    import stoker.model  # noqa: F401  registers the attention

    texts = ["The boat.", "A longer sentence about the tower of Torwick."]
    stock = SentenceTransformer(str(bert), device="cpu")
    named = SentenceTransformer(str(bert), device="cpu", model_kwargs={"attn_implementation": "stoker"})
    assert named.transformers_model.config._attn_implementation == "stoker"
    assert torch.allclose(torch.tensor(named.encode(texts)), torch.tensor(stock.encode(texts)), atol=1e-6)
    for model in (stock.train(), named.train()):
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model(model.preprocess(texts))["sentence_embedding"].square().sum().backward()
    layers = [model.transformers_model.encoder.layer[0] for model in (stock, named)]
    assert torch.allclose(*(layer.attention.self.query.weight.grad for layer in layers), atol=1e-6)
