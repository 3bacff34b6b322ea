"""Checkpoints in shared memory: one file for each rank, with slots that outlive it."""
