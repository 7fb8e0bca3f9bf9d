"""The built-in demo: generates texts about an invented world, and trains a model in minutes to answer questions about them."""
