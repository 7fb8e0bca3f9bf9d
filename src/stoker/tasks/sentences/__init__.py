"""What `stoker train embed` and `rerank` share: rows of texts, sentence-transformers' models and trainers."""
