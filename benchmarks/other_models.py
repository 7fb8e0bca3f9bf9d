"""One training step of models that are in no table: ViT, Whisper, T5 and BART, stock against `stoker.optimize`; never slower.

    python benchmarks/other_models.py                            every case, about ten minutes on two cores
    python benchmarks/other_models.py --case t5 --steps 3        one of them

Weights are random, the architectures those of deit-tiny, whisper-tiny, t5-small and bart-base; the rows of T5 and BART have
different lengths and are padded. Fails if losses differ without dropout, or Stoker is slower than stock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bars import Bar, Case, main
from lengths import MRPC
from sides import Step
from training_step import optimized_step, stock_step

SEEN = (16, 8)
"""Rows of a batch: images and texts, and recordings of 30 seconds."""


def vit(dropout: dict[str, float]) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=192,
            num_hidden_layers=12,
            num_attention_heads=3,
            intermediate_size=768,
            num_labels=10,
            **dropout,
        )
    )


def whisper(dropout: dict[str, float]) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder")
             for name, value in (("layers", 4), ("attention_heads", 6), ("ffn_dim", 1536))}  # fmt: skip
    return WhisperForConditionalGeneration(WhisperConfig(d_model=384, vocab_size=51865, **sizes, **dropout))


def t5(dropout: dict[str, float]) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(num_layers=6, decoder_start_token_id=0, **dropout))


def bart(dropout: dict[str, float]) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder")
             for name, value in (("layers", 6), ("attention_heads", 12), ("ffn_dim", 3072))}  # fmt: skip
    return BartForConditionalGeneration(BartConfig(d_model=768, vocab_size=50265, **sizes, **dropout))


def images(model: Any, number: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(number)
    rows = SEEN[0]
    return {"pixel_values": torch.randn(rows, 3, 224, 224, generator=generator), "labels": torch.arange(rows) % 10}


def recordings(model: Any, number: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(number)
    rows, width = SEEN[1], 2 * model.config.max_source_positions
    features = torch.randn(rows, model.config.num_mel_bins, width, generator=generator)
    return {"input_features": features, "labels": padded_rows(MRPC[number][:rows], generator, -100)[0]}


def texts(model: Any, number: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(number)
    ids, mask = padded_rows(MRPC[number], generator, model.config.pad_token_id)
    labels, _ = padded_rows([length // 2 for length in MRPC[number]], generator, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def padded_rows(lengths: Any, generator: Any, fill: int) -> tuple[Any, Any]:
    """Random tokens, and the mask of those that are real."""
    import torch

    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    ids = torch.randint(10, 30000, mask.shape, generator=generator)
    return ids.masked_fill(~mask, fill), mask.long()


def side(
    build: Callable[..., Any], batch: Callable[..., Any], off: tuple[str, ...], stoker: bool, dropout: bool = True
) -> Step:
    import torch

    torch.manual_seed(0)
    model = build({} if dropout else dict.fromkeys(off, 0.0))

    def loss_of(model: Any, number: int) -> Any:
        return model(**batch(model, number % len(MRPC))).loss

    return optimized_step(model, loss_of) if stoker else stock_step(model, loss_of)


def case(title: str, build: Callable[..., Any], batch: Callable[..., Any], *off: str) -> Callable[..., Case]:
    """`off` names the options of the configuration that set dropout."""
    stock, stoker = (functools.partial(side, build, batch, off, stoker) for stoker in (False, True))
    return lambda _: Case(title, stock, stoker, (Bar(1.0),))


CASES = {
    "vit": case("ViT (deit-tiny), 16 images", vit, images, "hidden_dropout_prob", "attention_probs_dropout_prob"),
    "whisper": case("Whisper (whisper-tiny), 8 recordings", whisper, recordings, "dropout", "attention_dropout"),
    "t5": case("T5 (t5-small), 16 pairs of texts", t5, texts, "dropout_rate"),
    "bart": case(
        "BART (bart-base), 16 pairs of texts", bart, texts, "dropout", "attention_dropout", "activation_dropout"
    ),
}

if __name__ == "__main__":
    main(CASES, __doc__)
