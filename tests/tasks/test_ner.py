"""Named entities: every format is read to the same words and tags, no word is lost or counted twice, and scores are seqeval's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from stoker.errors import UserError
from stoker.tasks.faults import Faults
from stoker.tasks.ner.data import Columns, Sentence, read_sentences, split_words
from stoker.tasks.ner.features import IGNORED, make_rows
from stoker.tasks.ner.metrics import entities_of, measure
from stoker.tasks.ner.predictions import write_predictions
from stoker.tasks.ner.tagger import Tagger
from stoker.tasks.ner.tags import Scheme, iob2, recognise
from tasks.models import byte_level, wordpiece

IOB2, IOBES = Scheme("IOB2", "BI"), Scheme("IOBES", "BIES")
WORDS = ["Ada", "Lovelace", "wrote", "to", "Charles", "from", "London", "."]
TAGS = ["B-PER", "I-PER", "O", "O", "B-PER", "O", "B-LOC", "O"]


def read(path: Path, labelled: bool = True, **columns: str) -> list[Sentence]:
    faults = Faults(str(path))
    _, sentences = read_sentences(path, Columns(**columns), faults, labelled=labelled)
    faults.settle(len(sentences))
    return sentences


def words_of(sentence: Sentence) -> list[str]:
    return [sentence.text[begin:end] for begin, end in sentence.words]


CONLL = {
    "tabs.conll": "\n".join(map("\t".join, zip(WORDS, TAGS, strict=True))),
    "spaces.txt": "\n".join(f"{word} NNP I-NP {tag}" for word, tag in zip(WORDS, TAGS, strict=True)),
    "marked.bio": "-DOCSTART- -X- O\n\n# id 17\n" + "\r\n".join(map(" ".join, zip(WORDS, TAGS, strict=True))),
    "list.jsonl": json.dumps({"tokens": WORDS, "ner_tags": TAGS}),
    "list.csv": '"words","tags"\n' + ",".join('"' + json.dumps(v).replace('"', '""') + '"' for v in (WORDS, TAGS)),
    "spans.jsonl": json.dumps({
        "text": " ".join(WORDS),
        "entities": [{"start": 0, "end": 12, "label": "PER", "text": "Ada Lovelace"},
                     {"start": 22, "end": 29, "label": "PER"}, {"start": 34, "end": 41, "label": "LOC"}],
    }),
    "doccano.jsonl": json.dumps({"text": " ".join(WORDS), "label": [[34, 41, "LOC"], [0, 13, "PER"], [22, 29, "PER"]]}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONLL)
def test_every_format_gives_the_same_words_and_tags(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(CONLL[name])
    (sentence,) = read(path)
    assert words_of(sentence) == WORDS
    assert list(sentence.tags or ()) == TAGS


def test_columns_of_a_conll_file_are_chosen_by_number(tmp_path: Path) -> None:
    path = tmp_path / "d.conll"
    path.write_text("1\tAda\tB-PER\tNNP\n2\twrote\tO\tVBD\n")
    (sentence,) = read(path, text="2", label="3")
    assert (words_of(sentence), sentence.tags) == (["Ada", "wrote"], ("B-PER", "O"))
    with pytest.raises(UserError, match=r"--label_column_name ner: the columns of a CoNLL file have no names"):
        read(path, label="ner")


def test_words_that_look_like_comments_or_contain_odd_spaces_are_words(tmp_path: Path) -> None:
    path = tmp_path / "d.conll"
    path.write_text("#hashtag\tO\n#\tO\nNew\u00a0York\u2028City\tB-LOC\n\t\n\n\n#\tO\n")
    first, second = read(path)
    assert words_of(first) == ["#hashtag", "#", "New\u00a0York\u2028City"]
    assert words_of(second) == ["#"]


BAD = {
    "no tag": ("conll", "Ada\n", "its word 1 ('Ada') does not have a word and a tag"),
    "empty word": ("conll", "\tO\tO\n", "its word 1 is empty"),
    "not UTF-8": ("conll", "K\udcf6ln\tB-LOC\n", "is not UTF-8"),
    "lengths": ("jsonl", {"tokens": ["a", "b"], "tags": ["O"]}, "it has 2 words but 1 tags"),
    "numbers": ("jsonl", {"tokens": ["a"], "tags": [3]}, "its tags are not all names"),
    "not a list": ("jsonl", {"tokens": "Ada wrote", "tags": ["O"]}, "its tokens is not a JSON list|is a str, not a list"),
    "outside": ("jsonl", {"text": "Ada", "entities": [{"start": 1, "end": 9, "label": "P"}]}, "is at 1 to 9, and the text has 3"),
    "overlap": ("jsonl", {"text": "Ada L", "entities": [[0, 3, "P"], [1, 5, "Q"]]}, "overlap; a word can belong to"),
    "elsewhere": ("jsonl", {"text": "Ada L", "entities": [{"start": 0, "end": 3, "label": "P", "text": "Bob"}]},
                  "its entity 'Bob' is not at 0, where the text reads 'Ada'"),
    "no offsets": ("jsonl", {"text": "Ada", "entities": [{"word": "Ada"}]}, "its entity 1 has no start, end and label"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_reported_with_their_line(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    suffix, row, message = BAD[name]
    path = tmp_path / f"d.{suffix}"
    if suffix == "conll":
        good = ["Ada\tB-PER\nwrote\tO\n\n"] * 120
        path.write_text("".join(good) + str(row), errors="surrogateescape")
    else:
        assert isinstance(row, dict)
        text = "text" in row
        fine = {"text": "Ada", "entities": []} if text else {"tokens": ["Ada"], "tags": ["O"]}
        path.write_text("\n".join(map(json.dumps, [fine] * 120 + [row])))
    with caplog.at_level("WARNING", logger="stoker"):
        assert len(read(path)) == 120
    assert f"line {361 if suffix == 'conll' else 121}: " in caplog.text
    assert any(part in caplog.text for part in message.split("|")), caplog.text


def test_schemes_are_recognised_and_iob1_and_types_become_iob2() -> None:
    assert recognise([TAGS]) == IOB2
    assert recognise([["S-PER", "O"], ["B-PER", "E-PER"]]).name == "IOBES"
    assert recognise([["U-PER", "O"]]).name == "BILOU"
    assert recognise([["O", "I-PER", "I-PER", "B-PER"]]).source == "IOB1"
    assert recognise([["PER", "O"]]).source == "types"
    assert iob2(["I-PER", "I-PER", "B-PER", "I-LOC", "O", "I-LOC"]) == (
        "B-PER", "I-PER", "B-PER", "B-LOC", "O", "B-LOC",
    )  # fmt: skip
    assert iob2(["PER", "PER", "O", "E-mail"]) == ("B-PER", "I-PER", "O", "B-mail")
    assert iob2(["S-PER", "S-PER", "B-LOC", "E-LOC"]) == ("B-PER", "B-PER", "B-LOC", "I-LOC")
    assert IOBES.convert(["B-PER", "I-PER", "E-PER", "S-LOC", "O"]) == ("B-PER", "I-PER", "E-PER", "S-LOC", "O")
    for wrong in (["B-PER", "O"], ["I-PER"], ["B-PER", "E-LOC"], ["B-PER"], ["S-PER", "E-PER"]):
        with pytest.raises(ValueError, match="is not valid IOBES"):
            IOBES.convert(wrong)
    for tags, message in (
        (["NN", "VB"], "no word has the tag O"),
        (["O"], "has no entities"),
        (["O", "I-X", "E-X", "U-X"], "fit none"),
    ):
        with pytest.raises(UserError, match=message):
            recognise([tags])
    assert IOB2.labels({"b", "a-c"}) == ("O", "B-a-c", "I-a-c", "B-b", "I-b")


def test_words_of_raw_texts_and_entities_inside_words(tmp_path: Path) -> None:
    text = "Don't e-mail Zoë\u0301 in 東京 नमस्ते"
    assert [text[b:e] for b, e in split_words(text)] == [
        "Don", "'", "t", "e", "-", "mail", "Zoë\u0301", "in", "東", "京", "नमस्ते",
    ]  # fmt: skip
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"text": "in NewYork now", "entities": [{"start": 6, "end": 10, "label": "LOC"}]}))
    (sentence,) = read(path)
    assert words_of(sentence) == ["in", "New", "York", "now"]
    assert sentence.tags == ("O", "O", "B-LOC", "O")


def tagged(words: list[str], tags: list[str]) -> Sentence:
    ends = np.cumsum([len(word) + 1 for word in words]).tolist()
    places = tuple((end - 1 - len(word), end - 1) for word, end in zip(words, ends, strict=True))
    return Sentence("here", " ".join(words), places, tuple(tags), ())


@pytest.mark.parametrize("kind", [wordpiece, byte_level], ids=["wordpiece", "byte level"])
def test_the_first_token_of_each_word_has_its_label(kind: Any) -> None:
    tokenizer, names = kind(), IOB2.labels({"PER", "LOC"})
    rows = make_rows([tagged(WORDS, TAGS)], tokenizer, names, max_seq_length=64, doc_stride=8)
    item = rows[0]
    stock = tokenizer(" ".join(WORDS), return_offsets_mapping=True)
    assert item["input_ids"].tolist() == stock["input_ids"]
    starts = {begin: names.index(tag) for (begin, _), tag in zip(rows.sentences[0].words, TAGS, strict=True)}
    spans = [(a + (" ".join(WORDS)[a:b][:1] == " "), b) for a, b in stock["offset_mapping"]]
    expected = [starts.get(begin, IGNORED) if end > begin else IGNORED for begin, end in spans]
    assert item["labels"].tolist() == expected
    every = make_rows([tagged(WORDS, TAGS)], tokenizer, names, max_seq_length=64, doc_stride=8, all_tokens=True)
    inside = [label for label, first in zip(every[0]["labels"], item["labels"], strict=True) if first == IGNORED]
    assert names.index("B-PER") not in inside
    assert names.index("I-PER") in inside, "the other tokens of `Lovelace` are inside of its entity"


@pytest.mark.parametrize(("length", "stride"), [(16, 4), (13, 0), (24, 15), (128, 8)])
def test_windows_count_every_word_once(length: int, stride: int) -> None:
    chance = np.random.default_rng(length)
    names = IOB2.labels({"PER"})
    sentences = []
    for count in (1, 5, 40, 90):
        words = [["Ada", "unbelievably", "x", "\u200b", "Torwick"][i] for i in chance.integers(0, 5, count)]
        sentences.append(tagged(words, [names[i] for i in chance.integers(0, 3, count)]))
    tokenizer = wordpiece()
    rows = make_rows(sentences, tokenizer, names, max_seq_length=length, doc_stride=stride)
    labels = [item["labels"] for item in (rows[i] for i in range(len(rows)))]
    counted = sum(int((one != IGNORED).sum()) for one in labels)
    with_tokens = [[bool(tokenizer.tokenize(word)) for word in one.text.split(" ")] for one in sentences]
    assert counted == sum(map(sum, with_tokens)), "each word that has tokens is labelled in one window"
    assert max(rows.lengths) <= length
    # A model that is always right, and wrong wherever a token does not count.
    found = rows.by_word([np.where(one == IGNORED, 1, one) for one in labels], otherwise=0)
    for sentence, predicted, known in zip(sentences, found, with_tokens, strict=True):
        expected = [tag if here else "O" for tag, here in zip(sentence.tags or (), known, strict=True)]
        assert [names[i] for i in predicted] == expected


def test_scores_are_those_of_seqevals_strict_mode() -> None:
    from seqeval.metrics import f1_score
    from seqeval.scheme import IOB2 as THEIRS

    chance = np.random.default_rng(3)
    names = list(IOB2.labels({"PER", "LOC", "creative-work"}))
    true = [list(iob2([names[i] for i in chance.integers(0, 7, 12)])) for _ in range(30)]
    predicted = [[names[chance.integers(7)] if chance.random() < 0.2 else tag for tag in one] for one in true]
    scores = measure(true, predicted, IOB2)
    assert scores.f1 == pytest.approx(f1_score(true, predicted, mode="strict", scheme=THEIRS))
    # A stray I- is no entity in strict mode.
    assert measure([["B-PER", "O"]], [["I-PER", "O"]], IOB2).recall == 0.0
    assert measure([["O"]], [["O"]], IOB2).f1 == 0.0
    half = measure([["O", "B-PER"]], [["O", "O"]], IOB2)
    assert (half.untagged, half.accuracy, half.f1) == (0.5, 0.5, 0.0)
    assert sum(n for (kind, _), n in scores.confusion.items() if kind != "no entity") == sum(
        map(len, entities_of(true, IOB2))
    )


def test_confusion_by_hand() -> None:
    true = [["B-PER", "I-PER", "O", "B-LOC", "O", "B-LOC", "B-PER"]]
    found = [["B-PER", "O", "B-LOC", "B-PER", "O", "O", "B-PER"]]
    scores = measure(true, found, IOB2)
    assert scores.confusion == {
        ("PER", "other boundaries"): 1, ("LOC", "PER"): 1, ("LOC", "not found"): 1, ("PER", "PER"): 1, ("no entity", "LOC"): 1,
    }  # fmt: skip
    assert scores.flat(by_type=True)["PER_number"] == 2
    by_type, confused = scores.tables()
    assert by_type["rows"][1] == ["PER", "0.333", "0.500", "0.400", "2"]
    assert confused["columns"] == ["", "LOC", "PER", "other boundaries", "not found"]
    assert confused["rows"] == [["LOC", "", 1, "", 1], ["PER", "", 1, 1, ""], ["no entity", 1, "", "", ""]]


@pytest.mark.parametrize("name", ["tabs.conll", "spaces.txt", "list.jsonl", "spans.jsonl", "untagged.txt"])
def test_predictions_have_the_format_of_the_data(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(CONLL.get(name, "\n".join(WORDS)))
    layout, sentences = read_sentences(path, Columns(), Faults(name), labelled=False)
    tags = [["O", "O", "O", "O", "B-PER", "O", "B-LOC", "O"]]
    written = write_predictions(tmp_path, layout, sentences, tags, entities_of(tags, IOB2), IOB2.labels({"PER", "LOC"}))
    if name.endswith(".jsonl"):
        row = json.loads(written.read_text())
        if name == "spans.jsonl":
            assert [(one["text"], one["label"]) for one in row["entities"]] == [("Charles", "PER"), ("London", "LOC")]
        else:
            assert row == {"tokens": WORDS, "ner_tags": tags[0]}
        return
    lines = [line.split("\t") for line in written.read_text().splitlines() if line]
    assert [(line[0], line[-1]) for line in lines] == list(zip(WORDS, tags[0], strict=True))
    assert {len(line) for line in lines} == {4 if name == "spaces.txt" else 2}


@pytest.mark.data
def test_the_real_wnut17_is_read_completely(data: Path) -> None:
    for name, sentences, entities in (("train", 3394, 1975), ("dev", 1009, 836)):
        found = read(data / "ner" / f"wnut17-{name}.conll")
        assert len(found) == sentences
        assert recognise(one.tags or () for one in found) == IOB2
        assert sum(tag.startswith("B-") for one in found for tag in one.tags or ()) == entities


class FirstPieces:
    """A model as training leaves it: it knows the tag of each word's first piece, and calls every other piece a place."""

    def __init__(self, tokenizer: Any, prefixes: str, words: dict[str, str], positions: int = 512) -> None:
        names = ["O", *(f"{prefix}-{kind}" for kind in ("LOC", "PER") for prefix in prefixes)]
        self.config = transformers.BertConfig(id2label=dict(enumerate(names)), max_position_embeddings=positions)
        self.labels = {
            tokenizer(word, add_special_tokens=False)["input_ids"][0]: names.index(tag) for word, tag in words.items()
        }
        self.pieces = {number for token, number in tokenizer.get_vocab().items() if token.startswith("##")}
        self.place = names.index("B-LOC")

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
        best = [
            [self.place if one in self.pieces else self.labels.get(one, 0) for one in row] for row in input_ids.tolist()
        ]
        logits = 9.0 * torch.nn.functional.one_hot(torch.tensor(best), len(self.config.id2label))
        return transformers.modeling_outputs.TokenClassifierOutput(logits=logits)


@pytest.mark.parametrize("prefixes", ["BI", "BIES", "BILU"], ids=["IOB2", "IOBES", "BILOU"])
@pytest.mark.parametrize("times", [1, 30], ids=["short", "longer than the model takes"])
def test_entities_are_whole_words_whatever_is_predicted_for_their_other_pieces(prefixes: str, times: int) -> None:
    tokenizer = wordpiece()
    begin, inside, end, single = prefixes if len(prefixes) == 4 else "BIIB"
    words = {"Quozabfengri": f"{begin}-PER", "Grigrifentor": f"{inside}-PER", "Zabmarquo": f"{end}-PER",
             "Torwickmarlen": f"{single}-LOC"}  # fmt: skip
    assert all(len(tokenizer(word, add_special_tokens=False)["input_ids"]) > 1 for word in words)
    model = FirstPieces(tokenizer, prefixes, words, positions=64)
    text = "Yesterday Quozabfengri Grigrifentor Zabmarquo, went to Torwickmarlen.  " * times
    found = Tagger(model, tokenizer)(text)
    assert [(one.label, text[one.begin : one.end]) for one in found] == [
        ("PER", "Quozabfengri Grigrifentor Zabmarquo"),
        ("LOC", "Torwickmarlen"),
    ] * times
    assert all(0.99 < one.score <= 1 for one in found)


@pytest.mark.parametrize("text", ["", "  ", "\u200b", "\x00"])
def test_a_text_without_words_has_no_entities(text: str) -> None:
    assert Tagger(FirstPieces(wordpiece(), "BI", {}), wordpiece())(text) == []
