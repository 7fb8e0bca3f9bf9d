"""An embedding script in the style of sentence-transformers' documentation. Knows nothing of Stoker.

embedding_style.py MODEL ROWS.json OUTPUT_DIR
"""

import json
import sys

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import CoSENTLoss

model_name, rows, output_dir = sys.argv[1:]

# 1. A model to fine-tune; an encoder gets mean pooling
model = SentenceTransformer(model_name, device="cpu")

# 2. Pairs of sentences with a score from 0 to 1
with open(rows) as file:
    dataset = Dataset.from_list(json.load(file))
split = dataset.train_test_split(test_size=8, seed=0)

# 3. A loss, and an evaluator for what it is meant to improve
loss = CoSENTLoss(model)
evaluator = EmbeddingSimilarityEvaluator(
    sentences1=split["test"]["sentence1"],
    sentences2=split["test"]["sentence2"],
    scores=split["test"]["score"],
    name="dev",
)

# 4. Train
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
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
