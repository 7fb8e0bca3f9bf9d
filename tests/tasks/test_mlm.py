"""Masked LM: texts of any size become rows as run_mlm.py makes them, masks are what the options say, and no text is lost."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from stoker.errors import UserError
from stoker.tasks import token_store
from stoker.tasks.faults import Faults
from stoker.tasks.file_patterns import expand
from stoker.tasks.mlm import texts
from stoker.tasks.mlm.features import TextRows, make_rows, tokenize_sources
from stoker.tasks.mlm.masking import MaskingCollator, Words
from stoker.tasks.mlm.texts import FileTexts
from tasks.models import byte_level, wordpiece

LINES = [
    "The river Ane flows through Torwick.", "", "Who founded the town?", "  It was unbelievably misty there, in 1832.  ",
] * 30  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))


def write(path: Path, lines: list[str] = LINES) -> Path:
    name = path.name.removesuffix(".gz")
    raw = "\r\n".join(lines) if name.endswith(".txt") else "\n".join(json.dumps({"text": line}) for line in lines)
    if name.endswith(".csv"):
        raw = "text\n" + "\n".join(f'"{line}"' for line in lines)
    path.write_bytes(gzip.compress(raw.encode()) if path.suffix == ".gz" else raw.encode())
    return path


def rows_of(
    *paths: Path, length: int = 32, line_by_line: bool = False, strict: bool = False, tokenizer: Any = None
) -> TextRows:
    tokenizer = tokenizer or wordpiece()
    found = tokenize_sources([FileTexts(path) for path in paths], tokenizer, strict=strict)
    return make_rows(found, tokenizer, max_seq_length=length, line_by_line=line_by_line)


@pytest.mark.parametrize("kind", [wordpiece, byte_level], ids=["wordpiece", "byte level"])
@pytest.mark.parametrize("name", ["d.txt", "d.txt.gz", "d.jsonl", "d.json", "d.csv"])
def test_lines_are_joined_and_divided_as_run_mlm_does(
    tmp_path: Path, name: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "TEXTS_TOGETHER", 500)  # several blocks
    tokenizer = kind()
    rows = rows_of(write(tmp_path / name), length=32, tokenizer=tokenizer)
    lines = [line if "json" in name or "csv" in name else line.strip() for line in LINES if line.strip()]
    expected = [token for line in lines for token in tokenizer(line)["input_ids"]]
    assert np.concatenate([rows[i]["input_ids"] for i in range(len(rows))]).tolist() == expected
    assert rows.lengths.tolist() == [32] * (len(expected) // 32) + ([len(expected) % 32] if len(expected) % 32 else [])
    special = [rows[i]["special_tokens_mask"].tolist() for i in range(len(rows))]
    stock = [
        tokenizer.get_special_tokens_mask(rows[i]["input_ids"].tolist(), already_has_special_tokens=True)
        for i in range(len(rows))
    ]
    assert [list(map(int, one)) for one in special] == stock


def test_line_by_line_has_a_row_per_line_truncated_as_the_tokenizer_does(tmp_path: Path) -> None:
    tokenizer = wordpiece()
    rows = rows_of(write(tmp_path / "d.txt"), length=10, line_by_line=True)
    lines = [line.strip() for line in LINES if line.strip()]
    expected = [tokenizer(line, truncation=True, max_length=10)["input_ids"] for line in lines]
    assert [rows[i]["input_ids"].tolist() for i in range(len(rows))] == expected
    assert rows.lengths.tolist() == list(map(len, expected))
    part = rows.part(5, 7)
    assert (len(part), part.lengths.tolist()) == (7, rows.lengths[5:12].tolist())
    assert part[0]["input_ids"].tolist() == expected[5]
    with pytest.raises(IndexError):
        part[7]


def test_several_files_and_patterns(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl"):
        write(tmp_path / name)
    found = expand([str(tmp_path / "*.txt"), str(tmp_path / "c.jsonl"), str(tmp_path / "a.txt")], "--train_file")
    assert [path.name for path in found] == ["a.txt", "b.txt", "c.jsonl"]
    one = rows_of(tmp_path / "a.txt", length=8)
    assert len(rows_of(*found, length=8).ids) == 3 * len(one.ids)
    with pytest.raises(UserError, match="no file has a name like this"):
        expand([str(tmp_path / "*.md")], "--train_file")


def test_tokens_come_from_the_cache_until_texts_or_tokenizer_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "d.txt")
    said: list[str] = []

    def ids(tokenizer: Any = None) -> list[int]:
        found = tokenize_sources([FileTexts(path)], tokenizer or wordpiece(), strict=False, say=said.append)
        assert isinstance(found.ids, np.memmap)
        assert found.ids.dtype == np.uint16
        return found.ids.tolist()

    wordpiece().backend_tokenizer.enable_truncation(8)  # as another use of the tokenizer in this process may leave it
    first = ids()
    assert ids() == first
    assert len(said) == 1
    ids(byte_level())
    write(path, [*LINES, "One more."])
    assert len(ids()) > len(first)
    assert len(said) == 3
    for stored in (tmp_path / "cache" / "features").glob("*.ids"):
        stored.write_bytes(stored.read_bytes()[:-2])  # cut short
    assert len(ids()) > len(first)
    assert len(said) == 4
    monkeypatch.setenv("STOKER_CACHE_DIR", "/proc/none")  # cannot be written: a temporary file is mapped
    assert len(ids()) > len(first)


def test_a_large_file_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no time are more than a few blocks of texts alive."""
    path = tmp_path / "d.txt"
    path.write_text("A line of text for the river.\n" * 4000)
    monkeypatch.setattr(texts, "TEXTS_TOGETHER", 3000)
    monkeypatch.setattr("stoker.user_files.MIB", 1000)
    alive = [0, 0]

    class Block(list[str]):
        def __init__(self, lines: list[str]) -> None:
            super().__init__(lines)
            alive[0] += 1
            alive[1] = max(alive)

        def __del__(self) -> None:
            alive[0] -= 1

    original = FileTexts.plain_lines
    monkeypatch.setattr(FileTexts, "plain_lines", lambda self, faults: map(Block, original(self, faults)))
    assert len(rows_of(path).ids) == 4000 * len(wordpiece()("A line of text for the river.")["input_ids"])
    assert alive[1] <= 4


def test_a_line_of_any_length_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "LONGEST_TEXT", 50)
    path = tmp_path / "d.txt"
    path.write_text("misty river " * 100 + "x" * 120)
    rows = rows_of(path, line_by_line=True, length=512)
    text = " ".join(wordpiece().decode(rows[i]["input_ids"], skip_special_tokens=True) for i in range(len(rows)))
    assert text.split()[:200] == ["misty", "river"] * 100
    assert text.count("x") == 120


BAD = {
    "not JSON": (b'{"text": "a"', "is not JSON"), "no text": (b'{"body": 1, "other": 2}', "has no column 'text'"),
    "a list": (b"[1]", "is a list, not an object"), "a number": (b'{"text": 3}', "its text is an int, not text"),
    "half a character": (b'{"text": "\\ud800"}', "lone surrogate"), "not UTF-8": (b'{"text": "\xf6"}', "is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_counted_and_again_when_they_come_from_the_cache(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    line, message = BAD[name]
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "fine"}'] * 150 + [line]))
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("WARNING", logger="stoker"):
            rows_of(path)
        assert f"line 151: {message}" in caplog.text or f"line 151: its text contains a {message}" in caplog.text
    with pytest.raises(UserError, match="--strict"):
        rows_of(path, strict=True)
    path.write_bytes(b"\n".join([b'{"text": "fine"}', line]))
    with pytest.raises(UserError, match="1 of 2 rows"):
        rows_of(path)


def test_files_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-9])
    for name, message in (
        ("empty.txt", "contains no text"), ("binary.txt", "contains a zero byte"), ("cut.txt.gz", "not a whole gzip"),
        ("none.txt", "does not exist"), (".", "it is a folder"), ("/dev/zero", "a device, pipe or socket"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            rows_of(tmp_path / name)


# Masks


def batch_of(tokenizer: Any, rows: int = 24, length: int = 60) -> list[dict[str, Any]]:
    chance = np.random.default_rng(1)
    text = [" ".join(chance.permutation(" ".join(LINES).split())) for _ in range(rows)]
    items = [
        tokenizer(one, truncation=True, max_length=length - n % 7, return_special_tokens_mask=True)
        for n, one in enumerate(text)
    ]
    return [
        {"input_ids": np.array(one["input_ids"]), "special_tokens_mask": np.array(one["special_tokens_mask"], bool)}
        for one in items
    ]


def test_masking_tokens_draws_what_transformers_own_collator_draws() -> None:
    tokenizer, items = wordpiece(), batch_of(wordpiece())
    stock = transformers.DataCollatorForLanguageModeling(tokenizer)
    torch.manual_seed(5)
    expected = stock([{name: value.tolist() for name, value in item.items()} for item in items])
    torch.manual_seed(5)
    found = MaskingCollator(tokenizer)(items)
    for name in ("input_ids", "labels", "attention_mask"):
        assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize("masking", ["words", "spans"])
@pytest.mark.parametrize("kind", [wordpiece, byte_level], ids=["wordpiece", "byte level"])
def test_whole_words_are_masked_as_often_as_asked(kind: Any, masking: str) -> None:
    tokenizer = kind()
    items = batch_of(tokenizer)
    collate = MaskingCollator(tokenizer, masking, 0.2)
    words = Words.of(tokenizer)
    torch.manual_seed(0)
    masked = total = runs = 0
    replaced: list[int] = []
    for _ in range(20):
        batch = collate(items)
        for item, labels, inputs in zip(items, batch["labels"], batch["input_ids"], strict=True):
            count = len(item["input_ids"])
            chosen = (labels[:count] != -100).numpy()
            assert not (labels[count:] != -100).any()
            assert not chosen[item["special_tokens_mask"]].any()
            assert (labels[:count].numpy()[chosen] == item["input_ids"][chosen]).all()
            starts = words.starts(item["input_ids"], item["special_tokens_mask"])
            assert all(chosen[i] == chosen[i - 1] for i in range(1, count) if not starts[i]), (
                "words are masked as a whole"
            )
            masked += int(chosen.sum())
            total += int((~item["special_tokens_mask"]).sum())
            word_chosen = chosen[starts]
            runs += int((word_chosen[1:] & ~word_chosen[:-1]).sum())
            replaced += inputs[:count][torch.from_numpy(chosen)].tolist()
    assert masked / total == pytest.approx(0.2, abs=0.015)
    assert replaced.count(tokenizer.mask_token_id) / len(replaced) == pytest.approx(0.8, abs=0.02)
    longer = masked / runs
    assert longer > (4 if masking == "spans" else 1), longer


def test_words_are_those_of_the_text() -> None:
    for tokenizer in (wordpiece(), byte_level()):
        ids = np.array(tokenizer("The unbelievably misty river, says Ane.", add_special_tokens=False)["input_ids"])
        starts = Words.of(tokenizer).starts(ids, np.zeros(len(ids), bool))
        edges = [*np.nonzero(starts)[0].tolist(), len(ids)]
        found = [tokenizer.decode(ids[a:b]).strip() for a, b in itertools.pairwise(edges)]
        assert found == ["The" if tokenizer is not wordpiece() else "the", "unbelievably", "misty", "river", ",", "says",
                         "Ane" if tokenizer is not wordpiece() else "ane", "."]  # fmt: skip


def test_a_tokenizer_that_does_not_mark_words_is_refused() -> None:
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "[MASK]": 2}, []))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, mask_token="[MASK]", pad_token="a")
    with pytest.raises(UserError, match="does not mark where words begin"):
        MaskingCollator(tokenizer, "words")
    MaskingCollator(tokenizer, "tokens")


def test_the_logits_of_masked_tokens_are_those_of_the_whole_model() -> None:
    from stoker.tasks.mlm.masked_trainer import masked_logits

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    for kind in (transformers.BertForMaskedLM, transformers.RobertaForMaskedLM):
        settings = {**config.to_dict(), "model_type": kind.config_class.model_type}
        model = kind(kind.config_class(**settings)).eval()
        ids, masked = torch.randint(5, 99, (3, 9)), torch.rand(3, 9) < 0.3
        with torch.no_grad():
            expected = model(input_ids=ids).logits[masked]
            assert torch.allclose(masked_logits(model, model, {"input_ids": ids}, masked), expected, atol=1e-6)
            assert model(input_ids=ids).logits.shape == (3, 9, 99), "the hook is gone"


def test_old_tokens_leave_the_cache_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.tasks import cache

    monkeypatch.setattr(cache, "MOST_BYTES", 3000)
    for n in range(3):
        rows_of(write(tmp_path / "d.txt", [f"{n} river"] * 300))
    left = {path.stem for path in (tmp_path / "cache" / "features").iterdir()}
    assert len(left) == 1
    assert token_store._load(left.pop()) is not None


@pytest.mark.parametrize("between", [" ", ""], ids=["spaces", "no spaces"])
def test_a_line_of_any_length_is_read_piece_by_piece(between: str, tmp_path: Path) -> None:
    text = between.join(["Fl\u00fcsse", "\u6cb3\u5ddd", "rivers"] * 600_000)
    path = tmp_path / "one-line.txt"
    path.write_text(text, encoding="utf-8")
    faults = Faults(str(path))
    parts = list(FileTexts(path).texts(faults))
    assert faults.count == 0
    assert max(sum(map(len, part)) for part in parts) <= 5 << 20
    assert between.join(itertools.chain(*parts)).split() == text.split()


def test_a_file_without_any_usable_text_is_announced_once(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": 1}\n' * 4)
    said: list[str] = []
    with pytest.raises(UserError, match="4 of 4 rows"):
        tokenize_sources([FileTexts(path)], wordpiece(), strict=False, say=said.append)
    assert len(said) == 1
