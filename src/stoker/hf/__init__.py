"""Doors to Hugging Face: Trainer, TrainingArguments, and the words that transformers no longer knows."""
