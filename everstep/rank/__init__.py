"""Modules that an agent and its ranks share: environment variables, step reports, and the faults of drills."""
