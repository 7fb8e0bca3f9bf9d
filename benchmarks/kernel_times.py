"""Every native operator against the PyTorch operators it replaces, forward and backward.

    python benchmarks/kernel_times.py                 all of them, about two minutes
    python benchmarks/kernel_times.py --only norm     those with "norm" in the name
    python benchmarks/kernel_times.py --json out.json --check
    python benchmarks/kernel_times.py --busy          on a machine that others use: one thread, CPU time

Both sides run in this process, in turn, on the same tensors; the ratio is the median over rounds of the ratio within a round,
so that a slow moment hits both. Both sides keep freed memory mapped, as Stoker does: without that PyTorch is slower still. The
rate counts what an operator cannot avoid: bytes it must read and write, or floating-point operations of its products. With
--check the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from stoker.kernels import native
from stoker.kernels.activation import bias_activation, gated_activation
from stoker.kernels.attention import attention_packed
from stoker.kernels.dropout import dropout
from stoker.kernels.embedding import embedding_layer_norm_dropout
from stoker.kernels.linear import linear_packed
from stoker.kernels.lora import Adapter, lora_linear_packed
from stoker.kernels.loss import cross_entropy, linear_cross_entropy
from stoker.kernels.norm import dropout_add_layer_norm, dropout_add_rms_norm, layer_norm
from stoker.kernels.quantized import QuantizedWeight, dequantize, quantize
from stoker.machine.facts import this_machine
from stoker.machine.measure import measure_rates
from stoker.model.memory import keep_mapped
from stoker.model.optimizers import fuse

TOKENS = 2048
SIZES = {"base": (768, 3072), "small": (384, 1536)}  # hidden and inner size of BERT-base and MiniLM
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VOCABULARY = 30522
P = 0.1


@dataclass(frozen=True)
class Case:
    """One comparison. `amount` is in bytes if `unit` is GB/s, in operations if it is GFLOP/s."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    amount: float
    unit: str = "GB/s"
    bar: float | None = None
    """The least ratio promised with all threads; None where none is."""


@dataclass(frozen=True)
class Result:
    name: str
    milliseconds: float
    torch_milliseconds: float
    ratio: float
    rate: float
    unit: str
    limit: float | None
    """What this machine was measured to reach, in the same unit."""
    bar: float | None

    @property
    def missed(self) -> bool:
        return self.bar is not None and self.ratio < self.bar


def run(case: Case, rounds: int, seconds: float, limits: dict[str, float], clock: Callable[[], float]) -> Result:
    """Rounds of one call per side, the first side changing, until `rounds` are done or `seconds` have passed."""
    sides = (case.ours, case.theirs)
    for side in sides:
        side()
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < rounds and (len(times[0]) < 3 or time.perf_counter() < end):
        for which in (0, 1) if len(times[0]) % 2 else (1, 0):
            begin = clock()
            sides[which]()
            times[which].append(clock() - begin)
    ours, theirs = (statistics.median(side) for side in times)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    rate = case.amount / ours / 1e9
    promised = case.bar if limits else None  # promises are about all threads
    return Result(case.name, ours * 1e3, theirs * 1e3, ratio, rate, case.unit, limits.get(case.unit), promised)


def step(call: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor | None = None) -> Callable[[], None]:
    """Forward and backward of `call(*leaves)`, with fresh gradients each time."""

    def work() -> None:
        for leaf in leaves:
            leaf.grad = None
        call(*leaves).backward(grad)

    return work


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def both_sizes() -> Iterator[tuple[str, int, int, torch.dtype, int]]:
    """Label, hidden size, inner size, dtype and its bytes."""
    for dtype_name, dtype in DTYPES.items():
        for size, (hidden, inner) in SIZES.items():
            yield f"{size} {dtype_name}", hidden, inner, dtype, dtype.itemsize


# Promises hold for fp32; bf16 is measured beside it.
def bar(value: float, dtype: torch.dtype) -> float | None:
    return value if dtype == torch.float32 else None


def dropout_cases() -> Iterator[Case]:
    for label, hidden, _, dtype, size in both_sizes():
        x, grad = leaf(TOKENS, hidden, dtype=dtype), torch.randn(TOKENS, hidden).to(dtype)
        yield Case(
            f"dropout, {label}",
            step(lambda x: dropout(x, P), [x], grad),
            step(lambda x: F.dropout(x, P), [x], grad),
            amount=4 * x.numel() * size,
            bar=bar(10.0, dtype),
        )


def norm_cases() -> Iterator[Case]:
    for label, hidden, _, dtype, size in both_sizes():
        x, residual = leaf(TOKENS, hidden, dtype=dtype), leaf(TOKENS, hidden, dtype=dtype)
        weight, bias, x_bias = (leaf(hidden, dtype=dtype) for _ in range(3))
        grad = torch.randn(TOKENS, hidden).to(dtype)
        yield Case(
            f"dropout + residual + LayerNorm, {label}",
            step(
                lambda x, r, w, b, c: dropout_add_layer_norm(x, r, w, b, x_bias=c, p=P),
                [x, residual, weight, bias, x_bias],
                grad,
            ),
            step(
                lambda x, r, w, b, c: F.layer_norm(r + F.dropout(x + c, P), w.shape, w, b, 1e-12),
                [x, residual, weight, bias, x_bias],
                grad,
            ),
            amount=8 * x.numel() * size,
            bar=bar(4.0, dtype),
        )
        yield Case(
            f"dropout + residual + RMSNorm, {label}",
            step(lambda x, r, w: dropout_add_rms_norm(x, r, w, p=P), [x, residual, weight], grad),
            step(lambda x, r, w: F.rms_norm(r + F.dropout(x, P), w.shape, w, 1e-6), [x, residual, weight], grad),
            amount=8 * x.numel() * size,
        )
        yield Case(
            f"LayerNorm, {label}",
            step(lambda x, w, b: layer_norm(x, w, b), [x, weight, bias], grad),
            step(lambda x, w, b: F.layer_norm(x, w.shape, w, b), [x, weight, bias], grad),
            amount=5 * x.numel() * size,
        )


def activation_cases() -> Iterator[Case]:
    for label, _, inner, dtype, size in both_sizes():
        x, bias, grad = leaf(TOKENS, inner, dtype=dtype), leaf(inner, dtype=dtype), torch.randn(TOKENS, inner).to(dtype)
        plain = {
            "GELU": ("gelu", F.gelu, 2.0),
            "GELU by tanh": ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), None),
            "ReLU": ("relu", F.relu, None),
            "SiLU": ("silu", F.silu, None),
        }
        for name, (kind, formula, promised) in plain.items():
            yield Case(
                f"bias + {name}, {label}",
                step(lambda x, b, kind=kind: bias_activation(x, b, kind), [x, bias], grad),
                step(lambda x, b, formula=formula: formula(x + b), [x, bias], grad),
                amount=5 * x.numel() * size,
                bar=bar(promised, dtype) if promised else None,
            )
        half = torch.randn(TOKENS, inner // 2).to(dtype)
        for name, kind, formula in (("GeGLU", "gelu", F.gelu), ("SwiGLU", "silu", F.silu)):

            def eager(x: Tensor, formula: Callable[[Tensor], Tensor] = formula) -> Tensor:
                gate, up = x.chunk(2, -1)
                return formula(gate) * up

            yield Case(
                f"{name}, {label}",
                step(lambda x, kind=kind: gated_activation(x, None, kind), [x], half),
                step(eager, [x], half),
                amount=4 * x.numel() * size,
            )


def loss_cases() -> Iterator[Case]:
    labels = torch.randint(0, VOCABULARY, (TOKENS // 4,))
    logits = leaf(TOKENS // 4, VOCABULARY)
    yield Case(
        f"cross entropy, {TOKENS // 4} rows of {VOCABULARY}",
        step(lambda x: cross_entropy(x, labels), [logits]),
        step(lambda x: F.cross_entropy(x, labels), [logits]),
        amount=3 * logits.numel() * 4,
    )
    hidden = SIZES["small"][0]
    masked = torch.randint(0, VOCABULARY, (TOKENS,)).masked_fill(torch.rand(TOKENS) >= 0.15, -100)
    x, weight, bias = leaf(TOKENS, hidden), leaf(VOCABULARY, hidden), leaf(VOCABULARY)
    yield Case(
        "linear + cross entropy, masked LM, small",
        step(lambda x, w, b: linear_cross_entropy(x, w, b, masked), [x, weight, bias]),
        step(lambda x, w, b: F.cross_entropy(F.linear(x, w, b), masked), [x, weight, bias]),
        amount=6.0 * (masked >= 0).sum().item() * VOCABULARY * hidden,
        unit="GFLOP/s",
    )
    x = leaf(len(labels), hidden)
    yield Case(
        "linear + cross entropy, soft cap, small",
        step(lambda x, w: linear_cross_entropy(x, w, None, labels, softcap=30.0), [x, weight]),
        step(lambda x, w: F.cross_entropy(30.0 * torch.tanh(F.linear(x, w) / 30.0), labels), [x, weight]),
        amount=6.0 * len(labels) * VOCABULARY * hidden,
        unit="GFLOP/s",
    )


def embedding_cases() -> Iterator[Case]:
    for label, (hidden, _) in SIZES.items():
        ids, positions, types = (torch.randint(0, size, (TOKENS,)) for size in (VOCABULARY, 384, 2))
        leaves = [*(leaf(size, hidden) for size in (VOCABULARY, 512, 2)), leaf(hidden), leaf(hidden)]
        grad = torch.randn(TOKENS, hidden)
        yield Case(
            f"embeddings + LayerNorm + dropout, {label} fp32",
            step(
                lambda word, place, kind, w, b, ids=ids, positions=positions, types=types: embedding_layer_norm_dropout(
                    ids, positions, types, word, place, kind, w, b, eps=1e-12, p=P, padding_idx=0
                ),
                leaves,
                grad,
            ),
            step(
                lambda word, place, kind, w, b, ids=ids, positions=positions, types=types: F.dropout(
                    F.layer_norm(
                        F.embedding(ids, word, 0) + F.embedding(positions, place) + F.embedding(types, kind),
                        w.shape,
                        w,
                        b,
                        1e-12,
                    ),
                    P,
                ),
                leaves,
                grad,
            ),
            amount=(12 * TOKENS + VOCABULARY) * hidden * 4,
        )


LENGTHS = (170, 132, 158, 201, 118, 150, 240, 384, 99, 141, 125, 130)  # 12 windows of SQuAD, 2,048 tokens
HEADS = 12


def attention_cases() -> Iterator[Case]:
    starts = torch.tensor((0, *itertools.accumulate(LENGTHS)))
    for label, (hidden, _) in SIZES.items():
        size = hidden // HEADS
        qkv, grad = leaf(TOKENS, 3 * hidden), torch.randn(TOKENS, hidden)
        operations = 3.5 * 4 * sum(length**2 for length in LENGTHS) * hidden  # 2 products forward, 5 backward

        # What stock BERT does in training: the batch padded to 384, a mask, dropout; no flash kernel takes that on a CPU.
        padded = leaf(3, len(LENGTHS), HEADS, 384, size)
        mask = torch.zeros(len(LENGTHS), 1, 1, 384)
        for row, length in zip(mask, LENGTHS, strict=True):
            row[..., length:] = torch.finfo(torch.float32).min
        padded_grad = torch.randn(len(LENGTHS), HEADS, 384, size)
        yield Case(
            f"attention with dropout against padded, {label} fp32",
            step(lambda x, starts=starts: attention_packed(x, starts, HEADS, dropout_p=P), [qkv], grad),
            step(lambda x, mask=mask: F.scaled_dot_product_attention(*x, mask, dropout_p=P), [padded], padded_grad),
            amount=operations,
            unit="GFLOP/s",
            bar=6.0,
        )

        def per_sequence(x: Tensor, size: int = size) -> Tensor:
            parts = x.view(TOKENS, 3, HEADS, size).permute(1, 2, 0, 3).split(LENGTHS, dim=2)
            return torch.cat(
                [F.scaled_dot_product_attention(*part[:, None])[0].transpose(0, 1).flatten(1) for part in parts]
            )

        yield Case(
            f"attention against flash per sequence, {label} fp32",
            step(lambda x, starts=starts: attention_packed(x, starts, HEADS), [qkv], grad),
            step(per_sequence, [qkv], grad),
            amount=operations,
            unit="GFLOP/s",
            bar=2.5,
        )


def relative_cases() -> Iterator[Case]:
    """Attention with relative positions as DeBERTa computes it: on the batch padded to 384, gathered from (tokens, positions)."""
    starts, width, span = torch.tensor((0, *itertools.accumulate(LENGTHS))), 384, 256
    distances = torch.arange(width)[:, None] - torch.arange(width)
    rows = torch.arange(1 - width, width).add(span).clamp(0, 2 * span - 1)
    mask = torch.arange(width) >= torch.tensor(LENGTHS)[:, None, None, None]
    for label, (hidden, _) in SIZES.items():
        size = hidden // HEADS
        qkv, grad = leaf(TOKENS, 3 * hidden), torch.randn(TOKENS, hidden)
        tables = [leaf(2 * span, HEADS, size) for _ in range(2)]
        padded = leaf(3, len(LENGTHS), HEADS, width, size)
        padded_grad = torch.randn(len(LENGTHS), HEADS, width, size)
        scale = (3 * size) ** -0.5

        def gathered(x: Tensor, position_q: Tensor, position_k: Tensor, scale: float = scale) -> Tensor:
            q, k, v = x
            index = rows[width - 1 + distances].expand(len(LENGTHS), HEADS, width, width)
            to_position = torch.gather(q @ position_k.permute(1, 2, 0), -1, index)
            to_content = torch.gather(k @ position_q.permute(1, 2, 0), -1, index.transpose(-1, -2)).transpose(-1, -2)
            scores = (q @ k.transpose(-1, -2) + to_position + to_content) * scale
            weights = scores.masked_fill(mask, torch.finfo(x.dtype).min).softmax(-1)
            return F.dropout(weights, P) @ v

        def ours(x: Tensor, position_q: Tensor, position_k: Tensor, scale: float = scale) -> Tensor:
            given = (position_q, position_k, rows)
            return attention_packed(x, starts, HEADS, relative=given, scale=scale, dropout_p=P)

        yield Case(
            f"attention with relative positions, {label} fp32",
            step(ours, [qkv, *tables], grad),
            step(gathered, [padded, *tables], padded_grad),
            amount=2.0 * (4 + 11) * sum(length**2 for length in LENGTHS) * hidden,  # 4 products forward, 11 backward
            unit="GFLOP/s",
        )


def linear_cases() -> Iterator[Case]:
    for label, (hidden, inner) in SIZES.items():
        for outs, width in (((hidden,) * 3, hidden), ((hidden,), hidden), ((inner,), hidden), ((hidden,), inner)):
            shape = f"{width} to {'3 x ' if len(outs) == 3 else ''}{outs[0]}"
            x, grad = leaf(TOKENS, width), torch.randn(TOKENS, sum(outs))
            weights = [leaf(out, width) for out in outs]
            operations = 6.0 * TOKENS * width * sum(outs)

            def eager(x: Tensor, *weights: Tensor) -> Tensor:
                return (
                    torch.cat([F.linear(x, weight) for weight in weights], 1)
                    if len(weights) > 1
                    else F.linear(x, *weights)
                )

            ours = step(lambda x, *weights: linear_packed(x, weights), [x, *weights], grad)
            yield Case(
                f"linear {shape}, {label} fp32",
                ours,
                step(eager, [x, *weights], grad),
                operations,
                unit="GFLOP/s",
                bar=0.97,
            )
            narrow, narrow_grad = x.detach().bfloat16().requires_grad_(), grad.bfloat16()
            yield Case(
                f"linear {shape}, {label} bf16 against own fp32",
                step(lambda x, *weights: linear_packed(x, weights), [narrow, *weights], narrow_grad),
                ours,
                operations,
                unit="GFLOP/s",
                bar=0.85,
            )


def lora_cases() -> Iterator[Case]:
    """A frozen weight, or q, k and v, with an adapter of rank 16 each, against what peft computes."""
    for label, (hidden, inner) in SIZES.items():
        for outs, width in (((hidden,) * 3, hidden), ((inner,), hidden), ((hidden,), inner)):
            shape = f"{width} to {'3 x ' if len(outs) == 3 else ''}{outs[0]}"
            x, grad = leaf(TOKENS, width), torch.randn(TOKENS, sum(outs))
            frozen = [torch.randn(out, width) for out in outs]
            trained = [leaf(*size) for out in outs for size in ((16, width), (out, 16))]
            operations = 4.0 * TOKENS * width * sum(outs)  # of the frozen weights; the adapters add 6 to 12%
            for p in (0.0, 0.1):

                def eager(x: Tensor, *trained: Tensor, p: float = p, frozen: list[Tensor] = frozen) -> Tensor:
                    pairs = zip(frozen, trained[::2], trained[1::2], strict=True)
                    parts = [F.linear(x, w) + F.linear(F.linear(F.dropout(x, p), a), b) * 2.0 for w, a, b in pairs]
                    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

                def ours(x: Tensor, *trained: Tensor, p: float = p, frozen: list[Tensor] = frozen) -> Tensor:
                    pairs = zip(trained[::2], trained[1::2], strict=True)
                    return lora_linear_packed(x, frozen, None, [[Adapter(a, b, 2.0, p)] for a, b in pairs])

                yield Case(
                    f"LoRA linear {shape}, {label} fp32{', dropout' if p else ''}",
                    step(ours, [x, *trained], grad),
                    step(eager, [x, *trained], grad),
                    operations,
                    unit="GFLOP/s",
                )


def quantized_cases() -> Iterator[Case]:
    """A frozen weight in few bits back to fp32, against indexing and a product in torch."""
    for label, (hidden, inner) in SIZES.items():
        weight = torch.randn(inner, hidden)
        four, eight = quantize(weight, 4), quantize(weight, 8)
        levels = torch.linspace(-1.0, 1.0, 16)

        def lookup(four: QuantizedWeight = four, levels: Tensor = levels) -> Tensor:
            codes = torch.stack([four.codes >> 4, four.codes & 15], 1).view(-1, 64).int()
            return (levels[codes] * four.scales.unsqueeze(1)).view(four.shape)

        def product(eight: QuantizedWeight = eight) -> Tensor:
            return eight.codes.float() * (eight.scales / 127).unsqueeze(1)

        for bits, stored, eager in ((4, four, lookup), (8, eight, product)):
            size = stored.nbytes + weight.nbytes
            yield Case(f"weight from {bits} bits, {label} fp32", partial(dequantize, stored), eager, size)


def adamw_cases() -> Iterator[Case]:
    """The update alone: no gradients are computed."""
    for label, (hidden, inner) in SIZES.items():
        shapes = ([(hidden, hidden), (hidden,)] * 4 + [(inner, hidden), (inner,), (hidden, inner), (hidden,)]) * 4
        size = sum(math.prod(shape) for shape in shapes)

        def update(native_update: bool, shapes: list[tuple[int, ...]] = shapes) -> Callable[[], object]:
            parameters = [leaf(*shape) for shape in shapes]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer = torch.optim.AdamW(parameters, fused=True)
            if native_update:
                fuse(optimizer)
            return optimizer.step

        yield Case(f"AdamW, {label} fp32", update(True), update(False), 28 * size)


GROUPS: list[Callable[[], Iterator[Case]]] = [
    dropout_cases,
    norm_cases,
    activation_cases,
    attention_cases,
    relative_cases,
    linear_cases,
    lora_cases,
    quantized_cases,
    loss_cases,
    embedding_cases,
    adamw_cases,
]


def measured_limits() -> dict[str, float]:
    """Measured now, as `stoker doctor --fresh` does: an old figure may come from a busier hour."""
    found = measure_rates(this_machine(), clock=None)
    return {"GB/s": found.bandwidth_all, "GFLOP/s": found.fp32_all}


def line(result: Result) -> str:
    limit = f"{100 * result.rate / result.limit:4.0f}%" if result.limit else "   ?"
    promise = "" if result.bar is None else f"  bar {result.bar:g}x" + (" MISSED" if result.missed else "")
    return (
        f"{result.name:52} {result.milliseconds:9.2f} {result.torch_milliseconds:9.2f} {result.ratio:6.1f}x "
        f"{result.rate:7.1f} {result.unit:7} {limit}{promise}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="cases with TEXT in their name")
    parser.add_argument("--rounds", type=int, default=25, help="calls of each side per case (default 25)")
    parser.add_argument("--seconds", type=float, default=4.0, help="at most about this long per case (default 4)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there too")
    parser.add_argument(
        "--busy", action="store_true", help="one thread and CPU time: what other programs disturb least"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    arguments = parser.parse_args()

    keep_mapped()
    torch.manual_seed(0)
    if arguments.busy:
        torch.set_num_threads(1)
    limits = {} if arguments.busy else measured_limits()
    clock = time.process_time if arguments.busy else time.perf_counter
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, level {native.level()}, {TOKENS} tokens")
    if limits:
        print(f"measured limits: {limits['GB/s']:.0f} GB/s, {limits['GFLOP/s']:.0f} GFLOP/s")
    print(f"{'forward + backward':52} {'ours ms':>9} {'torch ms':>9} {'ratio':>7} {'rate':>7} {'':7} of limit")
    results = []
    for group in GROUPS:
        for case in group():
            if arguments.only.lower() in case.name.lower():
                results.append(run(case, arguments.rounds, arguments.seconds, limits, clock))
                print(line(results[-1]), flush=True)
    if not results:
        parser.error(f"--only {arguments.only!r}: no case has that in its name")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return int(arguments.check and any(result.missed for result in results))


if __name__ == "__main__":
    sys.exit(main())
