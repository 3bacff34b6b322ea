"""Decisions about evictions: the rules, their plan for a job, an explanation of the answers, and a simulation."""
