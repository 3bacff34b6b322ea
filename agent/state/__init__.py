"""This package keeps the agent's lasting state: in shared memory at once, and on disk when the disk accepts it."""
