"""A tiny random Llama with a byte-level tokenizer, and chats to train it on."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ANSWERS = ("red", "green", "blue", "grey")


@functools.cache
def _backend() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    words = ["Which colour has thing 12? It is red. user assistant system"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(words, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    backend.add_special_tokens(
        [AddedToken(one, special=True) for one in ("<|im_start|>", "<|im_end|>", "<|end|>", "<pad>")]
    )
    text: str = backend.to_str()
    return text


def tokenizer(template: str | None = CHATML, longest: int = 256) -> Any:
    from tokenizers import Tokenizer

    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()), eos_token="<|im_end|>" if template else "<|end|>",
        pad_token="<pad>", model_max_length=longest,
    )  # fmt: skip
    made.chat_template = template
    return made


def save_tiny_llama(folder: Path, template: str | None = CHATML, seed: int = 0, longest: int = 256) -> Path:
    torch.manual_seed(seed)
    words = tokenizer(template, longest)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=longest, tie_word_embeddings=True, pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def chat(number: int, turns: int = 1) -> list[dict[str, str]]:
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Which colour has thing {number + turn}?"})
        messages.append({"role": "assistant", "content": f"It is {ANSWERS[(number + turn) % 4]}."})
    return messages


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def write_chats(path: Path, count: int = 24) -> Path:
    return write_lines(path, [{"messages": chat(n, 1 + n % 3)} for n in range(count)])
