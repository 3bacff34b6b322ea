"""Loops in every worker process, outside Temporal: they watch agents' observations, and clean up after jobs."""
