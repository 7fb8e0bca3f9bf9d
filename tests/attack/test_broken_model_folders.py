"""A broken model folder is refused in one sentence, and random weights are never trained without a warning.

The commands are called below the command line, where they load and first use a model: a process per folder would take hours.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attack.case import seed_of_tests
from attack.model_folders import make_good, variants
from stoker.cli import main
from stoker.errors import UserError
from stoker.tasks import loading
from stoker.tasks.classify.data import Example, Labels
from stoker.tasks.classify.features import make_rows
from stoker.tasks.collate import Collator
from stoker.tasks.loading import check_vocabulary, load_config, load_model, load_tokenizer, quiet, row_length
from stoker.tasks.qa.data import Question
from stoker.tasks.qa.features import make_windows
from stoker.tasks.qa.question_answerer import QuestionAnswerer
from stoker.tasks.training_options import ModelOptions

SEED = seed_of_tests()
TEXT = "The river Ane flows through Torwick, says the oldest chronicle."


def step(model: Any, tokenizer: Any, items: Any) -> None:
    """Forward and backward pass of one batch."""
    model(**Collator.of(tokenizer)([items[i] for i in range(len(items))])).loss.backward()


def qa(folder: Path) -> None:
    from transformers import AutoModelForQuestionAnswering

    options = ModelOptions(model_name_or_path=str(folder))
    config, tokenizer = load_config(options), load_tokenizer(options)
    check_vocabulary(tokenizer, config, str(folder))
    length = row_length(64, tokenizer, config)
    question = Question("1", "What flows through Torwick?", TEXT, ("The river Ane",), (0,))
    windows = make_windows([question], tokenizer, max_seq_length=length, doc_stride=8, training=True)
    step(load_model(AutoModelForQuestionAnswering, options, config), tokenizer, windows)


def classify(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    options = ModelOptions(model_name_or_path=str(folder))
    labels: dict[str, Any] = {"label2id": {"no": 0, "yes": 1}, "id2label": {0: "no", 1: "yes"}}
    config = load_config(options, **labels, problem_type="single_label_classification")
    tokenizer = load_tokenizer(options)
    check_vocabulary(tokenizer, config, str(folder))
    examples = [Example("1", (TEXT,), "yes"), Example("2", ("Who?",), "no")]
    length = row_length(64, tokenizer, config)
    rows = make_rows(examples, tokenizer, Labels(("no", "yes")), max_seq_length=length)
    step(load_model(AutoModelForSequenceClassification, options, config), tokenizer, rows)


def ask(folder: Path) -> None:
    with torch.random.fork_rng():
        QuestionAnswerer.load(str(folder), max_seq_length=64).ask("What flows?", TEXT)


COMMANDS: dict[str, Callable[[Path], None]] = {"qa": qa, "classify": classify, "ask": ask}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_good(tmp_path_factory.mktemp("model") / "good")


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    quiet()


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of loading, whatever the state of the logger."""
    found: list[str] = []
    monkeypatch.setattr(loading.log, "warning", lambda text, *values: found.append(text % values))
    return found


@pytest.fixture
def broken(good: Path, tmp_path: Path) -> Callable[[str], Path]:
    """The folder of a variant by its name."""

    def find(wanted: str) -> Path:
        for name, folder in variants(0, good, tmp_path / "broken", more=0):
            if name == wanted:
                return Path(shutil.copytree(folder, tmp_path / "found", symlinks=True))
        raise AssertionError(f"no variant {wanted}")

    return find


@pytest.mark.part("attack")
@pytest.mark.usefixtures("warned")
def test_every_broken_folder_is_refused_in_one_sentence_or_loads(good: Path, tree_path: Path) -> None:
    refused = 0
    for name, folder in variants(SEED, shutil.copytree(good, tree_path / "good"), tree_path / "broken"):
        for command, run in COMMANDS.items():
            sentence = ""
            try:
                run(folder)
            except UserError as error:
                sentence = str(error)
            except BaseException as error:
                raise AssertionError(f"{command} on a folder with {name}, seed {SEED}") from error
            refused += bool(sentence)
            assert "\n" not in sentence, f"{command}, {name}, seed {SEED}: {sentence}"
    assert refused > 3 * 90, "the folders are broken indeed"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_intact_folder_works_without_a_warning(good: Path, command: str, warned: list[str]) -> None:
    COMMANDS[command](good)
    assert warned == []


REFUSED = {
    "no tokenizer files": "it has no vocabulary (tokenizer.json, vocab.txt or similar); copy the tokenizer's files there",
    "weights that are of another architecture": r"they contain none of the 37 tensors of its base model, but transformer.h.0.att",
    "weights that are named otherwise": "they contain none of the 37 tensors of its base model, but module.bert.embeddings",
    "weights that are the head's alone": "they contain none of the 37 tensors of its base model",
    "weights that are int64": "are not floating-point numbers, in 37 tensors",
    "weights that have one NaN": "contain NaN or infinite values, in 1 tensor: bert.embeddings.word_embeddings.weight",
    "weights that have other embeddings": "do not fit its config.json: bert.embeddings.word_embeddings.weight is 50 x 16",
    "hidden_act in config.json is 'no_such_act'": "config.json does not describe a model that can be built (KeyError",
    "hidden_size in config.json is negative": "config.json does not describe a model that can be built (Trying to create tensor",
    "num_labels in config.json is '1099511627776'": "num_labels in config.json is 1099511627776",
    "num_hidden_layers in config.json is huge": "num_hidden_layers in config.json is 1099511627776",
    "config.json is a list": "config.json is not a JSON object",
    "config.json is missing": "config.json",
    "tokenizer.json is cut in the middle": "tokenizer.json is not JSON: ",
    "a vocab.txt without special tokens": "no tokenizer can be loaded from",
    "an index that has no map": "model.safetensors.index.json does not name the file of each tensor (weight_map)",
    "a pytorch_model.bin of code": "a weight file is damaged, or contains pickled code, which is never loaded",
}  # fmt: skip


def test_error_messages_name_the_file_and_the_cause(good: Path, tmp_path: Path) -> None:
    left = dict(REFUSED)
    for name, folder in variants(0, good, tmp_path / "broken", more=0):
        expected = left.pop(name, None)
        for run in (qa, ask) if expected else ():
            with pytest.raises(UserError) as caught:
                run(folder)
            assert expected in str(caught.value)
            assert "--ignore_mismatched_sizes" not in str(caught.value), "the head is not to blame"
    assert not left


WARNED = {
    "weights that lack a layer": "16 of 37 tensors of the base model are missing in ",
    "weights that lack the embeddings": "5 of 37 tensors of the base model are missing in ",
    "weights that have a layer too many": "16 tensors in ",
    "num_hidden_layers in config.json is '1'": "16 tensors in ",
    "weights that are the base model's alone": None,
}


def test_a_partly_random_model_is_trained_with_a_warning_that_has_counts(
    good: Path, tmp_path: Path, warned: list[str]
) -> None:
    left = dict(WARNED)
    for name, folder in variants(0, good, tmp_path / "broken", more=0):
        if name not in left:
            continue
        expected = left.pop(name)
        for run in (qa, classify):
            warned.clear()
            run(folder)
            assert len(warned) == (expected is not None), warned
            assert not expected or warned[0].startswith(expected)
    assert not left


def test_a_head_of_another_size_is_replaced_on_request(broken: Callable[[str], Path], warned: list[str]) -> None:
    from transformers import AutoModelForQuestionAnswering

    options = ModelOptions(model_name_or_path=str(broken("weights that have a head of another size")))
    config = load_config(options)
    with pytest.raises(
        UserError, match=r"qa_outputs.weight is 7 x 16 in the file.* --ignore_mismatched_sizes replaces it"
    ):
        load_model(AutoModelForQuestionAnswering, options, config)
    with pytest.raises(UserError, match=r"would be 2 x 16$"):
        ask(Path(options.model_name_or_path))
    options.ignore_mismatched_sizes = True
    assert load_model(AutoModelForQuestionAnswering, options, config).qa_outputs.weight.shape == (2, 16)
    assert warned == []


def test_models_without_a_separate_base_model_are_checked_too(good: Path, tmp_path: Path) -> None:
    import transformers

    config = transformers.T5Config(vocab_size=321, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    config.save_pretrained(tmp_path)
    shutil.copy(good / "model.safetensors", tmp_path)
    with pytest.raises(UserError, match=r"they contain none of the .* tensors of its base model, but bert\.embeddings"):
        loading.model_of(transformers.AutoModelForQuestionAnswering, str(tmp_path), config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("layer_norm_eps", "1e-12"), ("layer_norm_eps", None), ("hidden_act", 7), ("pad_token_id", True)],
)
def test_values_that_would_fail_in_the_first_step_are_refused_when_loading(name: str, value: Any) -> None:
    import transformers

    config = transformers.BertConfig()
    config.__dict__[name] = value  # as transformers 4 reads it from the file
    assert f"{name} in its config.json is {value!r}" in str(loading._wrong_type(config))
    assert loading._wrong_type(transformers.BertConfig()) is None


def test_a_bug_in_stoker_is_not_reported_as_a_broken_folder(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Buggy:
        @staticmethod
        def from_pretrained(name: str) -> Any:
            return make_windows(None, None, max_seq_length=8, doc_stride=1, training=True)  # type: ignore[arg-type]

    class Failing:
        @staticmethod
        def from_pretrained(name: str) -> Any:
            raise KeyError("gelu_next")

    with pytest.raises((TypeError, AttributeError)):
        loading.loaded(Buggy, "model", str(good))
    with pytest.raises(UserError, match="KeyError: 'gelu_next'"):
        loading.loaded(Failing, "model", str(good))
    monkeypatch.setenv("STOKER_TRACEBACK", "1")
    with pytest.raises(KeyError):
        loading.loaded(Failing, "model", str(good))


def test_ctrl_c_while_loading_ends_the_command(good: Path) -> None:
    class Slow:
        @staticmethod
        def from_pretrained(name: str) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loading.loaded(Slow, "model", str(good))


def test_commands_end_with_exit_code_two_for_a_broken_folder(
    broken: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(broken("hidden_act in config.json is 'no_such_act'"))
    assert main(["ask", "--model", folder, "--text", TEXT, "--question", "What flows?"]) == 2
    assert (
        main(["plan", "--model", folder, "--batch", "2", "--length", "16", "--nodes", "1,2", "--processes", "1"]) == 2
    )
    printed = capsys.readouterr().err
    assert printed.count("config.json does not describe a model that can be built") == 2, printed
    assert "Traceback" not in printed
