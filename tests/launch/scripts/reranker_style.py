"""A cross-encoder script in the style of sentence-transformers' documentation. Knows nothing of Stoker.

reranker_style.py MODEL ROWS.json OUTPUT_DIR
"""

import json
import sys

from datasets import Dataset
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.evaluation import CrossEncoderCorrelationEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import set_seed

model_name, rows, output_dir = sys.argv[1:]

set_seed(1)  # the head is new
model = CrossEncoder(model_name, num_labels=1, device="cpu")

with open(rows) as file:
    dataset = Dataset.from_list(json.load(file))
split = dataset.train_test_split(test_size=8, seed=0)

evaluator = CrossEncoderCorrelationEvaluator(
    sentence_pairs=list(zip(split["test"]["sentence1"], split["test"]["sentence2"], strict=True)),
    scores=split["test"]["score"],
    name="dev",
)
trainer = CrossEncoderTrainer(
    model=model,
    args=CrossEncoderTrainingArguments(
        output_dir=output_dir,
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=split["train"],
    eval_dataset=split["test"],
    loss=BinaryCrossEntropyLoss(model),
    evaluator=evaluator,
)
trainer.train()
model.save_pretrained(f"{output_dir}/final")
print("LOG " + json.dumps(trainer.state.log_history))
