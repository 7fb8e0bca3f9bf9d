"""Continued pre-training by masked words: texts of any size, tokenized once into memory-mapped files."""
