"""Checkpoints to rely on: the manifest, the choice of one to resume from, the command that does, the lock on the folder."""
