"""A token-classification script in the style of Hugging Face's run_ner.py: token_style.py MODEL ROWS.json OUTPUT_DIR

Knows nothing of Stoker.
"""

import json
import sys

from datasets import Dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

model_name, rows, output_dir = sys.argv[1:]
with open(rows) as file:
    split = Dataset.from_list(json.load(file)).train_test_split(test_size=8, seed=0)
labels = sorted({tag for row in split["train"] for tag in row["ner_tags"]})

set_seed(1)  # the head is new
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForTokenClassification.from_pretrained(model_name, num_labels=len(labels))


def tokenize_and_align_labels(examples):
    """The tag of each word for its first token."""
    inputs = tokenizer(examples["tokens"], truncation=True, is_split_into_words=True)
    inputs["labels"] = []
    for number, tags in enumerate(examples["ner_tags"]):
        before, found = None, []
        for word in inputs.word_ids(number):
            found.append(-100 if word is None or word == before else labels.index(tags[word]))
            before = word
        inputs["labels"].append(found)
    return inputs


split = split.map(tokenize_and_align_labels, batched=True, remove_columns=["tokens", "ner_tags"])
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=output_dir,
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        report_to="none",
    ),
    train_dataset=split["train"],
    eval_dataset=split["test"],
    data_collator=DataCollatorForTokenClassification(tokenizer),
    compute_metrics=lambda found: {
        "accuracy": float((found.predictions.argmax(-1) == found.label_ids)[found.label_ids >= 0].mean())
    },
)
trainer.train()
trainer.save_model(f"{output_dir}/final")
print("LOG " + json.dumps(trainer.state.log_history))
