"""Losing a rank without losing the run: the other ranks keep what they have in memory, and a new process takes it from them."""
