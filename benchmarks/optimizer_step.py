"""What follows backward: clipping, the update and zero_grad, with torch's clipping and with Stoker's.

    python benchmarks/optimizer_step.py                     MiniLM and BERT-base, a minute
    python benchmarks/optimizer_step.py --model minilm --steps 40

Both sides update with torch's fused AdamW; what differs is clip_grad_norm_. "Scaled": the norm is above max_norm, so every
gradient is multiplied; else there is nothing to scale. Each side has parameters of its own, sides take turns, medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch

MODELS = {"minilm": (384, 6), "bert": (768, 12)}
SIDES = ("torch", "stoker")


def parameters(hidden: int, layers: int) -> list[torch.nn.Parameter]:
    """Tensors of the sizes of a BERT for question answering."""
    sizes = [(30522, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    layer = [(hidden, hidden), (hidden,)] * 4 + [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,)]
    sizes += (layer + [(hidden,)] * 4) * layers + [(2, hidden), (2,)]
    return [torch.nn.Parameter(torch.randn(size) * 0.02) for size in sizes]


def side(name: str, hidden: int, layers: int) -> Callable[[bool], tuple[float, float]]:
    """A function that takes one step and returns its seconds, and those of clipping."""
    from stoker.model import clip_grad_norm_

    held = torch.nn.ParameterList(parameters(hidden, layers))
    optimizer = torch.optim.AdamW(held, lr=3e-5, fused=True)
    clip = clip_grad_norm_ if name == "stoker" else torch.nn.utils.clip_grad_norm_
    gradients = [torch.randn_like(parameter) * 1e-3 for parameter in held]

    def step(scaled: bool) -> tuple[float, float]:
        for parameter, gradient in zip(held, gradients, strict=True):
            parameter.grad = gradient.clone()  # as backward leaves them: new, and not in any cache
        begin = time.perf_counter()
        clip(held, 1.0 if scaled else 1e6)
        clipped = time.perf_counter() - begin
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin, clipped

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=tuple(MODELS))
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    for model in options.model or MODELS:
        sides = {name: side(name, *MODELS[model]) for name in SIDES}
        taken: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for number, scaled in itertools.product(range(options.steps + 2), (True, False)):
            for name, step in sides.items():
                seconds = step(scaled)
                if number >= 2:
                    taken.setdefault((name, scaled), []).append(seconds)
        for scaled in (True, False):
            whole, clipping = (
                {name: 1e3 * statistics.median(one[which] for one in taken[name, scaled]) for name in SIDES}
                for which in (0, 1)
            )
            shown = ", ".join(f"{name} {whole[name]:.1f} ms (clipping {clipping[name]:.1f})" for name in SIDES)
            gains = f"{whole['torch'] / whole['stoker']:.2f}x, clipping {clipping['torch'] / clipping['stoker']:.2f}x"
            print(f"{model:7} {'scaled' if scaled else 'nothing to scale':17} {shown}: {gains}", flush=True)


if __name__ == "__main__":
    main()
