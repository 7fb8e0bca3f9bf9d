"""The training steps of `stoker bench`, with random weights and token counts of real examples, and the processes they run in."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from stoker.bench import decoder_step, encoder_step, narrow
from stoker.bench.lengths import ALPACA, PAIRS, SQUAD
from stoker.bench.sides import Step
from stoker.bench.trainer_step import LossOf, optimized_step, stock_step

__all__ = ["CASES", "Cores", "Kind", "Size", "StepCase", "has_peft", "host_turn", "loads", "sweep_step", "train"]

Size = Literal["full", "quick", "tiny"]
"""All layers, a few of them, or models for tests."""
Kind = Literal["stock", "stock bf16", "stoker", "stoker bf16"]
BATCHES = 4
"""Different batches of a case; every side has seen all shapes of products after as many steps."""


@dataclass(frozen=True)
class Cores:
    """Where a process computes. Both sides get the same."""

    cpus: tuple[int, ...]
    """Empty: wherever the system puts it."""
    threads: int

    def use(self) -> None:
        import torch

        if self.cpus:
            for thread in os.listdir("/proc/self/task"):
                with suppress(OSError):  # it has ended, or a container forbids it
                    os.sched_setaffinity(int(thread), self.cpus)
        torch.set_num_threads(self.threads)


@dataclass(frozen=True)
class StepCase:
    name: str
    title: str
    build: Callable[[Size], tuple[Any, LossOf]]
    about: str
    """The legend below the table."""
    layers: dict[Size, int]
    gigabytes: tuple[float, float]
    """The peak of stock and of Stoker in fp32 with all layers, about; bf16 takes less on both sides."""
    fixed: float = 0.1
    """The share of it that the layers have no part in: embeddings with their optimizer's state, logits."""
    lr: float = 3e-5

    def shown_layers(self, size: Size) -> str:
        return "" if size == "full" else f"{self.layers[size]} of {self.layers['full']} layers"

    def need(self, kind: Kind, size: Size) -> float:
        """Bytes; a process with torch and transformers loaded takes about half a gigabyte of them."""
        whole = self.gigabytes[kind.startswith("stoker")]
        share = self.layers[size] / self.layers["full"]
        return 1e9 * (0.5 + (whole - 0.5) * (self.fixed + (1 - self.fixed) * share)) if size != "tiny" else 0.0


def has_peft() -> bool:
    return importlib.util.find_spec("peft") is not None


def _questions(size: Size) -> tuple[Any, LossOf]:
    lengths = SQUAD[:BATCHES]
    case = encoder_step.Case("", 768, LAYERS_BERT[size], "qa", lengths, 384)
    if size == "tiny":
        case = replace(case, hidden=96, lengths=((16, 9), (7, 12)), pad_to=24)
    return encoder_step.build_model(case), encoder_step.loss_of(case, case.pad_to)


def _embeddings(size: Size) -> tuple[Any, LossOf]:
    """Pairs of question and context, as sentence-transformers trains them: mean pooling, cosines, the others as negatives."""
    import torch
    from torch.nn import functional
    from transformers import BertConfig, BertModel

    width = 96 if size == "tiny" else 384
    batches = [batch[:2] for batch in PAIRS] if size == "tiny" else PAIRS
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=width,
        num_hidden_layers=LAYERS_MINILM[size],
        num_attention_heads=12,
        intermediate_size=4 * width,
    )
    model = BertModel(config, add_pooling_layer=False)

    def embed(model: Any, lengths: tuple[int, ...], number: int) -> Any:
        case = encoder_step.Case("", 0, 0, "classify", (lengths,), None)
        inputs = encoder_step.batch(case, number, None)
        del inputs["labels"]
        hidden = model(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"][..., None]
        return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def loss_of(model: Any, number: int) -> Any:
        questions, contexts = zip(*batches[number % len(batches)], strict=True)
        scores = 20.0 * embed(model, questions, 2 * number) @ embed(model, contexts, 2 * number + 1).T
        return functional.cross_entropy(scores.float(), torch.arange(len(questions)))

    return model, loss_of


def _language_model(size: Size) -> tuple[Any, LossOf]:
    rows: tuple[decoder_step.Rows, ...] = ALPACA[:BATCHES]
    case = decoder_step.Case("", "smollm2", has_peft(), rows, layers=LAYERS_SMOLLM2[size])
    if size == "tiny":
        case = replace(case, model="tiny", batches=(((16, 5), (9, 3)),))
    return decoder_step.build_model(case), decoder_step.loss_of(case, flat=False)


LAYERS_BERT: dict[Size, int] = {"full": 12, "quick": 3, "tiny": 1}
LAYERS_MINILM: dict[Size, int] = {"full": 6, "quick": 2, "tiny": 1}
LAYERS_SMOLLM2: dict[Size, int] = {"full": 30, "quick": 6, "tiny": 1}

CASES = {
    case.name: case
    for case in (
        StepCase(
            "bert-qa",
            "BERT-base QA",
            _questions,
            "12 windows of SQuAD, which stock pads to 384 as run_qa.py does",
            LAYERS_BERT,
            (9.5, 3.8),
        ),
        StepCase(
            "embeddings",
            "MiniLM embeddings",
            _embeddings,
            "64 pairs of question and context from SQuAD, all other contexts as negatives",
            LAYERS_MINILM,
            (8.5, 4.0),
        ),
        StepCase(
            "lora",
            "SmolLM2-135M LoRA" if has_peft() else "SmolLM2-135M, all weights",
            _language_model,
            "8 rows of Alpaca, stock padded to the longest; "
            + ("adapters of rank 16 on all linear layers" if has_peft() else "without adapters, as peft is missing"),
            LAYERS_SMOLLM2,
            (13.0, 3.6),
            fixed=0.35,
            lr=1e-5,
        ),
    )
}  # fmt: skip


def train(name: str, kind: Kind, cores: Cores, size: Size) -> Step:
    """The step of one side of a case: forward, backward, clipping, fused AdamW."""
    cores.use()
    _quiet()
    case = CASES[name]
    model, loss_of = case.build(size)
    if kind.startswith("stock"):
        return stock_step(model, loss_of, autocast=kind.endswith("bf16"), lr=case.lr)
    return optimized_step(model, loss_of, "bfloat16" if kind.endswith("bf16") else "float32", lr=case.lr)


def sweep_step(kind: Kind, start: Cores, size: Size) -> Callable[[tuple[int, Cores]], float | None]:
    """The step of BERT-base QA with the cores it is asked to use."""
    step = train("bert-qa", kind, start, size)
    now = start

    def run(asked: tuple[int, Cores]) -> float | None:
        nonlocal now
        number, cores = asked
        if cores != now:
            cores.use()
            now = cores
        return step(number)

    return run


def host_turn(name: str, bf16: bool, size: Size) -> Callable[[Any], dict[str, float]]:
    """Seconds of CPU time per step of each side, whose models are so narrow that only the host's work is left."""
    import copy
    import time

    import torch

    import stoker
    from stoker.model import clip_grad_norm_

    torch.set_num_threads(1)
    _quiet()
    torch.manual_seed(0)
    stock, labels = narrow.CASES[name][1]()

    def side(dtype: Any, autocast: bool = False) -> Callable[[], None]:
        model = copy.deepcopy(stock).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        if dtype is None:
            return narrow.step_of(model, labels, torch.nn.utils.clip_grad_norm_, optimizer, autocast)
        return narrow.step_of(stoker.optimize(model, optimizer, dtype=dtype)[0], labels, clip_grad_norm_, optimizer)

    sides = {"stock": side(None), "stoker": side(torch.float32)}
    if bf16:
        sides |= {"stock bf16": side(None, autocast=True), "stoker bf16": side(torch.bfloat16)}

    def turn(_: Any) -> dict[str, float]:
        found = {}
        for kind, step in sides.items():
            begin = time.process_time()
            for _ in range(narrow.IN_A_TURN):
                step()
            found[kind] = (time.process_time() - begin) / narrow.IN_A_TURN
        return found

    return turn


def loads() -> Callable[[Any], dict[str, Any]]:
    """A side that does nothing but load what the others need; its value is what this torch can do."""
    import torch

    from stoker.kernels import native
    from stoker.kernels.microkernels import torch_has_bf16_units

    native.library()
    facts = {
        "bf16_units": torch_has_bf16_units(),
        "kernels": native.level(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    return lambda _: facts


def _quiet() -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("stoker").setLevel(logging.ERROR)
