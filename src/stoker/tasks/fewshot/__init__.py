"""Few-shot classification by SetFit: an embedding model trained on pairs of a few examples, with a linear classifier on top."""
