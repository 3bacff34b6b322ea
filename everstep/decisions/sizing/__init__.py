"""Computes, before a job starts, what its checkpoints need and how long they take."""
