"""`stoker tune`: searches for the options with which a task of `stoker train` gives the best score."""
