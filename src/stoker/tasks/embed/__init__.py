"""Embedding models: texts as vectors, trained on pairs, triplets, pairs with scores or labelled texts."""
