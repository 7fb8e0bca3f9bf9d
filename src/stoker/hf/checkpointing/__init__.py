"""What makes checkpoints safe to rely on: the manifest, and the choice of the one to resume from."""
