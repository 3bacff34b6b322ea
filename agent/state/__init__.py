"""The agent's lasting state: written to shared memory at once, and to its state folder when the disk accepts it."""
