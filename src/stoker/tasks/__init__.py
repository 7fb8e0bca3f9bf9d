"""What a person came for: a fine-tuned model. Data, metrics, post-processing and the run itself, one room per task."""
