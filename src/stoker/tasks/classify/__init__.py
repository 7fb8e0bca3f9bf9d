"""Sentence and sentence-pair classification and regression: GLUE tasks, or any table with named columns."""
