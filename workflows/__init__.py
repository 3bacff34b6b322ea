"""Workflows: deterministic and thin. They order the steps; what to do is decided in ``everstep.decisions``."""
