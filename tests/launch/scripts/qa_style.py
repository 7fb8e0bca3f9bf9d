"""A question-answering script in the style people have: HfArgumentParser, three dataclasses, Trainer. Knows nothing of Stoker."""

import json
import os
import sys
from dataclasses import dataclass, field

import torch
from transformers import BertConfig, BertForQuestionAnswering, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    hidden_size: int = field(default=32, metadata={"help": "width of the model"})
    num_layers: int = field(default=1)


@dataclass
class DataTrainingArguments:
    train_samples: int = field(default=32)
    max_seq_length: int = field(default=32)
    doc_stride: int | None = field(default=16)


class Questions(torch.utils.data.Dataset):
    def __init__(self, count: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = []
        for _ in range(count):
            used = int(torch.randint(max(length // 6, 8), max(length // 2, 9), (1,), generator=generator))
            ids = torch.zeros(length, dtype=torch.long)
            ids[:used] = torch.randint(1, 100, (used,), generator=generator)
            mask = (torch.arange(length) < used).long()
            self.rows.append({"input_ids": ids, "attention_mask": mask, "start_positions": 2, "end_positions": 5})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = BertConfig(
        vocab_size=100,
        hidden_size=model_args.hidden_size,
        num_hidden_layers=model_args.num_layers,
        num_attention_heads=max(model_args.hidden_size // 16, 1) if model_args.hidden_size < 512 else 12,
        intermediate_size=4 * model_args.hidden_size,
    )
    model = BertForQuestionAnswering(config)
    data = Questions(data_args.train_samples, data_args.max_seq_length)
    trainer = Trainer(model=model, args=training_args, train_dataset=data, eval_dataset=data)
    result = trainer.train()
    trainer.save_model()
    report = {
        "rank": training_args.process_index,
        "world": training_args.world_size,
        "parallel": str(training_args.parallel_mode),
        "device": str(training_args.device),
        "steps": trainer.state.global_step,
        "loss": result.training_loss,
        "seconds": result.metrics["train_runtime"],
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "warmup_steps": training_args.get_warmup_steps(100),
        "sampling": getattr(training_args, "train_sampling_strategy", None),
        "bf16": training_args.bf16,
        "backend": torch.distributed.get_backend() if torch.distributed.is_initialized() else None,
        "origins": sorted({base.__module__.split(".")[0] for one in model.modules() for base in type(one).__mro__}),
        "argv": sys.argv[1:],
    }
    print("REPORT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
