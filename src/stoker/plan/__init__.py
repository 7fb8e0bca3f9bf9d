"""`stoker plan`: what several machines like this one would do with a training, before anyone rents them."""
