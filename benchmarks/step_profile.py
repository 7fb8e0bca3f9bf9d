"""Where the time of a training step goes: shares of products, attention, the rest of the layers, casts and the optimizer."""

from __future__ import annotations

from sides import Step

__all__ = ["KINDS", "shares"]

KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("attention", "scaled_dot_product"),
    "norm, activation, dropout": ("norm", "activation", "gelu", "silu", "dropout", "bernoulli", "embedding", "softmax"),
    "products": ("linear", "lora", "::mm", "addmm", "bmm", "matmul", "mkldnn", "cross_entropy"),
    "casts and copies": ("copy_", "::to", "::cat", "index_select", "index_copy", "clone"),
    "optimizer and clipping": ("optimizer", "adam", "foreach", "clip", "zero_"),
}
"""What the names of a kind's operators contain; the first kind that matches counts."""


def kind_of(operator: str) -> str:
    name = operator.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "rest")


def shares(step: Step, warm_up: int, steps: int) -> dict[str, float]:
    """The share of each kind in the time of all operators, by torch's profiler; time outside of operators is "rest" too."""
    import time

    from torch.profiler import ProfilerActivity, profile

    for number in range(warm_up):
        step(number)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        begin = time.perf_counter()
        for number in range(warm_up, warm_up + steps):
            step(number)
        whole = 1e6 * (time.perf_counter() - begin)
    found = dict.fromkeys((*KINDS, "rest"), 0.0)
    for event in recorded.key_averages():
        found[kind_of(event.key)] += event.self_cpu_time_total / whole
    found["rest"] += max(0.0, 1.0 - sum(found.values()))
    return found
