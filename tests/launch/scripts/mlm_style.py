"""A masked-LM script in the style people have: Trainer and DataCollatorForLanguageModeling. Knows nothing of Stoker.

KILL_AT names the step in which it kills itself; started again, it resumes from the last checkpoint, as run_mlm.py does.
"""

import hashlib
import json
import os
import signal

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **rest):
        if str(state.global_step) == os.environ.get("KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    (training_args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(95))]
    vocabulary = os.path.join(os.path.dirname(training_args.output_dir), "vocab.txt")
    with open(vocabulary, "w") as file:
        file.write("\n".join(words))
    tokenizer = BertTokenizerFast(vocabulary)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 24, (48,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(5, 100, (length,), generator=generator).tolist()} for length in lengths]
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    trainer = Trainer(
        model=BertForMaskedLM(config),
        args=training_args,
        train_dataset=rows,
        data_collator=collator,
        callbacks=[Kill()],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(training_args.output_dir))
    digest = hashlib.sha256()
    for name, value in sorted(trainer.model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    print("WEIGHTS", digest.hexdigest())
    print("LOG", json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
