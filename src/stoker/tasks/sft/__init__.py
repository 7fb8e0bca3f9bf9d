"""Supervised fine-tuning of language models, preference training, and chat."""
