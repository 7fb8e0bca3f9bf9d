"""What follows backward: clipping, the update and zero_grad, by torch and by Stoker.

    python benchmarks/optimizer_step.py                     MiniLM and BERT-base, a minute
    python benchmarks/optimizer_step.py --model narrow --busy --steps 200       host time: twelve layers of width 32, one thread

torch's side is clip_grad_norm_ and AdamW(fused=True). "Scaled": the norm is above max_norm, so every gradient is multiplied; else
there is nothing to scale. Each side has parameters of its own, sides take turns, medians. --busy counts CPU time of one thread.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch

MODELS = {"minilm": (384, 6), "bert": (768, 12), "narrow": (32, 12)}
DEFAULT = ("minilm", "bert")
SIDES = ("torch", "stoker")


def parameters(hidden: int, layers: int) -> list[torch.nn.Parameter]:
    """Tensors of the sizes of a BERT for question answering."""
    sizes = [(30522 if hidden > 32 else 100, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    layer = [(hidden, hidden), (hidden,)] * 4 + [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,)]
    sizes += (layer + [(hidden,)] * 4) * layers + [(2, hidden), (2,)]
    return [torch.nn.Parameter(torch.randn(size) * 0.02) for size in sizes]


def side(
    name: str, hidden: int, layers: int, clock: Callable[[], float]
) -> Callable[[bool], tuple[float, float, float]]:
    """A function that takes one step and returns its seconds, and those of clipping and of the update."""
    import stoker
    from stoker.model import clip_grad_norm_

    held = torch.nn.ParameterList(parameters(hidden, layers))
    optimizer = torch.optim.AdamW(held, lr=3e-5, fused=True)
    if name == "stoker":
        stoker.optimize(held, optimizer)
    clip = clip_grad_norm_ if name == "stoker" else torch.nn.utils.clip_grad_norm_
    listed = list(held)
    gradients = [torch.randn_like(parameter) * 1e-3 for parameter in held]

    def step(scaled: bool) -> tuple[float, float, float]:
        for parameter, gradient in zip(listed, gradients, strict=True):
            parameter.grad = gradient.clone()  # as backward leaves them: new, and not in any cache
        begin = clock()
        clip(listed, 1e-3 if scaled else 1e6)
        clipped = clock()
        optimizer.step()
        updated = clock()
        optimizer.zero_grad()
        return clock() - begin, clipped - begin, updated - clipped

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=tuple(MODELS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--busy", action="store_true", help="one thread and CPU time")
    options = parser.parse_args()
    if options.busy:
        torch.set_num_threads(1)
    clock = time.process_time if options.busy else time.perf_counter
    for model in options.model or DEFAULT:
        sides = {name: side(name, *MODELS[model], clock) for name in SIDES}
        taken: dict[tuple[str, bool], list[tuple[float, float, float]]] = {}
        for number, scaled in itertools.product(range(options.steps + 2), (True, False)):
            for name, step in sides.items():
                seconds = step(scaled)
                if number >= 2:
                    taken.setdefault((name, scaled), []).append(seconds)
        for scaled in (True, False):
            print(f"{model:7} {'scaled' if scaled else 'nothing to scale':17}", end="")
            for which, what in enumerate(("step", "clipping", "update")):
                ms = {name: 1e3 * statistics.median(one[which] for one in taken[name, scaled]) for name in SIDES}
                print(f" {what} {ms['torch']:.3g} to {ms['stoker']:.3g} ms, {ms['torch'] / ms['stoker']:.2f}x;", end="")
            print(flush=True)


if __name__ == "__main__":
    main()
