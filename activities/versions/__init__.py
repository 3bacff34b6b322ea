"""Versions of a job's code: made from a folder or a git revision, kept in a store, and brought to the machines."""
