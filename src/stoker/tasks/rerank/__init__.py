"""Rerankers: cross-encoders that read a query and a document together and give a score or a class."""
