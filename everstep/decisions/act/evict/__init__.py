"""Decisions about evictions: the rules, their limits, an explanation of their answers, and a simulation of a policy."""
