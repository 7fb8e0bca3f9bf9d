"""The scores of evaluations that are shown, under the names that the tasks give them, and what people call them."""

from __future__ import annotations

__all__ = ["SCORE_NAMES"]

SCORE_NAMES = {
    "f1": "F1", "exact_match": "exact match", "exact": "exact match", "accuracy": "accuracy", "pearson": "Pearson",
    "matthews_correlation": "Matthews", "spearman_cosine": "Spearman", "cosine_ndcg@10": "NDCG@10",
    "cosine_recall@10": "recall@10", "cosine_mrr@10": "MRR@10", "cosine_accuracy": "accuracy", "cosine_ap": "average precision",
    "perplexity": "perplexity", "masked_accuracy": "of the masked tokens right",
    "ndcg@10": "NDCG@10", "mrr@10": "MRR@10", "map": "MAP", "average_precision": "average precision", "spearman": "Spearman",
    "f1_macro": "macro F1", "f1_micro": "accuracy", "right": "% right answers", "form": "% in the form",
}  # fmt: skip
