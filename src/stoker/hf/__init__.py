"""Hugging Face integration: Trainer, TrainingArguments, Accelerator, checkpointing, retired flags and imports."""
