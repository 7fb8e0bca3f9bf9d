"""Which hosts and which cores, memory and threads each process gets."""
