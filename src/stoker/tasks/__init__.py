"""`stoker train`, `ask` and `demo`: data, metrics, post-processing and the run itself, with a package per task."""
