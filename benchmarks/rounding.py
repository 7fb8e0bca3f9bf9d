"""How far stock and Stoker are from exact arithmetic, which is the stock model in fp64 with equal weights and batches.

    python benchmarks/rounding.py --case bf16          # losses and gradients of single steps, over seeds
    python benchmarks/rounding.py --case adafactor     # losses of eight steps, and one update on equal gradients

Random BERT models (4 layers, width 128; adafactor: GPT-2, 2 layers, width 32) without dropout, for sequence classification
with batches of 4 rows. Exit code 1 if Stoker's error is more than three times stock's.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.optimization import Adafactor

import stoker

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VOCABULARY = 1000


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=_VOCABULARY, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, **_NO_DROPOUT
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).train()


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=_VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **_GPT2)
    return transformers.GPT2ForSequenceClassification(config).train()


def _batch(ones: int) -> dict[str, Tensor]:
    """Four rows of 20 to 60 tokens, `ones` of them with label 1."""
    lengths = torch.randint(20, 61, (4,))
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(5, _VOCABULARY, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": (torch.arange(4) < ones).long()}


def _step(model: nn.Module, batch: dict[str, Tensor], bf16: bool = False) -> tuple[float, Tensor]:
    """The loss, and all gradients in one vector."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(**batch).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def _rounded(model: nn.Module) -> nn.Module:
    """A stock model that also rounds what autocast keeps in fp32 between its layers."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda _, __, output: output.bfloat16().to(output.dtype))
    return model


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def bf16(seeds: int) -> bool:
    print(f"root mean squares over {seeds} seeds; labels 1 of 4: one, then two, where most of the gradient cancels")
    print(f"{'labels 1':>8}  {'side':<28}{'loss error':>12}{'gradient error':>16}{'norm, off by':>14}")
    fair = True
    for ones in (1, 2):
        errors: dict[str, list[tuple[float, ...]]] = {}
        for seed in range(seeds):
            torch.manual_seed(seed)
            model, batch = _bert(), _batch(ones)
            loss, exact = _step(copy.deepcopy(model).double(), batch)
            sides = {
                "stock fp32": _step(copy.deepcopy(model), batch),
                "stoker fp32": _step(stoker.optimize(copy.deepcopy(model)), batch),
                "stock bf16": _step(copy.deepcopy(model), batch, True),
                "stock bf16, residuals bf16": _step(_rounded(copy.deepcopy(model)), batch, True),
                "stoker bf16": _step(stoker.optimize(copy.deepcopy(model), dtype=torch.bfloat16), batch, True),
            }
            for side, (found, gradient) in sides.items():
                off = (gradient - exact).norm().item()
                row = (
                    found - loss,
                    off / exact.norm().item(),
                    gradient.norm().item() / exact.norm().item() - 1,
                )
                errors.setdefault(side, []).append(row)
        means = {side: [_rms(list(column)) for column in zip(*rows, strict=True)] for side, rows in errors.items()}
        for side, row in means.items():
            print(f"{ones:>8}  {side:<28}{row[0]:>12.1e}{row[1]:>16.1e}{row[2]:>14.1%}")
        fair = fair and means["stoker bf16"][1] < 3 * means["stock bf16"][1]
    return fair


def adafactor(seeds: int) -> bool:
    torch.manual_seed(0)
    model = _gpt2()
    sides: dict[str, Any] = {
        "stock": copy.deepcopy(model),
        "stock, rows reversed": copy.deepcopy(model),
        "stoker": stoker.optimize(copy.deepcopy(model)),
        "fp64": copy.deepcopy(model).double(),
    }
    optimizers = {side: _adafactor(one) for side, one in sides.items()}
    worst: dict[str, float] = dict.fromkeys(sides, 0.0)
    print(
        f"{'step':>4}"
        + "".join(f"{side:>22}" for side in sides if side != "fp64")
        + "   (distance of the loss from fp64's)"
    )
    for step in range(8):
        batch = _batch(2)
        losses = {}
        for side, one in sides.items():
            losses[side], _ = _step(one, {k: v.flip(0) for k, v in batch.items()} if "reversed" in side else batch)
            optimizers[side].step()
        distances = {side: abs(loss - losses["fp64"]) for side, loss in losses.items() if side != "fp64"}
        worst.update({side: max(worst[side], distance) for side, distance in distances.items()})
        print(f"{step + 1:>4}" + "".join(f"{distance:>22.0e}" for distance in distances.values()))
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    own, fused = _adafactor(one), stoker.optimize(other, _adafactor(other))[1]
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    own.step()
    fused.step()
    equal = all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    print(f"one update on equal gradients, bit for bit: {'equal' if equal else 'different'}")
    return equal and worst["stoker"] < 3 * max(worst["stock"], worst["stock, rows reversed"])


def _adafactor(model: nn.Module) -> Any:
    """As transformers' Trainer makes it for optim="adafactor"."""
    return Adafactor(model.parameters(), lr=1e-2, scale_parameter=False, relative_step=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("bf16", "adafactor"), required=True)
    parser.add_argument("--seeds", type=int, default=20)
    given = parser.parse_args()
    return 0 if {"bf16": bf16, "adafactor": adafactor}[given.case](given.seeds) else 1


if __name__ == "__main__":
    sys.exit(main())
