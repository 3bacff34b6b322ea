"""The replay of a job on groups of machines to identify a machine that computes wrongly; pure functions."""
