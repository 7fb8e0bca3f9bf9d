"""`--output_dir DIR SECONDS`: trains a tiny model with the Hugging Face Trainer, with a checkpoint every two steps, and waits
so long after each step that it can be interrupted.
"""

import sys
import time

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class Slow(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *about: object, **named: object) -> None:
        time.sleep(float(sys.argv[3]))


torch.manual_seed(0)
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
rows = [{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(number % 2)} for number in range(32)]
arguments = TrainingArguments(
    output_dir=sys.argv[2], max_steps=8, per_device_train_batch_size=2, save_steps=2, logging_steps=1, report_to=[],
    disable_tqdm=True, use_cpu=True,
)  # fmt: skip
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows, callbacks=[Slow()])
trainer.train()
if trainer.is_world_process_zero():
    print(f"FINISHED at step {trainer.state.global_step}", flush=True)
