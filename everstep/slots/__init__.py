"""Checkpoints in shared memory: one file a rank, with slots that outlive it."""
