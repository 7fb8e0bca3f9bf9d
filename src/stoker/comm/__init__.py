"""Collectives between processes and machines: the `ccl` backend of torch.distributed and what trains over it."""
