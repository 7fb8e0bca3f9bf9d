"""Lightning Fabric: `pip install lightning-fabric 'stoker[hf]'`, then `python examples/lightning_fabric_loop.py`.

Fabric starts the ranks and makes the process group in `launch`; the loop is your own, so `optimize` is called by name.
"""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from transformers import BertConfig, BertForSequenceClassification

import stoker
import stoker.distributed


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="ccl"))
    fabric.launch()
    joined = stoker.distributed.setup()
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = stoker.optimize(model, optimizer)
    applied = [part for part, *_ in stoker.report(model).applied]
    model, optimizer = fabric.setup(model, optimizer)
    texts = torch.randint(5, 100, (64, 16), generator=torch.Generator().manual_seed(joined.rank))
    for step in range(4):
        part = texts[4 * step : 4 * step + 4]
        loss = model(input_ids=part, labels=(part[:, 0] >= 50).long()).loss
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    weights = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
    result = {"rank": joined.rank, "ranks": joined.size, "backend": joined.backend, "threads": joined.threads}
    print("result", {**result, "optimised": applied, "weights": weights}, flush=True)


if __name__ == "__main__":
    main()
