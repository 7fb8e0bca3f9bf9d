"""A script in the style of sentence-transformers' documentation, for an embedding model or a cross-encoder.

    sentence_style.py embedding|reranker MODEL ROWS.json OUTPUT_DIR

Knows nothing of Stoker.
"""

import json
import sys

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.evaluation import CrossEncoderCorrelationEvaluator
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import CoSENTLoss
from transformers import set_seed

kind, model_name, rows, output_dir = sys.argv[1:]

# 1. Pairs of sentences with a score from 0 to 1
with open(rows) as file:
    split = Dataset.from_list(json.load(file)).train_test_split(test_size=8, seed=0)
first, second, scores = (split["test"][name] for name in ("sentence1", "sentence2", "score"))

# 2. A model to fine-tune, a loss, and an evaluator for what it is meant to improve
set_seed(1)  # the head of a cross-encoder is new
if kind == "embedding":
    model = SentenceTransformer(model_name, device="cpu")
    loss = CoSENTLoss(model)
    evaluator = EmbeddingSimilarityEvaluator(first, second, scores, name="dev")
    trainer_class, arguments_class = SentenceTransformerTrainer, SentenceTransformerTrainingArguments
else:
    model = CrossEncoder(model_name, num_labels=1, device="cpu")
    loss = BinaryCrossEntropyLoss(model)
    evaluator = CrossEncoderCorrelationEvaluator(list(zip(first, second, strict=True)), scores, name="dev")
    trainer_class, arguments_class = CrossEncoderTrainer, CrossEncoderTrainingArguments

# 3. Train
trainer = trainer_class(
    model=model,
    args=arguments_class(
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
    loss=loss,
    evaluator=evaluator,
)
trainer.train()
model.save_pretrained(f"{output_dir}/final")
print("LOG " + json.dumps(trainer.state.log_history))
