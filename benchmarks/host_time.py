"""Host time: what a training step costs besides its arithmetic, stock transformers against Stoker.

    python benchmarks/host_time.py                      every case, about two minutes
    python benchmarks/host_time.py --case bert llama    some of them
    python benchmarks/host_time.py --compile            stock with torch.compile too, which compiles for minutes

Models are so narrow (width 32, two rows of at most 8 tokens) that arithmetic vanishes: what is left is Python, dispatch, autograd
and the optimizer, which no number of cores divides. One thread; a step is forward, backward, clipping and fused AdamW. The sides
take turns of four steps in one process, and CPU time is counted, so that other programs disturb less. Prints medians, and ratios
to stock of the same run. "operators" is Stoker without layer programs, "stock bf16" is torch.autocast.

The case "trainer" is transformers.Trainer against stoker.Trainer (which is also what `stoker launch` puts in its place), with a
BERT of one layer. It prints the time of a whole step, and what is left of it without the model, clipping and the optimizer.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from stoker.bench.narrow import CASES, COMMON, GROUPED, IN_A_TURN, decoder, encoder, step_of, with_adapters

__all__ = [
    "CASES", "COMMON", "GROUPED", "IN_A_TURN", "decoder", "encoder", "measure_trainer", "sides_of", "step_of", "with_adapters",
]  # fmt: skip

TRAINER = "BERT, 1 layer, QA, by the Trainer"


def sides_of(case: str, compiled: bool = False) -> dict[str, Callable[[], None]]:
    import stoker
    from stoker.model import clip_grad_norm_

    torch.manual_seed(0)
    stock, labels = CASES[case][1]()

    def side(dtype: torch.dtype | None, program: bool = True, autocast: bool = False) -> Callable[[], None]:
        model = copy.deepcopy(stock).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
        if dtype is None:
            return step_of(model, labels, torch.nn.utils.clip_grad_norm_, optimizer, autocast)
        run = step_of(stoker.optimize(model, optimizer, dtype=dtype)[0], labels, clip_grad_norm_, optimizer)

        def step() -> None:
            os.environ["STOKER_LAYER_PROGRAM"] = "1" if program else "0"
            run()

        return step

    def compiled_side() -> Callable[[], None]:
        model = copy.deepcopy(stock).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
        return step_of(torch.compile(model), labels, torch.nn.utils.clip_grad_norm_, optimizer)

    return {
        "stock": side(None),
        **({"stock with torch.compile": compiled_side()} if compiled else {}),
        "stock bf16": side(None, autocast=True),
        "operators": side(torch.float32, program=False),
        "Stoker": side(torch.float32),
        "Stoker bf16": side(torch.bfloat16),
    }


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Token ids in memory: 8 tokens and 5 in turn, padded to 8."""

    def __init__(self, count: int) -> None:
        drawn = torch.randint(4, 100, (2, 8), generator=torch.Generator().manual_seed(0)).tolist()
        masks = [[1] * 8, [1] * 5 + [0] * 3]
        self.rows = [
            {"input_ids": ids, "attention_mask": mask, "start_positions": 1, "end_positions": 2}
            for ids, mask in zip(drawn, masks, strict=True)
        ]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index % 2]


def trainer_side(
    kind: type[Any], stock: Any, steps: int, folder: str
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Functions that measure a whole step, and model, clipping and optimizer alone: each the mean of a block of steps."""
    import transformers

    import stoker
    from stoker.model import clip_grad_norm_

    began: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **named: Any) -> None:
            began.append(time.process_time())

    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, max_steps=steps, logging_steps=50, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, optim="adamw_torch_fused", dataloader_pin_memory=False,
    )  # fmt: skip
    model = copy.deepcopy(stock)
    trainer = kind(model, arguments, train_dataset=Rows(2 * steps), callbacks=[Clock()])
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)

    def whole() -> float:
        began.clear()
        trainer.train()
        return (began[-1] - began[5]) / (len(began) - 6)

    def parts() -> float:
        spots = torch.tensor([1, 1]), torch.tensor([2, 2])
        labels = {"start_positions": spots[0], "end_positions": spots[1]}
        clip = clip_grad_norm_ if issubclass(kind, stoker.Trainer) else torch.nn.utils.clip_grad_norm_
        inner = getattr(
            trainer.optimizer, "optimizer", trainer.optimizer
        )  # accelerate's wrapper belongs to the Trainer
        step = step_of(trainer.model.train(), labels, clip, inner)
        for _ in range(5):
            step()
        begin = time.process_time()
        for _ in range(steps):
            step()
        return (time.process_time() - begin) / steps

    return whole, parts


def measure_trainer(steps: int, blocks: int = 8) -> None:
    import transformers

    import stoker

    torch.manual_seed(0)
    stock, _ = encoder("Bert", 1)
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            "stock": trainer_side(transformers.Trainer, stock, steps, f"{folder}/stock"),
            "Stoker": trainer_side(stoker.Trainer, stock, steps, f"{folder}/stoker"),
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for number in range(blocks + 1):
            for name, (whole, parts) in sides.items():
                found = whole(), parts()
                if number:  # the first block loads what is loaded once
                    taken[name].append(found)
    medians = {
        name: tuple(1e3 * statistics.median(one) for one in zip(*all_, strict=True)) for name, all_ in taken.items()
    }
    outside = {name: whole - parts for name, (whole, parts) in medians.items()}
    for name, (whole, parts) in medians.items():
        print(
            f"{TRAINER}: {name} {whole:.2f} ms a step ({whole / medians['stock'][0]:.2f}x), model, clipping and optimizer "
            f"{parts:.2f} ms, outside of them {outside[name]:.2f} ms ({outside[name] / outside['stock']:.2f}x)",
            flush=True,
        )


def main() -> None:
    cases = [*CASES, "trainer"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=cases, default=cases)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compile", action="store_true", help="measure stock with torch.compile too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in arguments.case:
        if case == "trainer":
            measure_trainer(max(arguments.steps, 200))
            continue
        sides = sides_of(case, arguments.compile)
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(arguments.steps + 5):
            for name, step in sides.items():
                begin = time.process_time()
                for _ in range(IN_A_TURN):
                    step()
                if number >= 5:
                    taken[name].append((time.process_time() - begin) / IN_A_TURN)
        medians = {name: 1e3 * statistics.median(times) for name, times in taken.items()}
        figures = ", ".join(f"{name} {ms:.1f} ms ({ms / medians['stock']:.2f}x)" for name, ms in medians.items())
        print(f"{CASES[case][0]}: {figures}", flush=True)


if __name__ == "__main__":
    main()
