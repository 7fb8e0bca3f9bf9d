"""What `stoker train embed`, `rerank` and `fewshot` share: rows of texts, sentence-transformers' models and trainers."""
