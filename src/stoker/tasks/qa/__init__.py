"""Extractive question answering: SQuAD-format data, windows over long contexts, answers from logits, EM and F1."""
