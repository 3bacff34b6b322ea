"""Decisions about a failure: the evicted machines, the next rung of the ladder, the restart, and the code version."""
