"""This package inspects the agent's machine. Each inspection has its own period, and gives a verdict."""
