"""Inspections of the agent's machine, each with its own period, and their verdicts."""
