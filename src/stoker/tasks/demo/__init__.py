"""The built-in demo: a small invented world to ask questions about, and a run that learns to answer them in minutes."""
