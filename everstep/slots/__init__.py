"""Checkpoints in shared memory: each rank has a file whose slots outlive the rank."""
