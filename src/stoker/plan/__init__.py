"""`stoker plan`: predicts how fast several machines like this one would train, before they are rented."""
