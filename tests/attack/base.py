"""Valid inputs that the cases start from: a model, data and the log of a run."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

__all__ = ["chats", "entities", "make_base", "pairs", "rows", "scored_pairs", "squad"]

_NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana"]
_PLACES = ["Torwick", "Lund", "Ash", "Kell"]


def squad(count: int, first: int = 0) -> dict[str, Any]:
    """Questions in the official nested layout."""
    paragraphs = []
    for number in range(first, first + count):
        name, place = _NAMES[number % len(_NAMES)], _PLACES[number // len(_NAMES) % len(_PLACES)]
        context = f"In {place} lived {name}, who wrote letter {number}."
        answer = {"text": name, "answer_start": context.index(name)}
        paragraphs.append({"context": context, "qas": [{"id": f"q{number}", "question": f"Who wrote letter {number}?",
                                                        "answers": [answer]}]})  # fmt: skip
    return {"version": "1.1", "data": [{"title": "letters", "paragraphs": paragraphs}]}


def rows(count: int) -> list[dict[str, Any]]:
    """Sentences with a label."""
    words = ("bad", "good")
    return [
        {"sentence": f"{_NAMES[n % 8]} is {words[n % 2]} in {_PLACES[n % 4]}.", "label": n % 2} for n in range(count)
    ]


def chats(count: int) -> list[dict[str, Any]]:
    """Questions and answers as turns of a chat."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"Who wrote letter {n}?"},
                {"role": "assistant", "content": _NAMES[n % 8]},
            ]
        }
        for n in range(count)
    ]


def entities(count: int) -> list[dict[str, Any]]:
    """Texts with entities by character."""
    texts = [f"{_NAMES[n % 8]} is in {_PLACES[n % 4]}." for n in range(count)]
    return [
        {
            "text": text,
            "entities": [
                {"start": 0, "end": text.index(" "), "label": "PER"},
                {"start": text.rindex(" ") + 1, "end": len(text) - 1, "label": "LOC"},
            ],
        }
        for text in texts
    ]


def pairs(count: int) -> list[dict[str, Any]]:
    """Questions with their answers."""
    return [
        {"question": f"Who wrote letter {n}?", "answer": f"{_NAMES[n % 8]} wrote letter {n} in {_PLACES[n % 4]}."}
        for n in range(count)
    ]


def scored_pairs(count: int) -> list[dict[str, Any]]:
    """Pairs of sentences with a score from 0 to 1."""
    return [
        {"sentence1": one["answer"], "sentence2": other["question"], "score": n % 3 / 2}
        for n, (one, other) in enumerate(zip(pairs(count), pairs(count)[::-1], strict=True))
    ]


def make_base(folder: Path) -> None:
    for name, count in (("train.conll", 24), ("dev.conll", 8)):
        lines = [f"{_NAMES[n % 8]}\tB-PER\nis\tO\nin\tO\n{_PLACES[n % 4]}\tB-LOC\n" for n in range(count)]
        (folder / name).write_text("\n".join(lines))
    (folder / "train.txt").write_text(
        "".join(f"{_NAMES[n % 8]} is in {_PLACES[n % 4]} and wrote letter {n}.\n" for n in range(40))
    )
    for name, count in (("train.pairs.jsonl", 24), ("dev.pairs.jsonl", 8)):
        (folder / name).write_text("\n".join(map(json.dumps, pairs(count))) + "\n")
    for name, count in (("train.jsonl", 16), ("dev.jsonl", 4)):
        (folder / name).write_text("\n".join(map(json.dumps, chats(count))) + "\n")
    (folder / "train.json").write_text(json.dumps(squad(24)))
    (folder / "dev.json").write_text(json.dumps(squad(6, first=24)))
    for name, count in (("train.tsv", 24), ("dev.tsv", 8)):
        lines = ["sentence\tlabel", *(f"{row['sentence']}\t{row['label']}" for row in rows(count))]
        (folder / name).write_text("\n".join(lines) + "\n")
    program = folder / "bin" / "mpirun"  # so that a launch on several hosts gets as far as starting mpirun
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20251105'\n")
    program.chmod(0o755)
    save_model(folder / "model", "BertModel")
    save_model(folder / "qa_model", "BertForQuestionAnswering")
    save_language_model(folder / "llm")
    save_adapter(folder / "adapter", folder / "llm")


def save_model(folder: Path, kind: str) -> None:
    """A BERT of two layers with an alphabet for a vocabulary, so that it loads fast."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    letters = string.ascii_lowercase + string.digits + string.punctuation
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    words += ["who", "wrote", "letter", "in", "lived", "good", "bad", "is"]
    backend = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=128, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=128,
    )  # fmt: skip
    getattr(transformers, kind)(config).save_pretrained(folder)


def save_language_model(folder: Path) -> None:
    """A Llama of two layers that reads bytes."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
    words.chat_template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    words.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=256, eos_token_id=words.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def save_adapter(folder: Path, base: Path) -> None:
    """LoRA adapters of that language model, as `stoker train sft` writes them."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    peft.get_peft_model(model, config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
