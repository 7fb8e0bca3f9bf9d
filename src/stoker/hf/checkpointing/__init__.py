"""What makes checkpoints safe to rely on: the manifest, the choice of the one to resume from, the lock on a run's folder."""
