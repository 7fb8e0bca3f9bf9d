"""Broken model folders: each file of a model, broken in every way seen so far and in random ways.

    good = make_good(tmp_path / "good")
    for name, folder in variants(seed=1, good=good, into=tmp_path / "broken"):
        ...  # `stoker ask`, `stoker train qa`, ... with that folder must end with exit code 0, 1 or 2, without a traceback

`name` says what is broken. A folder exists until the next one is requested. The same seed gives the same variants in the same
order: first those common to all seeds, then folders with random faults. `good` is any folder with a config.json, a
tokenizer.json and a model.safetensors; its files are linked, and never changed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Fault", "faults", "make_good", "random_fault", "variants"]

CONFIG, TOKENIZER, WEIGHTS, INDEX = "config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"
Fault = Callable[[Path], Any]


def make_good(folder: Path) -> Path:
    """A tiny question-answering BERT with its tokenizer, as `stoker train qa` writes it."""
    import torch
    import transformers

    from tasks.models import byte_level

    tokenizer = byte_level()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=128, type_vocab_size=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    transformers.BertForQuestionAnswering(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def variants(seed: int, good: Path, into: Path, *, more: int = 30) -> Iterator[tuple[str, Path]]:
    """(what is broken, the folder) for about 470 folders under `into`, of which `more` are drawn from `seed`."""
    draw = random.Random(seed)
    every = [*faults(good), *((f"random faults {n} of seed {seed}", random_fault(draw)) for n in range(more))]
    for number, (name, fault) in enumerate(every):
        folder = into / f"model-{number}"
        shutil.copytree(good, folder, copy_function=os.link)
        try:
            fault(folder)
            yield name, folder
        finally:
            folder.chmod(0o700)
            shutil.rmtree(folder, ignore_errors=True)


def faults(good: Path) -> Iterator[tuple[str, Fault]]:
    """What is broken, and a function that breaks a copy of `good` in that way. The copy may consist of links to the files."""
    for file in (CONFIG, "tokenizer_config.json", TOKENIZER, WEIGHTS, INDEX):
        for name, fault in _file_faults().items():
            yield f"{file} {name}", _on(file, fault)
    for file in (CONFIG, "tokenizer_config.json", TOKENIZER, INDEX):
        for name, content in _NOT_AN_OBJECT.items():
            yield f"{file} is {name}", _writes(file, content)
    yield from _field_faults(CONFIG, json.loads((good / CONFIG).read_text()))
    yield from _tokenizer_faults(json.loads((good / TOKENIZER).read_text()))
    yield from _weight_faults()
    yield from _folder_faults()


# Whole files


def _replace(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)  # replaces the link instead of writing through it to the good file
    path.write_bytes(content)


def _on(file: str, fault: Fault) -> Fault:
    return lambda folder: fault(folder / file)


def _writes(file: str, content: bytes) -> Fault:
    return lambda folder: _replace(folder / file, content)


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b"{}"


def _file_faults() -> dict[str, Fault]:
    def instead(make: Fault) -> Fault:
        def fault(path: Path) -> None:
            path.unlink(missing_ok=True)
            make(path)

        return fault

    def unreadable(path: Path) -> None:
        _replace(path, _bytes(path))
        path.chmod(0)

    return {
        "is missing": instead(lambda path: None),
        "is empty": lambda path: _replace(path, b""),
        "is garbage": lambda path: _replace(path, random.Random(path.name).randbytes(3000)),
        "is zeros": lambda path: _replace(path, b"\0" * 3000),
        "is cut in the middle": lambda path: _replace(path, _bytes(path)[: len(_bytes(path)) // 2]),
        "lacks its last byte": lambda path: _replace(path, _bytes(path)[:-1]),
        "has more at its end": lambda path: _replace(path, _bytes(path) + b'{"more": 1}'),
        "has a BOM": lambda path: _replace(path, b"\xef\xbb\xbf" + _bytes(path)),
        "is a folder": instead(lambda path: path.mkdir()),
        "is a pipe": instead(lambda path: os.mkfifo(path)),
        "is a link to itself": instead(lambda path: path.symlink_to(path.name)),
        "is a link to nothing": instead(lambda path: path.symlink_to("nothing")),
        "is a link to a device": instead(lambda path: path.symlink_to("/dev/zero")),
        "cannot be read": unreadable,
    }


_NOT_AN_OBJECT = {
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "text": b'"bert"',
    "an empty object": b"{}",
    "UTF-16": '{"model_type": "bert"}'.encode("utf-16"),
    "not UTF-8": b'{"model_type": "\xe9"}',
    "nested without end": b'{"a": ' + b"[" * 100_000,
    "a number of 5,000 digits": b'{"vocab_size": ' + b"7" * 5000 + b"}",
}


# Fields


_HUGE = 1 << 40
_ODD = {
    "negative": -3,
    "zero": 0,
    "huge": _HUGE,
    "text": "x",
    "null": None,
    "a list": [2],
    "an object": {"a": 1},
    "true": True,
}
_MORE_FIELDS: dict[str, tuple[Any, ...]] = {
    "model_type": ("no-such-model", "", None, 7, "gpt2", "t5", "../bert"),
    "hidden_act": ("no_such_act", None, 7, ["gelu"]),
    "architectures": ("x", [], [None], 7, ["NoSuchModel"], ["GPT2LMHeadModel"]),
    "id2label": ({"0": "a", "2": "b"}, {"x": "a"}, [], 7, {"0": None}),
    "num_labels": (-1, 0, _HUGE, "x"),
    "dtype": ("float7", 7, "int8", "float16"),
    "torch_dtype": ("float7", 7),
    "auto_map": ({"AutoConfig": "code.Config", "AutoModelForQuestionAnswering": "code.Model"}, "x"),
    "quantization_config": ({"quant_method": "gptq"}, {}, 7),
    "attn_implementation": ("no_such",),
    "_attn_implementation": ("no_such",),
    "problem_type": ("no_such",),
    "is_decoder": ("x", True),
    "num_attention_heads": (3, 7),
    "hidden_size": (17, 32),
    "vocab_size": (5, 100_000),
    "max_position_embeddings": (4, 64),
    "num_hidden_layers": (1, 3),
    "hidden_dropout_prob": (2.5, "0.1"),
    "layer_norm_eps": (float("nan"), "1e-12"),
}


def _set(file: str, name: str, value: Any) -> Fault:
    def fault(folder: Path) -> None:
        content = json.loads(_bytes(folder / file))
        content[name] = value
        _replace(folder / file, json.dumps(content).encode())

    return fault


def _field_faults(file: str, content: dict[str, Any]) -> Iterator[tuple[str, Fault]]:
    for name, value in content.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            for odd, other in _ODD.items():
                yield f"{name} in {file} is {odd}", _set(file, name, other)
    for name, values in _MORE_FIELDS.items():
        for value in values:
            yield f"{name} in {file} is {str(value)[:40]!r}", _set(file, name, value)


def _tokenizer_faults(content: dict[str, Any]) -> Iterator[tuple[str, Fault]]:
    for name in content:
        for odd, other in _ODD.items():
            yield f"{name} in {TOKENIZER} is {odd}", _set(TOKENIZER, name, other)
        yield (
            f"{name} in {TOKENIZER} is missing",
            lambda folder, name=name: _replace(
                folder / TOKENIZER, json.dumps({key: value for key, value in content.items() if key != name}).encode()
            ),
        )
    for name, other in (("vocab", {}), ("vocab", {"a": -1}), ("vocab", {"a": "b"}), ("vocab", {"a": 1 << 40}), ("vocab", None),
                        ("merges", [["no", "such"]]), ("merges", "x"), ("type", "NoSuch"), ("unk_token", "no such")):  # fmt: skip
        model = {**content["model"], name: other}
        yield f"{name} of {TOKENIZER} is {str(other)[:30]}", _set(TOKENIZER, "model", model)
    for name, values in {
        "tokenizer_class": ("NoSuchTokenizer", 7, None, "T5Tokenizer", "ByT5Tokenizer"),
        "model_max_length": (-1, 0, 5, "x", None, 1e30),
        "pad_token": (7, None, "no such token", {"a": 1}),
        "cls_token": (None, 7),
        "padding_side": ("up", 7),
        "added_tokens_decoder": ({"x": 1}, {"0": {}}, []),
        "auto_map": ({"AutoTokenizer": ["code.T", None]},),
        "model_input_names": ("x", [], ["input_ids", "no_such"]),
    }.items():
        for value in values:
            yield f"{name} in tokenizer_config.json is {value!r}", _set("tokenizer_config.json", name, value)

    def without_files(folder: Path) -> None:
        for name in (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"):
            (folder / name).unlink(missing_ok=True)

    def words(lines: bytes) -> Fault:
        def fault(folder: Path) -> None:
            without_files(folder)
            _replace(folder / "vocab.txt", lines)

        return fault

    yield "no tokenizer files", without_files
    yield "an empty vocab.txt", words(b"")
    yield "a vocab.txt without special tokens", words(b"one\ntwo\n")
    yield "a vocab.txt of garbage", words(bytes(range(256)) * 9)
    many = [b"[PAD]", b"[UNK]", b"[CLS]", b"[SEP]", *(b"w%d" % number for number in range(900))]
    yield "a vocab.txt of more words than the model", words(b"\n".join(many))


# Weights


def _tensors(change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Fault:
    def fault(folder: Path) -> None:
        from safetensors.torch import load, save

        tensors = load((folder / WEIGHTS).read_bytes())
        tensors = change(tensors) or tensors
        _replace(folder / WEIGHTS, save({name: value.contiguous() for name, value in tensors.items()}))

    return fault


def _weight_faults() -> Iterator[tuple[str, Fault]]:
    import torch

    words = "bert.embeddings.word_embeddings.weight"
    changes: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
        "hold no tensor": lambda tensors: {"nothing": torch.zeros(1)},
        "are of another architecture": lambda tensors: {f"transformer.h.{n}.attn.weight": torch.ones(16, 16) for n in range(9)},
        "are named otherwise": lambda tensors: {f"module.{name}": value for name, value in tensors.items()},
        "are the base model's alone": lambda tensors: {name: value for name, value in tensors.items() if "qa_" not in name},
        "are the head's alone": lambda tensors: {name: value for name, value in tensors.items() if "qa_" in name},
        "lack a layer": lambda tensors: {name: value for name, value in tensors.items() if ".layer.1." not in name},
        "lack the embeddings": lambda tensors: {name: value for name, value in tensors.items() if "embeddings" not in name},
        "have a layer too many": lambda tensors: {
            **tensors, **{name.replace(".layer.1.", ".layer.2."): value.clone() for name, value in tensors.items()}},
        "have transposed embeddings": lambda tensors: {**tensors, words: tensors[words].T},
        "have other embeddings": lambda tensors: {**tensors, words: tensors[words][:50]},
        "have flat tensors": lambda tensors: {name: value.reshape(-1) for name, value in tensors.items()},
        "have a head of another size": lambda tensors: {**tensors, "qa_outputs.weight": torch.zeros(7, 16)},
        "are int64": lambda tensors: {name: value.long() for name, value in tensors.items()},
        "are bool": lambda tensors: {name: value > 0 for name, value in tensors.items()},
        "are float64": lambda tensors: {name: value.double() for name, value in tensors.items()},
        "are float16": lambda tensors: {name: value.half() for name, value in tensors.items()},
        "are float8": lambda tensors: {name: value.to(torch.float8_e4m3fn) for name, value in tensors.items()},
        "are NaN": lambda tensors: {name: value * float("nan") for name, value in tensors.items()},
        "have one NaN": lambda tensors: tensors[words].view(-1)[7].fill_(float("nan")) and None,
        "have one infinity": lambda tensors: tensors[words].view(-1)[7].fill_(float("inf")) and None,
        "are empty tensors": lambda tensors: {name: value[:0] for name, value in tensors.items()},
    }  # fmt: skip
    for name, change in changes.items():
        yield f"weights that {name}", _tensors(change)

    def header(content: bytes, length: int | None = None) -> Fault:
        size = len(content) if length is None else length
        return _writes(WEIGHTS, size.to_bytes(8, "little") + content)

    yield "a header longer than the file", header(b"{}", 1 << 62)
    yield "a header of 90 MB that is not there", header(b"{}", 90 << 20)
    yield "a header without offsets", header(b'{"a": {"dtype": "F32", "shape": [2]}}')
    yield (
        "a header with a negative shape",
        header(b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}' + b"\0" * 8),
    )
    yield "a header with an unknown type", header(b'{"a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}')
    yield (
        "a header with a huge shape",
        header(b'{"a": {"dtype": "F32", "shape": [99999999999999], "data_offsets": [0, 8]}}'),
    )
    yield "a header that is a list", header(b"[]")
    for name, index in {
        "names files that are missing": {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}},
        "names files elsewhere": {"metadata": {}, "weight_map": {"a": "../../../../../../etc/passwd"}},
        "has no map": {"metadata": {}},
        "has a map that is a list": {"metadata": {}, "weight_map": []},
        "has a map of numbers": {"metadata": {}, "weight_map": {"a": 7}},
        "has an empty map": {"metadata": {}, "weight_map": {}},
        "has no metadata": {"weight_map": {"a": WEIGHTS}},
        "names itself": {"metadata": {}, "weight_map": {"a": INDEX}},
    }.items():
        yield f"an index that {name}", _index_instead(json.dumps(index).encode())
    for name, content in _NOT_AN_OBJECT.items():
        yield f"an index alone that is {name}", _index_instead(content)
    for name, content in {"garbage": b"\0garbage" * 99, "code": b"cos\nsystem\n(S'exit 1'\ntR.", "empty": b""}.items():
        yield (
            f"a pytorch_model.bin of {name}",
            lambda folder, content=content: (
                (folder / WEIGHTS).unlink(),
                (folder / "pytorch_model.bin").write_bytes(content),
            ),
        )


def _index_instead(content: bytes) -> Fault:
    def fault(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        _replace(folder / INDEX, content)

    return fault


# Folders


def _folder_faults() -> Iterator[tuple[str, Fault]]:
    def empty(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()

    def links(folder: Path) -> None:
        names = [path.name for path in folder.iterdir()]
        empty(folder)
        for name in names:
            (folder / name).symlink_to(name)

    yield "an empty folder", empty
    yield "a folder of links to themselves", links
    yield "a folder that cannot be read", lambda folder: folder.chmod(0)
    yield "a broken adapter_config.json", _writes("adapter_config.json", b"[]")
    yield (
        "an adapter of nothing",
        _writes("adapter_config.json", b'{"peft_type": "LORA", "base_model_name_or_path": "/nowhere"}'),
    )
    yield "a broken generation_config.json", _writes("generation_config.json", b"[")
    yield "a broken chat template", _writes("chat_template.jinja", b"{% for")
    yield "broken special tokens", _writes("special_tokens_map.json", b'{"pad_token": [1]}')
    yield "broken added tokens", _writes("added_tokens.json", b'{"a": "b"}')


def random_fault(draw: random.Random) -> Fault:
    """Overwrites, removes or repeats bytes at random places of one or more files."""
    files = (CONFIG, TOKENIZER, "tokenizer_config.json", WEIGHTS)
    contents = (b"", b"\0", b'"', b"[", b"}", b"-", b"9" * 12, b"\xff\xfe", b"null")
    plan = [
        (draw.choice(files), draw.random(), draw.randrange(1, 9), draw.choice(contents))
        for _ in range(draw.randint(1, 4))
    ]

    def fault(folder: Path) -> None:
        for file, where, length, content in plan:
            raw = bytearray((folder / file).read_bytes())
            # Most bytes of a weight file are numbers, which rarely cause an error: damage its header.
            at = int(where * (min(len(raw), 4000) if file == WEIGHTS else len(raw)))
            raw[at : at + length] = content
            _replace(folder / file, bytes(raw))

    return fault
